"""Matrix products in float32 for 16-bit models, on CPUs that compute 16-bit types slowly.

Without instructions for them, torch's products of two 16-bit matrices take six to sixteen times as
long as those of float32 ones; a product with a single token is bound by memory and is not slower.
So from a few tokens on, a layer's weights are made float32 for the length of its product, and the
result goes back to the model's type. One layer's weights are wide at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llminfer.engine.machine.device import computes_fast

# measured: with fewer tokens, making the weights wide costs more than the slow product
WIDE_FROM_TOKENS = 4


class WideLinear(nn.Linear):
    """A linear layer with 16-bit weights that computes in float32 from `WIDE_FROM_TOKENS` tokens on."""

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, shape [..., in_features] to [..., out_features], in the type of `input`."""
        if input.numel() < WIDE_FROM_TOKENS * self.in_features:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias).to(input.dtype)


class WideConv1D(Conv1D):  # type: ignore[misc]  # transformers has no types for it
    """The same for GPT-2's layer, whose weight lies the other way."""

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight + bias`, shape [..., rows] to [..., columns], in the type of `x`."""
        if x.numel() < WIDE_FROM_TOKENS * x.shape[-1]:
            return super().forward(x)  # type: ignore[no-any-return]
        flat = x.reshape(-1, x.shape[-1]).float()
        wide = torch.addmm(self.bias.float(), flat, self.weight.float()).to(x.dtype)
        return wide.view(*x.shape[:-1], self.nf)


# exact types: a subclass (packed, quantized) has a product of its own
_WIDE: Mapping[type[nn.Module], type[nn.Module]] = {nn.Linear: WideLinear, Conv1D: WideConv1D}


def widen_slow_products(model: Any) -> tuple[str, ...]:
    """Let a loaded model's 16-bit layers compute several tokens in float32 where that is faster.

    Returns:
        A note for the user when layers were changed.
    """
    slow = [module for module in model.modules() if type(module) in _WIDE and _is_slow(module.weight)]
    for module in slow:
        module.__class__ = _WIDE[type(module)]
    if not slow:
        return ()
    name = str(slow[0].weight.dtype).removeprefix("torch.")
    return (f"prompts are multiplied in float32, since this CPU has no fast {name}",)


def _is_slow(weight: Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16) and not computes_fast(weight.dtype, weight.device)
