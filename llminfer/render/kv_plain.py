"""`kv-size --format plain`: aligned text without colours, boxes or a width."""

from __future__ import annotations

from collections.abc import Sequence

from llminfer.kv.results import Answer
from llminfer.render.align import aligned
from llminfer.render.kv_columns import Table, Title, blocks


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers as text, a line each; with `layers` the layers and the fields they came from."""
    lines: list[str] = []
    for block in blocks(answers, layers=layers):
        if isinstance(block, Table):
            lines += [*aligned([block.headings, *block.rows], right=block.numbers), ""]
        elif isinstance(block, Title):
            lines.append(block.model + block.text)
        else:
            lines += [*block, ""]
    return "\n".join(lines)
