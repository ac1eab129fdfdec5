"""The cache that a run will have, predicted by the rules that `kv-size` uses."""

from __future__ import annotations

from dataclasses import replace

from llminfer.engine.kv_cache.kinds import TokenSchedule, predict_cache
from llminfer.engine.model import LoadedModel
from llminfer.kv.footprint import Footprint
from llminfer.params import CacheOptions


def predict(loaded: LoadedModel, tokens: int, cache: str) -> Footprint | None:
    """The predicted cache of so many tokens, None when it cannot be predicted or none is kept."""
    return predict_run(loaded, CacheOptions(kind=cache), TokenSchedule(prompt=(tokens,), steps=0, room=tokens))


def predict_run(loaded: LoadedModel, options: CacheOptions, fed: TokenSchedule) -> Footprint | None:
    """The predicted cache after what was fed, None when it cannot be predicted or none is kept."""
    if loaded.kv is None:
        return None
    return predict_cache(options, replace(loaded.kv, dtype=str(loaded.dtype).removeprefix("torch.")), fed)
