"""One forward pass as a callable from new ids to the last position's logits, in the way that suits model and cache.

`ChunkedForward` stands before each of the ways and feeds a long prompt in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llminfer.engine.forward.chunks import ChunkedForward, chunks_for
from llminfer.engine.forward.gqa_attention import grouped_attention
from llminfer.engine.forward.protocol import Call, ForwardFactory
from llminfer.engine.forward.turns import check_claim, claim, turn_of
from llminfer.engine.kv_cache.kinds import make_cache
from llminfer.engine.kv_cache.tensors import (
    cache_bytes,
    crop_cache,
    forget_states,
    keeps_past,
    module_states,
    returned_cache,
    stateful_modules,
)
from llminfer.engine.kv_cache.window import window_mask
from llminfer.engine.models.capabilities import forward_parameters, prepares_by_default
from llminfer.engine.models.protocols import CausalLM, Outputs
from llminfer.params import CacheOptions


def make_forward(
    model: CausalLM,
    *,
    options: CacheOptions | None = None,
    max_tokens: int | None = None,
    cache: Any = None,
    cached_ids: Sequence[int] = (),
    factory: ForwardFactory | None = None,
    one_by_one: bool = False,
) -> ChunkedForward:
    """The forward for this model.

    Args:
        options: which cache, and how much of a prompt to feed at a time; kind `none` gives the textbook loop.
        max_tokens: the most tokens that will be cached, for caches that are allocated at once.
        cache: what to go on from, in place of an empty cache.
        cached_ids: the ids that `cache` holds.
        factory: how to feed the model, in place of the way that suits it and the cache.
        one_by_one: feed what comes on top of a cache one id at a time.

    Raises:
        UnsupportedArchitecture: for a model that cannot have this cache, or cannot be fed in chunks.
    """
    options = options or CacheOptions()
    if cache is None:
        cache = make_cache(options, model, max_tokens)
    by_model = PlainForward if prepares_by_default(model) else PreparedForward
    factory = factory or _FACTORIES.get(options.name, by_model)
    attention = grouped_attention if options.name == "growing" else nullcontext

    @contextmanager
    def turn() -> Iterator[None]:
        with turn_of(model), attention():
            yield

    forward = factory(model, cache=cache, cached_ids=cached_ids)
    return ChunkedForward(forward, chunks_for(model, options, one_by_one=one_by_one), turn)


class UncachedForward:
    """Feeds the whole sequence each step, so a step's cost grows with the sequence."""

    kv_bytes = cache = None
    notes: tuple[str, ...] = ()

    def __init__(self, model: CausalLM, *, cache: None = None, cached_ids: Sequence[int] = ()) -> None:
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
        logits = self._model(input_ids=ids, **arguments).logits[0, -count:]
        self.ids.extend(new_ids)
        return logits

    def crop(self, tokens: int) -> bool:
        del self.ids[tokens:]
        return True


class CachedForward:
    """Feeds new ids on top of a cache, however a model's inputs are made.

    A model that takes the cache and puts nothing in is fed the whole sequence: the newest token alone gives garbage.
    """

    def __init__(self, model: CausalLM, *, cache: Any = None, cached_ids: Sequence[int] = ()) -> None:
        self._model = model
        self._device = model.device  # which asks the parameters each time
        self._cache = make_cache(CacheOptions(), model, None) if cache is None else cache
        self._accepts_positions = "position_ids" in forward_parameters(model)
        self._ids = list(cached_ids)
        self._torn = False  # a call was broken off, so the layers may hold more than these ids
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
        call, inputs = self._prepared(new_ids, count)
        self._torn = True
        outputs = call(**inputs)
        # most give back the cache they were given; BLT puts it into a larger one
        self._cache = returned_cache(outputs, self._cache)
        if not self._ids and (self._cache is None or not cache_bytes(self._cache)):
            self._uncached = UncachedForward(self._model)
            return self._uncached.last(new_ids, count)
        self._went_on(outputs)
        self._torn = False
        self._ids.extend(new_ids)
        return outputs.logits[0, -count:]

    def _prepared(self, new_ids: Sequence[int], count: int) -> tuple[Call, dict[str, Any]]:
        """What to call, and its arguments for the logits of the last `count` of these ids."""
        raise NotImplementedError

    def _went_on(self, outputs: Outputs) -> None:
        """Take from the outputs what the next step's inputs are made of."""

    def _went_back(self) -> None:
        """Forget what earlier outputs have left for the next step's inputs."""

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
            self._went_back()
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
        note = f"{type(self._model).__name__} returned no cache: every step recomputed the whole sequence"
        return () if self._uncached is None else (note,)


