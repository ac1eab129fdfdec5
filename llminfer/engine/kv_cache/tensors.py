"""The cache of a run, whatever its class: weighed tensor by tensor, and cut back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from llminfer.engine.kv_cache.growing import GrowingCache, GrowingLayer, GrowingSlidingLayer
from llminfer.engine.kv_cache.window import WindowCache, WindowLayer

# attributes that say where a cache is, or how it works, and hold nothing of the sequence
BOOKKEEPING = frozenset({"_sliding_window_tensor", "cumulative_length", "indexer_cumulative_length", "seqlen_offset"})
# attributes of modules that keep the states of the sequence in themselves, as RecurrentGemma's do
MODULE_STATES = frozenset({"conv1d_state", "recurrent_states"})
# caches that hold nothing outside their layers; a model's own subclass may
WHOLE_CACHES = frozenset({DynamicCache, GrowingCache, StaticCache, WindowCache})
# all tensors of layers of exactly these classes: what is weighed after every step is not searched for
_KEYS_AND_VALUES, _BUFFERS = attrgetter("keys", "values"), attrgetter("key_buffer", "value_buffer")
LAYER_TENSORS: Mapping[type, Callable[[Any], tuple[Tensor | None, ...]]] = {
    DynamicLayer: _KEYS_AND_VALUES,
    DynamicSlidingWindowLayer: _KEYS_AND_VALUES,
    GrowingLayer: _BUFFERS,
    GrowingSlidingLayer: _BUFFERS,
    WindowLayer: _KEYS_AND_VALUES,
}
# their windows can keep what leaves them until the next crop; exact classes
_SLIDING = (DynamicSlidingWindowLayer, GrowingSlidingLayer)
# quanto's tensors: packed data, scale and shift of groups, each possibly a shell again
_SHELLED = ("_data", "_scale", "_shift")


def crop_cache(cache: Any, tokens: int) -> bool:
    """Cut the cache to its first `tokens` tokens; False, and nothing changed, when some layer cannot go back.

    Every layer is cut by its own length, so one that a broken forward has left longer is mended.
    """
    layers: Sequence[Any] = getattr(cache, "layers", ())
    if type(cache) not in WHOLE_CACHES or not layers or not all(_can_crop(layer, tokens) for layer in layers):
        return False
    for layer in layers:
        excess = max(int(layer.get_seq_length()) - tokens, 0) if type(layer) is not DummyLayer else 0
        if excess or _keeps_past(layer):
            layer.crop(-excess)  # which also cuts a layer that keeps its past down to its window
    return True


def keep_past(cache: Any, keep: bool) -> bool:
    """Let windows hold what leaves them until the next crop, or no longer; whether there are such windows.

    Begin after the prefill, and end after a crop: in between they hold more than their window.
    """
    windows = [layer for layer in getattr(cache, "layers", ()) if type(layer) in _SLIDING]
    for layer in windows:
        layer.record_past = keep
    return bool(windows)


def keeps_past(cache: Any) -> bool:
    """Whether some layer holds more than its window until the next crop."""
    return any(_keeps_past(layer) for layer in getattr(cache, "layers", ()))


def _keeps_past(layer: Any) -> bool:
    return type(layer) in _SLIDING and bool(layer.record_past)


def _can_crop(layer: Any, tokens: int) -> bool:
    """Exact classes: a subclass may keep more than its parent cuts."""
    if type(layer) in _SLIDING:
        return _window_can_crop(layer, tokens)
    if type(layer) is WindowLayer:
        return bool(layer.get_seq_length() <= layer.window)
    return type(layer) in (DummyLayer, DynamicLayer, GrowingLayer, StaticLayer)


def _window_can_crop(layer: Any, tokens: int) -> bool:
    """What has left the window is gone, unless the layer keeps its past: enough must be there to fill the window."""
    seen, window = int(layer.get_seq_length()), int(layer.sliding_window)
    if seen < window:
        return True
    held = int(layer.keys.shape[-2]) - max(seen - tokens, 0)
    return bool(layer.record_past and window > 1 and held >= min(window - 1, tokens))


def stateful_modules(model: Any) -> tuple[Any, ...]:
    """The modules that keep states of the sequence in themselves, outside the cache."""
    return tuple(module for module in model.modules() if not MODULE_STATES.isdisjoint(vars(module)))


def forget_states(modules: Sequence[Any]) -> None:
    """Drop the states that an earlier sequence has left in the modules."""
    for module in modules:
        for name in MODULE_STATES.intersection(vars(module)):
            setattr(module, name, None)


def module_states(modules: Sequence[Any]) -> list[Any]:
    """The states kept in these modules."""
    return [value for module in modules for name, value in vars(module).items() if name in MODULE_STATES]


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache, views counted at their own size, one under two names once.

    Of buffers that are written in place all places count, also those that hold nothing yet.
    """
    tensors: list[Tensor | None] = []
    for part in cache.layers if type(cache) in WHOLE_CACHES else (cache,):
        read = LAYER_TENSORS.get(type(part), cache_tensors)
        tensors.extend(read(part))
    distinct = dict(zip(map(id, tensors), tensors, strict=True))
    return sum(tensor.nbytes for tensor in distinct.values() if tensor is not None)


def cache_tensors(holder: object) -> Iterator[Tensor]:
    """Every tensor that a cache holds of the sequence, whatever its class."""
    if isinstance(holder, Tensor):
        # a quantized tensor is a shell around the tensors that hold it
        parts = [getattr(holder, name, None) for name in _SHELLED]
        held = [part for part in parts if isinstance(part, Tensor)]
        yield from (tensor for part in held for tensor in cache_tensors(part)) if held else (holder,)
    elif isinstance(holder, Mapping):
        for value in holder.values():
            yield from cache_tensors(value)
    elif isinstance(holder, list | tuple):
        for value in holder:
            yield from cache_tensors(value)
    elif _is_cache_part(holder):
        for name, value in vars(holder).items():
            if name not in BOOKKEEPING:
                yield from cache_tensors(value)


def _is_cache_part(holder: object) -> bool:
    module = type(holder).__module__
    return module.startswith(("transformers.", "transformers_modules.", "llminfer.")) and hasattr(holder, "__dict__")
