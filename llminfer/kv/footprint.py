"""From a model's layers to bytes, as transformers' dynamic cache holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llminfer.kv.dtypes import element_type
from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a cache that holds `tokens` tokens of `batch` sequences.

    `bytes_per_token` is what the next token of every sequence adds, so 0 once all windows are
    full. `state_bytes` is the part that does not depend on the tokens.
    """

    tokens: int
    batch: int
    dtype: str
    layer_bytes: tuple[int, ...]
    bytes_per_token: int
    state_bytes: int
    formula: str

    @property
    def total_bytes(self) -> int:
        """All layers together."""
        return sum(self.layer_bytes)


def footprint(model: ModelKV, *, tokens: int, batch: int = 1, dtype: str | None = None) -> Footprint:
    """The bytes of the tensors in transformers' `DynamicCache` of this model.

    Args:
        tokens: cached tokens per sequence, so prompt + generated − 1 after a run.
        batch: sequences in the cache.
        dtype: the cache's element type; the model's own when not given.
    """
    dtype = element_type(dtype or model.dtype).name
    layer_bytes = tuple(_layer_bytes(layer, tokens, batch, dtype) for layer in model.layers)
    one_more = sum(_layer_bytes(layer, tokens + 1, batch, dtype) for layer in model.layers)
    return Footprint(
        tokens=tokens,
        batch=batch,
        dtype=dtype,
        layer_bytes=layer_bytes,
        bytes_per_token=one_more - sum(layer_bytes),
        state_bytes=sum(_layer_bytes(layer, 0, batch, dtype) for layer in model.layers),
        formula=_formula(model, tokens, batch, dtype, sum(layer_bytes)),
    )


def kept_tokens(layer: LayerKV, tokens: int) -> int:
    """Tokens that transformers' dynamic cache keeps: a window of w keeps w − 1, and one of 1 keeps all.

    Source: `DynamicSlidingWindowLayer.update` slices `[-w + 1:]`, which is everything for w = 1.
    """
    if layer.window is None or layer.window == 1:
        return tokens
    return min(tokens, layer.window - 1)


def _layer_bytes(layer: LayerKV, tokens: int, batch: int, dtype: str) -> int:
    kept = kept_tokens(layer, tokens)
    grown = sum(
        element_type(tensor.dtype or dtype).size_bytes(
            tensor.transformers_elements * tensor.entries(tokens=tokens, kept=kept)
        )
        for tensor in layer.tensors
    )
    states = sum(element_type(state.dtype or dtype).size_bytes(state.elements) for state in layer.states)
    return batch * (grown + states)


def _formula(model: ModelKV, tokens: int, batch: int, dtype: str, total_bytes: int) -> str:
    """The sum written out with its numbers, one term per group of equal layers."""
    terms = []
    for layer, count in Counter(model.layers).items():
        kept, per_batch = kept_tokens(layer, tokens), f"{batch} · " if batch > 1 else ""
        size = element_type(dtype)
        b_e = size.block_bytes if size.block_elements == 1 else f"{size.block_bytes}/{size.block_elements}"
        heads_dims = {(tensor.heads, tensor.dim) for tensor in layer.tensors}
        if len(heads_dims) == 1 and not layer.states:
            heads, dim = heads_dims.pop()
            terms.append(f"{per_batch}{len(layer.tensors)} · {count} · {heads} · {dim} · {kept} · {b_e}")
        else:
            terms.append(f"{count} · {_layer_bytes(layer, tokens, batch, dtype)}")
    return f"{' + '.join(terms) or '0'} B = {format_bytes(total_bytes)}"
