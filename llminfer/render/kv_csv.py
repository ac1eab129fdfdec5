"""`kv-size --format csv`: one line per answer, bytes as integers; the columns do not depend on the answers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from llminfer.kv.results import Answer
from llminfer.render.kv_columns import facts

COLUMNS = (
    *("model", "model_type", "method", "runtime", "release", "tokens", "batch", "tp", "k_dtype", "v_dtype"),
    *("total_bytes", "bytes_per_token", "state_bytes", "padding_bytes", "peak_bytes", "all_ranks_bytes"),
    *("context_limit", "beyond_context_limit", "memory_bytes", "cache_bytes", "fits", "max_tokens", "max_batch"),
    *("formula", "refusal"),
)
LAYER_COLUMNS = ("model", "runtime", "tokens", "batch", "layer", "kind", "kept_tokens", "bytes", "state_bytes")


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers in the order asked; with `layers` one line per layer instead."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(LAYER_COLUMNS if layers else COLUMNS)
    for answer in answers:
        writer.writerows(_layers(answer) if layers else [map(_values(answer).get, COLUMNS)])
    return stream.getvalue()


def _values(answer: Answer) -> dict[str, object]:
    """An answer's cells by column; a column that it has nothing for is missing, so empty."""
    values, found, fits = facts(answer), answer.footprint, answer.budget
    if found is not None:
        sizes = COLUMNS[COLUMNS.index("total_bytes") : COLUMNS.index("context_limit")]
        names = ("release", "k_dtype", "v_dtype", "formula", *sizes)
        values |= {name: getattr(found, name) for name in names}
    if fits is not None:
        values |= {"memory_bytes": fits.memory.total_bytes, "cache_bytes": fits.memory.cache_bytes}
        values |= {"fits": fits.fits, "max_tokens": fits.max_tokens, "max_batch": fits.max_batch}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}


def _layers(answer: Answer) -> list[tuple[object, ...]]:
    found = answer.footprint
    if found is None:
        return []
    about = (answer.model.name, answer.setup.runtime, answer.tokens, answer.setup.batch)
    return [
        (*about, index, layer.kind, row.slots if layer.tensors else 0, row.size_bytes, row.state_bytes)
        for index, (layer, row) in enumerate(zip(found.layers, found.layer_rows, strict=True))
    ]
