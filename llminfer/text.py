"""Text that others wrote: UTF-8, or whatever Unicode a byte order mark names; and their errors, as one line."""

from __future__ import annotations

import codecs

from llminfer.errors import UsageError

# UTF-32 first: its mark begins with that of UTF-16
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}


def decode_text(data: bytes, source: str) -> str:
    """The text of a file or of a stream, without its byte order mark.

    Args:
        source: names it in errors.

    Raises:
        UsageError: for what is no text of the encoding that it begins with.
    """
    try:
        return to_utf8(data, source).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8") from None


def to_utf8(data: bytes, source: str) -> bytes:
    """The same text in UTF-8 without a mark; what has no mark stays as it is, UTF-8 or not.

    Raises:
        UsageError: for a mark that what follows does not keep to, and for UTF-16 that has none.
    """
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            rest = data[len(mark) :]
            try:
                return rest if encoding == "utf-8" else rest.decode(encoding).encode("utf-8")
            except UnicodeDecodeError as error:
                reason = f"{source} begins as {encoding.upper()} and is not (byte {len(mark) + error.start})"
                raise UsageError(reason, hint="save it as UTF-8") from None
    if len(data) > 1 and (data[0] == 0) != (data[1] == 0):  # no text in UTF-8 begins so
        raise UsageError(f"{source} looks like UTF-16 without a byte order mark", hint="save it as UTF-8")
    return data


def without_line_end(text: str) -> str:
    """The text without the one line break, LF or CR LF, that an editor or `echo` puts at its end."""
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def first_line(error: BaseException) -> str:
    """The first line of another library's message, printable; two where the first only names what the second is of."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return "".join(character if character.isprintable() else "?" for character in reason)


def reason_of(error: BaseException) -> str:
    """The kind of another library's error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"
