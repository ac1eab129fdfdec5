"""`kv-size --format markdown`: a pipe table and the formulas as a list."""

from __future__ import annotations

from collections.abc import Sequence

from llminfer.kv.results import Answer
from llminfer.render.kv_columns import (
    CHECK_HEADINGS,
    FIELD_HEADINGS,
    LAYER_HEADINGS,
    check_rows,
    columns,
    field_rows,
    layer_rows,
    lines_below,
)
from llminfer.units import visible


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers as a Markdown table; with `layers` a table of layers and one of fields for each."""
    used = columns(answers)
    rows = [[column.text(answer) for column in used] for answer in answers]
    lines = _table([column.heading for column in used], rows, [column.number for column in used])
    lines += ["", *(f"- {_escaped(line)}" for line in lines_below(answers))]
    for answer in answers:
        if layers and answer.footprint is not None:
            numbers = (True, False, True, False, True, True, True)
            lines += ["", f"**{_escaped(visible(answer.model.name))}**, {answer.runtime}, {answer.tokens} tokens", ""]
            lines += _table(LAYER_HEADINGS, layer_rows(answer.footprint), numbers)
            lines += ["", *_table(FIELD_HEADINGS, field_rows(answer), (False, False, False))]
        if answer.check:
            lines += ["", *_table(CHECK_HEADINGS, check_rows(answer.check), (True, False, True, True, False))]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> list[str]:
    rules = ["--:" if number else "---" for number in numbers]
    return [_line(headings), _line(rules), *(_line([_escaped(cell) for cell in row]) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "\\|[]*<`" else char for char in text)
