"""One forward pass as a callable from new ids to the last position's logits.

Three ways, chosen before the loop starts so that the loop knows nothing of them:

- `PlainForward`: new ids, positions and the cache, for models that prepare their inputs as
  transformers does by default;
- `PreparedForward`: through the model's own `prepare_inputs_for_generation`, for all others;
- `UncachedForward`: the textbook loop that feeds the whole sequence each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationMixin

from llminfer.engine.cache import cache_bytes, crop_cache, make_dynamic_cache

# where models put what they cache: most under the first, some under names of their own
_CACHE_FIELDS = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
# what a prepared model is given again at each step, of which the first two alone follow the sequence
_CARRIED = frozenset({"cache", "position_ids", "use_cache", "logits_to_keep"})


class Forward(Protocol):
    """Feeds new ids to the model and keeps what the next call needs."""

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        """Logits after the newest id, shape [1, vocabulary]."""
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

    def crop(self, length: int) -> bool:
        """Keep only the first `length` ids; False when that cannot be done, and the forward is then spoilt."""
        ...


def make_forward(model: Any, *, cached: bool) -> Forward:
    """The forward for this model; `cached=False` gives the textbook loop."""
    if not cached:
        return UncachedForward(model)
    return PlainForward(model) if prepares_by_default(model) else PreparedForward(model)


def prepares_by_default(model: Any) -> bool:
    """Whether the model's inputs are just ids, positions and a default cache."""
    overridden = any(
        getattr(type(model), name) is not getattr(GenerationMixin, name)
        for name in (
            "prepare_inputs_for_generation",
            "_update_model_kwargs_for_generation",
            "_prepare_position_ids_for_generation",
        )
    )
    accepted = forward_parameters(model)
    return not overridden and "cache" in accepted and model._supports_default_dynamic_cache()


class UncachedForward:
    """Feeds the whole sequence each step, so a step's cost grows with the sequence."""

    __slots__ = ("_ids", "_keyword_arguments", "_model")
    kv_bytes = None
    cache = None
    notes: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids: Tensor | None = None
        self._keyword_arguments = _static_arguments(model, use_cache=False)

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        self._ids = _append(self._ids, new_ids, self._model.device)
        arguments = dict(self._keyword_arguments)
        if "position_ids" in forward_parameters(self._model):
            arguments["position_ids"] = _positions(self._ids, 0)
        return _last_logits(self._model(input_ids=self._ids, **arguments))

    def crop(self, length: int) -> bool:
        self._ids = None if self._ids is None else self._ids[:, :length]
        return True


class PlainForward:
    """Feeds the new ids and their positions; keys and values of the others come from the cache."""

    __slots__ = ("_accepts_positions", "_cache", "_keyword_arguments", "_length", "_model", "_uncached")

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = make_dynamic_cache(model)
        self._keyword_arguments = _static_arguments(model, use_cache=True)
        self._accepts_positions = "position_ids" in forward_parameters(model)
        self._length = 0
        self._uncached: UncachedForward | None = None

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        if self._uncached is not None:
            return self._uncached(new_ids)
        ids = _append(None, new_ids, self._model.device)
        arguments = {**self._keyword_arguments, "cache": self._cache}
        if self._accepts_positions:
            arguments["position_ids"] = _positions(ids, self._length)
        outputs = self._model(input_ids=ids, **arguments)
        if self._length == 0 and not cache_bytes(self._cache):
            # the model took the cache and put nothing in: the newest token alone would be garbage
            self._uncached = UncachedForward(self._model)
            return self._uncached(new_ids)
        self._length += len(new_ids)
        return _last_logits(outputs)

    def crop(self, length: int) -> bool:
        if self._uncached is not None:
            return self._uncached.crop(length)
        remove, self._length = self._length - length, length
        return crop_cache(self._cache, length=length, remove=remove)

    @property
    def cache(self) -> Any:
        return None if self._uncached is not None else self._cache

    @property
    def kv_bytes(self) -> int | None:
        return None if self.cache is None else cache_bytes(self.cache)

    @property
    def notes(self) -> tuple[str, ...]:
        return _no_cache_note(self._model) if self._uncached is not None else ()


