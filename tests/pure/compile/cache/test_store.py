"""Files are whole or not there, whatever happens to them, and their folder stays small."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.compile.cache.errors import DamagedError
from shoal.compile.cache.store import Store

KEY, OTHER = "a" * 64, "b" * 64
CONTENT = {"graph": [1, "zwei", None, 2.5], "more": {"x": []}}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = Store(folder=tmp_path / "new" / "folder")
    assert store.read(KEY) is None
    store.write(KEY, CONTENT)
    assert store.read(KEY) == CONTENT
    assert store.read(OTHER) is None
    assert [file.name for file in store.folder.iterdir()] == [f"{KEY}.json"]
    assert (store.folder.stat().st_mode & 0o077) == 0, "nobody else may write there"


@given(data=st.data())
def test_any_damage_is_noticed(tmp_path_factory, data) -> None:
    store = Store(folder=tmp_path_factory.mktemp("store"))
    store.write(KEY, CONTENT)
    file = store.folder / f"{KEY}.json"
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        file.write_bytes(whole[:at])
    else:
        bit = 1 << data.draw(st.integers(0, 7))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
    with pytest.raises(DamagedError):
        store.read(KEY)


def test_a_file_of_another_key_or_kind_is_noticed(tmp_path: Path) -> None:
    store = Store(folder=tmp_path)
    store.write(KEY, CONTENT)
    os.rename(tmp_path / f"{KEY}.json", tmp_path / f"{OTHER}.json")
    with pytest.raises(DamagedError):
        store.read(OTHER)
    for text in (b"", b"{}", b"\x80\x04pickle", b"[" * 100_000):
        (tmp_path / f"{KEY}.json").write_bytes(text)
        with pytest.raises(DamagedError):
            store.read(KEY)
    (tmp_path / f"{KEY}.json").unlink()
    (tmp_path / f"{KEY}.json").mkdir()
    with pytest.raises(DamagedError):
        store.read(KEY)


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    big = ["x" * 1000]
    store = Store(folder=tmp_path, most_bytes=3500)
    for number, key in enumerate("abc"):
        store.write(key, big)
        os.utime(tmp_path / f"{key}.json", (number, number))
    assert store.read("a") == big, "now used last"
    store.write("d", big)
    assert {file.stem for file in tmp_path.iterdir()} == {"a", "c", "d"}


def test_what_a_dead_process_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / "old.unfinished", tmp_path / "new.unfinished"
    for file in (old, new):
        file.write_text("half")
    os.utime(old, (1, 1))
    Store(folder=tmp_path).write(KEY, CONTENT)
    assert not old.exists()
    assert new.exists()


def _write_often(folder: Path, number: int) -> None:
    store = Store(folder=folder, most_bytes=20_000)
    for i in range(40):
        key = f"k{(i + number) % 7}"
        store.write(key, [key] * 500)
        try:
            found = store.read(key)
        except DamagedError as error:
            raise AssertionError("half a file was seen") from error
        assert found in (None, [key] * 500)


def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_often, args=(tmp_path, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not list(tmp_path.glob("*.unfinished"))
