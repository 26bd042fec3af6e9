"""The token file: what is in it, when it is made anew, and that no half of one stays."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import CheckpointError, UsageError
from shoal.train.text import token_file as module
from shoal.train.text.token_file import TokenFile, in_turns, token_file
from shoal.train.text.tokenizer import ByteTokenizer, FolderTokenizer, load_tokenizer
from tiny_models import needs_transformers, small_tokenizer


def name_file(tmp_path: Path, data: Path, **changes) -> TokenFile:
    options = {"key": "text", "max_bytes": None} | changes
    return token_file(tmp_path / "runs", data, ByteTokenizer(), **options)


def jsonl(path: Path, *texts: object) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_documents_are_packed_with_an_end_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_PIECES", 2)
    file = name_file(tmp_path, jsonl(tmp_path / "a.jsonl", "one", "zwölf", "", "x"))
    assert not file.exists
    told = list(file.make(ByteTokenizer()))
    assert told == ["11 tokens of 2 documents", "14 tokens of 4 documents"]
    tokens, info = file.read()
    assert bytes(tokens) == "one\nzwölf\n\nx\n".encode()
    assert (info.tokens, info.documents, info.dtype) == (14, 4, "|u1")
    assert not tokens.flags.writeable


@pytest.mark.parametrize(
    ("limit", "kept"), [(3, "one"), (5, "one\nzw"), (6, "one\nzw"), (7, "one\nzwö")]
)
def test_a_limit_cuts_between_characters(tmp_path, limit, kept):
    file = name_file(tmp_path, jsonl(tmp_path / "a.jsonl", "one", "zwölf"), max_bytes=limit)
    list(file.make(ByteTokenizer()))
    # What is cut to nothing is still a document that ends.
    assert bytes(file.read()[0]).decode().rstrip("\n") == kept


def test_another_file_for_other_data(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", "one")
    names = [name_file(tmp_path, data).folder]
    names.append(name_file(tmp_path, data, key="body").folder)
    names.append(name_file(tmp_path, data, max_bytes=10).folder)
    os.utime(data, (1, 1))
    names.append(name_file(tmp_path, data).folder)
    jsonl(data, "one", "two")
    names.append(name_file(tmp_path, data).folder)
    assert len(set(names)) == len(names)
    assert name_file(tmp_path, data).folder == names[-1]


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_PIECES", 1)
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "one"}\n{"text": "two"}\n{')
    making = name_file(tmp_path, data).make(ByteTokenizer())
    assert next(making) == "4 tokens of 1 documents"
    with pytest.raises(UsageError, match="line 3 is not JSON"):
        list(making)
    assert not (tmp_path / "runs" / ".tokens").exists()

    making = name_file(tmp_path, jsonl(data, "one", "two")).make(ByteTokenizer())
    next(making)
    making.close()
    assert not (tmp_path / "runs" / ".tokens").exists()


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_data_without_text_is_refused(tmp_path, content):
    data = tmp_path / "a.jsonl"
    data.write_text(content)
    with pytest.raises(UsageError, match=r"a\.jsonl holds no text: it is empty"):
        list(name_file(tmp_path, data).make(ByteTokenizer()))


def test_a_damaged_file_is_named(tmp_path):
    file = name_file(tmp_path, jsonl(tmp_path / "a.jsonl", "one", "two"))
    list(file.make(ByteTokenizer()))
    (file.folder / "tokens.bin").write_bytes(b"on")
    with pytest.raises(CheckpointError, match=r"holds 2 tokens, expected 8; remove .*made anew"):
        file.read()
    (file.folder / "tokens.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as tokens"):
        file.read()


def test_two_that_make_the_same_file_do_not_meet(tmp_path, monkeypatch):
    file = name_file(tmp_path, jsonl(tmp_path / "a.jsonl", "one", "two"))
    first = file.make(ByteTokenizer())
    next(first)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    list(file.make(ByteTokenizer()))
    monkeypatch.undo()
    list(first)
    assert bytes(file.read()[0]) == b"one\ntwo\n"
    assert [path.name for path in file.folder.parent.iterdir()] == [file.folder.name]


def test_turns_tell_the_last_word(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    assert list(in_turns(iter("abcdefg"), 3)) == ["c", "f", "g"]
    assert list(in_turns(iter(""), 3)) == []


@needs_transformers
def test_a_tokenizer_of_transformers_packs_its_own_tokens(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(small_tokenizer(tmp_path / "tokenizer"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    documents = ["the fish in the sea", "a ship 🐟"]
    data = jsonl(tmp_path / "a.jsonl", *documents)
    file = token_file(tmp_path / "runs", data, tokenizer, key="text", max_bytes=None)
    list(file.make(tokenizer))
    tokens, info = file.read()
    expected = [[*theirs(text)["input_ids"], theirs.eos_token_id] for text in documents]
    assert tokens.tolist() == [*expected[0], *expected[1]]
    assert (info.dtype, tokenizer.size) == ("<u2", len(theirs))
    assert tokenizer.decode(expected[1][:-1]) == documents[1]
    assert tokens.dtype == np.uint16
    assert file.folder != name_file(tmp_path, data).folder


@needs_transformers
def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no tokenizer: expected one of tokenizer\.json"):
        FolderTokenizer(tmp_path)
    folder = small_tokenizer(tmp_path / "endless", eos=None)
    with pytest.raises(UsageError, match="names no eos_token"):
        FolderTokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="transformers cannot read the tokenizer"):
        FolderTokenizer(folder)
