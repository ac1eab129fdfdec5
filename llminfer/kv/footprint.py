"""From a model's layers to bytes, as one runtime holds them on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from llminfer.errors import InvalidParams
from llminfer.kv.dtypes import FLOAT_TYPES, element_type
from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.kv.runtimes.records import Allocation, LayerBytes, Peak, Request, Runtime
from llminfer.kv.runtimes.table import runtime as runtime_row
from llminfer.kv.runtimes.transformers_dynamic import kept_tokens
from llminfer.kv.tensor_parallel import shard
from llminfer.units import format_bytes

__all__ = ["Footprint", "footprint", "kept_tokens", "total_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a cache that holds `tokens` tokens of `batch` sequences, on one of `tp` ranks.

    `bytes_per_token` is what the next token of every sequence adds, so 0 once all windows are
    full; a runtime that allocates blocks of `block_tokens` tokens adds them a block at a time.
    `state_bytes` is the part that does not depend on the tokens; `padding_bytes` is held by no
    layer. `layers` are the model's layers as the rank holds them, `layer_rows` their slots and
    terms, `layer_bytes` their sizes. `peaks` are the moments and meanings in which the bytes differ.
    """

    runtime: str
    release: str
    tokens: int
    batch: int
    tp: int
    dtype: str
    k_dtype: str
    v_dtype: str
    layers: tuple[LayerKV, ...]
    layer_rows: tuple[LayerBytes, ...]
    padding_bytes: int
    bytes_per_token: int
    block_tokens: int
    formula: str
    peaks: tuple[Peak, ...]
    notes: tuple[str, ...]

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
        return self.total_bytes * self.tp

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the layers of each kind, in the order in which the kinds first occur."""
        sums: dict[str, int] = {}
        for layer, row in zip(self.layers, self.layer_rows, strict=True):
            sums[layer.kind] = sums.get(layer.kind, 0) + row.size_bytes
        return sums


def footprint(
    model: ModelKV,
    *,
    tokens: int,
    batch: int = 1,
    dtype: str | None = None,
    runtime: str = "transformers",
    k_dtype: str | None = None,
    v_dtype: str | None = None,
    tp: int = 1,
    waiting: int | None = None,
    quantizer: str = "quanto",
) -> Footprint:
    """The bytes of this model's cache in a runtime.

    Args:
        tokens: cached tokens per sequence, so prompt + generated − 1 after a run.
        batch: sequences in the cache.
        dtype: the cache's element type; the model's own when not given.
        runtime: a name in `kv.runtimes.table.RUNTIMES`.
        k_dtype: the element type of the keys (and of all that is not values) where it is not `dtype`.
        v_dtype: the element type of the values where it is not `dtype`.
        tp: tensor-parallel ranks; the answer is for one of them.
        waiting: tokens that a quantized cache holds in full precision; as many as it can when not given.
        quantizer: the library of a quantized cache, `quanto` or `hqq`.

    Raises:
        InvalidParams: when a number is out of its range or an element type is unknown.
        UsageError: when the runtime is unknown, or has no such element type, or `tp` does not divide.
        UnsupportedArchitecture: when the runtime cannot hold such a model's cache.
    """
    for name, value, least in (("tokens", tokens, 0), ("batch", batch, 1), ("tp", tp, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidParams(f"{name} is {value!r}, not a whole number of {least} or more")
    row = runtime_row(runtime)
    rank = shard(model, ranks=tp, transformers_heads=row.transformers_heads)
    dtype, stored = _followed(model, row, dtype)
    request = replace(_request(model, tokens, batch, dtype, k_dtype, v_dtype), waiting=waiting, quantizer=quantizer)
    now = row.allocate(model, rank.layers, request)
    later = row.allocate(model, rank.layers, replace(request, tokens=tokens + now.block_tokens))
    return Footprint(
        runtime=row.name,
        release=row.release,
        tokens=tokens,
        batch=batch,
        tp=tp,
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


def total_bytes(
    model: ModelKV,
    *,
    dtype: str | None = None,
    runtime: str = "transformers",
    k_dtype: str | None = None,
    v_dtype: str | None = None,
    tp: int = 1,
) -> Callable[[int, int], int]:
    """`footprint(...).total_bytes` as a function of tokens and batch, for those who ask it many times.

    Raises:
        As `footprint`, when made or when called.
    """
    row = runtime_row(runtime)
    rank = shard(model, ranks=tp, transformers_heads=row.transformers_heads)
    dtype, _ = _followed(model, row, dtype)

    def of(tokens: int, batch: int) -> int:
        return _total(row.allocate(model, rank.layers, _request(model, tokens, batch, dtype, k_dtype, v_dtype)))

    return of


def _followed(model: ModelKV, row: Runtime, dtype: str | None) -> tuple[str | None, tuple[str, ...]]:
    """The element type asked for, else the one that the checkpoint states and the runtime follows; and a remark."""
    stored = model.stored_dtype
    if dtype is not None or stored is None or not row.follows_checkpoint:
        return dtype, ()
    if stored == "fp8":
        return stored, ("fp8, since the checkpoint's quantization_config states it for the cache",)
    return None, (f"the checkpoint states a {stored} cache, for which there is no rule: counted as {model.dtype}",)


def _request(
    model: ModelKV, tokens: int, batch: int, dtype: str | None, k_dtype: str | None, v_dtype: str | None
) -> Request:
    cache_type = element_type(dtype or model.dtype)
    own = cache_type if cache_type.name in FLOAT_TYPES else element_type(model.dtype)
    return Request(
        tokens=tokens,
        batch=batch,
        k_type=element_type(k_dtype) if k_dtype else cache_type,
        v_type=element_type(v_dtype) if v_dtype else cache_type,
        float_type=own,
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
