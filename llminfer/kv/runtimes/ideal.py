"""What the architecture needs at least: no rounding, no copies, no element wider than the model's.

A window of w keeps w tokens (all that attention sees), a convolution of k taps k − 1 columns, and
states have the model's element type.
"""

from __future__ import annotations

from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.kv.runtimes.records import (
    Allocation,
    LayerBytes,
    Request,
    each_layer,
    per_token_terms,
    state_terms,
    unpinned,
)


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """The least bytes from which attention and states can go on."""
    return Allocation(layers=each_layer(layers, lambda layer: _layer(layer, request)))


def _layer(layer: LayerKV, request: Request) -> LayerBytes:
    slots = request.tokens if layer.window is None else min(request.tokens, layer.window)
    grown = per_token_terms(layer, slots, request, sequences=request.batch, tokens=request.tokens)
    states = state_terms(
        layer, sequences=request.batch, dtype=lambda state: unpinned(state.dtype, request), needed_only=True
    )
    return LayerBytes(slots=slots, grown=grown, states=states)
