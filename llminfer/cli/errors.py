"""What goes wrong, as every command says it: an `error:` line, perhaps a `hint:`, and an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llminfer.errors import LlminferError, UsageError, reason_of
from llminfer.units import visible

INTERRUPTED_EXIT_CODE = 130

# a file that can never be written under this name; other errors, as a full disk, are no fault of the request
_BAD_NAMES = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
)


def say(text: str) -> None:
    """One line on standard error; whoever wrote parts of it, it is text and nothing that a terminal acts on."""
    print(visible(text), file=sys.stderr, flush=True)


def report(error: LlminferError) -> int:
    """Print an error for people and return its exit code."""
    say(f"error: {' '.join(error.message.split())}")
    if error.hint:
        say(f"hint: {error.hint}")
    return error.exit_code


def as_ours(error: Exception) -> LlminferError:
    """Any error as one to report: those of the system by what they say, others as a bug."""
    if isinstance(error, LlminferError):
        return error
    if isinstance(error, MemoryError):
        return LlminferError("out of memory", hint="this needs more memory than the machine has")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return LlminferError(f"{where}{error.strerror or error}")
    return LlminferError(reason_of(error), hint="this is a bug; --debug shows where")


@contextmanager
def writing(file: Path | None) -> Iterator[None]:
    """Name the file that the system says cannot be written."""
    try:
        yield
    except OSError as error:
        kind = UsageError if error.errno in _BAD_NAMES else LlminferError
        raise kind(f"cannot write {file}: {error.strerror or error}") from error
