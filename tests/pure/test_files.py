"""Files that may be anything else: links, pipes, sockets, devices, folders."""

import os
import socket
from pathlib import Path

import pytest

from shoal.files import (
    check_folder,
    create,
    is_still,
    open_own,
    open_regular,
    read_regular,
    replace,
    write_all,
)

KINDS = ["a link", "a pipe", "a socket", "a device", "a folder"]


def make(kind: str, path: Path) -> None:
    if kind == "a link":
        path.symlink_to(path.with_name("target"))
        path.with_name("target").write_text("secret")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once_and_named(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    path = tmp_path / "x"
    make(kind, path)
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        open_regular(path, follow=kind == "a device")
    with pytest.raises(OSError, match=r"it is .*, not a regular file"):
        open_own(path)


def test_a_path_that_a_person_chose_may_be_a_link(tmp_path):
    make("a link", tmp_path / "x")
    with open_regular(tmp_path / "x", follow=True) as file:
        assert file.read() == b"secret"


@pytest.mark.parametrize("is_hard", [False, True])
@pytest.mark.parametrize("write", ["create", "replace"])
def test_a_new_file_takes_the_name_and_leaves_what_it_linked_to(tmp_path, write, is_hard):
    path, target = tmp_path / "x", tmp_path / "target"
    target.write_text("mine")
    if is_hard:
        path.hardlink_to(target)
    else:
        path.symlink_to(target)
    with create(path) if write == "create" else replace(path, b"one ") as file:
        write_all(file, b"two")
    assert path.read_bytes() == (b"two" if write == "create" else b"one two")
    assert target.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [target, path]


def test_what_is_replaced_stays_if_the_new_file_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("old")

    def fail(source: Path, target: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        replace(path, b"new")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_lock_with_another_name_is_refused(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "x").hardlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="a hard link to a file that has other names"):
        open_own(tmp_path / "x")
    open_own(tmp_path / "y").close()
    assert (tmp_path / "y").is_file()


def test_more_than_was_allowed_is_not_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="it holds more than 4 bytes"):
        read_regular(tmp_path / "x", 4)


def test_a_folder_that_was_removed_or_replaced_is_another(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    before = folder.stat()
    assert is_still(folder, before)
    folder.rename(tmp_path / "y")
    assert not is_still(folder, before)
    folder.mkdir()
    assert not is_still(folder, before)


def test_a_link_to_a_folder_is_no_folder(tmp_path):
    check_folder(tmp_path / "nothing yet")
    check_folder(tmp_path)
    (tmp_path / "x").symlink_to(tmp_path)
    with pytest.raises(OSError, match="it is a link, not a folder"):
        check_folder(tmp_path / "x")
