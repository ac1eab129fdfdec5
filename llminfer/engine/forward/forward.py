"""One forward pass as a callable from new ids to the last position's logits.

Four ways, chosen before the loop starts so that the loop knows nothing of them:

- `PlainForward`: new ids, positions and the cache, for models that prepare their inputs as
  transformers does by default;
- `PreparedForward`: through the model's own `prepare_inputs_for_generation`, for all others;
- `WindowForward`: plain, with a mask for a cache that keeps a window;
- `UncachedForward`: the textbook loop that feeds the whole sequence each step.

`ChunkedForward` stands before each of them and feeds a long prompt in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from llminfer.engine.forward.gqa_attention import grouped_attention
from llminfer.engine.forward.turns import check_claim, claim, turn_of
from llminfer.engine.kv_cache.kinds import make_cache
from llminfer.engine.kv_cache.tensors import (
    cache_bytes,
    crop_cache,
    forget_states,
    keeps_past,
    module_states,
    stateful_modules,
)
from llminfer.engine.kv_cache.window import window_mask
from llminfer.engine.models.capabilities import (
    check_chunks,
    forward_parameters,
    layer_types,
    prepares_by_default,
    text_config,
    why_one_at_a_time,
)
from llminfer.params import CacheOptions

# where models put what they cache: most under the first, some under names of their own
_CACHE_FIELDS = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
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
# the model, or what runs it: its arguments to its outputs
Call = Callable[..., Any]


class Forward(Protocol):
    """Feeds new ids to the model and keeps what the next call needs; any number of ids, at any call."""

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        """Logits after the newest id, shape [1, vocabulary]."""
        ...

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        """Logits after each of the newest `count` ids, shape [count, vocabulary]; `new_ids` are so many at least."""
        ...

    @property
    def ids(self) -> Sequence[int]:
        """The ids fed so far, which need not be fed again."""
        ...

    def crop(self, tokens: int) -> bool:
        """Forget all but the first `tokens` ids; False, and nothing changed, when the cache cannot be cut so.

        This also mends a cache that a broken call has left half filled.
        """
        ...

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of the cache's tensors, None when there is no cache."""
        ...

    @property
    def cache(self) -> Any:
        """The cache itself, None when there is none."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about how the model was run."""
        ...


# (model, cache=..., cached_ids=...) to the forward
ForwardFactory = Callable[..., Forward]


def make_forward(
    model: Any,
    *,
    cached: bool = True,
    options: CacheOptions | None = None,
    max_tokens: int | None = None,
    cache: Any = None,
    cached_ids: Sequence[int] = (),
    factory: ForwardFactory | None = None,
) -> Forward:
    """The forward for this model.

    Args:
        cached: False gives the textbook loop, as `options` of kind `none` do.
        options: which cache, and how much of a prompt to feed at a time.
        max_tokens: the most tokens that will be cached, for caches that are allocated at once.
        cache: what to go on from, in place of an empty cache.
        cached_ids: the ids that `cache` holds.
        factory: how to feed the model, in place of the way that suits it and the cache.

    Raises:
        UnsupportedArchitecture: for a model that cannot have this cache, or cannot be fed in chunks.
    """
    options = options or CacheOptions(kind="dynamic" if cached else "none")
    if cache is None:
        cache = make_cache(options, model, max_tokens)
    by_model = PlainForward if prepares_by_default(model) else PreparedForward
    factory = factory or _FACTORIES.get(options.name, by_model)
    attention = grouped_attention if options.name == "growing" else nullcontext
    turn = partial(_turn, model, attention)
    return ChunkedForward(factory(model, cache=cache, cached_ids=cached_ids), _chunks(model, options), turn)


