"""Documents of every kind, in pieces; what is broken is named with its place."""

import importlib.util
import json
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.train.text import documents
from shoal.train.text.documents import find_source, has_tables

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None,
    reason="datasets is not installed: pip install 'shoal[hf]'",
)


def texts(path: Path, key: str = "text") -> list[str]:
    """Put the documents together again."""
    found, held = [], ""
    for piece in find_source(path).passages(key, []):
        held += piece.text
        if piece.ends:
            found.append(held)
            held = ""
    assert not held, "the last document ends"
    return found


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_is_a_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo")
    assert texts(file) == ["one\ntwo"]
    (tmp_path / "b.md").write_text("three")
    (tmp_path / "image").write_bytes(b"\xff\xd8")
    (tmp_path / "zero").write_bytes(b"a\0b")
    skipped: list[str] = []
    assert [p.text for p in find_source(tmp_path).passages("text", skipped) if p.text] == [
        "one\n",
        "two",
        "three",
    ]
    assert skipped == ["image", "zero"]
    assert not has_tables(tmp_path)


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_pieces_of_a_long_text_make_the_text(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", block)
    text = "é\n\nübergroße Zeile ohne Ende 🐟\nx" * 3
    (tmp_path / "a.txt").write_text(text)
    write_lines(tmp_path / "b.jsonl", {"text": text}, {"text": "z"})
    assert texts(tmp_path / "a.txt") == [text]
    assert texts(tmp_path / "b.jsonl") == [text, "z"]
    pieces = list(find_source(tmp_path / "a.txt").passages("text", []))
    assert len(pieces) > 5
    assert max(len(piece.text) for piece in pieces) < len(text)


def test_jsonl_gives_the_named_field(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"body": "one", "n": 1}, {"body": "two"})
    (tmp_path / "README").write_text("not data")
    assert has_tables(tmp_path)
    assert texts(tmp_path, "body") == ["one", "two"]
    with pytest.raises(UsageError, match=r"line 1 has no 'text', only body, n; try --text-key"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"text": 3}', "line 2: text should be text, got int"),
        ('{"text": null}', "got NoneType"),
        ('{"txt": "a"}', "line 2 has no 'text', only txt; try --text-key txt"),
        ('{"a":' * 100_000, "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
    ],
    ids=range(7),
)
def test_a_broken_line_is_named(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "good"}}\n{line}\n', errors="surrogateescape")
    with pytest.raises(UsageError, match=message):
        texts(file)


def test_a_text_that_breaks_off_later_is_named_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 4)
    file = tmp_path / "a.txt"
    file.write_bytes(b"good text, then \xff")
    with pytest.raises(UsageError, match=r"a.txt is no UTF-8 text near byte 16"):
        texts(file)


def test_what_is_not_there_or_mixed_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no file or folder"):
        find_source(tmp_path / "none")
    with pytest.raises(UsageError, match="no files in"):
        find_source(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.parquet").touch()
    with pytest.raises(UsageError, match="holds jsonl and parquet; give one kind"):
        find_source(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_without_pyarrow_parquet_says_what_to_install(tmp_path):
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UsageError, match=r"needs pyarrow, .* pip install 'pyarrow>=15.0'"):
        texts(tmp_path / "a.parquet")


@needs_datasets
def test_parquet_and_datasets_give_their_column(tmp_path):
    import datasets

    rows = [f"document {number}" for number in range(700)]
    dataset = datasets.Dataset.from_dict({"body": rows, "n": list(range(700))})
    dataset.to_parquet(tmp_path / "tables" / "a.parquet")
    dataset.save_to_disk(tmp_path / "dataset")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"test": dataset}).save_to_disk(tmp_path / "other")
    for name in ("tables", "tables/a.parquet", "dataset", "splits", "splits/test"):
        assert texts(tmp_path / name, "body") == rows, name
        with pytest.raises(UsageError, match="has no 'text', only body, n"):
            texts(tmp_path / name)
    with pytest.raises(UsageError, match=r"splits test, none of which is called train; .*other"):
        find_source(tmp_path / "other")
    with pytest.raises(UsageError, match="row 0: the text should be text, got int"):
        texts(tmp_path / "dataset", "n")

    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    assert texts(tmp_path / "empty") == []

    file = tmp_path / "tables" / "a.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read: .*; write it anew"):
        texts(file, "body")
    arrow = next((tmp_path / "dataset").glob("*.arrow"))
    arrow.write_bytes(b"")
    with pytest.raises(UsageError, match="dataset cannot be read: "):
        texts(tmp_path / "dataset", "body")
