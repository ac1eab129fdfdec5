"""Linear layers that hold their weights in another format, computed by kernels that torch has for CPUs.

`BACKENDS` is the table of them: a format's name to the function that makes the layer. A layer
computes `x @ weight.T + bias` in float32 for any number of tokens and says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A linear layer whose weight is held in a format of its own.

    Attributes:
        format: the name of the format, as in `params.WEIGHTS`.
        in_features: columns of the weight.
        out_features: rows of the weight.
    """

    format: str

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.bias: Tensor | None

    @property
    def held_bytes(self) -> int:
        """Bytes of all that the layer holds: the packed weight with its scales, and the bias."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The weight that the layer computes with, float32, shape [rows, columns]."""
        raise NotImplementedError

    def embedded(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids`, float32, shape [*ids.shape, columns]: an embedding that shares the weight."""
        return self.dequantized()[ids]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, for code that reads it past the layer; made anew each time."""
        return self.dequantized()

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, shape [..., columns] to [..., rows], in the type of `x`."""
        raise NotImplementedError


# makes the layer of a weight [rows, columns] and its bias [rows]
Pack = Callable[[Tensor, Tensor | None], PackedLinear]


class Float16Linear(PackedLinear):
    """Half-precision weights, float32 arithmetic."""

    format = "float16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("held", weight.detach().half())
        self.held: Tensor

    @property
    def held_bytes(self) -> int:
        return self.held.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dequantized(self) -> Tensor:
        return self.held.float()

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.float(), self.held.float(), self.bias).to(x.dtype)


# format name to what makes its layer; a faster backend replaces rows
BACKENDS: dict[str, Pack] = {"float16": Float16Linear}