@contextmanager
def _turn(model: Any, attention: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """No other thread is in the model's forward while this is open."""
    with turn_of(model), attention():
        yield


def prefill_chunk(model: Any, options: CacheOptions) -> int | None:
    """Tokens of a prompt to feed at a time at most, None for all at once.

    Raises:
        UnsupportedArchitecture: when chunks were asked for and the model cannot be fed so.
    """
    if options.prefill_chunk is not None:
        check_chunks(model.config, type(model).__name__)
        return options.prefill_chunk
    whole = options.name in _WHOLE_PROMPT or not _takes_pieces(model)
    return None if whole else _first_chunk(model, options)


def _first_chunk(model: Any, options: CacheOptions) -> int:
    """Tokens that may begin a prompt at once: many where attention needs no mask and keeps no scores."""
    tokens, dtypes = _FIRST_CHUNKS.get(model.device.type, (DEFAULT_PREFILL_CHUNK, frozenset[torch.dtype]()))
    fused = model.dtype in dtypes and options.name != "window" and _is_fused(model)
    return tokens if fused else DEFAULT_PREFILL_CHUNK


def _is_fused(model: Any) -> bool:
    """Whether every layer attends through torch's function, causally, with keys as wide as values."""
    text = text_config(model.config)
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or hasattr(text, "kv_lora_rank"):
        return False
    width = getattr(text, "head_dim", None) or hidden // heads
    full = layer_types(model.config) == {"full_attention"}
    return full and width <= _WIDEST_FUSED_HEAD and model.config._attn_implementation == "sdpa"


def _takes_pieces(model: Any) -> bool:
    """Whether several tokens may be fed after others; of a checkpoint's own code that is not known."""
    own_code = type(model).__module__.startswith("transformers_modules.")
    return not own_code and why_one_at_a_time(model.config) is None


def _chunks(model: Any, options: CacheOptions) -> Chunks:
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


class WrappedForward:
    """Another forward, all of which shows through; for those that change how it is fed."""

    __slots__ = ("_forward",)

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        return self._forward(new_ids)

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        return self._forward.last(new_ids, count)

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


class ChunkedForward(WrappedForward):
    """Feeds another forward chunk by chunk, so that a long prompt never is in the model all at once."""

    __slots__ = ("_chunks", "_turn")

    def __init__(
        self, forward: Forward, chunks: Chunks, turn: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        super().__init__(forward)
        self._chunks, self._turn = chunks, turn

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


class UncachedForward:
    """Feeds the whole sequence each step, so a step's cost grows with the sequence."""

    __slots__ = ("_accepts_positions", "_keyword_arguments", "_model", "ids")
    kv_bytes = None
    cache = None
    notes: tuple[str, ...] = ()

    def __init__(self, model: Any, *, cache: None = None, cached_ids: Sequence[int] = ()) -> None:
        self._model = model
        self.ids = list(cached_ids)
        self._keyword_arguments = static_arguments(model, use_cache=False)
        self._accepts_positions = "position_ids" in forward_parameters(model)

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        return self.last(new_ids, 1)

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        ids = _tensor([*self.ids, *new_ids], self._model.device)
        arguments = _keeping(count, self._keyword_arguments)
        if self._accepts_positions:
            arguments["position_ids"] = _positions(ids, 0)
        logits = _last_logits(self._model(input_ids=ids, **arguments), count)
        self.ids.extend(new_ids)
        return logits

    def crop(self, tokens: int) -> bool:
        del self.ids[tokens:]
        return True


class PlainForward:
    """Feeds the new ids and their positions; keys and values of the others come from the cache."""

    __slots__ = (
        "_accepts_positions",
        "_cache",
        "_device",
        "_ids",
        "_keyword_arguments",
        "_model",
        "_owner",
        "_stateful",
        "_step",
        "_torn",
        "_uncached",
    )

    def __init__(
        self, model: Any, *, cache: Any = None, cached_ids: Sequence[int] = (), step: Call | None = None
    ) -> None:
        self._model, self._step = model, step or model
        self._device = model.device  # which asks the parameters each time
        self._cache = make_cache(CacheOptions(), model, None) if cache is None else cache
        self._keyword_arguments = static_arguments(model, use_cache=True)
        self._accepts_positions = "position_ids" in forward_parameters(model)
        self._ids = list(cached_ids)
        self._torn = False
        self._uncached: UncachedForward | None = None
        self._stateful, self._owner = stateful_modules(model), None
        if self._stateful:
            with turn_of(model):
                self._owner = claim(model)
                if not cached_ids:
                    forget_states(self._stateful)

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        return self.last(new_ids, 1)

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        if self._uncached is not None:
            return self._uncached.last(new_ids, count)
        if self._stateful:
            check_claim(self._model, self._owner)
        ids = _tensor(new_ids, self._device)
        arguments = {**_keeping(count, self._keyword_arguments), "cache": self._cache, **self._arguments(ids)}
        self._torn = True
        run = self._step if self._ids and len(new_ids) == 1 else self._model
        outputs = run(input_ids=ids, **arguments)
        # most give back the cache they were given; BLT puts it into a larger one
        self._cache = _returned_cache(outputs, self._cache)
        if not self._ids and not cache_bytes(self._cache):
            # the model took the cache and put nothing in: the newest token alone would be garbage
            self._uncached = UncachedForward(self._model)
            return self._uncached.last(new_ids, count)
        self._torn = False
        self._ids.extend(new_ids)
        return _last_logits(outputs, count)

    def _arguments(self, ids: Tensor) -> dict[str, Tensor]:
        return {"position_ids": _positions(ids, len(self._ids))} if self._accepts_positions else {}

    @property
    def ids(self) -> Sequence[int]:
        return self._ids if self._uncached is None else self._uncached.ids

    def crop(self, tokens: int) -> bool:
        if self._uncached is not None:
            return self._uncached.crop(tokens)
        if tokens < len(self._ids) or self._torn or keeps_past(self._cache):
            if self._stateful or not crop_cache(self._cache, tokens):
                return False
            self._torn = False
            del self._ids[tokens:]
        return True

    @property
    def cache(self) -> Any:
        return None if self._uncached is not None else self._cache

    @property
    def kv_bytes(self) -> int | None:
        if self.cache is None:
            return None
        return cache_bytes([self.cache, module_states(self._stateful)] if self._stateful else self.cache)

    @property
    def notes(self) -> tuple[str, ...]:
        return _no_cache_note(self._model) if self._uncached is not None else ()


class WindowForward(PlainForward):
    """Says which of the kept tokens each new one may attend to, for a cache that keeps a window."""

    __slots__ = ()

    def _arguments(self, ids: Tensor) -> dict[str, Tensor]:
        mask = window_mask(
            len(self._ids), ids.shape[-1], self._cache.window, dtype=self._model.dtype, device=ids.device
        )
        return {**super()._arguments(ids), "attention_mask": mask}


class PreparedForward:
    """Asks the model to prepare each step's inputs from the whole sequence, as `generate()` does."""

    __slots__ = ("_accepts_positions", "_cache", "_ids", "_kwargs", "_model", "_sequence", "_torn", "_uncached")

    def __init__(self, model: Any, *, cache: Any = None, cached_ids: Sequence[int] = ()) -> None:
        self._model = model
        self._accepts_positions = "position_ids" in forward_parameters(model)
        self._ids = list(cached_ids)
        self._sequence = _tensor(self._ids, model.device)
        self._cache: object | None = make_cache(CacheOptions(), model, None) if cache is None else cache
        self._kwargs = self._first_kwargs()
        self._torn = False
        self._uncached: UncachedForward | None = None

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        return self.last(new_ids, 1)

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        if self._uncached is not None:
            return self._uncached.last(new_ids, count)
        first = not self._ids
        ids = self._extended(new_ids)
        # the model extends its own arguments by one token a step; for more they are made anew
        if self._accepts_positions and (len(new_ids) > 1 or "position_ids" not in self._kwargs):
            made_from = {name: value for name, value in self._kwargs.items() if name not in ("cache", "position_ids")}
            self._kwargs["position_ids"] = self._model._prepare_position_ids_for_generation(ids, made_from)
        inputs = self._model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=None if first else len(new_ids),
            is_first_iteration=first or len(new_ids) > 1,
            **_keeping(count, self._kwargs),
        )
        self._torn = True
        outputs = self._model(**inputs, return_dict=True)
        self._cache = _returned_cache(outputs, self._cache)
        if first and (self._cache is None or not cache_bytes(self._cache)):
            self._uncached = UncachedForward(self._model)
            return self._uncached.last(new_ids, count)
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._model.config.is_encoder_decoder
        )
        self._torn = False
        self._ids.extend(new_ids)
        return _last_logits(outputs, count)

    def _extended(self, new_ids: Sequence[int]) -> Tensor:
        """All ids with the new ones, shape [1, tokens]: written behind the others, which are not copied each time."""
        fed, tokens = len(self._ids), len(self._ids) + len(new_ids)
        if tokens > self._sequence.shape[-1]:
            longer = self._sequence.new_empty(1, 2 * tokens)
            longer[:, :fed] = self._sequence[:, :fed]
            self._sequence = longer
        self._sequence[:, fed:tokens] = _tensor(new_ids, self._sequence.device)
        return self._sequence[:, :tokens]

    def _first_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"use_cache": True}
        if self._cache is not None:
            kwargs["cache"] = self._cache
        if "logits_to_keep" in forward_parameters(self._model):
            kwargs["logits_to_keep"] = 1
        return kwargs

    @property
    def ids(self) -> Sequence[int]:
        return self._ids if self._uncached is None else self._uncached.ids

    def crop(self, tokens: int) -> bool:
        if self._uncached is not None:
            return self._uncached.crop(tokens)
        if tokens < len(self._ids) or self._torn or keeps_past(self._cache):
            if not crop_cache(self._cache, tokens):
                return False
            self._torn = False
            del self._ids[tokens:]
            self._kwargs = self._first_kwargs()
        return True

    @property
    def cache(self) -> Any:
        return None if self._uncached is not None else self._cache

    @property
    def kv_bytes(self) -> int | None:
        return None if self.cache is None else cache_bytes(self.cache)

    @property
    def notes(self) -> tuple[str, ...]:
        return _no_cache_note(self._model) if self._uncached is not None else ()


