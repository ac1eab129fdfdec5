"""Forwards that go on: several ids after others, a cache cut back, a cache mended after a broken call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llminfer.engine.forward.forward import PlainForward, PreparedForward, UncachedForward, make_forward
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from llminfer.events import Step
from llminfer.params import SamplingParams
from tests.engine.test_parity import WINDOW, NoText, prompt_of, reference_ids, tiny_config

TYPES = ("llama", "gpt2", "mistral", "gemma3_text")
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=TYPES)
def tiny(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(request.param)).eval()
    model.generation_config.eos_token_id = None
    return model


def steps_of(forward: Any, ids: list[int], count: int, cached: int = 0) -> list[Step]:
    output = Output(
        detokenizer=NoText(),
        matcher=StopMatcher(()),
        eos_ids=frozenset(),
        limit=TokenLimit(tokens=count),
        token_text=str,
    )
    sample = make_sampler(GREEDY, ids, torch.device("cpu"))
    return list(decode(forward, sample, output, Clock(), prompt_ids=ids, cached=cached))


@pytest.mark.parametrize("way", [PlainForward, PreparedForward, UncachedForward])
def test_a_second_turn_feeds_only_its_own_ids_and_gets_the_tokens_of_the_whole(tiny: Any, way: Any) -> None:
    first, second = prompt_of(11), prompt_of(6)
    forward = way(tiny)
    answer = [step.token_id for step in steps_of(forward, first, 5)]
    # the last token of the first turn was never fed
    assert list(forward.ids) == first + answer[:-1]
    whole = [*first, *answer, *second]
    new = whole[len(forward.ids) :]
    steps = steps_of(forward, new, 8, cached=len(forward.ids))
    assert [step.token_id for step in steps] == reference_ids(tiny, whole, 8)
    assert [step.cached_tokens for step in steps] == [len(whole) + index for index in range(8)]


@pytest.mark.parametrize("way", [PlainForward, PreparedForward])
def test_a_given_cache_goes_on_where_it_ended(tiny: Any, way: Any) -> None:
    whole = prompt_of(21)
    first = make_forward(tiny)
    steps_of(first, whole[:13], 1)
    resumed = way(tiny, cache=first.cache, cached_ids=whole[:13])
    assert [step.token_id for step in steps_of(resumed, whole[13:], 8, cached=13)] == reference_ids(tiny, whole, 8)


@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("way", [PlainForward, PreparedForward, UncachedForward])
def test_a_cropped_cache_is_as_if_the_rest_had_never_been(tiny: Any, way: Any, keep: int) -> None:
    forward, common = way(tiny), prompt_of(WINDOW - 1)
    steps_of(forward, common, 1)
    assert forward.crop(keep)
    assert list(forward.ids) == common[:keep]
    whole = common[:keep] + prompt_of(9)
    assert [step.token_id for step in steps_of(forward, whole[keep:], 8, cached=keep)] == reference_ids(tiny, whole, 8)


def test_a_full_window_cannot_be_cropped_and_stays_whole() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("mistral")).eval()
    model.generation_config.eos_token_id = None
    forward, prompt = make_forward(model), prompt_of(WINDOW)
    steps_of(forward, prompt, 1)
    assert not forward.crop(3)
    assert forward.crop(WINDOW), "nothing to cut off"
    assert list(forward.ids) == prompt
    whole = prompt + prompt_of(4)
    assert [step.token_id for step in steps_of(forward, whole[WINDOW:], 8)] == reference_ids(model, whole, 8)


@pytest.mark.parametrize("way", [PlainForward, PreparedForward])
def test_a_crop_mends_a_cache_that_a_broken_call_left_half_filled(way: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    model.generation_config.eos_token_id = None
    forward, prompt = way(model), prompt_of(9)
    steps_of(forward, prompt, 1)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        forward([5])
    hook.remove()
    assert list(forward.ids) == prompt
    assert forward.cache.layers[0].get_seq_length() == len(prompt) + 1
    assert forward.crop(len(prompt))
    assert [step.token_id for step in steps_of(forward, [7], 8)] == reference_ids(model, [*prompt, 7], 8)
