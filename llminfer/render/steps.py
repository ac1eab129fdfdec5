"""The per-step table: one aligned line per token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from llminfer.events import Step
from llminfer.render.fit import fitted

_HEADERS = (
    *("step", "token", "text", "logprob", "forward ms", "sampling ms", "text ms", "output ms", "at ms"),
    *("cached", "KV bytes"),
)
_DRAFT_HEADERS = ("accepted", "draft ms")
_DROPPED = ("text ms", "output ms", "at ms", "token", "cached", "draft ms", "logprob", "sampling ms", "accepted")


def step_table(steps: Sequence[Step], *, drafts: bool = False, width: int | None = None) -> Iterator[str]:
    """The table's lines, the header first; with `drafts` what was drafted for each forward.

    Columns that say least are left out where the table would be wider than `width`.
    """
    headers = (*_HEADERS, *_DRAFT_HEADERS) if drafts else _HEADERS
    rows = [(*_cells(step), *_draft_cells(step)) if drafts else _cells(step) for step in steps]
    heading, lines = fitted(headers, rows, numbers=[header != "text" for header in headers], width=width, drop=_DROPPED)
    yield from lines if heading is None else [heading, *lines]


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
        "-" if step.shared_forward else f"{step.forward_s * 1e3:.2f}",
        *(f"{value_s * 1e3:.2f}" for value_s in (step.sampling_s, step.text_s, step.output_s, step.at_s)),
        str(step.cached_tokens),
        "-" if step.kv_bytes is None else str(step.kv_bytes),
    )


def _draft_cells(step: Step) -> tuple[str, str]:
    """Accepted of drafted, and the time; dashes for a token of the forward of a step before."""
    if step.shared_forward:
        return "-", "-"
    return f"{step.accepted}/{step.drafted}", f"{step.draft_s * 1e3:.2f}"
