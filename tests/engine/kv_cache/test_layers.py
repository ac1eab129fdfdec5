"""The table of layer classes: what its rows say, against the classes themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    StaticIndexedLayer,
)

from llminfer.engine.kv_cache.batched import can_join
from llminfer.engine.kv_cache.layers import LAYERS, cache_tensors, grown, named_tensors, row_of, row_of_type
from llminfer.engine.kv_cache.tensors import cache_bytes, crop_cache

WINDOW, ROOM, STATES = 6, 20, 2
# layers of our own that take their window by its place
TAKE_A_WINDOW = ("GrowingSlidingLayer", "WindowLayer")
# what transformers has for a layer type and the table leaves to the search
WITHOUT_ROW = {StaticIndexedLayer}


def made(kind: Any) -> Any:
    """An empty layer of a class, with what the caches give it."""
    if kind.__module__.startswith("llminfer."):
        return kind(WINDOW) if kind.__name__ in TAKE_A_WINDOW else kind()
    return kind(sliding_window=WINDOW, max_cache_len=ROOM, number_of_states=STATES)


def feed(layer: Any, tokens: int) -> None:
    """Let the layer cache so many tokens, in every way that it can."""
    row = row_of(layer)
    if row.has_tokens:
        layer.update(torch.randn(1, 2, tokens, 4), torch.randn(1, 2, tokens, 3).half())
    if row.has_states:
        for index in range(STATES):
            layer.update_conv_state(torch.randn(1, 5, 4), state_idx=index)
            layer.update_recurrent_state(torch.randn(1, 2, 3, 3), state_idx=index)
    if isinstance(layer, DynamicIndexedLayer):
        layer.update_indexer(torch.randn(1, tokens, 7))


def holding(layer: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [layer]
    return cache


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_what_a_row_reads_is_what_a_search_finds(kind: Any) -> None:
    layer = made(kind)
    assert cache_bytes(holding(layer)) == cache_bytes([layer]) == 0
    for tokens in (3, 1, 5, 1, 1):
        feed(layer, tokens)
        found = list(cache_tensors(layer))
        read = [tensor for tensor in LAYERS[kind].tensors(layer) if tensor is not None]
        assert {id(tensor) for tensor in read} == {id(tensor) for tensor in found}
        assert cache_bytes(holding(layer)) == sum(tensor.numel() * tensor.element_size() for tensor in found)
        assert bool(found) == (LAYERS[kind].has_tokens or LAYERS[kind].has_states)


@pytest.mark.parametrize("tokens", [WINDOW - 1, 2 * WINDOW])
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_what_is_restored_goes_on_like_the_layer_itself(kind: Any, tokens: int) -> None:
    row, layer, again = LAYERS[kind], made(kind), made(kind)
    if not row.has_tokens or row.restore is None:
        return
    feed(layer, tokens)
    row.restore(again, *(part[..., :tokens, :].clone() for part in (layer.keys, layer.values)), tokens)
    assert int(again.get_seq_length()) == int(layer.get_seq_length()) == tokens
    new = (torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 3).half())
    for ours, theirs in zip(again.update(*new), layer.update(*new), strict=True):
        assert torch.equal(ours, theirs)
    assert again.get_mask_sizes(1) == layer.get_mask_sizes(1)


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_what_can_be_cropped_then_holds_the_first_tokens(kind: Any) -> None:
    row, layer = LAYERS[kind], made(kind)
    feed(layer, WINDOW - 1)
    before = [part.clone() for part in (layer.keys, layer.values)] if row.has_tokens else []
    assert crop_cache(holding(layer), 2) == (row.can_crop is not None)
    if row.has_tokens:
        left = WINDOW - 1 if row.can_crop is None else 2
        assert int(layer.get_seq_length()) == left
        for part, whole in zip((layer.keys, layer.values), before, strict=True):
            assert torch.equal(part[..., :left, :], whole[..., :left, :])


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_layer_that_writes_in_place_can_do_what_the_other_can(kind: Any) -> None:
    layer, row = made(kind), LAYERS[kind]
    other = row_of(grown(layer))
    assert (grown(layer) is layer) == (row.grow is None)
    assert (other.can_crop, other.slides, other.records_past) == (row.can_crop, row.slides, row.records_past)
    assert (other.restore is None) == (row.restore is None)


def test_every_layer_type_of_transformers_has_a_row() -> None:
    for static, classes in ((False, DYNAMIC_LAYER_TYPE_MAPPING), (True, STATIC_LAYER_TYPE_MAPPING)):
        for layer_type, kind in classes.items():
            # the others are registered by the models that they belong to, when those are imported
            if kind.__module__ == "transformers.cache_utils":
                assert (kind in LAYERS) != (kind in WITHOUT_ROW), kind
            assert (row_of_type(layer_type, static=static) is LAYERS.get(kind)) == (kind in LAYERS)


class Later(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """What a later transformers may bring: a layer that holds more than its parent."""

    __module__ = "transformers.later"

    def __init__(self) -> None:
        super().__init__()
        self.more: dict[str, list[Tensor]] = {"parts": [torch.ones(1, 3)]}


def test_a_layer_of_an_unknown_class_is_searched_and_left_alone() -> None:
    layer = Later()
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert dict(named_tensors(layer)).keys() == {"keys", "values", "more.parts.0"}
    assert cache_bytes(holding(layer)) == (2 * 24 + 3) * 4
    assert not crop_cache(holding(layer), 2)
    assert not can_join(holding(layer), 3)
    assert row_of(layer).restore is None
    assert grown(layer) is layer
