"""From lines to rows: what a job asks for is what a single run would be asked for, and a bad job is one bad job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llminfer.api import generate, generate_batch, generate_samples
from llminfer.engine import prepare
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.load import LoadedModel, load
from llminfer.errors import GenerationFailed, InvalidParams, UsageError
from llminfer.events import Started
from llminfer.params import Execution, SamplingParams, StopCriteria

ONE = StopCriteria(max_new_tokens=1)


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> LoadedModel:
    return load(inspect_checkpoint(tiny_llama), device="cpu", dtype="float32")


def test_bad_words_are_added_to_the_ids_that_are_given(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"sampling": {"bad_words": ((7, 8),), "seed": 1}, "bad_words": ["x"]}
    alone = next(generate(loaded, "a", stop=ONE, **options))
    (result,) = generate_batch(loaded, ["a"], stop=ONE, **options)
    (sample,) = generate_samples(loaded, "a", 1, stop=ONE, **options).traces
    assert isinstance(alone, Started)
    assert result.trace is not None
    assert (7, 8) in alone.sampling.bad_words
    assert len(alone.sampling.bad_words) > 1
    for started in (result.trace.started, sample.started):
        assert started is not None
        assert started.sampling.bad_words == alone.sampling.bad_words


def test_a_job_that_breaks_in_an_unforeseen_way_is_one_error(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = prepare.encode_prompt

    def encode(tokenizer: Any, text: str, **options: Any) -> Any:
        if text == "two":
            raise TypeError("no such thing")
        return real(tokenizer, text, **options)

    monkeypatch.setattr(prepare, "encode_prompt", encode)
    results = {result.index: result for result in generate_batch(loaded, ["one", "two", "x"], batch_size=2, stop=ONE)}
    assert sorted(results) == [0, 1, 2]
    assert isinstance(results[1].error, GenerationFailed)
    assert "TypeError: no such thing" in results[1].error.message
    assert results[0].trace is not None
    assert results[2].trace is not None


def test_a_native_step_that_is_not_taken_is_said_to_be_so(loaded: LoadedModel) -> None:
    native = replace(loaded, forward_factory=lambda *arguments, **options: None)
    said = "the native step is not taken over a dynamic cache"
    alone = next(generate(native, "a", stop=ONE, cache="dynamic"))
    (result,) = generate_batch(native, ["a"], stop=ONE)
    (sample,) = generate_samples(native, "a", 1, stop=ONE).traces
    assert result.trace is not None
    for started in (alone, result.trace.started, sample.started):
        assert isinstance(started, Started)
        assert any(note.startswith(said) for note in started.notes)
    plain = next(generate(loaded, "a", stop=ONE, cache="dynamic"))
    assert isinstance(plain, Started)
    assert not any("native" in note for note in plain.notes)


def test_a_compiled_model_does_not_run_in_a_batch_as_if_it_were_none(loaded: LoadedModel) -> None:
    compiled = replace(loaded, execution=Execution(compiled=True))
    with pytest.raises(UsageError, match="--compile"):
        list(generate_batch(compiled, ["a"]))
    with pytest.raises(UsageError, match="--compile"):
        generate_samples(compiled, "a", 2)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 2.5},
        {"top_k": 2.0},
        {"top_k": True},
        {"top_k": 10**400},
        {"min_new_tokens": 1.5},
        {"seed": 0.0},
        {"logprobs": 2.5},
        {"temperature": 10**400},
        {"temperature": True},
        {"logit_bias": {2.5: 1.0}},
        {"logit_bias": {10**5000: 1.0}},
        {"logit_bias": {2: 10**5000}},
    ],
)
def test_whole_numbers_and_finite_ones_are_what_is_taken(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match=r"must be a (whole|finite) number") as caught:
        SamplingParams(**values)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("tokens", [2.5, 10**400, True, -1])
def test_a_token_limit_is_a_whole_number(tokens: Any) -> None:
    with pytest.raises(InvalidParams, match="max_new_tokens must be a whole number"):
        StopCriteria(max_new_tokens=tokens)
