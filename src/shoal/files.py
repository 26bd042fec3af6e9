"""Files in folders that may come from somebody else: no link is followed, no pipe is waited for.

Reading opens regular files only. Writing never writes into a file that is there already: it makes
a new one and takes the name over, so that a link to a file elsewhere, symbolic or hard, loses its
name and nothing else.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a file to read it; raise an `OSError` if it is a link, a pipe, a device or a folder.

    A link in a folder that came from elsewhere could name any file of this machine, and a pipe
    could hold its reader for ever. `follow` is for paths that a person chose.
    """
    return os.fdopen(_opened(path, os.O_RDONLY, follow=follow), "rb", buffering=0)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file; raise an `OSError` if it holds more than `max_bytes`."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it holds more than {max_bytes:,} bytes", str(path))
        return file.read()


def open_own(path: Path) -> BinaryIO:
    """Open a file to read and write it, making it if need be; refuse one that has other names."""
    descriptor = _opened(path, os.O_RDWR | os.O_CREAT, follow=False)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it is a hard link to a file that has other names", str(path))
    return os.fdopen(descriptor, "r+b", buffering=0)


def create(path: Path) -> BinaryIO:
    """Make a new, empty file; what had its name before loses the name and keeps its bytes."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w+b", buffering=0)


def replace(path: Path, data: bytes) -> BinaryIO:
    """Give `path` a new file that holds `data`, all at once; return it open, to write on."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    file = create(part)
    try:
        write_all(file, data)
        os.replace(part, path)
    except OSError:
        file.close()
        with suppress(OSError):
            part.unlink()
        raise
    return file


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write every byte to an unbuffered file, which may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def is_still(folder: Path, before: os.stat_result) -> bool:
    """Tell whether a folder is the one that it was: it may have been removed or replaced."""
    try:
        return os.path.samestat(before, folder.stat())
    except FileNotFoundError:
        return False


def remove_folder(path: Path) -> None:
    """Remove a folder with all that it holds; of a link, the link and nothing that it leads to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def check_folder(path: Path) -> None:
    """Raise an `OSError` if `path` is there and is no folder itself: a link is none."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise OSError(errno.ENOTDIR, f"it is {_kind(mode)}, not a folder", str(path))


def _opened(path: Path, flags: int, *, follow: bool) -> int:
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ELOOP):
            mode = os.stat(path, follow_symlinks=follow).st_mode
            raise _irregular(error.errno, mode, path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(errno.EINVAL, mode, path)
    return descriptor


def _irregular(number: int, mode: int, path: Path) -> OSError:
    return OSError(number, f"it is {_kind(mode)}, not a regular file", str(path))


def kind_of(path: Path) -> str:
    """Say what `path`, or what it links to, is: "a pipe", "a folder", "a file"."""
    return _kind(os.stat(path).st_mode)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a file")
