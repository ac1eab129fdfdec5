"""Linear layers whose weights the native engine has packed, and rows of them for embeddings."""

from __future__ import annotations

import ctypes
from functools import partial
from threading import Lock

import torch
from torch import Tensor, nn

from llminfer.engine.native.library import FORMATS, MatrixRecord, library, pointer
from llminfer.engine.weights.packed_layer import PackedLinear
from llminfer.engine.weights.packed_linear import HEAD_FORMATS, Kernels

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
        bias = None if self.bias is None else pointer(self.bias[first:])
        data = self.packed.data_ptr() + first // GROUP_ROWS * group_bytes
        return MatrixRecord(format=self.record.format, rows=rows, columns=self.in_features, data=data, bias=bias)


def pack(weight: Tensor, bias: Tensor | None, kind: str) -> NativeLinear:
    """Pack the weights of a linear layer.

    Args:
        weight: shape [rows, columns], any floating element type.
        kind: one of `FORMATS`.
    """
    rows, columns = weight.shape
    packed = _ARENA.take(library().packed_bytes(FORMATS[kind], rows, columns))
    layer = NativeLinear(packed, bias, kind=kind, rows=rows, columns=columns)
    values = weight.detach().to(torch.float32).contiguous()
    library().pack(ctypes.byref(layer.record), values.data_ptr())
    return layer


class _Arena:
    """Room for packed weights in large pieces on huge pages, where the system gives them.

    Most matrices are smaller than a huge page; one after another they share them, and a step through all
    of them translates few addresses.
    """

    __slots__ = ("_piece", "_turn", "_used")

    def __init__(self) -> None:
        self._piece, self._used, self._turn = torch.empty(0, dtype=torch.uint8), 0, Lock()

    def take(self, size_bytes: int) -> Tensor:
        """So many bytes, zeros, `_ALIGNMENT` apart; the piece that they are from lives as long as they do."""
        with self._turn:
            if self._used + size_bytes > len(self._piece):
                self._piece, self._used = _huge(max(size_bytes, _PIECE_BYTES)), 0
            taken = self._piece[self._used : self._used + size_bytes]
            self._used += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken.zero_()


_ARENA = _Arena()
_PIECE_BYTES = 1 << 25
_HUGE_PAGE_BYTES = 1 << 21
_ALIGNMENT = 64


def _huge(size_bytes: int) -> Tensor:
    """Bytes that start with a huge page."""
    whole = torch.empty(size_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    library().advise(whole.data_ptr() + start, size_bytes)
    return whole[start : start + size_bytes]


NATIVE_KERNELS = Kernels(make={kind: partial(pack, kind=kind) for kind in FORMATS}, head_formats=HEAD_FORMATS)
