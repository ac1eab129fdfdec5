"""What a run takes from the model's generation_config: sampling and stop texts, and a note of what it leaves."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llminfer.errors import InvalidParams
from llminfer.params import (
    NEVER_FROM_MODEL,
    SAMPLER_FIELDS,
    SAMPLING_RANGES,
    SamplingOverrides,
    SamplingParams,
    StopCriteria,
    check_range,
)

APPLIED = frozenset({"do_sample", "bad_words_ids", "stop_strings", "eos_token_id"}) | (
    frozenset(SAMPLER_FIELDS) - NEVER_FROM_MODEL
)
# what changes the text and is not done here, with the value that means "off"; a test goes through all fields
NOT_APPLIED: Mapping[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "guidance_scale": 1.0,
    "penalty_alpha": None,
    "dola_layers": None,
    "remove_invalid_values": False,
    "token_healing": False,
    "watermarking_config": None,
    "assistant_ensemble_weight": None,
}
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def effective_sampling(
    asked: SamplingOverrides, model_defaults: Mapping[str, Any], bad_words: Sequence[tuple[int, ...]] = ()
) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling in force: what was asked, then the model's own generation_config, then temperature 1 unfiltered.

    A generation_config that says `do_sample: false` means temperature 0. Without a seed a random
    one is drawn, so that the run can be repeated.

    Args:
        bad_words: the ids of the texts that were asked not to be completed.

    Returns:
        The params, each with its origin, and notes on what the generation_config states but this
        loop does not do, or does where `generate()` would not.

    Raises:
        InvalidParams: for a value out of its range, wherever it came from.
    """
    flags = asked.stated()
    if bad_words:
        flags["bad_words"] = (*asked.bad_words, *bad_words)
    stated = dict(model_defaults)
    if stated.get("do_sample") is False:
        stated["temperature"] = 0.0
    if stated.get("bad_words_ids"):
        stated["bad_words"] = _stated_bad_words(stated["bad_words_ids"])
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SAMPLER_FIELDS, "default")
    for name in SAMPLER_FIELDS:
        flag, model = flags.get(name), stated.get(name)
        if flag is not None:
            values[name], origins[name] = flag, "flag"
        elif model is not None and name not in NEVER_FROM_MODEL:
            if name in SAMPLING_RANGES:
                check_range(f"the {name} in the model's generation_config", model, *SAMPLING_RANGES[name])
            values[name], origins[name] = model, "model"
    if "seed" not in values:
        values["seed"], origins["seed"] = random.SystemRandom().randrange(2**32), "random"
    return SamplingParams(**values, origins=origins), tuple(_notes(stated, origins))


def effective_stop(stop: StopCriteria, model_defaults: Mapping[str, Any]) -> StopCriteria:
    """When to end: at the stop texts asked for, where there are none at those of the generation_config.

    Raises:
        InvalidParams: for a generation_config whose stop texts are not texts.
    """
    stated = model_defaults.get("stop_strings")
    if stop.stop or not stated:
        return stop
    texts = [stated] if isinstance(stated, str) else stated
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidParams("stop_strings in the model's generation_config is not a text or a list of texts")
    return replace(stop, stop=tuple(texts), stop_from_model=True)


def _notes(stated: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    notes = []
    ignored = sorted(name for name, off in NOT_APPLIED.items() if stated.get(name, off) not in (off, None))
    if ignored:
        notes.append(f"the model's generation_config also states {', '.join(ignored)}, not applied")
    taken = [name.replace("_", "-") for name in _ONLY_WHEN_SAMPLING if origins[name] == "model"]
    if taken and "do_sample" not in stated and origins["temperature"] != "flag":
        what = "and no do_sample: this run samples, generate() would not (--temperature 0)"
        notes.append(f"the model's generation_config states {', '.join(taken)} {what}")
    return notes


def _stated_bad_words(stated: Any) -> tuple[tuple[int, ...], ...]:
    words = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(word, list) and all(isinstance(token_id, int) for token_id in word) for word in words):
        raise InvalidParams("bad_words_ids in the model's generation_config is not a list of lists of ids")
    return tuple(tuple(word) for word in words)
