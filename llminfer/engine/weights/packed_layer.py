"""What every packed layer is: a weight held in another format, read past the layer only as far as is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class LazyWeight(Tensor):
    """A float32 weight that is made when its values are asked for; its shape and type are there before.

    Some models read no more of a layer's weight than its type, and an embedding no more than some rows.
    `held` is what it is made from, where no module counts that.
    """

    held: Tensor | None

    _make: Callable[[], Tensor]
    _rows: Callable[[Tensor], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], make: Any, rows: Any, *, held: Tensor | None = None) -> LazyWeight:
        lazy: LazyWeight = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)
        lazy._make, lazy._rows, lazy.held = make, rows, held
        return lazy

    @classmethod  # torch types it as a bound method
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if func is torch.ops.aten.embedding.default and isinstance(first, LazyWeight):
            return first._rows(args[1])
        if func in _PARTS and isinstance(first, LazyWeight) and first.held is not None:
            return func(first.held, *args[1:], **(kwargs or {})).float()
        args, kwargs = tree_map(lambda value: value._make() if isinstance(value, LazyWeight) else value, (args, kwargs))
        return func(*args, **(kwargs or {}))


# what takes a part of a tensor, so that no more than that part is made float32: an expert's weights, say
_PARTS = frozenset({torch.ops.aten.select.int, torch.ops.aten.slice.Tensor, torch.ops.aten.index.Tensor})


def widened(held: Tensor) -> LazyWeight:
    """A float32 weight that stays in a 16-bit type; what of it is used becomes float32 for that long."""
    held = held.detach()
    return LazyWeight(held.shape, held.float, lambda ids: held[ids].float(), held=held)


class FixedModule(nn.Module):
    """A module whose tensors are in the types that its format needs: moving and casting pass it by."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedModule:
        return self


class PackedLinear(FixedModule):
    """A linear layer whose weight is held in a format of its own.

    Attributes:
        format: the name of the format, as in `params.WEIGHTS`.
        in_features: columns of the weight.
        out_features: rows of the weight.
        finds_rows: whether single rows can be read cheaply, so that an embedding can share the weight.
    """

    format: str
    finds_rows = True
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def held_bytes(self) -> int:
        """Bytes of all that the layer holds: the packed weight with its scales, and the bias."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def dequantized(self) -> Tensor:
        """The weight that the layer computes with, float32, shape [rows, columns]."""
        raise NotImplementedError

    def embedded(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids`, float32, shape [*ids.shape, columns]."""
        return self.dequantized()[ids]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, for code that reads it past the layer; made anew each time."""
        return LazyWeight((self.out_features, self.in_features), self.dequantized, self.embedded)

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, shape [..., columns] to [..., rows], in the type of `x`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.format}"


# makes the layer of a weight [rows, columns] and its bias [rows]
Pack = Callable[[Tensor, Tensor | None], PackedLinear]
