"""Caches of several sequences in one: rows join after a prefill of their own and leave when they end.

Every row keeps exactly what it would keep alone, aligned at the right: shorter rows have zeros on
their left, which the attention mask hides. Padding that no row needs any more is cut off, so the
joined cache is never longer than its longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from llminfer.engine.kv_cache.layers import STATES, row_of
from llminfer.engine.models.protocols import CacheLayer, LayeredCache


def can_join(cache: LayeredCache, tokens: int) -> bool:
    """Whether the cache of a sequence of `tokens` tokens can be put beside that of another.

    Every layer must be of a kind whose rows are independent, and hold a place for each token and no
    more: models that add places of their own (a learned prefix, a mask token) count them otherwise.
    """
    # exactly this class: one derived from it may keep more than its layers
    return type(cache) is DynamicCache and bool(cache.layers) and all(_joins(layer, tokens) for layer in cache.layers)


def _joins(layer: CacheLayer, tokens: int) -> bool:
    # a layer for an image that is not there stays empty
    return row_of(layer).joins and (not _keeps_tokens(layer) or layer.get_seq_length() == tokens)


def _keeps_tokens(layer: CacheLayer) -> bool:
    return row_of(layer).has_tokens and layer.is_initialized


def has_tokens(cache: LayeredCache) -> bool:
    """Whether some layer holds tokens, which have places, and not states alone."""
    return any(row_of(layer).has_tokens for layer in cache.layers)


class JoinedCache:
    """One transformers cache for several rows (None while there is none), and the cached tokens of each row."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.lengths: list[int] = []

    @property
    def total(self) -> int:
        """Cached tokens of the longest row, which is the length of the joined cache."""
        return max(self.lengths, default=0)

    def join(self, cache: Any, length: int, copies: int = 1) -> None:
        """Add the cache of one sequence, of `length` tokens, as the last rows; the cache is taken over.

        Whatever goes wrong on the way, the rows before stay as they were.
        """
        if copies > 1:
            for layer in cache.layers:
                _each_tensor(layer, layer, lambda mine, _: mine.repeat_interleave(copies, dim=0))
        if self.cache is None:
            self.cache, self.lengths = cache, [length] * copies
            return
        before, after = self.total, max(self.total, length)
        try:
            for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
                _set_length(ours, before, after)
                _set_length(theirs, length, after)
                _each_tensor(ours, theirs, lambda mine, other: torch.cat([mine, other], dim=0))
        except Exception:
            # views alone, since there may be no memory for more; layers that were not reached stay as they are
            for layer in self.cache.layers:
                _each_tensor(layer, layer, lambda mine, _: mine[: len(self.lengths)])
                _set_length(layer, after, before)
            raise
        self.lengths.extend([length] * copies)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        before = self.total
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = None
            return
        for layer in self.cache.layers:
            _each_tensor(layer, layer, lambda mine, _: mine[list(rows)])
            _set_length(layer, before, self.total)

    def grown(self) -> None:
        """The model has cached one more token for every row."""
        self.lengths = [length + 1 for length in self.lengths]

    def mask(self, device: torch.device) -> Tensor | None:
        """Which places hold a token, the one about to be fed included: shape [rows, total + 1].

        None when all do, which lets the model take its faster way.
        """
        if len(set(self.lengths)) == 1:
            return None
        places = torch.arange(self.total + 1, device=device)
        padding = self.total - torch.tensor(self.lengths, device=device)
        return (places >= padding[:, None]).long()

    def positions(self, device: torch.device) -> Tensor:
        """The position of the token about to be fed, shape [rows, 1]."""
        return torch.tensor(self.lengths, device=device)[:, None]


def _set_length(layer: Any, before: int, after: int) -> None:
    """Pad on the left, or cut there, so that a layer of `before` tokens counts as one of `after`."""
    if before == after or not _keeps_tokens(layer):
        return
    kept = after
    if row_of(layer).slides:
        layer.cumulative_length = after
        # the layer keeps one less than its window, and everything when the window is 1
        kept = min(after, layer.sliding_window - 1) if layer.sliding_window > 1 else after
    layer.keys, layer.values = _fit(layer.keys, kept), _fit(layer.values, kept)


def _fit(states: Tensor, length: int) -> Tensor:
    """States of shape [rows, heads, tokens, dim] with `length` tokens: zeros on the left, or a cut there."""
    missing = length - states.shape[-2]
    if missing > 0:
        return torch.nn.functional.pad(states, (0, 0, missing, 0))
    return states[..., -missing:, :] if missing else states


def _each_tensor(ours: Any, theirs: Any, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace every row-wise tensor of a layer by what `combine` makes of it and the other layer's."""
    if _keeps_tokens(ours):
        ours.keys, ours.values = combine(ours.keys, theirs.keys), combine(ours.values, theirs.values)
    if row_of(ours).has_states:
        for name in STATES:
            mine, other = getattr(ours, name), getattr(theirs, name)
            for state, tensor in mine.items():
                if tensor is not None:
                    mine[state] = combine(tensor, other[state])
