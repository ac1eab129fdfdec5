"""The kinds of cache that a run can ask for: what each needs of a model, how it is made, what it weighs.

One row a kind. `check` refuses from the config alone, before any weights are read; `make` gives the
empty cache, or None for a model that makes its own; `predict` is the size that the run is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from transformers import DynamicCache, QuantizedCache, StaticCache

from llminfer.engine.kv_cache.layers import grown, row_of_type
from llminfer.engine.kv_cache.window import WindowCache
from llminfer.engine.models.capabilities import (
    check_chunks,
    forward_parameters,
    layer_types,
    model_class,
    prepares_by_default,
    text_config,
)
from llminfer.engine.models.protocols import CausalLM, Config
from llminfer.engine.models.quirks import Quirks, quirks_of
from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.kv.footprint import Footprint, footprint
from llminfer.kv.layer import ModelKV
from llminfer.kv.quantizers import quantizer
from llminfer.kv.runtimes.transformers_quantized import GROUP_ELEMENTS, waiting_tokens
from llminfer.params import DEFAULT_KV_BITS, CacheOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSchedule:
    """Prompt tokens by forward, then `steps` of one token, on top of `reused`; `room` is what the run may hold."""

    prompt: Sequence[int]
    steps: int
    reused: int = 0
    room: int

    @property
    def tokens(self) -> int:
        """Tokens of the sequence that have been fed."""
        return self.reused + sum(self.prompt) + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that may or may not be able to have a cache: its config, its class where known."""

    config: Config
    model_class: type[CausalLM] | None
    options: CacheOptions

    @property
    def model_type(self) -> str:
        """The type of the language model itself."""
        return str(text_config(self.config).model_type)

    @property
    def quirks(self) -> Quirks:
        """What is peculiar about its type."""
        return quirks_of(self.model_type)


