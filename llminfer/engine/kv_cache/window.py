"""A cache that keeps the first few tokens and the newest: its size stops growing, the text need not.

The rule: with a window of N, the token at position p attends to the positions below `SINK_TOKENS`
and to the last N − `SINK_TOKENS` positions, p included. Keys keep the rotary position they were
cached with, and the position of a new token goes on growing. Because the rule speaks of positions
alone, it does not matter in how many pieces a prompt is fed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from llminfer.params import SINK_TOKENS


class WindowLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of the kept tokens, shape [1, heads, at most window, dim]."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.cumulative_length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return what was kept with the new states behind it, and keep the window of that."""
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = self._kept(keys), self._kept(values)
        return keys, values

    def get_seq_length(self) -> int:
        """All tokens seen, which is what the next position follows from."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """As a dynamic layer's; of use only while nothing has left the window."""
        super().crop(tokens_to_remove)
        self.cumulative_length -= abs(tokens_to_remove)

    def _kept(self, states: Tensor) -> Tensor:
        excess = states.shape[-2] - self.window
        if excess <= 0:
            return states
        return torch.cat([states[..., :SINK_TOKENS, :], states[..., SINK_TOKENS + excess :, :]], dim=-2)


class WindowCache(Cache):  # type: ignore[misc]
    """A `WindowLayer` for each layer of the model."""

    def __init__(self, *, layers: int, window: int) -> None:
        super().__init__(layers=[WindowLayer(window) for _ in range(layers)])
        self.window = window


def window_mask(past: int, new: int, window: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each new token may attend to, as numbers added to the scores: shape [1, 1, new, kept + new].

    Args:
        past: tokens seen before, of which the window is kept.
        new: tokens that are being fed.
    """
    places = torch.arange(past + new, device=device)
    if past > window:
        places = torch.cat([places[:SINK_TOKENS], places[past - (window - SINK_TOKENS) :]])
    queries = torch.arange(past, past + new, device=device)[:, None]
    near = places > queries - (window - SINK_TOKENS)
    seen = (places <= queries) & (near | (places < SINK_TOKENS))
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
    return mask[None, None]
