"""What a run may be asked for: validated once, when made."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from llminfer.errors import InvalidParams, UsageError
from llminfer.exclusions import check_together

DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
CACHES = ("dynamic", "growing", "static", "quantized", "none")
KV_BITS = (8, 4, 2)
DEFAULT_KV_BITS = 4
WEIGHTS = ("float32", "float16", "int8", "int4")
ENGINES = ("transformers", "native")
LOOKUPS = ("prompt-lookup",)
SPECULATIONS = (*LOOKUPS, "draft-model")
DEFAULT_DRAFT_TOKENS = 15  # with the newest one 16, which the native step takes at once
MAX_DRAFT_TOKENS = 64
SINK_TOKENS = 4  # what a windowed cache keeps of the beginning, beside the newest
DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]+)?")

MAX_LOGPROBS = 1000
MAX_BIAS = 1e6  # forbids or forces an id, and still adds to any logit without overflow
MIN_TEMPERATURE = 1e-6  # below it a float32 logit could overflow
MAX_SEED = 2**64 - 1  # what torch.Generator.manual_seed accepts without wrapping
MAX_WHOLE = MAX_SEED  # what 64 bits hold, which is more of anything than there is


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token and ignores the filters.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probabilities reach p; 1 keeps
            all, 0 the best one only.
        min_p: drop tokens less likely than min_p times the best one; 0 drops none.
        typical_p: keep the ids whose surprise is nearest the expected one until they reach
            probability p; 1 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of every id seen in the
            prompt or the output; 1 changes nothing.
        presence_penalty: subtracted from the logit of every id in the output; the prompt is not counted.
        frequency_penalty: subtracted once for every time that an id is in the output.
        min_new_tokens: no EOS before so many tokens.
        logit_bias: added to the logits of single ids.
        bad_words: sequences of ids that are never completed.
        logprobs: alternatives to report with every token.
        seed: seeds the private generator that the run draws from.
        origins: for each value, `flag`, `model` (its generation_config) or `default`.

    Raises:
        InvalidParams: for a value out of its range, NaN and infinity included.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int = 0
    seed: int = 0
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high) in SAMPLING_RANGES.items():
            check_range(name, getattr(self, name), low, high)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidParams(
                f"temperature must be 0 or at least {MIN_TEMPERATURE:g}, not {self.temperature!r}",
                hint="0 takes the most likely token",
            )
        for token_id, bias in self.logit_bias.items():
            check_range("the id of a logit_bias", token_id, 0, math.inf)
            check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if () in self.bad_words:
            raise InvalidParams("a bad word must have at least one token")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken, so no random number is drawn."""
        return self.temperature == 0


# name: (lowest, highest)
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-6, 1.0),
    # below this a float32 logit could overflow
    "repetition_penalty": (1e-6, math.inf),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "min_new_tokens": (0, math.inf),
    "logprobs": (0, MAX_LOGPROBS),
    "seed": (0, MAX_SEED),
}

