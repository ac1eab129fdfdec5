"""The cache of a run: built as transformers builds it for the config, and weighed tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

# attributes that say where a cache is, or how it works, and hold nothing of the sequence
BOOKKEEPING = frozenset({"_sliding_window_tensor", "cumulative_length", "indexer_cumulative_length", "seqlen_offset"})
# attributes of modules that keep the states of the sequence in themselves, as RecurrentGemma's do
MODULE_STATES = frozenset({"conv1d_state", "recurrent_states"})


def make_dynamic_cache(model: Any) -> Any | None:
    """An empty cache of the layers that the model's config asks for, None for models that make their own."""
    if not model._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def crop_cache(cache: Any, tokens: int) -> bool:
    """Cut the cache to its first `tokens` tokens; False, and nothing changed, when some layer cannot go back.

    Every layer is cut by its own length, so one that a broken forward has left longer is mended.
    """
    layers: Sequence[Any] = getattr(cache, "layers", ())
    if not layers or not all(_can_crop(layer) for layer in layers):
        return False
    for layer in layers:
        excess = int(layer.get_seq_length()) - tokens if type(layer) is not DummyLayer else 0
        if excess > 0:
            layer.crop(-excess)
    return True


def _can_crop(layer: Any) -> bool:
    """Exact classes: a subclass may keep more than its parent cuts."""
    if type(layer) is DynamicSlidingWindowLayer:
        # what has left the window is gone
        return bool(layer.get_seq_length() < layer.sliding_window)
    return type(layer) in (DummyLayer, DynamicLayer, StaticLayer)


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


def cache_bytes(cache: object) -> int:
    """Bytes of all tensors in a cache, views counted at their own size, one under two names once."""
    distinct = {id(tensor): tensor for tensor in cache_tensors(cache)}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def cache_tensors(holder: object) -> Iterator[Tensor]:
    """Every tensor that a cache holds of the sequence, whatever its class."""
    if isinstance(holder, Tensor):
        yield holder
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
    return module.startswith(("transformers.", "transformers_modules.")) and hasattr(holder, "__dict__")
