"""Files and folders that other users cannot steer: folders that only this user may write to, files written whole.

Reads   owners and modes.
Writes  a file that has no name, or a random one, until it takes the place of the file that was asked for.
Never   opens a file that was there before; follows a link of another user's; removes what it did not make.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class UnsafeFolder(OSError):
    """Another user could have put things there."""


def check_private(path: Path) -> None:
    """Raise UnsafeFolder unless it is a folder of this user's that no other user may write to."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{path} is no folder")
    if not hasattr(os, "getuid"):
        return
    if found.st_uid != os.geteuid():
        raise UnsafeFolder(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o022:
        raise UnsafeFolder(f"{path} can be written to by other users; `chmod 700 {path}` makes it safe")


def create(path: Path, mode: int = 0o600) -> int:
    """A descriptor of a file that was not there; FileExistsError where anything has that name, a link included."""
    return os.open(path, _NEW, mode)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is at `path` once the block has ended: whole, or not at all.

    A process that is killed meanwhile leaves nothing behind where the file system has files without names (O_TMPFILE).
    Elsewhere it leaves a file `.outlive-…` in that folder.
    """
    path = _behind_own_link(path)
    descriptor, beside = _nameless(path.parent), ""
    if descriptor is None:
        beside = _beside(path)
        descriptor = create(Path(beside), 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            if not beside:
                beside = _beside(path)
                # Given a folder's descriptor, Python follows the link in /proc, which names the file.
                os.link(f"/proc/self/fd/{descriptor}", beside, src_dir_fd=descriptor)
        os.replace(beside, path)
    except BaseException:
        if beside:
            with contextlib.suppress(OSError):
                os.unlink(beside)  # the name is ours: it has 64 random bits
        raise
    _sync_folder(path.parent)


def write(path: Path, body: bytes) -> None:
    """Write a file whole or not at all. What is no file, such as /dev/null, is written to: replacing it would take it
    away from all.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(body)
        return
    with replacing(path) as file:
        file.write(body)


def _behind_own_link(path: Path) -> Path:
    """Where a link of this user's leads to. A link of another user's is replaced, not followed."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) and (not hasattr(os, "geteuid") or found.st_uid == os.geteuid()):
            return Path(os.path.realpath(path))
    return path.absolute()


def has_nameless_files(folder: Path) -> bool:
    """Whether a file in this folder can be written before it has a name."""
    descriptor = _nameless(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _nameless(folder: Path) -> int | None:
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except OSError:  # not on every file system; where the folder itself is at fault, the next try says so
        return None
    if os.path.exists(f"/proc/self/fd/{descriptor}"):
        return descriptor
    os.close(descriptor)
    return None


def _beside(path: Path) -> str:
    return str(path.parent / f".outlive-{secrets.token_hex(8)}")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can; the rename is atomic all the same
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