class PreparedForward:
    """Asks the model to prepare each step's inputs from the whole sequence, as `generate()` does."""

    __slots__ = ("_cache", "_ids", "_kwargs", "_model", "_uncached")

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids: Tensor | None = None
        self._cache: object | None = make_dynamic_cache(model)
        self._kwargs: dict[str, Any] = {"use_cache": True}
        if self._cache is not None:
            self._kwargs["cache"] = self._cache
        if "logits_to_keep" in forward_parameters(model):
            self._kwargs["logits_to_keep"] = 1
        self._uncached: UncachedForward | None = None

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        if self._uncached is not None:
            return self._uncached(new_ids)
        first = self._ids is None
        self._ids = _append(self._ids, new_ids, self._model.device)
        if first and "position_ids" in forward_parameters(self._model):
            self._kwargs["position_ids"] = self._model._prepare_position_ids_for_generation(self._ids, self._kwargs)
        elif self._kwargs.get("position_ids") is not None:
            self._kwargs["position_ids"] = _extended(self._kwargs["position_ids"], self._ids.shape[-1])
        inputs = self._model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=None if first else len(new_ids),
            is_first_iteration=first,
            **self._kwargs,
        )
        outputs = self._model(**inputs, return_dict=True)
        self._cache = _returned_cache(outputs, self._cache)
        if first and (self._cache is None or not cache_bytes(self._cache)):
            self._uncached = UncachedForward(self._model)
            return self._uncached(new_ids)
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._model.config.is_encoder_decoder
        )
        return _last_logits(outputs)

    def crop(self, length: int) -> bool:
        if self._uncached is not None:
            return self._uncached.crop(length)
        if self._ids is None or self._kwargs.keys() - _CARRIED:
            return False  # what else a model carries from step to step cannot be taken back from outside
        remove, self._ids = self._ids.shape[-1] - length, self._ids[:, :length]
        if self._kwargs.get("position_ids") is not None:
            self._kwargs["position_ids"] = self._kwargs["position_ids"][..., :length]
        return crop_cache(self._cache, length=length, remove=remove)

    @property
    def cache(self) -> Any:
        return None if self._uncached is not None else self._cache

    @property
    def kv_bytes(self) -> int | None:
        return None if self.cache is None else cache_bytes(self.cache)

    @property
    def notes(self) -> tuple[str, ...]:
        return _no_cache_note(self._model) if self._uncached is not None else ()


def forward_parameters(model: Any) -> frozenset[str]:
    """Names of the arguments that the model's forward takes."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def _static_arguments(model: Any, *, use_cache: bool) -> dict[str, Any]:
    """The arguments that stay the same at every step, as far as the model knows them."""
    wanted = {"use_cache": use_cache, "logits_to_keep": 1}
    accepted = forward_parameters(model)
    return {name: value for name, value in wanted.items() if name in accepted} | {"return_dict": True}


def _append(ids: Tensor | None, new_ids: Sequence[int], device: torch.device) -> Tensor:
    """The ids with the new ones at their end, shape [1, tokens]."""
    new = torch.tensor([new_ids], dtype=torch.long, device=device)
    return new if ids is None else torch.cat([ids, new], dim=-1)


def _positions(ids: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + ids.shape[-1], device=ids.device).unsqueeze(0)


def _extended(positions: Tensor, length: int) -> Tensor:
    """The positions of `length` tokens, of which the first are known; the last dimension runs over the tokens."""
    missing = length - positions.shape[-1]
    if missing <= 0:
        return positions
    steps = torch.arange(1, missing + 1, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, positions[..., -1:] + steps], dim=-1)


def _last_logits(outputs: Any) -> Tensor:
    logits: Tensor = outputs.logits[:, -1]
    return logits


def _returned_cache(outputs: Any, given: object | None) -> object | None:
    for name in _CACHE_FIELDS:
        value = outputs.get(name)
        if value is not None:
            return value  # type: ignore[no-any-return]
    return given


def _no_cache_note(model: Any) -> tuple[str, ...]:
    return (f"{type(model).__name__} returned no cache: every step recomputed the whole sequence",)
