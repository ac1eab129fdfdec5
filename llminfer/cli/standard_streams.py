"""The standard streams, made safe once at the start: closed, full, without a reader, in another encoding."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any, TextIO

from llminfer.errors import UsageError
from llminfer.units import visible

# what tables are written with, for consoles whose encoding lacks it; blocks of a picture become stars
_LOOK_ALIKES = {"·": "*", "×": "x", "–": "-", "−": "-", "─": "-", "━": "-", "│": "|", "┃": "|", "µ": "u", "≠": "!"}
_ERRORS = "llminfer-look-alikes"


def set_up_streams() -> None:
    """Put streams of ours in place of standard output and standard error, for the rest of the process.

    Whatever is printed can be encoded. Standard output that cannot be written raises an `OSError` that says
    so, once; what nobody can read on standard error is left out.
    """
    for number in range(3):  # else the next file that is opened takes the place of a closed one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error(_ERRORS, _look_alike)
    sys.stdout = _text_stream(sys.stdout, says_errors=True)
    sys.stderr = _text_stream(sys.stderr, says_errors=False)


def quiet_libraries(*, bars: bool) -> None:
    """Leave standard error to us: the libraries read this when they are imported, and what goes wrong is an exception.

    `bars` leaves the Hub's own progress bars on. Whoever has set these variables keeps them.
    """
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not bars:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def check_stdout() -> None:
    """Raise the `OSError` of a standard output that cannot be written, before there is anything to write."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Border):
        raw.write(b"")


def write_text(text: str) -> None:
    """Text to standard output, at once: UTF-8 byte for byte; what a terminal would act on is written out there."""
    if text:
        if sys.stdout.isatty():
            text = visible(text, keep="\n\t")
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
        _unfinished[0] = not text.endswith("\n")


# whether the text so far did not end its line; a process has one standard output
_unfinished = [False]


def end_line() -> None:
    """On a terminal the text ends its last line, so that what comes next stands on a line of its own."""
    if _unfinished[0] and sys.stdout.isatty():
        write_text("\n")


def begin_line() -> None:
    """End the text's line before something is said, where both reach the same terminal or file.

    The line break goes to standard error, so the text stays what it is, byte for byte.
    """
    if _unfinished[0] and _reach_the_same():
        sys.stderr.write("\n")
        _unfinished[0] = False


def _reach_the_same() -> bool:
    try:
        out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def read_stdin() -> bytes:
    """All of standard input.

    Raises:
        UsageError: when it is closed or cannot be read.
    """
    if sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from error


class _Border(io.RawIOBase):
    """What writes below Python's own buffers; after its first failure it takes everything and writes nothing.

    So an error is met once: not again by what is still in the buffers when the process ends.
    """

    replaced: Any = None  # kept, since a stream that nobody holds closes what it writes to

    def __init__(self, raw: Any, *, says_errors: bool) -> None:
        self._raw, self._says_errors, self._broken = raw, says_errors, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self._says_errors else 2

    def isatty(self) -> bool:
        return self._raw is not None and bool(self._raw.isatty())

    def write(self, data: Any) -> int | None:
        if self._broken:
            return len(data)
        try:
            if self._raw is None:
                raise OSError(errno.EBADF, "it is closed")
            written: int | None = self._raw.write(data)
            return written
        except OSError as error:
            self._broken = True
            if not self._says_errors:
                return len(data)
            raise OSError(error.errno, error.strerror, "cannot write to standard output") from error


def _text_stream(stream: Any, *, says_errors: bool) -> TextIO:
    """The stream with a border below it; one that is no stream of bytes stays as it is."""
    if stream is not None and not hasattr(stream, "buffer"):
        return stream  # type: ignore[no-any-return]
    raw = None if stream is None else getattr(stream.buffer, "raw", stream.buffer)
    border = _Border(raw, says_errors=says_errors)
    border.replaced = stream
    return io.TextIOWrapper(
        io.BufferedWriter(border),
        encoding="utf-8" if stream is None else stream.encoding,
        errors=_ERRORS,
        line_buffering=not says_errors or border.isatty(),
    )


def _look_alike(error: UnicodeError) -> tuple[str, int]:
    """The replacement of what an encoding lacks: something of one column where there is one, else an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_replacement, error.object[error.start : error.end])), error.end


def _replacement(character: str) -> str:
    if "\u2500" <= character <= "\u259f" or "\u2800" <= character <= "\u28ff":
        return _LOOK_ALIKES.get(character, "+" if character <= "\u257f" else " " if character == "\u2800" else "*")
    escape = character.encode("ascii", "backslashreplace").decode("ascii")
    return _LOOK_ALIKES.get(character, escape)
