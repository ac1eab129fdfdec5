"""The same tokens as `model.generate()`, and predicted bytes equal to the cache's own, after every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from llminfer.api import generate
from llminfer.engine.forward.forward import PlainForward, PreparedForward, UncachedForward, make_forward
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from llminfer.events import Started, Step
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from llminfer.params import SamplingParams, StopCriteria

PROMPTS = {
    "english": "Explain in one sentence why the sea is salty.",
    "chinese": "请用一句话介绍北京。",
    "emoji": "What do these mean: 🎉🐙🇫🇷👩‍👩‍👧?",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "long": "The quick brown fox jumps over the lazy dog, and then it rests. " * 100,
}


class NoText:
    """A detokenizer for models without a vocabulary."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def reference_ids(model: Any, prompt_ids: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """What `model.generate()` appends to the prompt."""
    ids = torch.tensor([prompt_ids], device=model.device)
    options = {"do_sample": False, "top_k": 0, "top_p": 1.0, "temperature": 1.0, **options}
    if not options["do_sample"]:
        options = {name: value for name, value in options.items() if name in {"do_sample", "repetition_penalty"}}
    generation_config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=0,
        **options,
    )
    # its own defaults would otherwise fill what the test leaves unset
    saved, model.generation_config = model.generation_config, transformers.GenerationConfig()
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation_config)
    finally:
        model.generation_config = saved
    return output[0, len(prompt_ids) :].tolist()


def our_steps(model: Any, prompt_ids: list[int], forward: Any, params: SamplingParams, count: int) -> Iterator[Step]:
    output = Output(
        detokenizer=NoText(),
        matcher=StopMatcher(()),
        eos_ids=frozenset(),
        limit=TokenLimit(tokens=count),
        token_text=str,
    )
    return decode(forward, make_sampler(params, prompt_ids, model.device), output, Clock(), prompt_ids=prompt_ids)


GREEDY = SamplingParams(temperature=0)


# The real model


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_of_the_real_model_equal_generate(smollm: Any, name: str) -> None:
    events = list(generate(smollm, PROMPTS[name], sampling={"temperature": 0}, stop=StopCriteria(max_new_tokens=24)))
    started, steps = events[0], [event for event in events if isinstance(event, Step)]
    assert isinstance(started, Started)
    if name == "long":
        assert len(started.prompt_ids) >= 1500
    assert [step.token_id for step in steps] == reference_ids(smollm.model, list(started.prompt_ids), 24)
    for step in steps:
        predicted = footprint(smollm.kv, tokens=step.cached_tokens, dtype="float32").total_bytes
        assert step.kv_bytes == predicted == 2 * 30 * 3 * 64 * step.cached_tokens * 4


@pytest.mark.parametrize("name", ["english", "emoji"])
def test_the_textbook_loop_gives_the_same_tokens_on_the_real_model(smollm: Any, name: str) -> None:
    events = list(
        generate(smollm, PROMPTS[name], sampling={"temperature": 0}, stop=StopCriteria(max_new_tokens=12), cache="none")
    )
    steps = [event for event in events if isinstance(event, Step)]
    assert [step.token_id for step in steps] == reference_ids(smollm.model, list(events[0].prompt_ids), 12)
    assert {step.kv_bytes for step in steps} == {None}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
)
def test_sampled_tokens_of_the_real_model_equal_generate(smollm: Any, sampling: dict[str, float]) -> None:
    # everything that the checkpoint's own generation_config states is overridden
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, **sampling}
    events = list(
        generate(smollm, PROMPTS["english"], sampling={**full, "seed": 1234}, stop=StopCriteria(max_new_tokens=24))
    )
    torch.manual_seed(1234)
    expected = reference_ids(
        smollm.model,
        list(events[0].prompt_ids),
        24,
        do_sample=True,
        **{name: value for name, value in full.items() if name != "min_p" or value},
    )
    assert [event.token_id for event in events if isinstance(event, Step)] == expected


# Tiny random models of several kinds

WINDOW = 8


def tiny_config(model_type: str) -> Any:
    """A config of the type, two to four tiny layers; windows are smaller than the long prompt."""
    common = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    grouped = {**common, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    alternating = {**grouped, "num_hidden_layers": 4, "sliding_window": WINDOW}
    options: dict[str, dict[str, Any]] = {
        "llama": grouped,
        "gpt2": {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "mistral": {**grouped, "sliding_window": WINDOW},
        "qwen2": grouped,
        "qwen3": grouped,
        "gemma2": alternating,
        "gemma3_text": alternating,
        "phi3": {**common, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0},
    }
    return transformers.AutoConfig.for_model(model_type, **options[model_type])


TYPES = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")


@pytest.fixture(scope="module", params=TYPES)
def tiny(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(request.param)).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 128, (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [1, 5, 23])
@pytest.mark.parametrize("way", [PlainForward, PreparedForward, UncachedForward])
def test_greedy_tokens_equal_generate(tiny: Any, length: int, way: Any) -> None:
    prompt = prompt_of(length)
    steps = our_steps(tiny, prompt, way(tiny), GREEDY, 20)
    assert [step.token_id for step in steps] == reference_ids(tiny, prompt, 20)


@pytest.mark.parametrize("length", [5, 23])
@pytest.mark.parametrize("seed", [0, 7])
def test_sampled_tokens_equal_generate(tiny: Any, length: int, seed: int) -> None:
    prompt = prompt_of(length)
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3, seed=seed)
    ours = [step.token_id for step in our_steps(tiny, prompt, make_forward(tiny), params, 20)]
    torch.manual_seed(seed)
    assert ours == reference_ids(
        tiny, prompt, 20, do_sample=True, temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3
    )


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, 23])
def test_predicted_bytes_equal_the_cache_after_every_step(tiny: Any, length: int) -> None:
    kv = read_model(tiny.config.to_dict(), source="tiny")
    forward = make_forward(tiny)
    for step in our_steps(tiny, prompt_of(length), forward, GREEDY, 12):
        predicted = footprint(kv, tokens=step.cached_tokens, dtype="float32")
        assert step.cached_tokens == length + step.index
        assert step.kv_bytes == predicted.total_bytes
        # the cache's own tensors, layer by layer
        cache = forward.cache
        assert isinstance(cache, DynamicCache)
        measured = tuple(sum(t.numel() * t.element_size() for t in (c.keys, c.values)) for c in cache.layers)
        assert predicted.layer_bytes == measured


def test_cached_and_recomputed_logits_agree(tiny: Any) -> None:
    prompt = prompt_of(11)
    cached, uncached = make_forward(tiny), UncachedForward(tiny)
    new = prompt
    with torch.inference_mode():
        for _ in range(10):
            with_cache, without = cached(new), uncached(new)
            assert torch.allclose(with_cache, without, atol=1e-4)
            new = [int(with_cache.argmax())]
