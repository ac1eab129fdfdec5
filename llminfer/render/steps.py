"""The per-step table: one aligned line per token, never wrapped or cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from llminfer.events import Step

_HEADERS = (
    "step",
    "token",
    "text",
    "logprob",
    "forward ms",
    "sampling ms",
    "text ms",
    "output ms",
    "at ms",
    "cached",
    "KV bytes",
)
_LEFT = frozenset({"text"})


def step_table(steps: Sequence[Step]) -> Iterator[str]:
    """The table's lines, the header first."""
    rows = [_HEADERS, *(_cells(step) for step in steps)]
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(_HEADERS))]
    for row in rows:
        padded = (
            _pad(cell, width, left=header in _LEFT) for cell, width, header in zip(row, widths, _HEADERS, strict=True)
        )
        yield "  ".join(padded).rstrip()


def escaped(text: str) -> str:
    """Text in quotes on one line: line breaks, tabs and control characters as escapes, the rest as it is."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in quoted)


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.index),
        str(step.token_id),
        escaped(step.token_text),
        f"{step.logprob:.3f}",
        *(
            f"{value_s * 1e3:.2f}"
            for value_s in (step.forward_s, step.sampling_s, step.text_s, step.output_s, step.at_s)
        ),
        str(step.cached_tokens),
        "-" if step.kv_bytes is None else str(step.kv_bytes),
    )


def _pad(cell: str, width: int, *, left: bool) -> str:
    space = " " * (width - cell_len(cell))
    return cell + space if left else space + cell
