"""Linear layers whose weights the native engine has packed, and rows of them for embeddings."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor, nn

from llminfer.engine.native.library import FORMATS, MatrixRecord, library, pointer
from llminfer.engine.weights import HEAD_FORMATS, Kernels, PackedLinear

GROUP_ROWS = 8  # rows are packed in groups of so many


class NativeLinear(PackedLinear):
    """`x @ weight.T + bias` for x of shape [..., columns], from weights in one of `FORMATS`.

    Computes in float32 and gives back the element type it was given.

    Attributes:
        format: how the weights are held.
        packed: their bytes.
    """

    packed: Tensor

    def __init__(self, packed: Tensor, bias: Tensor | None, *, kind: str, rows: int, columns: int) -> None:
        nn.Module.__init__(self)
        self.format, self.out_features, self.in_features = kind, rows, columns
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous(), persistent=False)
        self.record = MatrixRecord(
            format=FORMATS[kind], rows=rows, columns=columns, data=pointer(packed), bias=pointer(self.bias)
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and bias."""
        bias_bytes = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.packed.numel() + bias_bytes

    def forward(self, x: Tensor) -> Tensor:
        """The product, shape [..., rows]."""
        values = x.detach().to(torch.float32).contiguous()
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=torch.float32)
        if values.shape[-1] != self.in_features:
            raise ValueError(f"{values.shape[-1]} columns where {self.in_features} are needed")
        count = values.numel() // self.in_features
        if count:
            library().multiply(ctypes.byref(self.record), values.data_ptr(), count, out.data_ptr())
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def dequantized(self) -> Tensor:
        """The weights as they act, float32, shape [rows, columns]."""
        return self.embedded(torch.arange(self.out_features))

    def embedded(self, ids: Tensor) -> Tensor:
        """Rows by their numbers, float32, shape [*ids.shape, columns]."""
        numbers = ids.detach().to(torch.long).contiguous()
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.out_features:
            raise IndexError(f"row numbers reach from 0 to {self.out_features - 1}")
        out = torch.empty(*ids.shape, self.in_features, dtype=torch.float32)
        library().rows(ctypes.byref(self.record), numbers.data_ptr(), numbers.numel(), out.data_ptr())
        return out

    def part(self, first: int, rows: int) -> MatrixRecord:
        """A record of some of the rows, which start a group; it points into this layer's bytes."""
        if first % GROUP_ROWS:
            raise ValueError(f"row {first} does not start a group of {GROUP_ROWS}")
        group_bytes = library().packed_bytes(self.record.format, GROUP_ROWS, self.in_features)
        bias = None if self.bias is None else self.bias.data_ptr() + 4 * first
        data = self.packed.data_ptr() + first // GROUP_ROWS * group_bytes
        return MatrixRecord(format=self.record.format, rows=rows, columns=self.in_features, data=data, bias=bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def pack(weight: Tensor, bias: Tensor | None, kind: str) -> NativeLinear:
    """Pack the weights of a linear layer.

    Args:
        weight: shape [rows, columns], any floating element type.
        kind: one of `FORMATS`.
    """
    rows, columns = weight.shape
    packed = _empty(kind, rows, columns)
    layer = NativeLinear(packed, bias, kind=kind, rows=rows, columns=columns)
    values = weight.detach().to(torch.float32).contiguous()
    library().pack(ctypes.byref(layer.record), values.data_ptr())
    return layer


def _pack_as(kind: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return pack(weight, bias, kind)


def _empty(kind: str, rows: int, columns: int) -> Tensor:
    """Room for packed weights, zeros, on huge pages where the system gives them."""
    size_bytes = library().packed_bytes(FORMATS[kind], rows, columns)
    packed = torch.empty(size_bytes, dtype=torch.uint8)
    library().advise(packed.data_ptr(), size_bytes)
    return packed.zero_()


NATIVE_KERNELS = Kernels(make={kind: partial(_pack_as, kind) for kind in FORMATS}, head_formats=HEAD_FORMATS)
