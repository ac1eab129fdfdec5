"""Columns that line up on a terminal, whatever the letters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from llminfer.render.align import aligned


def test_numbers_to_the_right_and_wide_letters_by_their_cells() -> None:
    assert aligned([("name", "bytes"), ("日本", "7"), ("x", "12345")], right=(False, True)) == [
        "name  bytes",
        "日本      7",
        "x     12345",
    ]
    assert aligned([("/save FILE", "Write it."), ("/help", "")]) == ["/save FILE  Write it.", "/help"]


@given(st.lists(st.tuples(st.text("ab日é"), st.text("xy本")), min_size=1), st.booleans())
def test_every_second_column_begins_and_ends_in_one_place(rows: list[tuple[str, str]], right: bool) -> None:
    first = max(cell_len(cell) for cell, _ in rows)
    second = max(cell_len(cell) for _, cell in rows)
    for (left, last), line in zip(rows, aligned(rows, right=(False, right)), strict=True):
        start = first + 2 + (second - cell_len(last) if right else 0)
        assert line == (left + " " * (start - cell_len(left)) + last).rstrip()
