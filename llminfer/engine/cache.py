"""The cache of a run: built as transformers builds it for the config, and weighed tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

# attributes that say how a cache layer works and hold nothing of the sequence
_BOOKKEEPING = frozenset({"_sliding_window_tensor", "cumulative_length"})
# layers that keep what single tokens left and nothing else; subclasses say that they can be cropped
# and leave states of their own behind
_CROPPABLE = frozenset({DynamicLayer, DynamicSlidingWindowLayer, DummyLayer})


def make_dynamic_cache(model: Any) -> Any | None:
    """An empty cache of the layers that the model's config asks for, None for models that make their own."""
    if not model._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def crop_cache(cache: Any, *, length: int, remove: int) -> bool:
    """Forget the newest `remove` tokens, so that `length` stay; False when that cannot be, and the cache is spoilt."""
    if not remove:
        return True
    if not isinstance(cache, Cache) or any(type(layer) not in _CROPPABLE for layer in cache.layers):
        return False
    try:
        cache.crop(-remove)
    except RuntimeError:  # a window that has moved on no longer has what came before it
        return False
    return bool(cache.get_seq_length() == length)


def cache_bytes(cache: object) -> int:
    """Bytes of all tensors in a cache, views counted at their own size."""
    return sum(tensor.numel() * tensor.element_size() for tensor in cache_tensors(cache))


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
            if name not in _BOOKKEEPING:
                yield from cache_tensors(value)


def _is_cache_part(holder: object) -> bool:
    module = type(holder).__module__
    return module.startswith(("transformers.", "transformers_modules.")) and hasattr(holder, "__dict__")
