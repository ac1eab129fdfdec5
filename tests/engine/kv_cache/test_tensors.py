"""What a cache weighs: every tensor once."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from llminfer.engine.kv_cache.tensors import cache_bytes


def test_a_tensor_under_two_names_counts_once() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    once = cache_bytes(cache)
    cache.layers.append(cache.layers[0])
    assert cache_bytes(cache) == once
    cache.layers[0].values = cache.layers[0].keys
    assert cache_bytes(cache) == once / 2
