"""Our tokens are those of `generate()`, for every causal language model of the installed transformers.

Each type runs as a tiny random float32 model with its real classes: greedily and sampled, with a
prompt within its window and one beyond it, alone and beside others, its cache weighed after every
step. A representative of every kind runs always; all of them run in the sweep (`-m slow`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.engine.models.capabilities import prepares_by_default
from llminfer.kv.layer import ModelKV
from llminfer.kv.rules.families import read_model
from tests.parity import (
    CANNOT_RUN,
    GREEDY,
    ONE_AFTER_ANOTHER,
    SAMPLED,
    check_batch,
    check_footprint,
    check_tokens,
    new_tokens,
    prepare_for_comparison,
    prompt_of,
)
from tests.tiny_models import tiny_config, tiny_model

# one type at least of every way to prepare inputs, to place tokens and to keep a cache
REPRESENTATIVES = (
    "llama",
    "gpt2",  # learned positions
    "opt",  # learned positions, with an offset
    "bloom",  # distances instead of positions
    "gemma2",  # sliding and full
    "gemma3n_text",  # shared layers
    "falcon_h1",  # states beside attention, inputs of its own making
    "mamba",  # states alone
    "qwen3_next",
    "deepseek_v3",  # latent
    "deepseek_v32",  # latent with an indexer, which does not join
    "deepseek_v4",  # keys that are the values too
    "roberta",  # positions that begin behind the padding id
    "bart",  # positions that come from the cache's length
    "cpmant",  # a learned prefix, and the whole sequence fed at every step
    "blt",  # a cache that the model wraps
    "rwkv",  # a state under its own name
    "recurrent_gemma",  # states in modules
    "xlnet",
    "openai-gpt",  # no cache
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model type under test: its tiny model and the prediction from its config."""

    model_type: str
    model: Any
    kv: ModelKV

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens to generate from the short prompt and from the long one."""
        return new_tokens(self.model_type)


def every_type() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in CANNOT_RUN
    ]


@pytest.fixture(scope="module", params=every_type())
def subject(request: pytest.FixtureRequest) -> Any:
    config = tiny_config(request.param)
    kv = read_model(json.loads(json.dumps(config.to_dict(), default=str)), source=request.param)
    model = tiny_model(config, torch.float32)
    prepare_for_comparison(model)
    return Subject(model_type=request.param, model=model, kv=kv)


def test_greedy_tokens_equal_generate(subject: Subject) -> None:
    check_tokens(subject.model, GREEDY, subject.counts)


def test_sampled_tokens_equal_generate(subject: Subject) -> None:
    check_tokens(subject.model, SAMPLED, subject.counts)


def test_rows_of_a_batch_get_the_tokens_they_get_alone(subject: Subject) -> None:
    assert check_batch(subject.model, SAMPLED) == (subject.model_type not in ONE_AFTER_ANOTHER)


def test_predicted_bytes_equal_those_of_every_step(subject: Subject) -> None:
    check_footprint(subject.model, subject.kv, subject.counts)


@pytest.mark.parametrize("model_type", CANNOT_RUN)
def test_what_cannot_run_still_cannot(model_type: str) -> None:
    with pytest.raises((ImportError, ValueError, AttributeError)):
        run_alone(tiny_config(model_type))


def run_alone(config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generate(torch.tensor([prompt_of(5)]), max_new_tokens=2, do_sample=False)


def test_the_tables_name_types_of_the_mapping() -> None:
    assert {*CANNOT_RUN, *ONE_AFTER_ANOTHER, *REPRESENTATIVES} <= {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert not CANNOT_RUN.keys() & ONE_AFTER_ANOTHER.keys()


@pytest.mark.parametrize(
    ("model_type", "expected"), [("llama", True), ("bart", True), ("mamba", False), ("xlm", False)]
)
def test_only_models_that_need_it_prepare_their_own_inputs(model_type: str, expected: bool) -> None:
    assert prepares_by_default(tiny_model(tiny_config(model_type), torch.float32)) is expected
