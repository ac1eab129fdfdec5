"""Whether a model goes on from a cache exactly as it goes on from the tokens themselves.

A cache that outlives its run is a promise: what follows is what a run from the beginning would
give. Most models keep it, some only when they are fed one token at a time, a few not at all. So it
is tried once on a handful of tokens, and what a handful cannot show is known by its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicIndexedLayer

from llminfer.engine.forward.forward import make_forward
from llminfer.engine.models.protocols import CausalLM, Config

_HEAD, _TAIL = 5, 3
# in units of the logits' spread. How far single tokens are apart is rounding, as long as it is little; a lost
# state may be little too, but it is far above the rounding
_LITTLE, _LITTLE_IN_SHORT_TYPES = 1e-3, 0.2
_ROUNDING, _TIMES_ROUNDING = 1e-5, 3
_MASKED_BELOW = 50.0


class FeedMode(Enum):
    """How new tokens may be fed on top of a cache: together, one at a time, or not at all."""

    TOGETHER = "together"
    ONE_BY_ONE = "one by one"
    NEVER = "never"


@torch.inference_mode()
def choose_feed_mode(model: CausalLM, ids: Sequence[int]) -> FeedMode:
    """Run a few of these ids in one piece and in two, and see which way gives the same logits."""
    few = (list(ids) * (_HEAD + _TAIL))[: _HEAD + _TAIL]
    try:
        whole = make_forward(model)
        expected = whole(few)
        if whole.cache is None or _selects_keys(whole.cache):
            return FeedMode.NEVER
    except Exception:  # the run itself will meet it and say so
        return FeedMode.NEVER
    limit = _LITTLE if expected.dtype == torch.float32 else _LITTLE_IN_SHORT_TYPES
    one_by_one = _apart(model, few, expected, one_by_one=True)
    if not one_by_one <= limit:  # then no answer goes on from its own prompt exactly
        return FeedMode.NEVER
    same = _apart(model, few, expected, one_by_one=False) <= max(_ROUNDING, _TIMES_ROUNDING * one_by_one)
    return FeedMode.TOGETHER if same else FeedMode.ONE_BY_ONE


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (our, their) in pairs if our != their), min(len(ours), len(theirs)))


def exact_length(config: Config) -> int | None:
    """The length up to which cached keys stay what they were, None for any length.

    Rotary embeddings of these kinds change their frequencies for the whole sequence once it is longer.
    """
    text_config = config.get_text_config(decoder=True)
    lengths = [
        rope.get("original_max_position_embeddings") or getattr(text_config, "max_position_embeddings", None) or 0
        for rope in _ropes(getattr(text_config, "rope_parameters", None))
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(lengths, default=None)


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """One record, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for nested in parameters.values():
            yield from _ropes(nested)


def _selects_keys(cache: Any) -> bool:
    """Sparse attention chooses its keys differently for a prompt and for single tokens, once there are enough."""
    return isinstance(cache, Cache) and any(isinstance(layer, DynamicIndexedLayer) for layer in cache.layers)


def _apart(model: CausalLM, ids: Sequence[int], expected: Tensor, *, one_by_one: bool) -> float:
    """How far the logits after a continuation are from those expected, in units of their spread."""
    try:
        forward = make_forward(model, one_by_one=one_by_one)
        forward(ids[:_HEAD])
        ours = forward(ids[_HEAD:]).float()
    except Exception:  # a model that cannot be fed this way may say so in any manner
        return math.inf
    expected = expected.float()
    possible = expected > expected.max() - _MASKED_BELOW  # ids that a model rules out would hide all other differences
    spread = float((expected - expected[possible].mean())[possible].norm())
    difference = float((ours - expected)[possible].norm())
    # a model that is certain of one token has no spread
    return difference / spread if spread else math.inf * difference if difference else 0.0