# the fields that a run takes from flags, from the model, or as they are by default
SAMPLER_FIELDS = (*(name for name in SAMPLING_RANGES if name != "seed"), "logit_bias", "bad_words", "seed")
NEVER_FROM_MODEL = frozenset({"seed", "logprobs", "logit_bias"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOverrides:
    """What a run states of `SamplingParams`; where it is None the model's own value holds, then the default.

    `bad_texts` are never completed either, and no ids yet.

    Raises:
        InvalidParams: for a value out of its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_new_tokens: int | None = None
    logprobs: int | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    bad_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        SamplingParams(**self.stated())

    def stated(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are stated."""
        values = {name: getattr(self, name) for name in SAMPLER_FIELDS}
        return {name: value for name, value in values.items() if value is not None and value != ()}

    def over(self, other: SamplingOverrides) -> SamplingOverrides:
        """These laid over others: what must not be said adds up, of all else these come first."""
        return replace(
            other,
            **self.stated(),
            bad_words=(*other.bad_words, *self.bad_words),
            bad_texts=(*other.bad_texts, *self.bad_texts),
        )


Sampling: TypeAlias = SamplingParams | SamplingOverrides | Mapping[str, Any] | None


def read_sampling(sampling: Sampling = None, bad_texts: Sequence[str] = ()) -> SamplingOverrides:
    """What a caller states: all values as `SamplingParams`, some as `SamplingOverrides`, or some by name.

    Raises:
        InvalidParams: for an unknown name, or a value out of its range.
    """
    if isinstance(sampling, SamplingParams):
        sampling = {name: getattr(sampling, name) for name in SAMPLER_FIELDS}
    if not isinstance(sampling, SamplingOverrides):
        stated = {name: value for name, value in (sampling or {}).items() if value is not None}
        known = [field.name for field in fields(SamplingOverrides)]
        for name in stated.keys() - set(known):
            raise InvalidParams(f"sampling has no {name!r}", hint=f"known: {', '.join(known)}")
        sampling = SamplingOverrides(**stated)
    return replace(sampling, bad_texts=(*sampling.bad_texts, *bad_texts)) if bad_texts else sampling


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise `InvalidParams` naming the value and its range unless it is a finite number inside it.

    A lowest value that is an int says that whole numbers are meant, and no more than `MAX_WHOLE`.
    """
    whole = isinstance(low, int)
    kinds, most = (int, min(high, MAX_WHOLE)) if whole else ((int, float), min(high, sys.float_info.max))
    # a model's file may hold anything; NaN, for which every comparison is false, fails
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= most:
        highest = f" and at most {int(high) if high > 1e15 else format(high, 'g')}" if math.isfinite(high) else ""
        kind = "whole" if whole else "finite"
        huge = isinstance(value, int) and value.bit_length() > 128
        found = f"one of {int(value).bit_length()} bits" if huge else repr(value)
        raise InvalidParams(f"{name} must be a {kind} number of at least {low:g}{highest}, not {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """When a run ends.

    Attributes:
        max_new_tokens: tokens to generate at most; an EOS token counts. With 0 nothing runs.
        stop: texts that end the run when they appear in the output; they are not printed. One that names a
            special token ends it at that token.
        stop_from_model: these are the model's own, since none were asked for.
        ignore_eos: keep generating past EOS tokens.
        max_time_s: end after the token at which so many seconds have passed since tokenizing began.

    Raises:
        InvalidParams: for less than no token, or an empty stop text.
    """

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_time_s: float | None = None
    stop_from_model: bool = False

    def __post_init__(self) -> None:
        check_range("max_new_tokens", self.max_new_tokens, 0, math.inf)
        if self.max_time_s is not None:
            check_range("max_time_s", self.max_time_s, 0.0, math.inf)
        if "" in self.stop:
            raise InvalidParams("a stop text must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How a run keeps keys and values, and how it fills them.

    Attributes:
        kind: one of `CACHES`.
        bits: bits an element, for the quantized cache; 4 when not given.
        window: keep the first `SINK_TOKENS` tokens and as many of the newest as make `window` together.
        prefill_chunk: tokens of the prompt to feed at a time; as suits the model when not given.
        file: reuse what this file has of the prompt, and keep the run's cache there.

    Raises:
        UsageError: for an unknown kind, or options that cannot be combined.
        InvalidParams: for a value out of its range.
    """

    kind: str = "dynamic"
    bits: int | None = None
    window: int | None = None
    prefill_chunk: int | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        check_known("--cache", self.kind, CACHES)
        if self.bits is not None:
            check_known("--kv-bits", self.bits, KV_BITS)
        if self.window is not None:
            check_range("--kv-window", self.window, SINK_TOKENS + 1, math.inf)
        if self.prefill_chunk is not None:
            check_range("--prefill-chunk", self.prefill_chunk, 1, math.inf)
        check_together(self.given())
        if self.file is not None:
            check_writable("--prompt-cache", self.file)

    def given(self) -> frozenset[str]:
        """The options that ask for it, for `check_together`."""
        stated = {
            "--kv-bits": self.bits,
            "--kv-window": self.window,
            "--prefill-chunk": self.prefill_chunk,
            "--prompt-cache": self.file,
        }
        return frozenset({f"--cache {self.kind}", *(name for name, value in stated.items() if value is not None)})

    @property
    def name(self) -> str:
        """What the cache is called in tables and reports: its kind, or `window`."""
        return self.kind if self.window is None else "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What carries out the model's arithmetic.

    Attributes:
        weights: the format that linear layers hold their weights in; the checkpoint's own when not given.
        engine: `transformers` runs the model's own forward, `native` our compiled decoder step.
        compiled: run each token after the prompt through torch.compile, over a static cache.

    Raises:
        UsageError: for an unknown format or engine, or options that cannot be combined.
    """

    weights: str | None = None
    engine: str = "transformers"
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_known("--weights", self.weights, WEIGHTS)
        check_known("--engine", self.engine, ENGINES)
        check_together(self.given())

    def given(self) -> frozenset[str]:
        """The options that ask for it, for `check_together`."""
        return frozenset({f"--engine {self.engine}", *(["--compile"] if self.compiled else [])})

    def check_placed(self, *, device: str, dtype: str) -> None:
        """Refuse a device or an element type that the weights' format cannot be combined with.

        Raises:
            UsageError: naming both.
        """
        if self.weights_format is None:
            return
        option = f"--weights {self.weights}" if self.weights is not None else f"--engine {self.engine}"
        if device not in ("auto", "cpu"):
            raise UsageError(f"{option} needs the CPU, not {device}", hint="drop one of them")
        if dtype not in ("auto", "float32"):
            raise UsageError(f"{option} computes in float32, not in {dtype}", hint="drop one of them")

    @property
    def default_cache(self) -> str:
        """The kind of cache that a run has when none is asked for."""
        if self.compiled:
            return "static"
        return "growing" if self.engine == "native" else "dynamic"

    @property
    def weights_format(self) -> str | None:
        """The format that linear layers are packed in, None when they stay as they are."""
        return self.weights or ("float32" if self.engine == "native" else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Where drafts come from, which one forward of the model then checks.

    Attributes:
        kind: `prompt-lookup` copies what followed the same ids earlier in prompt or output, `draft-model`
            asks a smaller model with the same vocabulary.
        draft_tokens: ids to draft for a forward at most; fewer where they are not likely enough.

    Raises:
        UsageError: for an unknown kind.
        InvalidParams: for a number out of its range.
    """

    kind: str = "prompt-lookup"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS

    def __post_init__(self) -> None:
        check_known("--speculate", self.kind, SPECULATIONS)
        check_range("--draft-tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)

    @property
    def option(self) -> str:
        """What asks for it on the command line."""
        return "--draft" if self.kind == "draft-model" else "--speculate"


def check_known(option: str, value: object, known: Sequence[object]) -> None:
    """Refuse a value that is not one of those known.

    Raises:
        UsageError: naming the option and what it may be.
    """
    if value not in known:
        raise UsageError(f"{option} {value}: unknown", hint=f"one of {', '.join(map(str, known))}")


def check_writable(option: str, file: Path, *, streams: bool = False) -> None:
    """Refuse a file that could not be written after the run, as far as that can be known; `streams` may be pipes.

    Raises:
        UsageError: naming the option.
    """
    stream = file.exists() and not file.is_file()
    if file.is_dir() or (stream and not streams):
        raise UsageError(f"{option} {file}: not a file", hint="name a file")
    if not file.parent.is_dir():
        raise UsageError(f"{option} {file}: no such folder as {file.parent}", hint="make the folder first")
    for place in (file,) if stream else (file.parent, file):
        if place.exists() and not os.access(place, os.W_OK):
            raise UsageError(f"{option} {file}: cannot write to {place}", hint="name another file")
