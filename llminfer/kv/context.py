"""How long a sequence a config says that its model takes."""

from __future__ import annotations

from collections.abc import Mapping

# rope types whose files state the scaled length already
_SCALED_ALREADY = frozenset({"default", "longrope", "su", "llama3"})


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
    if kind in _SCALED_ALREADY or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return stated
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    start = original if isinstance(original, int) and not isinstance(original, bool) else stated
    return int(start * factor) if 1 <= factor < 1e6 else stated
