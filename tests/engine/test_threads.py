"""Two threads with one loaded model: the tokens of a single thread, or an error that says why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llminfer.engine.backend import prepare_execution
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.native.packed import pack
from llminfer.errors import GenerationFailed
from llminfer.params import CacheOptions, Execution
from tests.parity import prompt_of
from tests.tiny_models import tiny_config, tiny_model

RUNS = 100
# of other lengths, so that a step of one run with the places of the other shows
PROMPTS = (prompt_of(5), prompt_of(21))
Run = Callable[[Sequence[int]], list[int]]


def runner(model_type: str, execution: Execution, cache: str) -> Run:
    model = tiny_model(tiny_config(model_type), torch.float32)
    factory = prepare_execution(model, execution, "a model").factory

    def run(prompt: Sequence[int]) -> list[int]:
        with torch.inference_mode():
            forward = make_forward(model, options=CacheOptions(kind=cache), factory=factory)
            tokens = [int(forward(prompt).argmax())]
            while len(tokens) < 8:
                tokens.append(int(forward(tokens[-1:]).argmax()))
        return tokens

    return run


def on_two_threads(run: Run, runs: int) -> list[list[list[int]]]:
    """What each of two threads gets from its own prompt, run after run."""
    together = Barrier(2)

    def work(prompt: Sequence[int]) -> list[list[int]]:
        together.wait()
        return [run(prompt) for _ in range(runs)]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, PROMPTS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "execution", "cache"),
    [
        ("llama", Execution(engine="native"), "growing"),
        ("llama", Execution(engine="native", weights="int4"), "growing"),
        ("llama", Execution(), "growing"),
        ("llama", Execution(), "dynamic"),
        ("gpt2", Execution(weights="int8"), "dynamic"),
    ],
)
def test_each_thread_gets_the_tokens_of_a_single_one(model_type: str, execution: Execution, cache: str) -> None:
    before = dict(ALL_ATTENTION_FUNCTIONS)
    run = runner(model_type, execution, cache)
    alone = [run(prompt) for prompt in PROMPTS]
    assert on_two_threads(run, RUNS) == [[tokens] * RUNS for tokens in alone]
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_rotations_that_change_with_the_length_are_one_forward_s_at_a_time() -> None:
    model = tiny_model(
        tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}), torch.float32
    )
    model.config.max_position_embeddings = 8

    def run(prompt: Sequence[int]) -> list[int]:
        with torch.inference_mode():
            forward = make_forward(model)
            return [int(forward(prompt).argmax()), *(int(forward([token]).argmax()) for token in (5, 6, 7))]

    alone = [run(prompt) for prompt in PROMPTS]
    assert on_two_threads(run, RUNS) == [[tokens] * RUNS for tokens in alone]


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_keeps_states_in_its_layers_is_one_run_s_at_a_time() -> None:
    model = tiny_model(tiny_config("recurrent_gemma"), torch.float32)
    with torch.inference_mode():
        first = make_forward(model)
        first(PROMPTS[0])
        second = make_forward(model)
        second(PROMPTS[1])
        with pytest.raises(GenerationFailed, match="another run of this model has begun"):
            first([5])
        assert torch.isfinite(second([5])).all()


def test_layers_packed_on_two_threads_have_bytes_of_their_own() -> None:
    weights = [torch.full((8, 32), float(number)) for number in range(1, 65)]
    with ThreadPoolExecutor(2) as pool:
        layers: list[Any] = list(pool.map(lambda weight: pack(weight, None, "float32"), weights))
    for weight, layer in zip(weights, layers, strict=True):
        assert torch.equal(layer.dequantized(), weight)
