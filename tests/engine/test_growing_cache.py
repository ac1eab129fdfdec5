"""The growing cache against transformers' own layers: whatever is done to both, they hold and return the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from llminfer.engine.cache import cache_bytes
from llminfer.engine.growing_cache import GrowingLayer, GrowingSlidingLayer

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
# tokens that one call may bring: mostly one, now and then a prompt
PIECES = st.lists(st.sampled_from([1, 1, 1, 2, 7, 100, 255, 256, 300, 700]), min_size=1, max_size=12)
WINDOWS = st.sampled_from([None, 1, 2, 8, 127, 129, 256, 300])


def states(tokens: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # laid out as projections come: tokens before heads
    keys = torch.randn(batch, tokens, HEADS, KEY_DIM, generator=generator).transpose(1, 2)
    values = torch.randn(batch, tokens, HEADS, VALUE_DIM, generator=generator).transpose(1, 2)
    return keys, values.to(torch.bfloat16)


def layers(window: int | None) -> tuple[Any, Any]:
    if window is None:
        return GrowingLayer(), DynamicLayer()
    return GrowingSlidingLayer(window), DynamicSlidingWindowLayer(window)


def check_same(ours: Any, theirs: Any) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    if theirs.get_seq_length():
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def places(tokens: int, window: int | None) -> int:
    """The rule of `docs/decisions.md`, written down a second time."""
    if window is not None and window > 1:
        tokens = min(tokens, window + 127)
    return (tokens + 255) // 256 * 256


def check_bytes(ours: Any, tokens: int, window: int | None, batch: int = 1) -> None:
    held = places(tokens, window) * batch * HEADS
    assert cache_bytes([ours]) == held * KEY_DIM * 4 + held * VALUE_DIM * 2


@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, window=WINDOWS, batch=st.sampled_from([1, 2]))
def test_updates_return_and_keep_what_a_concatenation_does(pieces: list[int], window: int | None, batch: int) -> None:
    ours, theirs = layers(window)
    for at, tokens in enumerate(pieces):
        keys, values = states(tokens, batch, at)
        returned, expected = ours.update(keys, values), theirs.update(keys, values)
        assert all(torch.equal(mine, other) for mine, other in zip(returned, expected, strict=True))
        check_same(ours, theirs)
        check_bytes(ours, sum(pieces[: at + 1]), window, batch)


@settings(max_examples=30, deadline=None)
@given(pieces=PIECES, window=WINDOWS)
def test_what_is_written_from_outside_counts_like_an_update(pieces: list[int], window: int | None) -> None:
    outside, inside = layers(window)[0], layers(window)[0]
    for at, tokens in enumerate(pieces):
        keys, values = states(tokens, seed=at)
        inside.update(keys, values)
        outside.reserve(tokens, like_keys=keys, like_values=values)
        begin, end = outside.begin, outside.end
        assert 0 <= begin <= end <= outside.key_buffer.shape[-2] - tokens
        outside.key_buffer[:, :, end : end + tokens] = keys
        outside.value_buffer[:, :, end : end + tokens] = values
        outside.advance(tokens)
        check_same(outside, inside)
        check_bytes(outside, sum(pieces[: at + 1]), window)


def test_an_empty_layer_is_told_what_it_will_hold() -> None:
    layer = GrowingLayer()
    with pytest.raises(ValueError, match="like"):
        layer.reserve(1)
    layer.reserve(1, like_keys=torch.empty(1, 2, 0, 3), like_values=torch.empty(1, 2, 0, 5, dtype=torch.bfloat16))
    assert layer.key_buffer is not None
    assert layer.value_buffer is not None
    assert layer.key_buffer.shape == (1, 2, 256, 3)
    assert layer.value_buffer.shape == (1, 2, 256, 5)
    assert layer.value_buffer.dtype is torch.bfloat16
    assert layer.key_buffer.is_contiguous()