# why a model cannot have a cache, None where it can
Refusal = Callable[[Candidate], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """A row of the table: the cache's name in errors, why a model may be refused, and what to do then."""

    what: str = ""
    refusals: Sequence[Refusal] = ()
    hint: str = "use --cache dynamic"
    make: Callable[[CacheOptions, CausalLM, int | None], Any]
    predict: Callable[[CacheOptions, ModelKV, TokenSchedule], Footprint] | None


def check_cache(options: CacheOptions, config: Config, source: str, *, known: type[CausalLM] | None = None) -> None:
    """Refuse what a model of this config cannot do, before its weights are read.

    Args:
        source: names the model in errors.
        known: the model's class; the one that transformers has for the config when not given.

    Raises:
        UnsupportedArchitecture: naming what about the model the cache cannot serve.
        UsageError: when the cache needs a package that is not installed.
    """
    candidate = Candidate(config=config, model_class=known or model_class(config), options=options)
    kind = CACHE_KINDS[options.name]
    _check(candidate, source, kind.what, refusals=kind.refusals, hint=kind.hint)
    if options.prefill_chunk is not None:
        check_chunks(config, source)
    if options.file is not None:
        refusals = (_makes_its_own, _has_unknown_layers, _is_not_continued)
        _check(candidate, source, "a saved cache", refusals=refusals, hint="drop --prompt-cache")


def _check(candidate: Candidate, source: str, what: str, *, refusals: Sequence[Refusal], hint: str) -> None:
    for refusal in refusals:
        if (reason := refusal(candidate)) is not None:
            raise UnsupportedArchitecture(f"{source} cannot have {what}: {reason}", hint=hint)


def make_cache(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    """An empty cache of this kind, None for a model that makes its own.

    Args:
        max_tokens: the most tokens it will hold, for caches that are allocated at once.
    """
    check_cache(options, model.config, type(model).__name__, known=type(model))
    return CACHE_KINDS[options.name].make(options, model, max_tokens)


def predict_cache(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint | None:
    """The bytes of this kind of cache after what was fed, None where there is no cache.

    Args:
        kv: with the element type that the model computes in.
    """
    predict = CACHE_KINDS[options.name].predict
    return None if predict is None else predict(options, kv, fed)


def chunk_sizes(tokens: int, chunk: int | None) -> tuple[int, ...]:
    """Tokens of each forward when a prompt is fed in chunks; one forward without."""
    size = chunk or max(tokens, 1)
    return tuple(min(size, tokens - start) for start in range(0, tokens, size))


# Why a model is refused


def _makes_its_own(candidate: Candidate) -> str | None:
    if candidate.model_class is None or candidate.model_class._supports_default_dynamic_cache():
        return None
    return f"{candidate.model_type} models make a cache of their own"


def _is_not_full_attention(candidate: Candidate) -> str | None:
    others = sorted(layer_types(candidate.config) - {"full_attention"})
    return f"it needs full attention in all layers, and some are {', '.join(others)}" if others else None


def _has_unknown_layers(candidate: Candidate, *, static: bool = False) -> str | None:
    """Layers whose tensors may not be all that they hold."""
    types = layer_types(candidate.config)
    unknown = sorted(name for name in types if row_of_type(name, static=static).restore is None)
    return f"there is no rule for {', '.join(unknown)} layers" if unknown else None


def _is_not_continued(candidate: Candidate) -> str | None:
    return candidate.quirks.one_at_a_time if candidate.quirks.not_continued else None


def _cannot_be_quantized(candidate: Candidate) -> str | None:
    text = text_config(candidate.config)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if heads * width % GROUP_ELEMENTS:
        return f"its {heads * width} elements a token are not groups of {GROUP_ELEMENTS}"
    quantizer(candidate.options.bits or DEFAULT_KV_BITS)  # which raises where none is installed
    return None


def _takes_no_mask(candidate: Candidate) -> str | None:
    known = candidate.model_class  # None for the checkpoint's own code, of which nothing is known yet
    if (
        known is not None
        and not candidate.quirks.not_windowed
        and prepares_by_default(known)
        and {"position_ids", "attention_mask"} <= forward_parameters(known)
    ):
        return None
    return f"{candidate.model_type} models do not take positions and a mask from outside"


# How a cache is made


def _make_dynamic(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> DynamicCache | None:
    return DynamicCache(config=text_config(model.config)) if model._supports_default_dynamic_cache() else None


def _make_growing(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> DynamicCache:
    cache = DynamicCache(config=text_config(model.config))
    cache.layers = [grown(layer) for layer in cache.layers]
    return cache


def _make_static(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> StaticCache:
    if max_tokens is None:
        raise UsageError("a static cache must be told how many tokens it will hold")
    return StaticCache(config=text_config(model.config), max_cache_len=max_tokens)


def _make_quantized(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> QuantizedCache:
    bits = options.bits or DEFAULT_KV_BITS
    library, axis = quantizer(bits)
    return QuantizedCache(library, config=text_config(model.config), nbits=bits, axis_key=axis, axis_value=axis)


def _make_window(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> WindowCache:
    if options.window is None:
        raise UsageError("a windowed cache must be told its window")
    return WindowCache(layers=text_config(model.config).num_hidden_layers, window=options.window)


# What a cache weighs


def _predict_quantized(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint:
    bits = options.bits or DEFAULT_KV_BITS
    return footprint(
        kv,
        tokens=fed.tokens,
        runtime="transformers-quantized",
        dtype=f"int{bits}",
        waiting=waiting_tokens(fed.prompt, fed.steps),
        quantizer=quantizer(bits)[0],
    )


def _predict_window(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint:
    # a dynamic layer's window counts the token that is about to come, so it keeps one less
    kept = (options.window or 0) + 1
    layers = tuple(replace(layer, window=kept) for layer in kv.layers)
    return footprint(replace(kv, layers=layers), tokens=fed.tokens)


CACHE_KINDS: Mapping[str, CacheKind] = {
    "dynamic": CacheKind(make=_make_dynamic, predict=lambda options, kv, fed: footprint(kv, tokens=fed.tokens)),
    "growing": CacheKind(
        what="a growing cache",
        refusals=(_makes_its_own, attrgetter("quirks.not_growing")),
        make=_make_growing,
        predict=lambda options, kv, fed: footprint(kv, tokens=fed.tokens, runtime="llminfer"),
    ),
    "static": CacheKind(
        what="a static cache",
        refusals=(_makes_its_own, partial(_has_unknown_layers, static=True), attrgetter("quirks.not_static")),
        make=_make_static,
        predict=lambda options, kv, fed: footprint(kv, tokens=fed.room, runtime="transformers-static"),
    ),
    "quantized": CacheKind(
        what="a quantized cache",
        refusals=(_makes_its_own, _is_not_full_attention, attrgetter("quirks.not_static"), _cannot_be_quantized),
        make=_make_quantized,
        predict=_predict_quantized,
    ),
    "window": CacheKind(
        what="a windowed cache",
        refusals=(_makes_its_own, _is_not_full_attention, _takes_no_mask),
        hint="drop --kv-window",
        make=_make_window,
        predict=_predict_window,
    ),
    "none": CacheKind(make=lambda options, model, max_tokens: None, predict=None),
}
