"""From a model's layers to bytes, as one runtime holds them on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

from llminfer.kv.dtypes import FLOAT_TYPES, element_type
from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.kv.runtimes.records import Allocation, LayerBytes, Peak, Request, Runtime
from llminfer.kv.runtimes.table import runtime as runtime_row
from llminfer.kv.setup import DEFAULT_SETUP, CacheSetup, SetupOptions, require_count
from llminfer.kv.tensor_parallel import shard
from llminfer.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a cache that holds `tokens` tokens of each sequence of its setup, on one of its ranks.

    `bytes_per_token` is what the next token of every sequence adds, so 0 once all windows are
    full; a runtime that allocates blocks of `block_tokens` tokens adds them a block at a time.
    `state_bytes` is the part that does not depend on the tokens; `padding_bytes` is held by no
    layer. `layers` are the model's layers as the rank holds them, `layer_rows` their slots and
    terms, `layer_bytes` their sizes. `peaks` are the moments and meanings in which the bytes differ.
    """

    setup: CacheSetup
    tokens: int
    layers: tuple[LayerKV, ...]
    layer_rows: tuple[LayerBytes, ...]
    peaks: tuple[Peak, ...]
    notes: tuple[str, ...]
    padding_bytes: int
    bytes_per_token: int
    block_tokens: int
    formula: str
    release: str
    dtype: str
    k_dtype: str
    v_dtype: str

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer."""
        return tuple(row.size_bytes for row in self.layer_rows)

    @property
    def state_bytes(self) -> int:
        """Bytes that do not depend on the tokens."""
        return sum(row.state_bytes for row in self.layer_rows)

    @property
    def total_bytes(self) -> int:
        """All layers together, and what belongs to none."""
        return sum(self.layer_bytes) + self.padding_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any of the moments named in `peaks`."""
        return max((self.total_bytes, *(peak.size_bytes for peak in self.peaks)))

    @property
    def all_ranks_bytes(self) -> int:
        """The bytes of all tensor-parallel ranks, what they hold in common counted on each."""
        return self.total_bytes * self.setup.tp

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the layers of each kind, in the order in which the kinds first occur."""
        sums: dict[str, int] = {}
        for layer, row in zip(self.layers, self.layer_rows, strict=True):
            sums[layer.kind] = sums.get(layer.kind, 0) + row.size_bytes
        return sums


def footprint(
    model: ModelKV, *, tokens: int, setup: CacheSetup = DEFAULT_SETUP, **options: Unpack[SetupOptions]
) -> Footprint:
    """The bytes of this model's cache in a runtime.

    Args:
        tokens: cached tokens per sequence, so prompt + generated − 1 after a run.
        setup: whose cache it is and how it is set up.
        options: fields of the setup to take instead of its own.

    Raises:
        InvalidParams: when a number is out of its range or an element type is unknown.
        UsageError: when the runtime is unknown, or has no such element type, or the ranks do not divide.
        UnsupportedArchitecture: when the runtime cannot hold such a model's cache.
    """
    require_count("tokens", tokens, least=0)
    setup = replace(setup, **options)
    row = runtime_row(setup.runtime)
    rank = shard(model, ranks=setup.tp, transformers_heads=row.transformers_heads)
    followed, stored = _followed(model, row, setup)
    request = _request(model, followed, tokens=tokens)
    now = row.allocate(model, rank.layers, request)
    later = row.allocate(model, rank.layers, replace(request, tokens=tokens + now.block_tokens))
    return Footprint(
        setup=setup,
        release=row.release,
        tokens=tokens,
        dtype=request.float_type.name,
        k_dtype=request.k_type.name,
        v_dtype=request.v_type.name,
        layers=rank.layers,
        layer_rows=now.layers,
        padding_bytes=now.padding_bytes,
        bytes_per_token=(_total(later) - _total(now)) // now.block_tokens,
        block_tokens=now.block_tokens,
        formula=_formula(rank.layers, now),
        peaks=now.peaks,
        notes=rank.notes + now.notes + stored,
    )


def total_bytes(model: ModelKV, setup: CacheSetup = DEFAULT_SETUP) -> Callable[[int, int], int]:
    """`footprint(...).total_bytes` as a function of tokens and batch, for those who ask it many times.

    Raises:
        As `footprint`, when made or when called.
    """
    row = runtime_row(setup.runtime)
    rank = shard(model, ranks=setup.tp, transformers_heads=row.transformers_heads)
    setup, _ = _followed(model, row, setup)

    def of(tokens: int, batch: int) -> int:
        return _total(row.allocate(model, rank.layers, _request(model, replace(setup, batch=batch), tokens=tokens)))

    return of


def _followed(model: ModelKV, row: Runtime, setup: CacheSetup) -> tuple[CacheSetup, tuple[str, ...]]:
    """The setup, with the element type that the checkpoint states where the runtime follows it; and a remark."""
    stored = model.stored_dtype
    if setup.dtype is not None or stored is None or not row.follows_checkpoint:
        return setup, ()
    if stored == "fp8":
        remark = "fp8, since the checkpoint's quantization_config states it for the cache"
        return replace(setup, dtype=stored), (remark,)
    return setup, (f"the checkpoint states a {stored} cache, for which there is no rule: counted as {model.dtype}",)


def _request(model: ModelKV, setup: CacheSetup, *, tokens: int) -> Request:
    cache_type = element_type(setup.dtype or model.dtype)
    return Request(
        tokens=tokens,
        batch=setup.batch,
        k_type=element_type(setup.k_dtype) if setup.k_dtype else cache_type,
        v_type=element_type(setup.v_dtype) if setup.v_dtype else cache_type,
        float_type=cache_type if cache_type.name in FLOAT_TYPES else element_type(model.dtype),
        waiting=setup.waiting,
        quantizer=setup.quantizer,
    )


def _total(allocation: Allocation) -> int:
    return sum(row.size_bytes for row in allocation.layers) + allocation.padding_bytes


def _formula(layers: tuple[LayerKV, ...], allocation: Allocation) -> str:
    """The sum written out with its numbers, one term per group of equal layers; with letters too if it is one."""
    groups = Counter(zip(layers, allocation.layers, strict=True))
    products, letters, labels = [], [], []
    for (_, row), count in groups.items():
        for term in row.terms:
            products.append(_product(term.factors, str(count), term.layers_at))
            letters.append(_product(term.symbols, "L", term.layers_at))
            labels.append(term.label)
    if allocation.padding_bytes:
        products.append(str(allocation.padding_bytes))
        labels.append("padding layers")
    total = format_bytes(_total(allocation))
    if not products:
        return f"0 B = {total}"
    if len(products) == 1:
        return f"{letters[0]} = {products[0]} B = {total}"
    terms = (f"{product} ({label})" for product, label in zip(products, labels, strict=True))
    return f"{' + '.join(terms)} B = {total}"


def _product(factors: tuple[str, ...], layers: str, layers_at: int) -> str:
    return " · ".join((*factors[:layers_at], layers, *factors[layers_at:]))
