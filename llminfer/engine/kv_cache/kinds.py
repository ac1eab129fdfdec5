"""The kinds of cache that a run can ask for: what each needs of a model, how it is made, what it weighs.

One row a kind. `check` refuses from the config alone, before any weights are read; `make` gives the
empty cache, or None for a model that makes its own; `predict` is the size that the run is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

_FULL = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSchedule:
    """What a run has fed, or will have: prompt tokens by forward, then `steps` of one token.

    `reused` tokens were in the cache before; `room` is what the run may come to hold.
    """

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
    """A model that may or may not be able to have a cache: its config, its class where known, its name in errors."""

    config: Config
    model_class: type[CausalLM] | None
    source: str

    @property
    def model_type(self) -> str:
        """The type of the language model itself."""
        return str(text_config(self.config).model_type)

    @property
    def quirks(self) -> Quirks:
        """What is peculiar about its type."""
        return quirks_of(self.model_type)

    def refuse(self, what: str, why: str, hint: str = "use --cache dynamic") -> UnsupportedArchitecture:
        """The error that says why it cannot have `what`."""
        return UnsupportedArchitecture(f"{self.source} cannot have {what}: {why}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """A row of the table."""

    check: Callable[[CacheOptions, Candidate], None]
    make: Callable[[CacheOptions, CausalLM, int | None], Any]
    predict: Callable[[CacheOptions, ModelKV, TokenSchedule], Footprint] | None


def check_cache(options: CacheOptions, config: Config, source: str, *, known: type[CausalLM] | None = None) -> None:
    """Refuse what a model of this config cannot do, before its weights are read.

    Args:
        source: names the model in errors.
        known: the model's class; the one that transformers has for the config when not given.

    Raises:
        UnsupportedArchitecture: naming what about the model does not go with the cache.
        UsageError: when the cache needs a package that is not installed.
    """
    candidate = Candidate(config=config, model_class=known or model_class(config), source=source)
    CACHE_KINDS[options.name].check(options, candidate)
    if options.prefill_chunk is not None:
        check_chunks(config, source)
    if options.file is not None:
        _check_file(candidate)


def make_cache(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    """An empty cache of this kind, None for a model that makes its own.

    Args:
        max_tokens: the most tokens it will hold, for caches that are allocated at once.
    """
    check_cache(options, model.config, type(model).__name__, known=type(model))
    return CACHE_KINDS[options.name].make(options, model, max_tokens)


def predict_cache(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint | None:
    """The bytes of this kind of cache after what was fed, None where none is kept.

    Args:
        kv: with the element type that the model computes in.
    """
    predict = CACHE_KINDS[options.name].predict
    return None if predict is None else predict(options, kv, fed)


def chunk_sizes(tokens: int, chunk: int | None) -> tuple[int, ...]:
    """Tokens of each forward when a prompt is fed in chunks; one forward without."""
    size = chunk or max(tokens, 1)
    return tuple(min(size, tokens - start) for start in range(0, tokens, size))


def _check_own_cache(what: str, candidate: Candidate) -> None:
    if candidate.model_class is not None and not candidate.model_class._supports_default_dynamic_cache():
        raise candidate.refuse(what, f"{candidate.model_type} models make a cache of their own")


def _check_full_attention(what: str, candidate: Candidate) -> None:
    others = sorted(layer_types(candidate.config) - {_FULL})
    if others:
        raise candidate.refuse(what, f"all layers would have to be full attention, and some are {', '.join(others)}")


def _check_file(candidate: Candidate) -> None:
    what, hint = "a saved cache", "drop --prompt-cache"
    _check_own_cache(what, candidate)
    unknown = _without_rule(candidate)
    if unknown:
        raise candidate.refuse(what, f"there is no rule for {', '.join(unknown)} layers", hint)
    if candidate.quirks.not_continued:
        raise candidate.refuse(what, str(candidate.quirks.one_at_a_time), hint)


def _without_rule(candidate: Candidate, *, static: bool = False) -> list[str]:
    """The layer types whose tensors may not be all that they hold."""
    types = layer_types(candidate.config)
    return sorted(name for name in types if row_of_type(name, static=static).restore is None)


# dynamic


def _make_dynamic(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    return DynamicCache(config=text_config(model.config)) if model._supports_default_dynamic_cache() else None


def _predict_dynamic(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint:
    return footprint(kv, tokens=fed.tokens)


# growing


def _check_growing(options: CacheOptions, candidate: Candidate) -> None:
    what = "a growing cache"
    _check_own_cache(what, candidate)
    if candidate.quirks.not_growing is not None:
        raise candidate.refuse(what, candidate.quirks.not_growing)


def _make_growing(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    cache = DynamicCache(config=text_config(model.config))
    cache.layers = [grown(layer) for layer in cache.layers]
    return cache


def _predict_growing(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint:
    return footprint(kv, tokens=fed.tokens, runtime="llminfer")


# static


def _check_static(options: CacheOptions, candidate: Candidate) -> None:
    what = "a static cache"
    _check_own_cache(what, candidate)
    unknown = _without_rule(candidate, static=True)
    if unknown:
        raise candidate.refuse(what, f"none is made for {', '.join(unknown)} layers")
    if candidate.quirks.not_static is not None:
        raise candidate.refuse(what, candidate.quirks.not_static)


def _make_static(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    if max_tokens is None:
        raise UsageError("a static cache must be told how many tokens it will hold")
    return StaticCache(config=text_config(model.config), max_cache_len=max_tokens)


def _predict_static(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint:
    return footprint(kv, tokens=fed.room, runtime="transformers-static")


# quantized


def _check_quantized(options: CacheOptions, candidate: Candidate) -> None:
    what, text = "a quantized cache", text_config(candidate.config)
    _check_own_cache(what, candidate)
    _check_full_attention(what, candidate)
    if candidate.quirks.not_static is not None:
        raise candidate.refuse(what, candidate.quirks.not_static)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if heads * width % GROUP_ELEMENTS:
        raise candidate.refuse(what, f"its {heads * width} elements a token are not groups of {GROUP_ELEMENTS}")
    quantizer(options.bits or DEFAULT_KV_BITS)


def _make_quantized(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    bits = options.bits or DEFAULT_KV_BITS
    library, axis = quantizer(bits)
    return QuantizedCache(library, config=text_config(model.config), nbits=bits, axis_key=axis, axis_value=axis)


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


# window


def _check_window(options: CacheOptions, candidate: Candidate) -> None:
    what = "a windowed cache"
    _check_own_cache(what, candidate)
    _check_full_attention(what, candidate)
    if candidate.quirks.not_windowed or not _takes_mask(candidate.model_class):
        why = f"{candidate.model_type} models do not take positions and a mask from outside"
        raise candidate.refuse(what, why, "drop --kv-window")


def _takes_mask(known: type[CausalLM] | None) -> bool:
    if known is None:  # the checkpoint's own code, of which nothing is known yet
        return False
    return prepares_by_default(known) and {"position_ids", "attention_mask"} <= forward_parameters(known)


def _make_window(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    if options.window is None:
        raise UsageError("a windowed cache must be told its window")
    return WindowCache(layers=text_config(model.config).num_hidden_layers, window=options.window)


def _predict_window(options: CacheOptions, kv: ModelKV, fed: TokenSchedule) -> Footprint:
    # a dynamic layer's window counts the token that is about to come, so it keeps one less
    kept = (options.window or 0) + 1
    layers = tuple(replace(layer, window=kept) for layer in kv.layers)
    return footprint(replace(kv, layers=layers), tokens=fed.tokens)


# none


def _check_nothing(options: CacheOptions, candidate: Candidate) -> None:
    """The default and no cache at all suit every model."""


def _make_nothing(options: CacheOptions, model: CausalLM, max_tokens: int | None) -> Any:
    return None


CACHE_KINDS: Mapping[str, CacheKind] = {
    "dynamic": CacheKind(check=_check_nothing, make=_make_dynamic, predict=_predict_dynamic),
    "growing": CacheKind(check=_check_growing, make=_make_growing, predict=_predict_growing),
    "static": CacheKind(check=_check_static, make=_make_static, predict=_predict_static),
    "quantized": CacheKind(check=_check_quantized, make=_make_quantized, predict=_predict_quantized),
    "window": CacheKind(check=_check_window, make=_make_window, predict=_predict_window),
    "none": CacheKind(check=_check_nothing, make=_make_nothing, predict=None),
}
