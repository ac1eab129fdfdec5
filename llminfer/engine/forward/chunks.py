"""Feeds a long prompt in chunks: how many ids a model takes at a time, and the forward that cuts them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from llminfer.engine.forward.protocol import Forward
from llminfer.engine.models.capabilities import check_chunks, layer_types, text_config, why_one_at_a_time
from llminfer.engine.models.protocols import CausalLM
from llminfer.params import CacheOptions

# tokens of a prompt at a time: enough to keep a processor busy, few enough to bound what a layer holds at once
DEFAULT_PREFILL_CHUNK = 2048
# by kind of device: tokens that begin a prompt at once, in which element types. They need no mask, so a
# kernel takes them that later chunks cannot have; where there is none, all scores would be in memory
_FIRST_CHUNKS = {"cuda": (32768, frozenset({torch.bfloat16, torch.float16}))}
_WIDEST_FUSED_HEAD = 256
# a quantized cache gives later tokens what is left of earlier ones: in one pass they see the whole of it
_WHOLE_PROMPT = frozenset({"quantized", "none"})
# (new ids, ids fed before) to the chunks to feed
Chunks = Callable[[Sequence[int], int], Iterator[Sequence[int]]]


def prefill_chunk(model: CausalLM, options: CacheOptions) -> int | None:
    """Tokens of a prompt to feed at a time at most, None for all at once.

    Raises:
        UnsupportedArchitecture: when chunks were asked for and the model cannot be fed so.
    """
    if options.prefill_chunk is not None:
        check_chunks(model.config, type(model).__name__)
        return options.prefill_chunk
    if options.name in _WHOLE_PROMPT or not _takes_pieces(model):
        return None
    tokens, dtypes = _FIRST_CHUNKS.get(model.device.type, (DEFAULT_PREFILL_CHUNK, frozenset[torch.dtype]()))
    fused = model.dtype in dtypes and options.name != "window" and _is_fused(model)
    return tokens if fused else DEFAULT_PREFILL_CHUNK


def _is_fused(model: CausalLM) -> bool:
    """Whether every layer attends through torch's function, causally, with keys as wide as values."""
    text = text_config(model.config)
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or hasattr(text, "kv_lora_rank"):
        return False
    width = getattr(text, "head_dim", None) or hidden // heads
    full = layer_types(model.config) == {"full_attention"}
    return full and width <= _WIDEST_FUSED_HEAD and model.config._attn_implementation == "sdpa"


def _takes_pieces(model: CausalLM) -> bool:
    """Whether several tokens may be fed after others; of a checkpoint's own code that is not known."""
    own_code = type(model).__module__.startswith("transformers_modules.")
    return not own_code and why_one_at_a_time(model.config) is None


def chunks_for(model: CausalLM, options: CacheOptions, *, one_by_one: bool) -> Chunks:
    """How this model is to be fed when more than one id comes at once; `one_by_one` on top of a cache."""
    chunk = prefill_chunk(model, options)
    first = chunk or sys.maxsize
    if one_by_one:
        size = 1
    elif chunk is not None:
        size = options.prefill_chunk or DEFAULT_PREFILL_CHUNK
    else:
        size = first if options.name == "none" or _takes_pieces(model) else 1

    def split(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
        start, end = 0, size if fed else first
        while start < len(new_ids):
            yield new_ids[start:end]
            start, end = end, end + size

    return split


class ChunkedForward:
    """Feeds another forward chunk by chunk, so that a long prompt never is in the model all at once."""

    def __init__(self, forward: Forward, chunks: Chunks, turn: Callable[[], AbstractContextManager[None]]) -> None:
        self._forward, self._chunks, self._turn = forward, chunks, turn

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        logits = None
        for chunk in self._chunks(new_ids, len(self._forward.ids)):
            with self._turn():
                logits = self._forward(chunk)
        if logits is None:
            raise ValueError("nothing to feed")
        return logits

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        if len(new_ids) > count:
            self(new_ids[:-count])
        with self._turn():
            return self._forward.last(new_ids[-count:], count)

    @property
    def ids(self) -> Sequence[int]:
        return self._forward.ids

    def crop(self, tokens: int) -> bool:
        return self._forward.crop(tokens)

    @property
    def cache(self) -> Any:
        return self._forward.cache

    @property
    def kv_bytes(self) -> int | None:
        return self._forward.kv_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        return self._forward.notes