# the ways that a kind of cache asks for; the others are the model's choice
_FACTORIES: Mapping[str, ForwardFactory] = {"none": UncachedForward, "window": WindowForward}


def static_arguments(model: Any, *, use_cache: bool) -> dict[str, Any]:
    """The arguments that stay the same at every step, as far as the model knows them."""
    wanted = {"use_cache": use_cache, "logits_to_keep": 1}
    accepted = forward_parameters(model)
    return {name: value for name, value in wanted.items() if name in accepted} | {"return_dict": True}


def _tensor(ids: Sequence[int], device: torch.device) -> Tensor:
    """The ids as a batch of one, shape [1, tokens]."""
    return torch.from_numpy(np.array([ids], dtype=np.int64)).to(device)


def _positions(ids: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + ids.shape[-1], device=ids.device).unsqueeze(0)


def _keeping(count: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ask for the logits of so many last positions, where the model can leave out the others."""
    return {**arguments, "logits_to_keep": count} if "logits_to_keep" in arguments else dict(arguments)


def _last_logits(outputs: Any, count: int) -> Tensor:
    logits: Tensor = outputs.logits[0, -count:]
    return logits


def _returned_cache(outputs: Any, given: object | None) -> object | None:
    for name in _CACHE_FIELDS:
        value = outputs.get(name)
        if value is not None:
            return value  # type: ignore[no-any-return]
    return given


def _no_cache_note(model: Any) -> tuple[str, ...]:
    return (f"{type(model).__name__} returned no cache: every step recomputed the whole sequence",)
