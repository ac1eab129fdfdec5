"""`kv-size --format table`: the answers as Rich tables, never narrower than their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from llminfer.kv.results import Answer
from llminfer.render.kv_columns import (
    CHECK_HEADINGS,
    FIELD_HEADINGS,
    LAYER_HEADINGS,
    check_rows,
    columns,
    field_rows,
    layer_rows,
    layers_title,
    lines_below,
)


def render(answers: Sequence[Answer], *, layers: bool = False, color: bool = False) -> str:
    """The answers as a table, the formulas and notes below it; with `layers` the layers and their fields.

    Cells are `Text`, so that a name with brackets is a name and no markup. The width is what the
    widest table needs: a terminal may wrap a line, a pipe or a file never gets a cut number.
    """
    stream = StringIO()
    console = Console(
        file=stream,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        width=10_000,
    )
    used = columns(answers)
    rows = [[column.text(answer) for column in used] for answer in answers]
    _print(console, [column.heading for column in used], rows, [column.number for column in used])
    for line in lines_below(answers):
        console.print(Text(line), soft_wrap=True)
    for answer in answers:
        if layers and answer.footprint is not None:
            console.print(Text(f"\n{layers_title(answer)}", style="bold"))
            _print(console, LAYER_HEADINGS, layer_rows(answer.footprint), (True, False, True, False, True, True, True))
            _print(console, FIELD_HEADINGS, field_rows(answer), (False, False, False))
        if answer.check:
            _print(console, CHECK_HEADINGS, check_rows(answer.check), (True, False, True, True, False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _print(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, number in zip(headings, numbers, strict=True):
        table.add_column(Text(heading), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table, width=Measurement.get(console, console.options, table).maximum)
