"""How many ids at a time a model is fed when more than one comes at once: all, chunks, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llminfer.engine.models.capabilities import check_chunks, why_one_at_a_time
from llminfer.engine.models.protocols import CausalLM
from llminfer.params import CacheOptions

# tokens of a prompt at a time: enough to keep a processor busy, few enough to bound what a layer holds at once
DEFAULT_PREFILL_CHUNK = 2048
# a quantized cache gives later tokens what is left of earlier ones: in one pass they see the whole of it
_WHOLE_PROMPT = frozenset({"quantized", "none"})
# (new ids, ids fed before) to the chunks to feed
Chunks = Callable[[Sequence[int], int], Iterator[Sequence[int]]]


def prefill_chunk(model: CausalLM, options: CacheOptions) -> int | None:
    """Tokens of a prompt to feed at a time, None for all at once.

    Raises:
        UnsupportedArchitecture: when chunks were asked for and the model cannot be fed so.
    """
    if options.prefill_chunk is not None:
        check_chunks(model.config, type(model).__name__)
        return options.prefill_chunk
    whole = options.name in _WHOLE_PROMPT or not _takes_pieces(model)
    return None if whole else DEFAULT_PREFILL_CHUNK


def _takes_pieces(model: CausalLM) -> bool:
    """Whether several tokens may be fed after others; of a checkpoint's own code that is not known."""
    own_code = type(model).__module__.startswith("transformers_modules.")
    return not own_code and why_one_at_a_time(model.config) is None


def chunks_for(model: CausalLM, options: CacheOptions) -> Chunks:
    """How this model is to be fed when more than one id comes at once."""
    chunk = prefill_chunk(model, options)
    if chunk is not None:
        return _chunks_of(chunk)
    return _all_at_once if options.name == "none" or _takes_pieces(model) else _one_at_a_time


def _all_at_once(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
    yield new_ids


def _chunks_of(size: int) -> Chunks:
    def split(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
        for start in range(0, len(new_ids), size):
            yield new_ids[start : start + size]

    return split


def _one_at_a_time(new_ids: Sequence[int], fed: int) -> Iterator[Sequence[int]]:
    if fed == 0:
        yield new_ids
    else:
        yield from ([new_id] for new_id in new_ids)
