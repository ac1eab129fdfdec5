"""Our own growing cache (`--cache growing`): buffers of whole blocks of places, written in place.

Source: `llminfer/engine/kv_cache/growing.py`, which takes its capacity from here. Layers that are not
growing ones there (hybrid, compressed, block-sparse) are transformers' own, and so are the keys of
an indexer.
"""

from __future__ import annotations

from llminfer.kv.layer import LayerKV, ModelKV, PerToken
from llminfer.kv.runtimes.records import Allocation, LayerBytes, Request, each_layer, per_token_terms, refuse
from llminfer.kv.runtimes.transformers_dynamic import kept_tokens, layer_bytes

BLOCK_TOKENS = 256
# a window's buffer has so many places more than the window keeps, at least, and shifts no oftener
SHIFT_TOKENS = 128
# model types with a cache of their own, in which no layer can be replaced
OWN_CACHES = frozenset({"blt", "minimax", "reformer", "rwkv", "xlnet", "xlstm"})
# the tensors that growing layers hold
_BUFFERED = frozenset({"k", "v", "latent", "rope_key"})
_NOT_GROWING = frozenset({"compressed", "sparse_blocks"})


def whole_blocks(tokens: int) -> int:
    """Places for so many tokens, in whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def capacity(tokens: int, window: int | None) -> int:
    """Places of a layer's buffer after `tokens` tokens of a sequence, however they came.

    A window of w keeps w − 1 tokens (one of 1 keeps all, as in transformers' cache), in a buffer
    that stops growing when there is room for those and `SHIFT_TOKENS` more.
    """
    return whole_blocks(_placed(tokens, window))


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """Whole blocks for every growing layer; what transformers keeps for the others."""
    if model.model_type in OWN_CACHES:
        raise refuse("llminfer's growing cache", model, f"{model.model_type} models make a cache of their own")
    return Allocation(layers=each_layer(layers, lambda layer: _layer(layer, request)), block_tokens=BLOCK_TOKENS)


def _placed(tokens: int, window: int | None) -> int:
    """Tokens that have places before rounding."""
    return tokens if window is None or window == 1 else min(tokens, window - 1 + SHIFT_TOKENS)


def _layer(layer: LayerKV, request: Request) -> LayerBytes:
    if layer.states or layer.kind in _NOT_GROWING or not layer.tensors:
        return layer_bytes(layer, kept_tokens(layer, request.tokens), request)
    placed = _placed(request.tokens, layer.window)
    terms = per_token_terms(
        layer, placed, request, sequences=request.batch, tokens=request.tokens, places=_places, symbol="places"
    )
    return LayerBytes(slots=whole_blocks(placed), grown=terms)


def _places(tensor: PerToken, entries: int) -> int:
    return whole_blocks(entries) if tensor.name in _BUFFERED else entries