class PlainForward(CachedForward):
    """Feeds the new ids and their positions; keys and values of the others come from the cache."""

    def __init__(
        self, model: CausalLM, *, cache: Any = None, cached_ids: Sequence[int] = (), step: Call | None = None
    ) -> None:
        super().__init__(model, cache=cache, cached_ids=cached_ids)
        self._step = step or model
        self._keyword_arguments = static_arguments(model, use_cache=True)

    def _prepared(self, new_ids: Sequence[int], count: int) -> tuple[Call, dict[str, Any]]:
        ids = _tensor(new_ids, self._device)
        call = self._step if self._ids and len(new_ids) == 1 else self._model
        arguments = _keeping(count, self._keyword_arguments)
        return call, {"input_ids": ids, **arguments, "cache": self._cache, **self._arguments(ids)}

    def _arguments(self, ids: Tensor) -> dict[str, Tensor]:
        return {"position_ids": _positions(ids, len(self._ids))} if self._accepts_positions else {}


class WindowForward(PlainForward):
    """Says which of the kept tokens each new one may attend to, for a cache that keeps a window."""

    def _arguments(self, ids: Tensor) -> dict[str, Tensor]:
        past, new = len(self._ids), ids.shape[-1]
        mask = window_mask(past, new, self._cache.window, dtype=self._model.dtype, device=ids.device)
        return {**super()._arguments(ids), "attention_mask": mask}


class PreparedForward(CachedForward):
    """Asks the model to prepare each step's inputs from the whole sequence, as `generate()` does."""

    def __init__(self, model: CausalLM, *, cache: Any = None, cached_ids: Sequence[int] = ()) -> None:
        super().__init__(model, cache=cache, cached_ids=cached_ids)
        self._sequence = _tensor(self._ids, self._device)
        self._kwargs: dict[str, Any] = {}
        self._went_back()

    def _prepared(self, new_ids: Sequence[int], count: int) -> tuple[Call, dict[str, Any]]:
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
        return self._model, {**inputs, "return_dict": True}

    def _extended(self, new_ids: Sequence[int]) -> Tensor:
        """All ids with the new ones, shape [1, tokens]: written behind the others, which are not copied each time."""
        fed, tokens = len(self._ids), len(self._ids) + len(new_ids)
        if tokens > self._sequence.shape[-1]:
            longer = self._sequence.new_empty(1, 2 * tokens)
            longer[:, :fed] = self._sequence[:, :fed]
            self._sequence = longer
        self._sequence[:, fed:tokens] = _tensor(new_ids, self._device)
        return self._sequence[:, :tokens]

    def _went_on(self, outputs: Outputs) -> None:
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._model.config.is_encoder_decoder
        )

    def _went_back(self) -> None:
        self._kwargs = {"use_cache": True}
        if self._cache is not None:
            self._kwargs["cache"] = self._cache
        if "logits_to_keep" in forward_parameters(self._model):
            self._kwargs["logits_to_keep"] = 1


# the ways that a kind of cache asks for; the others are the model's choice
_FACTORIES: Mapping[str, ForwardFactory] = {"none": UncachedForward, "window": WindowForward}


def static_arguments(model: CausalLM, *, use_cache: bool) -> dict[str, Any]:
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
