"""Text that others wrote, in every encoding that has a mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llminfer.errors import UsageError
from llminfer.text import decode_text, reason_of, to_utf8, without_line_end

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), min_size=0)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@given(text=UNICODE)
def test_a_mark_says_the_encoding_and_is_no_part_of_the_text(encoding: str, text: str) -> None:
    # in UTF-16 a first NUL would make the mark that of UTF-32
    text = text.lstrip("\0\ufeff")
    data = ("\ufeff" + text).encode(encoding)
    assert decode_text(data, "the file") == text
    assert to_utf8(data, "the file").decode() == text


@given(text=UNICODE)
def test_utf_8_needs_no_mark(text: str) -> None:
    text = text.lstrip("\0\ufeff")
    if "\0" not in text[:2]:
        assert decode_text(text.encode(), "the file") == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ab\xff", "the file is not UTF-8 text (byte 2)"),
        ("hi".encode("utf-16-le"), "the file looks like UTF-16 without a byte order mark"),
        ("hi".encode("utf-16-be"), "the file looks like UTF-16 without a byte order mark"),
        (b"\xff\xfea", "the file begins as UTF-16-LE and is not (byte 2)"),
        (b"\xff\xfe\x00\xd8", "the file begins as UTF-16-LE and is not (byte 2)"),
    ],
)
def test_what_is_no_text_is_named(data: bytes, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode_text(data, "the file")
    assert caught.value.message == said
    assert caught.value.hint == "save it as UTF-8"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\n", "a"),
        ("a\r\n", "a"),
        ("a\n\n", "a\n"),
        ("a\r", "a\r"),
        ("a\r\r\n", "a\r"),
        ("a\u2028", "a\u2028"),
        ("", ""),
    ],
)
def test_one_line_end_goes_and_a_lone_carriage_return_stays(text: str, kept: str) -> None:
    assert without_line_end(text) == kept


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("one\ntwo", "ValueError: one"),
        ("\n  field:\n  is wrong\nmore", "ValueError: field: is wrong"),
        ("a\x1b[2Jb", "ValueError: a?[2Jb"),
        ("", "ValueError: no message"),
    ],
)
def test_an_error_of_another_library_is_one_printable_line(message: str, reason: str) -> None:
    assert reason_of(ValueError(message)) == reason
