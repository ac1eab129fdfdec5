"""What a run samples with: what was asked for, then what the model states, then nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from llminfer.errors import InvalidParams
from llminfer.params import (
    NEVER_FROM_MODEL,
    SAMPLER_FIELDS,
    SAMPLING_RANGES,
    SamplingParams,
    check_range,
)

# what a generation_config may state that this loop does not do, with the value that means "off"
_UNSUPPORTED_DEFAULTS: Mapping[str, object] = {
    "num_beams": 1,
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
}


def effective_sampling(
    flags: Mapping[str, Any], model_defaults: Mapping[str, Any]
) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling in force: flags, then the model's own generation_config, then temperature 1 unfiltered.

    A generation_config that says `do_sample: false` means temperature 0. Without a seed a random
    one is drawn, so that the run can be repeated.

    Returns:
        The params, each with its origin, and notes on what the generation_config states but this
        loop does not do.

    Raises:
        InvalidParams: for a value out of its range, wherever it came from.
    """
    stated = dict(model_defaults)
    if stated.get("do_sample") is False:
        stated["temperature"] = 0.0
    values: dict[str, Any] = {}
    origins = {}
    if stated.get("bad_words_ids"):
        stated["bad_words"] = _stated_bad_words(stated["bad_words_ids"])
    for name in SAMPLER_FIELDS:
        flag, model = flags.get(name), stated.get(name)
        if flag is not None:
            values[name], origins[name] = flag, "flag"
        elif model is not None and name not in NEVER_FROM_MODEL:
            if name in SAMPLING_RANGES:
                check_range(f"the {name} in the model's generation_config", model, *SAMPLING_RANGES[name])
            values[name], origins[name] = model, "model"
        else:
            origins[name] = "default"
    if "seed" not in values:
        values["seed"], origins["seed"] = random.SystemRandom().randrange(2**32), "random"
    ignored = sorted(name for name, off in _UNSUPPORTED_DEFAULTS.items() if stated.get(name, off) not in (off, None))
    notes = (f"the model's generation_config also states {', '.join(ignored)}, not applied",) if ignored else ()
    return SamplingParams(**values, origins=origins), notes


def _stated_bad_words(stated: Any) -> tuple[tuple[int, ...], ...]:
    words = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(word, list) and all(isinstance(token_id, int) for token_id in word) for word in words):
        raise InvalidParams("bad_words_ids in the model's generation_config is not a list of lists of ids")
    return tuple(tuple(word) for word in words)
