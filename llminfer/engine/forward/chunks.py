"""How many ids at a time a model is fed when more than one comes at once: all, chunks, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

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
    whole = options.name in _WHOLE_PROMPT or not _takes_pieces(model)
    return None if whole else _first_chunk(model, options)


def _first_chunk(model: CausalLM, options: CacheOptions) -> int:
    """Tokens that may begin a prompt at once: many where attention needs no mask and keeps no scores."""
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


def chunks_for(model: CausalLM, options: CacheOptions) -> Chunks:
    """How this model is to be fed when more than one id comes at once."""
    chunk = prefill_chunk(model, options)
    if chunk is not None:
        return _chunks_of(chunk, options.prefill_chunk or DEFAULT_PREFILL_CHUNK)
    return _all_at_once if options.name == "none" or _takes_pieces(model) else _one_at_a_time


def _all_at_once(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
    yield new_ids


def _chunks_of(first: int, size: int) -> Chunks:
    def split(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
        start, end = 0, size if fed else first
        while start < len(new_ids):
            yield new_ids[start:end]
            start, end = end, end + size

    return split


def _one_at_a_time(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
    if fed == 0:
        yield new_ids
    else:
        yield from ([new_id] for new_id in new_ids)
