"""Linear layers that hold their weights in another format, computed by kernels that torch has for CPUs.

A product with few tokens is bound by the reading of the weight, so the packed kernels win; one with many
is bound by arithmetic, so formats whose kernels are slow there are dequantized, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from llminfer.engine.weights.packed_layer import Pack, PackedLinear
from llminfer.params import MAX_DRAFT_TOKENS

# for so many tokens the kernels of int8 and int4 compute, each token as it does alone; a draft and the token
# before it are among these. A dequantized product is faster from about half of them on, and rounds otherwise
FEW_TOKENS = MAX_DRAFT_TOKENS + 1
# elements of a weight that are dequantized at a time
_PIECE_ELEMENTS = 2**22
INT4_GROUP = 32  # columns that share a scale and a zero point
_VECTOR = 32  # columns that the int8 kernels may read at a time
# whole blocks of FBGEMM's on every processor, which takes 16 or 32 rows and 512 columns at a time
_HALF_ROWS, _HALF_COLUMNS = 32, 512


class Float32Linear(PackedLinear):
    """The weight laid out for oneDNN; one that is an embedding's as well is left as it is and computed from too."""

    format = "float32"

    def __init__(self, weight: Tensor, bias: Tensor | None, *, tied: bool = False) -> None:
        super().__init__(weight, bias)
        self.finds_rows = self.is_embedding = tied
        self._held = weight.detach().float()
        if not tied:
            # an opaque tensor, which no buffer may be: it cannot be moved or saved
            laid_out = torch.ops.mkldnn._reorder_linear_weight(self._held.contiguous(), None)
            padded = torch.ops.mkldnn._nbytes(laid_out) > self._held.nbytes  # as small layers are on some processors
            self._held = self._held.contiguous() if padded else laid_out

    @property
    def held_bytes(self) -> int:
        held = int(torch.ops.mkldnn._nbytes(self._held)) if self._held.is_mkldnn else self._held.nbytes
        return super().held_bytes + (0 if self.is_embedding else held)

    def dequantized(self) -> Tensor:
        weight: Tensor = self._held.to_dense() if self._held.is_mkldnn else self._held
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.float(), self._held, self.bias, "none", [], "")
        return y.to(x.dtype)


