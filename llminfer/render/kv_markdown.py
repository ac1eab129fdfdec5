"""`kv-size --format markdown`: a pipe table and the formulas as a list."""

from __future__ import annotations

from collections.abc import Sequence

from llminfer.kv.results import Answer
from llminfer.render.kv_columns import Block, Table, Title, blocks


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers as a Markdown table; with `layers` a table of layers and one of fields for each."""
    return "\n".join("".join(f"{line}\n" for line in _lines(block)) for block in blocks(answers, layers=layers))


def _lines(block: Block) -> list[str]:
    if isinstance(block, Table):
        rules = ["--:" if number else "---" for number in block.numbers]
        return [_row(block.headings), _row(rules), *(_row([_escaped(cell) for cell in row]) for row in block.rows)]
    if isinstance(block, Title):
        return [f"**{_escaped(block.model)}**{block.text}"]
    return [f"- {_escaped(line)}" for line in block]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "\\|[]*<`" else char for char in text)
