"""What one of several tensor-parallel ranks holds of each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llminfer.errors import UsageError
from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The layers as one rank holds them, and what is held more than once over the ranks."""

    layers: tuple[LayerKV, ...]
    notes: tuple[str, ...] = ()


def shard(model: ModelKV, *, ranks: int, transformers_heads: bool) -> Shard:
    """The layers of `model` on one of `ranks` equal ranks.

    Heads are dealt out evenly; when there are more ranks than heads every head is held by several.
    A latent has no heads to deal out: every rank holds it whole.

    Args:
        transformers_heads: count heads as transformers' modelling code caches them.

    Raises:
        UsageError: when the heads (or a state's channels) cannot be dealt out evenly.
    """
    found: dict[LayerKV, LayerKV] = {}
    notes: dict[str, None] = {}
    for layer in model.layers:
        if layer not in found:
            tensors = tuple(_tensor(layer, tensor, ranks, transformers_heads, notes) for tensor in layer.tensors)
            states = tuple(_state(layer, state, ranks) for state in layer.states)
            found[layer] = replace(layer, tensors=tensors, states=states)
    return Shard(layers=tuple(found[layer] for layer in model.layers), notes=tuple(notes))


def _tensor(layer: LayerKV, tensor: PerToken, ranks: int, transformers_heads: bool, notes: dict[str, None]) -> PerToken:
    heads = tensor.heads
    if transformers_heads and tensor.transformers_heads is not None:
        heads = tensor.transformers_heads
    if ranks == 1 or heads == 0 or layer.latent:
        if ranks > 1 and heads:
            notes[f"the {layer.kind} entries have no heads to split: every rank holds them whole"] = None
        return replace(tensor, heads=heads, transformers_heads=None)
    if heads % ranks and ranks % heads:
        raise UsageError(
            f"--tp {ranks} does not divide {heads} key-value heads", hint=f"divisors of {heads}, or multiples of it"
        )
    if ranks > heads:
        notes[f"{heads} heads on {ranks} ranks: each is held {ranks // heads} times"] = None
    return replace(tensor, heads=max(1, heads // ranks), transformers_heads=None)


def _state(layer: LayerKV, state: State, ranks: int) -> State:
    if ranks == 1 or not state.shape:  # a single number is on every rank
        return state
    first, *rest = state.shape
    if first % ranks:
        raise UsageError(f"--tp {ranks} does not divide the {first} rows of the {layer.kind} layers' {state.name}")
    return replace(state, shape=(first // ranks, *rest))
