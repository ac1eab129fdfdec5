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
    return tokens if layer.window is None or layer.window == 1 else min(tokens, layer.window - 1)


def state_type(state: State, request: Request) -> ElementType:
    """The type that the modelling code pins a state to, else the model's."""
    return element_type(state.dtype) if state.dtype is not None else request.float_type


def layer_bytes(layer: LayerKV, slots: int, request: Request) -> LayerBytes:
    """A layer that keeps `slots` of its window's tokens, and its states as transformers keeps them."""
    grown = per_token_terms(layer, slots, request, sequences=request.batch, tokens=request.tokens)
    states = state_terms(layer, sequences=request.batch, dtype=lambda state: state_type(state, request))
    return LayerBytes(slots=slots, grown=grown, states=states)


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """The cache's tensors; where storage differs from them, the storage too."""
    rows = each_layer(layers, lambda layer: layer_bytes(layer, kept_tokens(layer, request.tokens), request))
    return Allocation(layers=rows, peaks=_storage(layers, rows, request))


def _storage(layers: tuple[LayerKV, ...], rows: tuple[LayerBytes, ...], request: Request) -> tuple[Peak, ...]:
    """Storage right after a prefill and after the step that follows it, when a window makes them differ."""
    later = replace(request, tokens=request.tokens + 1)
    tensors, next_tensors, prefill, step = (
        sum(row.size_bytes for row in found)
        for found in (
            rows,
            each_layer(layers, lambda layer: layer_bytes(layer, kept_tokens(layer, later.tokens), later)),
            each_layer(layers, lambda layer: _after_prefill(layer, request)),
            each_layer(layers, lambda layer: _after_step(layer, request)),
        )
    )
    if (prefill, step) == (tensors, next_tensors):
        return ()
    return (
        Peak(
            moment=Moment.PREFILL,
            name="storage after prefill",
            size_bytes=prefill,
            reason="what a layer keeps of a prompt is a view of the whole prompt's tensor",
        ),
        Peak(
            moment=Moment.STEP,
            name="storage after the next step",
            size_bytes=step,
            reason="the step's concatenation frees the prompt's tensor: what was kept and the new token stay",
        ),
    )


def _after_prefill(layer: LayerKV, request: Request) -> LayerBytes:
    # a window and a buffer are slices of all tokens, whatever they keep of them
    tokens = request.tokens
    whole = (replace(each, stride=1, remainder=False) if each.remainder else each for each in layer.tensors)
    padded = tuple(replace(each, extra_tokens=each.extra_tokens + each.padding(tokens)) for each in whole)
    return layer_bytes(replace(layer, tensors=padded), tokens, request)


def _after_step(layer: LayerKV, request: Request) -> LayerBytes:
    # one token concatenated to what was kept; the slice taken of it afterwards frees nothing
    tokens = request.tokens + 1
    grown = tuple(
        replace(each, extra_tokens=each.stride) if each.remainder and not tokens % each.stride else each
        for each in layer.tensors
    )
    states = tuple(replace(each, shape=(each.elements + each.sliced_off,)) for each in layer.states)
    stored = replace(layer, tensors=grown, states=states)
    return layer_bytes(stored, kept_tokens(layer, request.tokens) + 1, replace(request, tokens=tokens))
