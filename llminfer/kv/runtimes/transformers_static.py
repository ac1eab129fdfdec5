"""transformers' `StaticCache(config=..., max_cache_len=N)`: everything is allocated with the first token.

Source: `StaticLayer` and `StaticSlidingWindowLayer` in `cache_utils.py` of transformers 5.24.
"""

from __future__ import annotations

from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.kv.runtimes.records import Allocation, Request, check_no_compression, each_layer
from llminfer.kv.runtimes.transformers_dynamic import layer_bytes


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """`request.tokens` is the cache's maximum length; a sliding layer allocates min(window, maximum)."""
    check_no_compression("transformers-static", model, layers)
    rows = each_layer(layers, lambda layer: layer_bytes(layer, _slots(layer, request.tokens), request))
    return Allocation(layers=rows, notes=("allocated in full by the first token, for N tokens at most",))


def _slots(layer: LayerKV, tokens: int) -> int:
    return tokens if layer.window is None else min(layer.window, tokens)
