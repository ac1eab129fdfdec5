"""The cache of a run, whatever its class: weighed tensor by tensor, and cut back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from llminfer.engine.kv_cache.layers import row_of
from llminfer.engine.kv_cache.window import WindowCache
from llminfer.engine.models.protocols import CausalLM, Outputs

# the names under which a model's output carries what the next step needs: most under the first
CACHE_FIELDS = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
# attributes of modules that keep the states of the sequence in themselves, as RecurrentGemma's do
MODULE_STATES = frozenset({"conv1d_state", "recurrent_states"})
# caches that hold nothing outside their layers; a model's own subclass may
WHOLE_CACHES = frozenset({DynamicCache, StaticCache, WindowCache})


def returned_cache(outputs: Outputs, given: Any) -> Any:
    """The cache that a model's output carries, the one it was given where it carries none."""
    return next((value for name in CACHE_FIELDS if (value := outputs.get(name)) is not None), given)


def crop_cache(cache: Any, tokens: int) -> bool:
    """Cut the cache to its first `tokens` tokens; False, and nothing changed, when some layer cannot go back.

    Every layer is cut by its own length, so one that a broken forward has left longer is mended.
    """
    layers: Sequence[Any] = getattr(cache, "layers", ())
    if type(cache) not in WHOLE_CACHES or not layers or not all(_can_crop(layer, tokens) for layer in layers):
        return False
    for layer in layers:
        excess = max(int(layer.get_seq_length()) - tokens, 0) if row_of(layer).has_tokens else 0
        if excess or _keeps_past(layer):
            layer.crop(-excess)  # which also cuts a layer that keeps its past down to its window
    return True


def keep_past(cache: Any, keep: bool) -> bool:
    """Let windows hold what leaves them until the next crop, or no longer; whether there are such windows.

    Begin after the prefill, and end after a crop: in between they hold more than their window.
    """
    windows = [layer for layer in getattr(cache, "layers", ()) if row_of(layer).records_past]
    for layer in windows:
        layer.record_past = keep
    return bool(windows)


def keeps_past(cache: Any) -> bool:
    """Whether some layer holds more than its window until the next crop."""
    return any(_keeps_past(layer) for layer in getattr(cache, "layers", ()))


def _keeps_past(layer: Any) -> bool:
    return row_of(layer).records_past and bool(layer.record_past)


def _can_crop(layer: Any, tokens: int) -> bool:
    can_crop = row_of(layer).can_crop
    return can_crop is not None and can_crop(layer, tokens)


def stateful_modules(model: CausalLM) -> tuple[torch.nn.Module, ...]:
    """The modules that keep states of the sequence in themselves, outside the cache."""
    return tuple(module for module in model.modules() if not MODULE_STATES.isdisjoint(vars(module)))


def forget_states(modules: Sequence[torch.nn.Module]) -> None:
    """Drop the states that an earlier sequence has left in the modules."""
    for module in modules:
        for name in MODULE_STATES.intersection(vars(module)):
            setattr(module, name, None)


def module_states(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """The states kept in these modules."""
    return [value for module in modules for name, value in vars(module).items() if name in MODULE_STATES]


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache, views counted at their own size, one under two names once.

    Of buffers that are written in place all places count, also those that hold nothing yet.
    """
    tensors: list[Tensor | None] = []
    for part in cache.layers if type(cache) in WHOLE_CACHES else (cache,):
        tensors.extend(row_of(part).tensors(part))
    distinct = dict(zip(map(id, tensors), tensors, strict=True))
    return sum(tensor.nbytes for tensor in distinct.values() if tensor is not None)
