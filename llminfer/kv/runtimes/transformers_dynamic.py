"""transformers' `DynamicCache(config=...)`: every layer grows by concatenation.

Source: `cache_utils.py` of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import replace

from llminfer.kv.dtypes import ElementType, element_type
from llminfer.kv.layer import LayerKV, ModelKV, State
from llminfer.kv.runtimes.records import (
    Allocation,
    LayerBytes,
    Moment,
    Peak,
    Request,
    each_layer,
    per_token_terms,
    state_terms,
)


def kept_tokens(layer: LayerKV, tokens: int) -> int:
    """Tokens that stay cached: a window of w keeps w − 1, and one of 1 keeps all.

    Source: `DynamicSlidingWindowLayer.update` slices `[-w + 1:]`, which is everything for w = 1.
    """
    if layer.window is None or layer.window == 1:
        return tokens
    return min(tokens, layer.window - 1)


def state_type(state: State, request: Request) -> ElementType:
    """The type that the modelling code pins a state to, else the model's."""
    return element_type(state.dtype) if state.dtype is not None else request.float_type


def layer_bytes(layer: LayerKV, slots: int, request: Request) -> LayerBytes:
    """A layer that keeps `slots` of its window's tokens, and its states as transformers keeps them."""
    grown = per_token_terms(layer, slots, request, sequences=request.batch, tokens=request.tokens)
    states = state_terms(layer, sequences=request.batch, dtype=lambda state: state_type(state, request))
    return LayerBytes(
        slots=slots,
        terms=grown + states,
        state_bytes=sum(term.size_bytes for term in states),
    )


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """The cache's tensors; where storage differs from them, the storage too."""
    rows = each_layer(layers, lambda layer: layer_bytes(layer, kept_tokens(layer, request.tokens), request))
    return Allocation(layers=rows, peaks=_storage(layers, rows, request))


def _storage(layers: tuple[LayerKV, ...], rows: tuple[LayerBytes, ...], request: Request) -> tuple[Peak, ...]:
    """Storage right after a prefill and after the step that follows it, when a window makes them differ."""
    tensors = sum(row.size_bytes for row in rows)
    prefill = sum(row.size_bytes for row in each_layer(layers, lambda layer: _after_prefill(layer, request)))
    if prefill == tensors:
        return ()
    step = sum(row.size_bytes for row in each_layer(layers, lambda layer: _after_step(layer, request)))
    return (
        Peak(
            moment=Moment.PREFILL,
            name="storage after prefill",
            size_bytes=prefill,
            reason="the kept tokens of a sliding layer are a view of the whole prompt's tensor",
        ),
        Peak(
            moment=Moment.STEP,
            name="storage after the next step",
            size_bytes=step,
            reason="the step's concatenation frees the prompt's tensor: a window's kept tokens and the new one stay",
        ),
    )


def _after_prefill(layer: LayerKV, request: Request) -> LayerBytes:
    return layer_bytes(layer, request.tokens, request)


def _after_step(layer: LayerKV, request: Request) -> LayerBytes:
    # one token concatenated to what was kept; the slice taken of it afterwards frees nothing
    return layer_bytes(layer, kept_tokens(layer, request.tokens) + 1, replace(request, tokens=request.tokens + 1))
