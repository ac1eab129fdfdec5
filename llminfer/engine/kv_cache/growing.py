"""Layers that write keys and values in place: a step costs their reading, and no copy of them.

transformers' own layers concatenate, so every step copies all that is cached. Here a layer has
buffers with room for some tokens more, and what attention reads is a view of the places in use.
How large the buffers are depends on the number of tokens alone, not on how they came: in pieces,
one by one, or after others were taken back. So the bytes held can be predicted.

A sliding layer's window moves along its buffer; at the buffer's end it is moved back to the front.
Layers of other kinds (recurrent, compressed, hybrid, shared) stay transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from llminfer.kv.runtimes.growing import BLOCK_TOKENS, capacity


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of every token.

    Attributes:
        key_buffer: shape [batch, heads, places, dim of keys], None before its first use.
        value_buffer: shape [batch, heads, places, dim of values], None before its first use.
        begin: the first place in use.
        end: the place behind the last one in use.
    """

    key_buffer: Tensor | None = None
    value_buffer: Tensor | None = None
    begin: int = 0
    end: int = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty buffers for states of this form, of any number of tokens."""
        self.device = key_states.device
        self.key_buffer, self.value_buffer = _empty_like(key_states, 0), _empty_like(value_states, 0)
        self.begin = self.end = 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states behind the others; returned are views of all that the new tokens may see."""
        tokens = key_states.shape[-2]
        self.reserve(tokens, like_keys=key_states, like_values=value_states)
        start, end = self.end, self.end + tokens
        first = self._first_kept(start)
        keys, values = self.key_buffer[..., first:end, :], self.value_buffer[..., first:end, :]  # type: ignore[index]
        keys[..., start - first :, :].copy_(key_states)
        values[..., start - first :, :].copy_(value_states)
        self.advance(tokens)
        return keys, values

    def reserve(self, tokens: int, *, like_keys: Tensor | None = None, like_values: Tensor | None = None) -> None:
        """Make room for `tokens` more behind `end`; this may replace the buffers and move `begin` and `end`.

        Args:
            like_keys: shape [batch, heads, any, dim], for a layer that is not in use yet: its keys are of
                this form, element type and device.
            like_values: the same of its values.

        Raises:
            ValueError: for a layer that is not in use yet, without both of these.
        """
        if self.key_buffer is None:
            if like_keys is None or like_values is None:
                raise ValueError("an empty layer must be told what its keys and values are like")
            self.lazy_initialization(like_keys, like_values)
        if self.end + tokens > self._places():
            # more than the capacity at most for one call: `advance` takes back what a window does not keep
            self._move(max(self._capacity(self.get_seq_length() + tokens), self.end - self.begin + tokens))

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as written behind `end`, in places that were reserved."""
        self.end += tokens
        if not 0 <= self._places() - self.end < BLOCK_TOKENS:
            self._fit()

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far."""
        return self.end - self.begin

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest `-tokens_to_remove` tokens back.

        Raises:
            ValueError: for a positive number.
        """
        _check_negative(tokens_to_remove)
        self.end = max(self.end - abs(tokens_to_remove), self.begin)
        self._fit()

    def reset(self) -> None:
        """Empty the layer and let go of its buffers."""
        super().reset()
        self.begin = self.end = 0

    @property
    def keys(self) -> Tensor | None:
        """The kept keys, shape [batch, heads, kept tokens, dim]: a view of their buffer."""
        return None if self.key_buffer is None else self.key_buffer[..., self.begin : self.end, :]

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self.key_buffer = self._replaced(states)

    @property
    def values(self) -> Tensor | None:
        """The kept values, shape [batch, heads, kept tokens, dim]: a view of their buffer."""
        return None if self.value_buffer is None else self.value_buffer[..., self.begin : self.end, :]

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self.value_buffer = self._replaced(states)

    def _capacity(self, tokens: int) -> int:
        """Places for a sequence of so many tokens."""
        return capacity(tokens, None)

    def _first_kept(self, end: int) -> int:
        """The first place that is kept when `end` is the place behind the last."""
        return self.begin

    def _places(self) -> int:
        return 0 if self.key_buffer is None else self.key_buffer.shape[-2]

    def _fit(self) -> None:
        """Let the buffers have the places that the number of tokens calls for."""
        wanted = max(self._capacity(self.get_seq_length()), self.end - self.begin)
        if self.key_buffer is not None and wanted != self._places():
            self._move(wanted)

    def _move(self, places: int) -> None:
        """Move what is kept to the front of new buffers."""
        keys, values = _placed(self.keys, places), _placed(self.values, places)
        # nothing is called between these, so an interrupt finds the layer before the move or after it
        self.begin, self.end = 0, self.end - self.begin
        self.key_buffer, self.value_buffer = keys, values

    def _replaced(self, states: Tensor | None) -> Tensor | None:
        """A buffer that holds these states from the front, in place of the one before."""
        if states is None:
            return None
        if self.begin:
            self._move(self._places())
        self.end = states.shape[-2]
        return _placed(states, max(self._capacity(self.get_seq_length()), self.end))


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keys and values of the newest tokens, one less than the window, as transformers' own layer keeps them.

    While past recording is on, nothing leaves the window before `crop`.

    Attributes:
        sliding_window: tokens that attention sees, the newest included; with 1 all are kept.
        cumulative_length: tokens of the sequence so far.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """As a growing layer's."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)  # type: ignore[has-type]

    def advance(self, tokens: int) -> None:
        """As a growing layer's; what leaves the window is no longer kept."""
        self.end += tokens
        self.cumulative_length += tokens
        if not self.record_past:
            self.begin = self._first_kept(self.end)
        self._fit()

    def advance_over(self, tokens: int) -> None:
        """Count `tokens` more as seen, in front of those that are kept: they have left the window."""
        self.cumulative_length += tokens
        self._fit()

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far, also those that have left the window."""
        return int(self.cumulative_length)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest `-tokens_to_remove` tokens back, and what past recording has kept out of the window.

        Raises:
            ValueError: for a positive number.
            RuntimeError: when the window has moved, so that what is to come back is gone.
        """
        _check_negative(tokens_to_remove)
        if self.cumulative_length >= self.sliding_window and not self.record_past:
            raise RuntimeError("what has left the window cannot come back: call activate_past_recording before")
        removed = min(abs(tokens_to_remove), self.end - self.begin)
        self.end -= removed
        self.cumulative_length -= removed
        self.begin = self._first_kept(self.end)
        self._fit()

    def _capacity(self, tokens: int) -> int:
        return capacity(tokens, self.sliding_window)

    def _first_kept(self, end: int) -> int:
        return self.begin if self.sliding_window == 1 else max(self.begin, end - int(self.sliding_window) + 1)


class GrowingIndexedLayer(DynamicIndexedLayer, GrowingLayer):  # type: ignore[misc]
    """Keys and values as a growing layer's, the indexer's keys as transformers keeps them."""


def _empty_like(states: Tensor, places: int) -> Tensor:
    """A buffer for states of shape [batch, heads, any, dim], with so many places."""
    # an inference tensor could not be written to outside of inference mode
    with torch.inference_mode(False):
        return torch.empty((*states.shape[:-2], places, states.shape[-1]), dtype=states.dtype, device=states.device)


def _placed(states: Tensor | None, places: int) -> Tensor:
    """A buffer with so many places that begins with these states."""
    assert states is not None
    buffer = _empty_like(states, places)
    buffer[..., : states.shape[-2], :].copy_(states)
    return buffer


def _check_negative(tokens_to_remove: int) -> None:
    if tokens_to_remove > 0:
        raise ValueError(f"tokens to remove are given as a negative number, not as {tokens_to_remove}")
