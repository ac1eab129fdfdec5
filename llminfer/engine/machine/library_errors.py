"""The errors of other packages on a file that nobody vouches for, as one line of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llminfer.errors import LlminferError, ModelNotAvailable


@contextmanager
def foreign_errors(path: Path, what: str) -> Iterator[None]:
    """Report whatever is raised inside as `path: what (the reason)`.

    The metadata of a file can contradict itself in any way, and each way raises another type deep in
    another package. Our own errors and those of the system (a full disk) pass.
    """
    try:
        yield
    except (LlminferError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ModelNotAvailable(f"{path}: {what} ({type(error).__name__}: {_first_sentence(error)})") from error


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # some put the field's name in the first line and what is wrong with it in the second
    reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return "".join(character if character.isprintable() else "?" for character in reason)
