"""`kv-size --format csv`: one line per answer, bytes as integers; the columns do not depend on the answers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from llminfer.kv.results import Answer

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
    if layers:
        writer.writerow(LAYER_COLUMNS)
        for answer in answers:
            writer.writerows(_layers(answer))
    else:
        writer.writerow(COLUMNS)
        for answer in answers:
            values = _values(answer)
            writer.writerow([values.get(name) for name in COLUMNS])
    return stream.getvalue()


def _values(answer: Answer) -> dict[str, object]:
    """An answer's cells by column; a column that it has nothing for is missing, so empty."""
    model, found, fits = answer.model, answer.footprint, answer.budget
    values: dict[str, object] = {
        "model": model.name,
        "model_type": model.model_type,
        "method": model.method,
        "runtime": answer.runtime,
        "tokens": answer.tokens,
        "batch": answer.batch,
        "tp": answer.tp,
        "context_limit": model.context_limit,
        "beyond_context_limit": _word(answer.beyond_limit),
        "refusal": answer.refusal,
    }
    if found is not None:
        sizes = COLUMNS[COLUMNS.index("total_bytes") : COLUMNS.index("context_limit")]
        names = ("release", "k_dtype", "v_dtype", "formula", *sizes)
        values |= {name: getattr(found, name) for name in names}
    if fits is not None:
        values |= {"memory_bytes": fits.memory.total_bytes, "cache_bytes": fits.memory.cache_bytes}
        values |= {"fits": _word(fits.fits), "max_tokens": fits.max_tokens, "max_batch": fits.max_batch}
    return values


def _word(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()


def _layers(answer: Answer) -> list[tuple[object, ...]]:
    found = answer.footprint
    if found is None:
        return []
    about = (answer.model.name, answer.runtime, answer.tokens, answer.batch)
    return [
        (*about, index, layer.kind, row.slots if layer.tensors else 0, row.size_bytes, row.state_bytes)
        for index, (layer, row) in enumerate(zip(found.layers, found.layer_rows, strict=True))
    ]
