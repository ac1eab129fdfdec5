"""`kv-size --format json`: one strict document, bytes as integers.

`schema_version` rises when a key changes its meaning or goes; keys may be added without that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llminfer.kv.budget import Budget
from llminfer.kv.footprint import Footprint
from llminfer.kv.layer import LayerKV
from llminfer.kv.results import Answer, CheckRow
from llminfer.kv.runtimes.records import LayerBytes
from llminfer.render.kv_columns import facts
from llminfer.units import to_json

SCHEMA_VERSION = 1
_SIZES = (
    *("release", "dtype", "k_dtype", "v_dtype", "total_bytes", "bytes_per_token", "block_tokens", "state_bytes"),
    *("padding_bytes", "peak_bytes", "all_ranks_bytes", "bytes_by_kind"),
)


def render(answers: Sequence[Answer], *, layers: bool = False) -> str:
    """The answers in the order asked; with `layers` every layer and every field used."""
    document = {"schema_version": SCHEMA_VERSION, "results": [_result(answer, layers) for answer in answers]}
    return to_json(document, indent=2) + "\n"


def _result(answer: Answer, layers: bool) -> dict[str, Any]:
    model, found = answer.model, answer.footprint
    result = {**facts(answer), "model_notes": list(model.notes)}
    if found is not None:
        result |= _footprint(found)
        if layers:
            result["layers"] = [
                _layer(index, layer, row)
                for index, (layer, row) in enumerate(zip(found.layers, found.layer_rows, strict=True))
            ]
    if layers:
        result["fields"] = [
            {"name": field.name, "value": _plain(field.value), "from": field.origin} for field in model.fields
        ]
    if answer.budget is not None:
        result["budget"] = _budget(answer.budget)
    if answer.check:
        result["verified"] = [_check(row) for row in answer.check]
    return result


def _footprint(found: Footprint) -> dict[str, Any]:
    return {
        **{name: getattr(found, name) for name in _SIZES},
        "peaks": [{"name": peak.name, "bytes": peak.size_bytes, "reason": peak.reason} for peak in found.peaks],
        "formula": found.formula,
        "notes": list(found.notes),
    }


def _layer(index: int, layer: LayerKV, row: LayerBytes) -> dict[str, Any]:
    return {
        "layer": index,
        "kind": layer.kind,
        "window": layer.window,
        "kept_tokens": row.slots if layer.tensors else 0,
        "bytes": row.size_bytes,
        "state_bytes": row.state_bytes,
        "tensors": [
            {"name": tensor.name, "heads": tensor.heads, "dim": tensor.dim, "dtype": tensor.dtype}
            for tensor in layer.tensors
        ],
        "states": [{"name": state.name, "shape": list(state.shape), "dtype": state.dtype} for state in layer.states],
    }


def _budget(found: Budget) -> dict[str, Any]:
    return {
        "memory_bytes": found.memory.total_bytes,
        "weights_bytes": found.memory.weights_bytes,
        "reserve_bytes": found.memory.reserve_bytes,
        "cache_bytes": found.memory.cache_bytes,
        "needed_bytes": found.needed_bytes,
        "fits": found.fits,
        "max_tokens": found.max_tokens,
        "max_batch": found.max_batch,
        "unbounded_tokens": found.max_tokens is None,
    }


def _check(row: CheckRow) -> dict[str, Any]:
    return {
        "tokens": row.tokens,
        "agrees": row.agrees,
        "real_run": row.real,
        "predicted_layer_bytes": list(row.predicted_bytes),
        "measured_layer_bytes": list(row.measured_bytes),
        "predicted_storage_bytes": row.predicted_storage_bytes,
        "measured_storage_bytes": row.measured_storage_bytes,
    }


def _plain(value: object) -> Any:
    """A field's value if JSON has it, else its text; NaN and infinities as text too."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)