class RowsLinear(PackedLinear):
    """A format whose rows can be read: packed kernels for few tokens, dequantized rows for many."""

    _panel = 1  # slices begin at multiples of this

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        y = self._few(flat) if len(flat) <= FEW_TOKENS else self._many(flat.float())
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def dequantized(self) -> Tensor:
        return self._slice(0, self.out_features)

    def _few(self, x: Tensor) -> Tensor:
        """The product for few tokens, shape [tokens, columns] to [tokens, rows]."""
        return self._many(x.float())

    def _many(self, x: Tensor) -> Tensor:
        """The same for many: some rows are dequantized at a time, so that memory stays bounded."""
        step = -(-max(_PIECE_ELEMENTS // self.in_features, 1) // self._panel) * self._panel
        pieces = []
        for start in range(0, self.out_features, step):
            stop = min(start + step, self.out_features)
            bias = None if self.bias is None else self.bias[start:stop]
            pieces.append(linear(x, self._slice(start, stop), bias))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def _slice(self, start: int, stop: int) -> Tensor:
        """Rows from `start` to before `stop`, float32, shape [stop - start, columns]."""
        raise NotImplementedError


class PlainHalfLinear(RowsLinear):
    """Half-precision weights where FBGEMM is missing: made float32 for each product."""

    format = "float16"
    held: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("held", weight.detach().half())

    def embedded(self, ids: Tensor) -> Tensor:
        return self.held[ids].float()

    def _slice(self, start: int, stop: int) -> Tensor:
        return self.held[start:stop].float()


class HalfLinear(PackedLinear):
    """Half-precision weights with float32 arithmetic, by FBGEMM.

    FBGEMM fills columns up to whole blocks with zeros that it holds, and rows to as many as suit the
    processor. So it gets whole blocks of rows, and of columns too where filling them up would hold more
    than the weight did; what is left of the weight, to the right and below, is held as it is.
    """

    format = "float16"
    finds_rows = False
    _right: Tensor
    _below: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, *, fill: bool = True) -> None:
        super().__init__(weight, bias)
        weight, rows = weight.detach(), self.out_features // _HALF_ROWS * _HALF_ROWS
        filled = -(-self.in_features // _HALF_COLUMNS) * _HALF_COLUMNS
        fits = fill and 2 * filled < weight.itemsize * self.in_features
        self._columns = self.in_features if fits else self.in_features // _HALF_COLUMNS * _HALF_COLUMNS
        self._packed_bytes = 2 * rows * (filled if fits else self._columns)
        # the bias stays with us: the packed form would hold it once more
        whole = weight[:rows, : self._columns].float().contiguous()
        self._held = torch.ops.quantized.linear_prepack_fp16(whole, None)
        # copies, so that they do not keep the whole weight
        self.register_buffer("_right", weight[:rows, self._columns :].half().clone())
        self.register_buffer("_below", weight[rows:].half().clone())

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self._packed_bytes

    def dequantized(self) -> Tensor:
        whole = torch.ops.quantized.linear_unpack_fp16(self._held)[0]
        return torch.cat((torch.cat((whole, self._right.float()), dim=1), self._below.float()))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(wide[..., : self._columns], self._held)
        if self._right.numel():
            y += _half_product(wide[..., self._columns :], self._right)
        if self._below.numel():
            y = torch.cat((y, _half_product(wide, self._below)), dim=-1)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


def _half_product(x: Tensor, held: Tensor) -> Tensor:
    """`x @ held.T` in float32, some rows of the half-precision weight at a time so that memory stays bounded."""
    pieces = [linear(x, rows.float()) for rows in torch.split(held, max(_PIECE_ELEMENTS // held.shape[1], 1))]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


class Int8Linear(RowsLinear):
    """Eight bits an element and a scale a row; for few tokens with bfloat16 activations."""

    format = "int8"
    held: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        # the kernel reads whole vectors of columns: others end in a crash or in wrong sums
        weight = pad(weight.detach().float(), (0, -self.in_features % _VECTOR))
        # the kernel wants bfloat16 scales: what is divided by is the rounded one
        scales = _nonzero(weight.abs().amax(dim=1) / 127).bfloat16()
        held = (weight / scales.float()[:, None]).round_().clamp_(-127, 127)
        self.register_buffer("held", held.to(torch.int8))
        self.register_buffer("scales", scales)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.held[ids][..., : self.in_features] * self.scales[ids].float()[..., None]

    def _slice(self, start: int, stop: int) -> Tensor:
        return self.held[start:stop, : self.in_features] * self.scales[start:stop].float()[:, None]

    def _few(self, x: Tensor) -> Tensor:
        x = pad(x.bfloat16(), (0, -self.in_features % _VECTOR)).contiguous()
        y = torch._weight_int8pack_mm(x, self.held, self.scales).float()
        return y if self.bias is None else y.add_(self.bias)


class Int4Linear(RowsLinear):
    """Four bits an element, a scale and a zero point for 32 columns; for few tokens with bfloat16 activations.

    The held bytes are what torch packs: panels of rows, in each a byte for two rows of a column.
    Columns are padded to whole groups, rows to whole panels.
    """

    format = "int4"
    held: Tensor
    scales_and_zeros: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        panel = int4_panel() or _ANY_PANEL
        rows, columns = weight.shape
        self._columns = -(-columns // INT4_GROUP) * INT4_GROUP
        weight = pad(weight.detach().float(), (0, self._columns - columns, 0, -rows % panel))
        weight[:, columns:] = weight[:, columns - 1 : columns]  # zeros would widen the last group's range
        grouped = weight.view(len(weight), -1, INT4_GROUP)
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
        # the kernel computes (q - 8) · scale + zero with both in bfloat16: q is chosen for the rounded ones
        scales = _nonzero((high - low) / 15).bfloat16()
        zeros = (low + 8 * scales.float()).bfloat16()
        quantized = ((grouped - zeros.float()[..., None]) / scales.float()[..., None]).add_(8).round_().clamp_(0, 15)
        quantized = quantized.to(torch.int32).view(len(weight), -1)
        self.register_buffer("held", _pack_int4(quantized, panel))
        # [groups, rows, 2]
        self.register_buffer("scales_and_zeros", torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous())
        self._panel = panel

    def embedded(self, ids: Tensor) -> Tensor:
        half = self._panel // 2
        place = ids % self._panel
        packed = self._panels()[ids // self._panel, :, place % half]  # [*ids, columns]
        nibbles = torch.where((place < half)[..., None], packed & 15, packed >> 4)
        scales, zeros = self.scales_and_zeros[:, ids].float().movedim(0, -2).unbind(dim=-1)
        grouped = nibbles.view(*ids.shape, -1, INT4_GROUP).float().sub_(8)
        weight = grouped.mul_(scales[..., None]).add_(zeros[..., None])
        return weight.flatten(start_dim=-2)[..., : self.in_features]

    def _slice(self, start: int, stop: int) -> Tensor:
        first, last = start // self._panel, -(-stop // self._panel)
        packed = self._panels()[first:last].transpose(0, 1)  # [columns, panels, rows of a panel / 2]
        # columns first, as they are held: the product takes the weight from either side
        weight = torch.empty(self._columns, last - first, self._panel)
        weight[..., : self._panel // 2] = packed & 15
        weight[..., self._panel // 2 :] = packed >> 4
        # [groups, 1, rows]
        scales, zeros = self.scales_and_zeros[:, None, first * self._panel : last * self._panel].float().unbind(dim=-1)
        grouped = weight.view(-1, INT4_GROUP, scales.shape[-1])
        weight = torch.addcmul(zeros - 8 * scales, grouped, scales, out=grouped).flatten(0, 1).T
        return weight[: stop - start, : self.in_features]

    def _few(self, x: Tensor) -> Tensor:
        if int4_panel() is None:
            return super()._few(x)
        x = pad(x.bfloat16(), (0, self._columns - self.in_features)).contiguous()
        y = torch._weight_int4pack_mm_for_cpu(x, self.held, INT4_GROUP, self.scales_and_zeros)
        y = y[:, : self.out_features].float()
        return y if self.bias is None else y.add_(self.bias)

    def _panels(self) -> Tensor:
        """The held bytes, shape [panels, columns, rows of a panel / 2]."""
        return self.held.view(-1, self._columns, self._panel // 2)


# rows of a panel where torch's own layout is one that we cannot read, and its kernel is not used
_ANY_PANEL = 32


@cache
def int4_panel() -> int | None:
    """Rows of a panel in the layout of torch's int4 weights on this CPU; None when it is another layout."""
    probe = torch.arange(128 * INT4_GROUP, dtype=torch.int32).mul(7).remainder(13).view(128, INT4_GROUP)
    packed = torch._convert_weight_to_int4pack_for_cpu(probe, 1)
    return next((panel for panel in (32, 64, 128) if torch.equal(packed, _pack_int4_by_hand(probe, panel))), None)


def _pack_int4(quantized: Tensor, panel: int) -> Tensor:
    if int4_panel() is None:
        return _pack_int4_by_hand(quantized, panel)
    return torch._convert_weight_to_int4pack_for_cpu(quantized, 1)


def _pack_int4_by_hand(quantized: Tensor, panel: int) -> Tensor:
    rows, columns = quantized.shape
    low, high = quantized.view(-1, panel, columns).transpose(1, 2).to(torch.uint8).chunk(2, dim=-1)
    return (low | high << 4).reshape(rows, columns // 2)


def _nonzero(scales: Tensor) -> Tensor:
    """Scales to divide by: a row of zeros has any."""
    return scales.clamp_(min=torch.finfo(torch.bfloat16).tiny)


def has_fbgemm() -> bool:
    """Whether torch was built with FBGEMM, as it is for x86."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _make_half(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    rows, columns = weight.shape
    blocks = rows >= _HALF_ROWS and weight.itemsize * columns > 2 * _HALF_COLUMNS
    return (HalfLinear if has_fbgemm() and blocks else PlainHalfLinear)(weight, bias)


def _make_tied_half(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    # FBGEMM's layout has no rows for the embedding, which then has a copy: as much as there is room for in float32
    rows, columns = weight.shape
    wide = weight.itemsize > 2 and has_fbgemm() and rows >= _HALF_ROWS and columns >= _HALF_COLUMNS
    return HalfLinear(weight, bias, fill=False) if wide else PlainHalfLinear(weight, bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What computes with packed weights: for each format, what makes its layer.

    Attributes:
        make: format name to what packs a layer.
        make_tied: the same for layers whose weight is an embedding's too, where that differs.
        head_formats: the format of output layers, where it is another one.
        least_size: rows and columns below which integer formats gain nothing.
    """

    make: Mapping[str, Pack]
    make_tied: Mapping[str, Pack] = field(default_factory=dict)
    head_formats: Mapping[str, str] = field(default_factory=dict)
    least_size: int = 1


# the output layer is where 4 bits cost most, and where files with 4-bit weights have more themselves
HEAD_FORMATS: Mapping[str, str] = {"int4": "int8"}

TORCH_KERNELS = Kernels(
    make={"float32": Float32Linear, "float16": _make_half, "int8": Int8Linear, "int4": Int4Linear},
    make_tied={"float32": partial(Float32Linear, tied=True), "float16": _make_tied_half},
    head_formats=HEAD_FORMATS,
    least_size=INT4_GROUP,
)
