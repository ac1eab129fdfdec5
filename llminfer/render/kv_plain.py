"""`kv-size --format plain`: aligned text without colours, boxes or a width."""

from __future__ import annotations

from collections.abc import Sequence

from llminfer.kv.results import Answer
from llminfer.render.kv_columns import (
    CHECK_HEADINGS,
    FIELD_HEADINGS,
    LAYER_HEADINGS,
    aligned,
    check_rows,
    columns,
    field_rows,
    layer_rows,
    layers_title,
    lines_below,
)


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers as text, a line each; with `layers` the layers and the fields they came from."""
    used = columns(answers)
    table = [[column.text(answer) for column in used] for answer in answers]
    lines = aligned([column.heading for column in used], table, [column.number for column in used])
    lines += ["", *lines_below(answers)]
    for answer in answers:
        if layers and answer.footprint is not None:
            rows = layer_rows(answer.footprint)
            lines += ["", layers_title(answer)]
            lines += aligned(LAYER_HEADINGS, rows, (True, False, True, False, True, True, True))
            lines += ["", *aligned(FIELD_HEADINGS, field_rows(answer), (False, False, False))]
        if answer.check:
            lines += ["", *aligned(CHECK_HEADINGS, check_rows(answer.check), (True, False, True, True, False))]
    return "\n".join(lines) + "\n"
