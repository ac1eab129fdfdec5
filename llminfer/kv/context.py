"""What a config says beside its sizes: the element types of model and cache, and the longest sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llminfer.errors import InvalidParams, UnknownConfigField
from llminfer.kv.config import ConfigView
from llminfer.kv.dtypes import FLOAT_TYPES, element_type

# rope types whose files state the scaled length already
_SCALED_ALREADY = frozenset({"default", "longrope", "su", "llama3"})

_NO_DTYPE = "the config states no dtype: float32 is assumed, and a checkpoint in 16 bit caches half of that"
# what weights are stored in and our table has no row for
_WEIGHT_TYPES = frozenset({"uint8", "int16", "int32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"})


def computed_dtype(view: ConfigView) -> tuple[str, tuple[str, ...]]:
    """The element type that the model computes in, and what has to be said about it."""
    name = next((name for name in ("dtype", "torch_dtype") if view.get(name) is not None), None)
    if name is None:
        view.note("dtype", "float32", "not in the file: what torch uses when nothing is stated")
        return "float32", (_NO_DTYPE,)
    stated = view.get(name)
    try:
        found = element_type(str(stated)).name
    except InvalidParams as error:
        if str(stated).removeprefix("torch.") not in _WEIGHT_TYPES:
            raise UnknownConfigField(
                f"{view.source}: {name} is {stated!r}, not an element type", hint=f"known: {', '.join(FLOAT_TYPES)}"
            ) from error
        found = ""
    if found in FLOAT_TYPES:
        return found, ()
    view.note(name, stated, "file; a type of weights, so the cache is counted as bfloat16")
    return "bfloat16", (f"{name} is {stated}, in which no model computes: bfloat16 is assumed",)


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """The element type that a quantized checkpoint wants its cache to have, where the file says it."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return None
    parts = (stated, inner) if isinstance(inner := stated.get("quantization"), Mapping) else (stated,)
    for part in parts:
        scheme = part.get("kv_cache_scheme") or part.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping):
            bits, kind = scheme.get("num_bits"), scheme.get("type")
            return "fp8" if (bits, kind) == (8, "float") else f"{kind}{bits}"
        if isinstance(scheme, str):
            return scheme.lower()
    return None


def context_limit(view: ConfigView) -> int | None:
    """The longest sequence that the model was made for, None when the config states none."""
    limit = view.get("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
        return None
    rope = view.config.get("rope_scaling") or view.config.get("rope_parameters")
    scaled = scaled_context(limit, rope, model_type=view.model_type)
    if scaled != limit:
        view.note("context", scaled, f"{limit}, scaled as the rotary positions are")
    return scaled


def scaled_context(stated: int, rope: object, *, model_type: str) -> int:
    """The longest sequence of a model, from the length that its config states and from its rope scaling.

    YaRN files state the original length in the scaling, and the factor by which it grows; linear and
    dynamic ones state the factor alone. That is how vLLM reads them; transformers has no limit.
    Gemma 3 states the scaled length beside a factor.
    """
    if not isinstance(rope, Mapping) or model_type.startswith("gemma3"):
        return stated
    # newer files have an entry for each kind of layer
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return max((stated, *(_scaled(stated, part) for part in nested or [rope])))


def _scaled(stated: int, rope: Mapping[str, object]) -> int:
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    start = original if isinstance(original, int) else stated
    if str(kind) in _SCALED_ALREADY or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return stated
    return int(start * factor) if 1 <= factor < 1e6 and 0 < start < 2**53 else stated
