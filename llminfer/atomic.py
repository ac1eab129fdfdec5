"""Files that are written whole or not at all; what a killed process leaves, the next writer of the file removes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # without these locks nobody can tell a leftover from a file being written, so none is removed
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of `target` when the block ends without an error.

    A link stays a link. A new file is its owner's alone, one that was there keeps its mode. The path is
    in a folder of its own beside the target, since libraries write by way of files of their own naming.

    Raises:
        OSError: when it cannot be written, or is there and no file: a device would be gone with all that use it.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(target))
    _remove_leftovers(target)
    folder, lock = _locked_folder(target)
    try:
        beside = folder / target.name
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o600)
        os.replace(beside, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(lock)


def _locked_folder(target: Path) -> tuple[Path, int | None]:
    """A new folder, and a descriptor that locks it for as long as this process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"))
        lock = _lock(folder, wait=True)
        if folder.exists():  # gone where another writer took it for a leftover just now
            return folder, lock
        _unlock(lock)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """A descriptor that locks the folder; None where another process holds it, or nothing can be locked."""
    if fcntl is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        _unlock(descriptor)
        return None
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _remove_leftovers(target: Path) -> None:
    name = re.compile(rf"\.{re.escape(target.name)}\.\w{{8}}\.tmp")
    for folder in [entry for entry in target.parent.iterdir() if name.fullmatch(entry.name)]:
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            _unlock(lock)
