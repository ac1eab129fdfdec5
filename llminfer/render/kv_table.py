"""`kv-size --format table`: answers for people, fitted to their terminal; what all answers share is said once above."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.cells import cell_len
from rich.text import Text

from llminfer.kv.results import Answer
from llminfer.render.console import make_console, wants_color
from llminfer.render.fit import broken, fitted, width_of
from llminfer.render.kv_columns import Block, Table, Title, blocks


def render(answers: Sequence[Answer], *, layers: bool = False, color: bool | None = None) -> str:
    """The answers as a table, the formulas and notes below it; with `layers` the layers and their fields.

    In a terminal no line is wider than it is: columns that say least are left out, long lines are broken
    between words. In a pipe or a file everything is there and nothing is broken.
    """
    stream = StringIO()
    console = make_console(stream, color=wants_color(sys.stdout) if color is None else color)
    for block in blocks(answers, layers=layers):
        for line in _lines(block, width_of(sys.stdout)):
            console.print(line)
    return stream.getvalue()


def _lines(block: Block, width: int | None) -> Iterator[Text]:
    if isinstance(block, Title):
        yield Text()
        yield from (Text(line, style="bold") for line in broken(block.model + block.text, width, indent=2))
    elif isinstance(block, Table):
        caption, table = block.captioned()
        yield from (Text(line, style="bold") for line in (broken(caption, width, indent=2) if caption else ()))
        heading, rows = fitted(table.headings, table.rows, numbers=table.numbers, width=width, drop=table.drop)
        if heading is not None:
            yield Text(heading, style="bold")
            yield Text("─" * max(map(cell_len, [heading, *rows])))
        yield from map(Text, [*rows, ""])
    else:
        for text in block:
            yield from map(Text, broken(text, width, indent=2))
