"""Our own growing cache (`--cache growing`): buffers in whole blocks of places, written in place.

Source: `llminfer/engine/growing_cache.py`, which takes its capacity from here.
"""

from __future__ import annotations

BLOCK_TOKENS = 256
# a window's buffer has this many places more than the window keeps, so that it shifts so seldom
_SHIFT_TOKENS = 128


def whole_blocks(tokens: int) -> int:
    """Places for so many tokens in whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def capacity(tokens: int, window: int | None) -> int:
    """Places of a layer's buffer after `tokens` tokens of a sequence, however they came.

    A window of w keeps w − 1 tokens (one of 1 keeps all, as in transformers' cache), in a buffer
    that stops growing when those and some to shift by have a place.
    """
    if window is None or window == 1:
        return whole_blocks(tokens)
    return whole_blocks(min(tokens, window - 1 + _SHIFT_TOKENS))
