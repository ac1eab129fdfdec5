"""transformers' `QuantizedCache`: groups of 64 elements with a scale and a zero, and a residual in full precision.

Sources: `QuantizedLayer` and its two backends in `cache_utils.py` of transformers 5.24;
`pack_weights` of optimum-quanto 0.2.7; `Quantizer.quantize` of hqq 0.2.8.

The first forward's tokens are quantized at once. Later ones gather in full precision until
there would be 128 of them; then the whole layer is quantized anew. So what N tokens weigh depends
on how many came with the prompt: the size given here is the largest (127 of them wait in full
precision), the one right after a prefill of N is named with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llminfer.errors import UsageError
from llminfer.kv.layer import LayerKV, ModelKV
from llminfer.kv.runtimes.records import (
    Allocation,
    LayerBytes,
    Moment,
    Peak,
    Request,
    Term,
    bytes_per_element,
    check_no_compression,
    each_layer,
    refuse,
)

GROUP_ELEMENTS = 64
RESIDUAL_TOKENS = 128
DEFAULT_BITS = 4
_NOTHING_WAITS = "all N tokens quantized, nothing waiting"
BITS = {"int2": 2, "int4": 4, "int8": 8}


def allocate(model: ModelKV, layers: tuple[LayerKV, ...], request: Request) -> Allocation:
    """The fullest that the cache is while it holds `request.tokens` tokens per sequence."""
    check_no_compression("transformers-quantized", model, layers)
    if any(layer.window is not None or layer.states or not layer.tensors for layer in layers):
        raise refuse(
            "transformers-quantized",
            model,
            "QuantizedCache is only for models whose layers are all full attention",
            hint=f"layer kinds here: {', '.join(sorted({layer.kind for layer in layers}))}",
        )
    bits = _bits(request)
    waiting = request.waiting
    if waiting is None:
        waiting = min(RESIDUAL_TOKENS - 1, max(request.tokens - 1, 0))
    rows = each_layer(layers, lambda layer: _layer(layer, request, bits, waiting))
    prefilled = sum(row.size_bytes for row in each_layer(layers, lambda layer: _layer(layer, request, bits, 0)))
    total = sum(row.size_bytes for row in rows)
    dense = max((_dense(layer, request) for layer in layers), default=0)
    return Allocation(
        layers=rows,
        peaks=(
            Peak(moment=Moment.PREFILL, name="after prefill", size_bytes=prefilled, reason=_NOTHING_WAITS),
            Peak(
                moment=Moment.STEP,
                name="during a step",
                size_bytes=total + dense,
                reason="a layer is dequantized in full for its attention, one layer at a time",
            ),
        ),
        notes=(f"{bits} bit in groups of {GROUP_ELEMENTS}, {waiting} tokens waiting in {request.float_type.name}",),
    )


def waiting_tokens(prompt: Iterable[int], steps: int) -> int:
    """Tokens that wait in full precision after forwards of so many prompt tokens each, then `steps` of one token.

    The first forward's tokens are quantized at once; whatever brings the waiting ones to 128 quantizes all.
    """
    waiting = 0
    for index, tokens in enumerate((*prompt, *([1] * steps))):
        waiting = 0 if index == 0 or waiting + tokens >= RESIDUAL_TOKENS else waiting + tokens
    return waiting


def _bits(request: Request) -> int:
    if request.k_type != request.v_type:
        raise UsageError("transformers-quantized has one width for keys and values", hint="give --dtype alone")
    return BITS.get(request.k_type.name, DEFAULT_BITS)


def _layer(layer: LayerKV, request: Request, bits: int, waiting: int) -> LayerBytes:
    alike = Counter((tensor.heads, tensor.dim) for tensor in layer.tensors)
    terms = (_terms(layer, request, bits, waiting, shape, count) for shape, count in alike.items())
    return LayerBytes(slots=request.tokens, grown=tuple(term for pair in terms for term in pair))


def _terms(
    layer: LayerKV, request: Request, bits: int, waiting: int, shape: tuple[int, int], count: int
) -> tuple[Term, ...]:
    """The packed groups of `count` tensors alike, and their tokens that wait in full precision."""
    (heads, dim), kind, packed = shape, request.float_type, request.tokens - waiting
    groups = -(-request.batch * packed * heads * dim // GROUP_ELEMENTS)
    if request.quantizer == "quanto":
        # it packs whole rows of groups, so that an odd group takes a row of bytes
        packed_bytes = -(-groups // (8 // bits)) * GROUP_ELEMENTS
    else:
        packed_bytes = groups * GROUP_ELEMENTS * bits // 8
    scale_bytes = groups * 2 * kind.block_bytes
    before = tuple(str(factor) for factor in (request.batch, count) if factor != 1)
    quantized = Term(
        label=f"{layer.kind}, quantized",
        symbols=(*before, "h_kv", "d_h", "N", "b_q"),
        factors=(*before, str(heads), str(dim), str(packed), f"({bits}/8 + 2·{kind.block_bytes}/{GROUP_ELEMENTS})"),
        size_bytes=count * (packed_bytes + scale_bytes),
        layers_at=len(before),
    )
    if not waiting:
        return (quantized,)
    full = Term(
        label=f"{layer.kind}, waiting",
        symbols=(*before, "h_kv", "d_h", "r", "b_e"),
        factors=(*before, str(heads), str(dim), str(waiting), bytes_per_element(kind)),
        size_bytes=count * kind.size_bytes(request.batch * waiting * heads * dim),
        layers_at=len(before),
    )
    return (quantized, full)


def _dense(layer: LayerKV, request: Request) -> int:
    return request.float_type.size_bytes(request.batch * request.tokens * layer.elements_per_token)
