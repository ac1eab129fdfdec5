"""What a run may be asked for: validated once, when made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llminfer.errors import InvalidParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHES = ("dynamic", "none")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")

MAX_LOGPROBS = 1000
MAX_BIAS = 1e6  # forbids or forces an id, and still adds to any logit without overflow
MIN_TEMPERATURE = 1e-6  # below it a float32 logit could overflow
MAX_SEED = 2**64 - 1  # what torch.Generator.manual_seed accepts without wrapping


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


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise `InvalidParams` naming the value and its range unless it is a finite number inside it."""
    # written so that NaN, for which every comparison is false, fails
    if not (math.isfinite(value) and low <= value <= high):
        highest = f" and at most {int(high) if high > 1e15 else format(high, 'g')}" if math.isfinite(high) else ""
        raise InvalidParams(f"{name} must be a finite number of at least {low:g}{highest}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """When a run ends.

    Attributes:
        max_new_tokens: tokens to generate at most; an EOS token counts.
        stop: texts that end the run when they appear in the output; they are not printed.
        ignore_eos: generate on over EOS tokens.
        max_time_s: end after the token at which so many seconds have passed since tokenizing began.

    Raises:
        InvalidParams: for less than one token, or an empty stop text.
    """

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_time_s: float | None = None

    def __post_init__(self) -> None:
        check_range("max_new_tokens", self.max_new_tokens, 1, math.inf)
        if self.max_time_s is not None:
            check_range("max_time_s", self.max_time_s, 0, math.inf)
        if "" in self.stop:
            raise InvalidParams("a stop text must not be empty")
