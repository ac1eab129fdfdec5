"""The errors of other packages on a file that nobody vouches for, as one line of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llminfer.errors import LlminferError, ModelNotAvailable
from llminfer.text import reason_of


@contextmanager
def foreign_errors(path: Path, what: str, *, stated: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Report whatever is raised inside as `path: what (the reason)`.

    `stated` is the config that is read: a name that nobody knows is reported with the field that states it.

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
        reason = _unknown_name(error, stated or {}) or reason_of(error)
        raise ModelNotAvailable(f"{path}: {what} ({reason})") from error


def _unknown_name(error: Exception, stated: Mapping[str, Any]) -> str | None:
    """The field of the config whose value a table or a module does not have, None for another error."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else getattr(error, "name", None)
    return next(
        (f"{field} is {value!r}, which is unknown" for field, value in _fields(stated) if value and value == name), None
    )


def _fields(stated: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in stated.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        elif isinstance(value, str):
            yield f"{prefix}{name}", value
