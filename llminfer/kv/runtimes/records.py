"""What a runtime is asked and what it answers, and the arithmetic that all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from llminfer.errors import UnsupportedArchitecture
from llminfer.kv.dtypes import ElementType, element_type
from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A cache to be sized: `tokens` of each of `batch` sequences.

    `k_type` is the element type of every tensor that grows except the values, `v_type` that of the
    values, `float_type` the one that the model computes in, so that of states and of whatever a
    quantized cache leaves in full precision. `waiting` is how many tokens it leaves so (None: as
    many as it can), and `quantizer` the library that packs the others.
    """

    tokens: int
    batch: int
    k_type: ElementType
    v_type: ElementType
    float_type: ElementType
    waiting: int | None = None
    quantizer: str = "quanto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the formula for one layer: the product of `factors` is `size_bytes`.

    `symbols` are the factors' names, so that the sum can be written with letters too. The number
    of layers is written before the factor at `layers_at`.
    """

    label: str
    symbols: tuple[str, ...]
    factors: tuple[str, ...]
    size_bytes: int
    layers_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One layer's bytes for the whole batch; `slots` are the token slots that hold them.

    `slots` counts a sequence's slots, except where a runtime keeps one pool for all sequences.
    """

    slots: int
    grown: tuple[Term, ...]
    states: tuple[Term, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        """All summands."""
        return self.grown + self.states

    @property
    def state_bytes(self) -> int:
        """Bytes that do not depend on the tokens."""
        return sum(term.size_bytes for term in self.states)

    @property
    def size_bytes(self) -> int:
        """Everything the layer holds."""
        return sum(term.size_bytes for term in self.terms)


class Moment(Enum):
    """When the bytes differ from those of the steady state."""

    PREFILL = "right after the prompt's forward"
    STEP = "during the next step, or right after it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """More (or other) bytes than in the steady state, held at one moment."""

    moment: Moment
    name: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A runtime's answer: bytes layer by layer, bytes of no layer (`padding_bytes`), peaks and remarks.

    `block_tokens` is the number of tokens that the allocation grows by.
    """

    layers: tuple[LayerBytes, ...]
    padding_bytes: int = 0
    peaks: tuple[Peak, ...] = ()
    notes: tuple[str, ...] = ()
    block_tokens: int = 1


Allocate: TypeAlias = Callable[[ModelKV, tuple[LayerKV, ...], Request], Allocation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A row of the runtime table.

    `release` is the version whose rules are modelled. `allocate` gets the model and its layers as
    one rank holds them. `transformers_heads` says that heads are cached as transformers' modelling
    code does it, which for some models is more than the architecture needs. `follows_checkpoint` says
    that the cache gets the element type that a quantized checkpoint states for it.
    """

    name: str
    release: str
    allocate: Allocate
    transformers_heads: bool = False
    follows_checkpoint: bool = False


def each_layer(layers: tuple[LayerKV, ...], size: Callable[[LayerKV], LayerBytes]) -> tuple[LayerBytes, ...]:
    """`size` of every layer, computed once per group of equal layers."""
    known = {layer: size(layer) for layer in dict.fromkeys(layers)}
    return tuple(known[layer] for layer in layers)


def tensor_type(tensor: PerToken, request: Request) -> ElementType:
    """The element type of a growing tensor: the one it is pinned to, else the request's."""
    usual = request.v_type if tensor.name == "v" else request.k_type
    return usual if tensor.dtype is None else element_type(tensor.dtype)


def per_token_terms(
    layer: LayerKV,
    slots: int,
    request: Request,
    *,
    sequences: int,
    tokens: int | None = None,
    symbol: str = "N",
    places: Callable[[PerToken, int], int] = lambda tensor, entries: entries,
) -> tuple[Term, ...]:
    """The summands of the tensors that grow, equal ones together: `B · n · L · h · d · slots · b_e`.

    Args:
        slots: tokens that stay cached of the layer's window.
        tokens: tokens seen, for tensors that the window does not apply to; `slots` when not given.
        symbol: the letter that stands for `slots` in the formula.
        places: what a tensor takes for so many entries, where that is more.
    """
    seen = slots if tokens is None else tokens
    groups: dict[tuple[int, int, int, ElementType], list[str]] = {}
    for tensor in layer.tensors:
        entries = places(tensor, tensor.entries(tokens=seen, kept=slots))
        key = (tensor.heads, tensor.dim, entries, tensor_type(tensor, request))
        groups.setdefault(key, []).append(tensor.name)
    terms = []
    for (heads, dim, entries, kind), names in groups.items():
        count = len(names)
        before = [pair for pair in (("B", sequences), (str(count), count)) if pair[1] != 1]
        used = [*before, *([] if layer.latent else [("h_kv", heads)]), ("d_c" if layer.latent else "d_h", dim)]
        terms.append(
            Term(
                label=layer.kind if len(groups) == 1 else f"{layer.kind} {', '.join(names)}",
                symbols=(*(name for name, _ in used), symbol, "b_e"),
                factors=(*(str(value) for _, value in used), str(entries), bytes_per_element(kind)),
                size_bytes=sequences * count * kind.size_bytes(heads * dim * entries),
                layers_at=len(before),
            )
        )
    return tuple(terms)


def state_terms(
    layer: LayerKV, *, sequences: int, dtype: Callable[[State], ElementType], needed_only: bool = False
) -> tuple[Term, ...]:
    """The summands of the fixed states: the product of each state's shape, times its element size.

    Args:
        dtype: the element type a state has in this runtime.
        needed_only: keep of a convolution state only the columns that the next step reads, as all
            but transformers do.
    """
    terms = []
    for state in layer.states:
        shape = state.shape
        if needed_only and state.role == "conv":
            columns = shape[-1] - 1 if state.needed_columns is None else state.needed_columns
            shape = (*shape[:-1], columns)
        kind = dtype(state)
        before = (str(sequences),) if sequences != 1 else ()
        factors = (*before, *(str(size) for size in shape), bytes_per_element(kind))
        terms.append(
            Term(
                label=f"{layer.kind} {state.name}",
                symbols=factors,
                factors=factors,
                size_bytes=kind.size_bytes(sequences * math.prod(shape)),
                layers_at=len(before),
            )
        )
    return tuple(terms)


def unpinned(dtype: str | None, request: Request) -> ElementType:
    """A state's type where nothing holds it in float32: the model's, but for types that are no widening (ids)."""
    return request.float_type if dtype in (None, "float32") else element_type(str(dtype))


def bytes_per_element(kind: ElementType) -> str:
    """The size of an element as a factor: `2`, or `34/32` for a block type."""
    return str(kind.block_bytes) if kind.block_elements == 1 else f"{kind.block_bytes}/{kind.block_elements}"


def check_no_compression(runtime: str, model: ModelKV, layers: Iterable[LayerKV]) -> None:
    """Refuse a model with compressed entries, for which only transformers' dynamic cache has a rule here.

    Raises:
        UnsupportedArchitecture: naming the kinds of its layers that have such entries.
    """
    kinds = {layer.kind for layer in layers if any(tensor.stride != 1 for tensor in layer.tensors)}
    if kinds:
        raise refuse(runtime, model, f"no rule for the compressed entries of {', '.join(sorted(kinds))} layers")


def check_latent(runtime: str, model: ModelKV, layers: Iterable[LayerKV], *, known: frozenset[str]) -> None:
    """Refuse a model with a latent that the runtime is not known to keep compressed.

    Raises:
        UnsupportedArchitecture: naming the model types whose latent it does keep.
    """
    if model.model_type not in known and any(layer.latent for layer in layers):
        reason = f"it is not known to keep the latent of {model.model_type} compressed"
        raise refuse(runtime, model, reason, hint=f"known: {', '.join(sorted(known))}")


def refuse(runtime: str, model: ModelKV, reason: str, *, hint: str | None = None) -> UnsupportedArchitecture:
    """The error that says why a runtime cannot size a model."""
    return UnsupportedArchitecture(f"{runtime} cannot hold the cache of {model.name}: {reason}", hint=hint)
