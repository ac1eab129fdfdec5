"""What a cache weighs: layers that are read by name hold what a search of them finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from llminfer.engine.kv_cache.growing import GrowingLayer, GrowingSlidingLayer
from llminfer.engine.kv_cache.tensors import LAYER_TENSORS, cache_bytes, cache_tensors
from llminfer.engine.kv_cache.window import WindowLayer

SLIDING = (DynamicSlidingWindowLayer, GrowingSlidingLayer)
LAYERS = {DynamicLayer: (), GrowingLayer: (), **dict.fromkeys((*SLIDING, WindowLayer), (6,))}


def test_every_layer_that_is_read_by_name_is_tested() -> None:
    assert set(LAYERS) == set(LAYER_TENSORS)


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_what_is_read_by_name_is_what_a_search_finds(kind: Any) -> None:
    layer = kind(*LAYERS[kind])
    assert cache_bytes([layer]) == 0
    cache = DynamicCache()
    cache.layers = [layer]
    assert cache_bytes(cache) == 0
    for tokens in (3, 1, 5, 1, 1):
        layer.update(torch.ones(1, 2, tokens, 4), torch.ones(1, 2, tokens, 3, dtype=torch.float16))
        found = list(cache_tensors(layer))
        assert {id(tensor) for tensor in found} == {id(tensor) for tensor in LAYER_TENSORS[kind](layer)}
        assert cache_bytes(cache) == sum(tensor.numel() * tensor.element_size() for tensor in found) > 0


def test_a_tensor_under_two_names_counts_once() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    once = cache_bytes(cache)
    cache.layers.append(cache.layers[0])
    assert cache_bytes(cache) == once
    cache.layers[0].values = cache.layers[0].keys
    assert cache_bytes(cache) == once / 2
