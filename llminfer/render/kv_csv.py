"""`kv-size --format csv`: one line per answer, bytes as integers; the columns do not depend on the answers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from llminfer.kv.answers import Answer

COLUMNS = (
    "model",
    "model_type",
    "method",
    "runtime",
    "release",
    "tokens",
    "batch",
    "tp",
    "k_dtype",
    "v_dtype",
    "total_bytes",
    "bytes_per_token",
    "state_bytes",
    "padding_bytes",
    "peak_bytes",
    "all_ranks_bytes",
    "context_limit",
    "beyond_context_limit",
    "memory_bytes",
    "cache_bytes",
    "fits",
    "max_tokens",
    "max_batch",
    "formula",
    "refusal",
)


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers in the order asked; with `layers` one line per layer instead."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if layers:
        writer.writerow(("model", "runtime", "tokens", "batch", "layer", "kind", "kept_tokens", "bytes", "state_bytes"))
        for answer in answers:
            writer.writerows(_layers(answer))
    else:
        writer.writerow(COLUMNS)
        writer.writerows([_value(answer, name) for name in COLUMNS] for answer in answers)
    return stream.getvalue()


def _value(answer: Answer, name: str) -> object:
    for record, renamed in (
        (answer, {"beyond_context_limit": "beyond_limit"}),
        (answer.footprint, {}),
        (answer.model, {"model": "name"}),
        (answer.budget, {}),
        (answer.budget.memory if answer.budget else None, {"memory_bytes": "total_bytes"}),
    ):
        attribute = renamed.get(name, name)
        if record is None or attribute == "model" or not hasattr(record, attribute):
            continue
        value = getattr(record, attribute)
        return str(value).lower() if isinstance(value, bool) else value
    return None


def _layers(answer: Answer) -> list[tuple[object, ...]]:
    found = answer.footprint
    if found is None:
        return []
    about = (answer.model.name, answer.runtime, answer.tokens, answer.batch)
    return [
        (*about, index, layer.kind, row.slots if layer.tensors else 0, row.size_bytes, row.state_bytes)
        for index, (layer, row) in enumerate(zip(found.layers, found.layer_rows, strict=True))
    ]
