"""`kv-size --format table`: the answers as Rich tables, never narrower than their numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import StringIO

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from llminfer.kv.results import Answer
from llminfer.render.console import make_console, wants_color
from llminfer.render.kv_columns import Table, Title, blocks

_UNLIMITED = 10_000


def render(answers: Sequence[Answer], *, layers: bool = False, color: bool | None = None) -> str:
    """The answers as a table, the formulas and notes below it; with `layers` the layers and their fields.

    Cells are `Text`, so that a name with brackets is a name and no markup. The width is what the
    widest table needs: a terminal may wrap a line, a pipe or a file never gets a cut number.
    """
    stream = StringIO()
    color = wants_color(sys.stdout) if color is None else color
    console = make_console(stream, color=color, width=_UNLIMITED)
    for block in blocks(answers, layers=layers):
        if isinstance(block, Table):
            _print(console, block)
        elif isinstance(block, Title):
            console.print(Text(f"\n{block.model}{block.text}", style="bold"))
        else:
            console.print(Text("\n".join(block)))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _print(console: Console, block: Table) -> None:
    table = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, number in zip(block.headings, block.numbers, strict=True):
        table.add_column(Text(heading), justify="right" if number else "left", no_wrap=True)
    for row in block.rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table, width=Measurement.get(console, console.options, table).maximum)
