"""What we know of each class of cache layers: what it holds, how that is cut back, joined, grown, saved and restored.

One row a class, looked up by the exact class, since a subclass may hold more than its parent. A layer whose
class has no row is searched for tensors when it is weighed, and is not cut back, joined, grown or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from llminfer.engine.kv_cache.growing import GrowingIndexedLayer, GrowingLayer, GrowingSlidingLayer
from llminfer.engine.kv_cache.window import WindowLayer

# attributes that say where a cache is, or how it works, and hold nothing of the sequence
BOOKKEEPING = frozenset({"_sliding_window_tensor", "cumulative_length", "indexer_cumulative_length", "seqlen_offset"})
# dicts of a recurrent layer's states, each with the method that sets one of them
STATES = {"conv_states": "update_conv_state", "recurrent_states": "update_recurrent_state"}
# quanto's tensors: packed data, scale and shift of groups, each possibly a shell again
_SHELLED = ("_data", "_scale", "_shift")

Restore = Callable[[Any, Tensor, Tensor, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """The row of one class.

    Attributes:
        tensors: all that a layer holds of the sequence, None among them for what is not there yet.
        has_tokens: it has `keys` and `values` with a place for every token that it keeps.
        has_states: it has recurrent states, which cannot go back.
        slides: it keeps the newest tokens, one less than its `sliding_window`, and counts all that have come.
        records_past: its window can hold what leaves it until the next crop.
        can_crop: whether a layer can be cut to its first so many tokens; None where none ever can.
        joins: rows of several sequences can stand in one layer, padded on the left.
        grow: makes the empty layer that writes in place of it.
        restore: puts keys and values, and how many tokens they stand for, into an empty layer; None where
            that, and so saving, is not known.
    """

    tensors: Callable[[Any], Iterable[Tensor | None]]
    has_tokens: bool = True
    has_states: bool = False
    slides: bool = False
    records_past: bool = False
    can_crop: Callable[[Any, int], bool] | None = None
    joins: bool = False
    grow: Callable[[Any], Any] | None = None
    restore: Restore | None = None


def row_of(layer: object) -> LayerRow:
    """The row of a layer's class."""
    return LAYERS.get(type(layer), _UNKNOWN)


def row_of_type(layer_type: str, *, static: bool = False) -> LayerRow:
    """The row of the class that transformers' dynamic or static cache has for a layer type of configs."""
    classes = STATIC_LAYER_TYPE_MAPPING if static else DYNAMIC_LAYER_TYPE_MAPPING
    return LAYERS.get(classes.get(layer_type), _UNKNOWN)


def grown(layer: Any) -> Any:
    """The layer that writes in place of this empty one; the same where there is none."""
    grow = row_of(layer).grow
    return layer if grow is None else grow(layer)


def named_tensors(holder: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a cache, or a part of one, holds of the sequence, whatever its class, by its path."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(holder, Tensor):
        # a quantized tensor is a shell around the tensors that hold it
        parts = [(part, getattr(holder, part)) for part in _SHELLED if isinstance(getattr(holder, part, None), Tensor)]
        if not parts:
            yield name, holder
    elif isinstance(holder, Mapping):
        parts = holder.items()
    elif isinstance(holder, list | tuple):
        parts = enumerate(holder)
    elif _is_cache_part(holder):
        parts = ((key, value) for key, value in vars(holder).items() if key not in BOOKKEEPING)
    for key, value in parts:
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def cache_tensors(holder: object) -> Iterator[Tensor]:
    """The tensors that a search finds, without their names."""
    return (tensor for _, tensor in named_tensors(holder))


def _is_cache_part(holder: object) -> bool:
    module = type(holder).__module__
    return module.startswith(("transformers.", "transformers_modules.", "llminfer.")) and hasattr(holder, "__dict__")


# What they hold

_keys_and_values = attrgetter("keys", "values")
_buffers = attrgetter("key_buffer", "value_buffer")


def _states(layer: Any) -> tuple[Tensor | None, ...]:
    return (*layer.conv_states.values(), *layer.recurrent_states.values())


def _hybrid(layer: Any) -> tuple[Tensor | None, ...]:
    return (layer.keys, layer.values, *_states(layer))


# What can be cut back


def _always(layer: Any, tokens: int) -> bool:
    return True


def _window_reaches(layer: Any, tokens: int) -> bool:
    """What has left the window is gone, unless the layer keeps its past: enough must be there to fill the window."""
    seen, window = int(layer.get_seq_length()), int(layer.sliding_window)
    if seen < window:
        return True
    held = int(layer.keys.shape[-2]) - max(seen - tokens, 0)
    return bool(layer.record_past and window > 1 and held >= min(window - 1, tokens))


def _nothing_has_left(layer: Any, tokens: int) -> bool:
    return bool(layer.get_seq_length() <= layer.window)


# How keys and values come back


def _append(layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens


def _write(layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
    layer.update(keys, values)


def _write_growing_window(layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
    layer.update(keys, values)
    layer.advance_over(tokens - keys.shape[-2])


def _write_static_window(layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
    layer.update(keys, values)
    layer.cumulative_length_int = tokens


def _refuse(layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
    raise ValueError(f"it has keys and values for a {type(layer).__name__}")


LAYERS: Mapping[type, LayerRow] = {
    DummyLayer: LayerRow(tensors=lambda layer: (), has_tokens=False, can_crop=_always, joins=True, restore=_refuse),
    DynamicLayer: LayerRow(
        tensors=_keys_and_values, can_crop=_always, joins=True, grow=lambda layer: GrowingLayer(), restore=_append
    ),
    DynamicSlidingWindowLayer: LayerRow(
        tensors=_keys_and_values,
        slides=True,
        records_past=True,
        can_crop=_window_reaches,
        joins=True,
        grow=lambda layer: GrowingSlidingLayer(layer.sliding_window),
        restore=_append,
    ),
    DynamicIndexedLayer: LayerRow(
        tensors=attrgetter("keys", "values", "indexer_keys", "indexer_position_ids"),
        grow=lambda layer: GrowingIndexedLayer(),
    ),
    GrowingLayer: LayerRow(tensors=_buffers, can_crop=_always, restore=_write),
    GrowingSlidingLayer: LayerRow(
        tensors=_buffers, slides=True, records_past=True, can_crop=_window_reaches, restore=_write_growing_window
    ),
    GrowingIndexedLayer: LayerRow(
        tensors=attrgetter("key_buffer", "value_buffer", "indexer_keys", "indexer_position_ids")
    ),
    WindowLayer: LayerRow(tensors=_keys_and_values, can_crop=_nothing_has_left, restore=_append),
    StaticLayer: LayerRow(tensors=_keys_and_values, can_crop=_always, restore=_write),
    StaticSlidingWindowLayer: LayerRow(tensors=_keys_and_values, restore=_write_static_window),
    LinearAttentionLayer: LayerRow(tensors=_states, has_tokens=False, has_states=True, joins=True, restore=_refuse),
    LinearAttentionAndFullAttentionLayer: LayerRow(tensors=_hybrid, has_states=True, joins=True, restore=_append),
    LinearAttentionAndSlidingWindowAttentionLayer: LayerRow(
        tensors=_hybrid, has_states=True, slides=True, joins=True, restore=_append
    ),
    LinearAttentionAndStaticFullAttentionLayer: LayerRow(tensors=_hybrid, has_states=True, restore=_write),
    LinearAttentionAndStaticSlidingWindowAttentionLayer: LayerRow(
        tensors=_hybrid, has_states=True, restore=_write_static_window
    ),
}
_UNKNOWN = LayerRow(tensors=cache_tensors, has_tokens=False)
