"""The growing cache against transformers' own layers: whatever is done to both, they hold and return the same."""

from __future__ import annotations

from threading import Thread, current_thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.engine.forward.forward import make_forward
from llminfer.engine.forward.gqa_attention import attend, grouped_attention
from llminfer.engine.kv_cache.growing import GrowingLayer, GrowingSlidingLayer
from llminfer.engine.kv_cache.kinds import check_cache, make_cache
from llminfer.engine.kv_cache.tensors import cache_bytes, module_states, stateful_modules
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.models.capabilities import prepares_by_default, why_one_at_a_time
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.errors import UnsupportedArchitecture
from llminfer.events import Step
from llminfer.kv.footprint import footprint
from llminfer.kv.layer import ModelKV
from llminfer.kv.rules.families import read_model
from llminfer.kv.runtimes.growing import OWN_CACHES
from llminfer.params import CacheOptions, SamplingParams
from tests.parity import (
    CANNOT_RUN,
    GREEDY,
    LONG,
    NEW_TOKENS,
    SAMPLED,
    SHORT,
    assert_same,
    expected_tokens,
    output_of,
    prepare_for_comparison,
    prompt_of,
)
from tests.tiny_models import tiny_config, tiny_model

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
# tokens that one call may bring: mostly one, now and then a prompt
PIECES = st.lists(st.sampled_from([1, 1, 1, 2, 7, 100, 255, 256, 300, 700]), min_size=1, max_size=12)
WINDOWS = st.sampled_from([None, 1, 2, 8, 127, 129, 256, 300])


def states(tokens: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # laid out as projections come: tokens before heads
    keys = torch.randn(batch, tokens, HEADS, KEY_DIM, generator=generator).transpose(1, 2)
    values = torch.randn(batch, tokens, HEADS, VALUE_DIM, generator=generator).transpose(1, 2)
    return keys, values.to(torch.bfloat16)


def layers(window: int | None) -> tuple[Any, Any]:
    if window is None:
        return GrowingLayer(), DynamicLayer()
    return GrowingSlidingLayer(window), DynamicSlidingWindowLayer(window)


def check_same(ours: Any, theirs: Any) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    if theirs.get_seq_length():
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def places(tokens: int, window: int | None) -> int:
    """The rule of `docs/decisions.md`, written down a second time."""
    if window is not None and window > 1:
        tokens = min(tokens, window + 127)
    return (tokens + 255) // 256 * 256


def check_bytes(ours: Any, tokens: int, window: int | None, batch: int = 1) -> None:
    held = places(tokens, window) * batch * HEADS
    assert cache_bytes([ours]) == held * KEY_DIM * 4 + held * VALUE_DIM * 2


@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, window=WINDOWS, batch=st.sampled_from([1, 2]))
def test_updates_return_and_keep_what_a_concatenation_does(pieces: list[int], window: int | None, batch: int) -> None:
    ours, theirs = layers(window)
    for at, tokens in enumerate(pieces):
        keys, values = states(tokens, batch, at)
        returned, expected = ours.update(keys, values), theirs.update(keys, values)
        assert all(torch.equal(mine, other) for mine, other in zip(returned, expected, strict=True))
        check_same(ours, theirs)
        check_bytes(ours, sum(pieces[: at + 1]), window, batch)


@settings(max_examples=30, deadline=None)
@given(pieces=PIECES, window=WINDOWS)
def test_what_is_written_from_outside_counts_like_an_update(pieces: list[int], window: int | None) -> None:
    outside, inside = layers(window)[0], layers(window)[0]
    for at, tokens in enumerate(pieces):
        keys, values = states(tokens, seed=at)
        inside.update(keys, values)
        outside.reserve(tokens, like_keys=keys, like_values=values)
        begin, end = outside.begin, outside.end
        assert 0 <= begin <= end <= outside.key_buffer.shape[-2] - tokens
        outside.key_buffer[:, :, end : end + tokens] = keys
        outside.value_buffer[:, :, end : end + tokens] = values
        outside.advance(tokens)
        check_same(outside, inside)
        check_bytes(outside, sum(pieces[: at + 1]), window)


def test_an_empty_layer_is_told_what_it_will_hold() -> None:
    layer = GrowingLayer()
    with pytest.raises(ValueError, match="like"):
        layer.reserve(1)
    layer.reserve(1, like_keys=torch.empty(1, 2, 0, 3), like_values=torch.empty(1, 2, 0, 5, dtype=torch.bfloat16))
    assert layer.key_buffer is not None
    assert layer.value_buffer is not None
    assert layer.key_buffer.shape == (1, 2, 256, 3)
    assert layer.value_buffer.shape == (1, 2, 256, 5)
    assert layer.value_buffer.dtype is torch.bfloat16
    assert layer.key_buffer.is_contiguous()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.sampled_from([1, 1, 2, 5, 200, 300])),
        st.tuples(st.just("crop"), st.integers(0, 260)),
        st.tuples(st.just("reorder"), st.permutations([0, 1])),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("select"), st.just([1, 0])),
        st.tuples(st.just("assign"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=2,
    max_size=10,
)


def act(layer: Any, action: str, argument: Any, at: int) -> None:
    """One thing that transformers does to a layer, on a layer of either kind."""
    if action == "update":
        layer.update(*states(argument, 2, at))
    elif action == "crop":
        # what is taken back must be there, and still in the window; transformers fails on an empty one
        if layer.is_initialized and (not layer.is_sliding or layer.get_seq_length() < layer.sliding_window):
            layer.crop(-min(argument, layer.get_seq_length()))
    elif action == "reset":
        layer.reset()
    elif layer.is_initialized and action == "reorder":
        layer.reorder_cache(torch.tensor(argument))
    elif layer.is_initialized and action == "repeat":
        layer.batch_repeat_interleave(argument)
        layer.batch_select_indices(torch.tensor([0, 3]))
    elif layer.is_initialized and action == "select":
        layer.batch_select_indices(torch.tensor(argument))
    elif layer.is_initialized and action == "assign":
        layer.keys, layer.values = layer.keys * 2, layer.values * 3


@settings(max_examples=100, deadline=None)
@given(actions=ACTIONS, window=st.sampled_from([None, 8, 129, 300]))
def test_whatever_is_done_to_a_layer_it_holds_what_transformers_does(
    actions: list[tuple[str, Any]], window: int | None
) -> None:
    ours, theirs = layers(window)
    for at, (action, argument) in enumerate(actions):
        for layer in (ours, theirs):
            act(layer, action, argument, at)
        check_same(ours, theirs)
        if ours.key_buffer is not None:
            check_bytes(ours, theirs.get_seq_length(), window, 2)


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=25), prompt=st.integers(1, 300))
def test_a_window_that_records_its_past_can_be_taken_back(pieces: list[tuple[int, int]], prompt: int) -> None:
    ours, theirs = layers(129)
    for layer in (ours, theirs):
        layer.activate_past_recording()
    for at, (tokens, removed) in enumerate([(prompt, 0), *pieces]):
        returned, expected = (layer.update(*states(tokens, seed=at)) for layer in (ours, theirs))
        assert all(torch.equal(mine, other) for mine, other in zip(returned, expected, strict=True))
        for layer in (ours, theirs):
            layer.crop(-min(removed, tokens))
        assert ours.get_seq_length() == theirs.get_seq_length()
        kept = min(ours.get_seq_length(), 128)
        assert torch.equal(ours.keys[..., -kept:, :], theirs.keys[..., -kept:, :])
        check_bytes(ours, ours.get_seq_length(), 129)


def test_a_full_window_without_its_past_is_not_taken_back() -> None:
    layer = GrowingSlidingLayer(8)
    layer.update(*states(8))
    with pytest.raises(RuntimeError, match="window"):
        layer.crop(-1)
    with pytest.raises(ValueError, match="negative"):
        layer.crop(1)
    with pytest.raises(ValueError, match="negative"):
        GrowingLayer().crop(1)


def test_a_step_leaves_the_buffers_where_they_are() -> None:
    layer = GrowingLayer()
    layer.update(*states(257))
    address = layer.key_buffer.data_ptr()  # type: ignore[union-attr]
    for _ in range(255):
        layer.update(*states(1))
        assert layer.key_buffer.data_ptr() == address  # type: ignore[union-attr]
    layer.update(*states(1))
    assert layer.key_buffer.data_ptr() != address  # type: ignore[union-attr]


def test_a_long_prompt_is_not_kept_alive_by_its_window() -> None:
    layer = GrowingSlidingLayer(8)
    layer.update(*states(5000))
    assert layer.keys.untyped_storage().nbytes() == places(5000, 8) * HEADS * KEY_DIM * 4  # type: ignore[union-attr]


def test_buffers_made_in_inference_mode_are_written_outside_of_it() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(*states(3))
    keys, _ = layer.update(*states(2, seed=1))
    assert keys.shape[-2] == 5


# In a model


def small(model_type: str, **options: Any) -> Any:
    """A model with room for more than a block, whose three query heads share a key head."""
    config = CONFIG_MAPPING[model_type](
        vocab_size=64,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        **options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def ids_of(length: int) -> list[int]:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length)).tolist()


MODELS = {
    "full": ("llama", {}),
    "a small window": ("mistral", {"sliding_window": 9}),
    "a window over a block": ("mistral", {"sliding_window": 260}),
    "both": ("gemma3_text", {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2}),
}


@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_bytes_over_the_end_of_a_block(name: str, sampling: SamplingParams, chunk: int | None) -> None:
    model_type, options = MODELS[name]
    model, prompt, count = small(model_type, **options), ids_of(250), 12
    kv = read_model({**model.config.to_dict(), "dtype": "float32"}, source=name)
    forward = make_forward(model, options=CacheOptions(kind="growing", prefill_chunk=chunk))
    steps = run_steps(forward, model, prompt, count, sampling)
    assert_same(steps, expected_tokens(model, prompt, count, sampling), name)
    for step in steps:
        assert step.kv_bytes == footprint(kv, tokens=step.cached_tokens, runtime="llminfer").total_bytes


def run_steps(forward: Any, model: Any, prompt: list[int], count: int, params: SamplingParams) -> list[Step]:
    sample = make_sampler(params, prompt, model.device)
    return list(decode(forward, sample, output_of(count), Clock(), prompt_ids=prompt))


def test_tokens_after_taking_tokens_back() -> None:
    model, prompt = small("llama"), ids_of(300)
    grown, fresh = (make_forward(model, options=CacheOptions(kind="growing")) for _ in range(2))
    with torch.inference_mode():
        grown(prompt)
        assert grown.crop(200)
        assert grown.kv_bytes == fresh_bytes(model, 200)
        logits = grown(prompt[200:260])
        torch.testing.assert_close(logits, fresh(prompt[:260]), rtol=1e-5, atol=1e-5)
    assert grown.kv_bytes == fresh.kv_bytes


def fresh_bytes(model: Any, tokens: int) -> int:
    forward = make_forward(model, options=CacheOptions(kind="growing"))
    with torch.inference_mode():
        forward(ids_of(tokens))
    assert forward.kv_bytes is not None
    return forward.kv_bytes


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation makes, not those that it shows a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        for part in tree_leaves(made):
            if isinstance(part, Tensor) and part.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, part.numel())
        return made


@pytest.mark.parametrize(("kind", "copies"), [("growing", False), ("dynamic", True)])
def test_a_step_makes_nothing_of_the_size_of_the_cache(kind: str, copies: bool) -> None:
    model, tokens = small("llama"), 1000
    forward = make_forward(model, options=CacheOptions(kind=kind))
    with torch.inference_mode():
        forward(ids_of(tokens))
        with Largest() as largest:
            forward([5])
    cached = tokens * 2 * 8  # elements of a layer's keys
    assert (largest.elements >= cached) is copies


# Attention


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    batch=st.integers(1, 2),
    new=st.sampled_from([1, 1, 3]),
    dims=st.sampled_from([(8, 8), (8, 4), (16, 16)]),
    masked=st.booleans(),
)
def test_attention_is_that_of_transformers(
    heads: int, groups: int, batch: int, new: int, dims: tuple[int, int], masked: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, new, heads * groups, dims[0], generator=generator).transpose(1, 2)
    buffers = [torch.randn(batch, heads, 40, dim, generator=generator) for dim in dims]
    key, value = (buffer[..., 2:33, :] for buffer in buffers)
    mask = torch.rand(1, 1, new, 31, generator=generator) > 0.3 if masked else None
    module = torch.nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]
    ours, _ = attend(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_attention_is_ours_only_while_it_is_asked_for() -> None:
    before, own = ALL_ATTENTION_FUNCTIONS["sdpa"], dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    with grouped_attention():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
        with grouped_attention():
            pass
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == own


def test_another_thread_and_another_replacement_are_left_alone() -> None:
    seen: list[str] = []

    def replaced(*arguments: Any, **keyword_arguments: Any) -> Any:
        seen.append(current_thread().name)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = replaced
    try:
        with grouped_attention():
            other = Thread(target=lambda: ALL_ATTENTION_FUNCTIONS["sdpa"](None), name="other")
            other.start()
            other.join()
        assert seen == ["other"]
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is replaced
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


# Every architecture


def growing_types() -> list[str]:
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(CANNOT_RUN) - set(OWN_CACHES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", growing_types())
def test_every_architecture_has_the_tokens_and_bytes_of_its_prediction(model_type: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(tiny_config(model_type), torch.float32).eval()
    prepare_for_comparison(model)
    kv = read_model(model.config.to_dict(), source=model_type)
    for length, count, params in ((SHORT, NEW_TOKENS, SAMPLED), (LONG, NEW_TOKENS // 2, GREEDY)):
        prompt = prompt_of(length)
        torch.manual_seed(params.seed)
        steps = run_steps(make_growing(model), model, prompt, count, params)
        assert_same(steps, expected_tokens(model, prompt, count, params), f"prompt of {length}")
        for step in steps:
            predicted = footprint(kv, tokens=step.cached_tokens, dtype="float32", runtime="llminfer").total_bytes
            assert step.kv_bytes == predicted or (step.kv_bytes is None and predicted == 0)
    if why_one_at_a_time(model.config) is None:
        check_crop(model)
    check_batched_bytes(model_type, kv)


def make_growing(model: Any) -> Any:
    return make_forward(model, options=CacheOptions(kind="growing"))


def check_crop(model: Any) -> None:
    """It can go back where the dynamic cache can, and goes on from there with the same logits."""
    prompt, logits, cut = prompt_of(SHORT), [], []
    for kind in ("growing", "dynamic"):
        forward = make_forward(model, options=CacheOptions(kind=kind))
        with torch.inference_mode():
            forward(prompt)
            cut.append(forward.crop(2))
            logits.append(forward([7]) if cut[-1] else torch.zeros(1))
    assert cut[0] == cut[1]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def check_batched_bytes(model_type: str, kv: ModelKV) -> None:
    """Two sequences in bfloat16, where the model prepares its inputs as most do."""
    torch.manual_seed(0)
    model = tiny_model(tiny_config(model_type), torch.bfloat16).eval()
    if not prepares_by_default(model) or model_type == "openai-gpt":
        return
    cache = make_cache(CacheOptions(kind="growing"), model, None)
    with torch.inference_mode():
        for tokens, fed in ((LONG, LONG), (LONG + 1, 1)):
            model(input_ids=torch.tensor([prompt_of(fed)] * 2), cache=cache, use_cache=True)
            predicted = footprint(kv, tokens=tokens, batch=2, dtype="bfloat16", runtime="llminfer")
            assert cache_bytes([cache, module_states(stateful_modules(model))]) == predicted.total_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(OWN_CACHES))
def test_a_model_with_a_cache_of_its_own_is_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match="own"):
        check_cache(CacheOptions(kind="growing"), tiny_config(model_type), "tiny")
    with pytest.raises(UnsupportedArchitecture, match="own"):
        footprint(read_model(tiny_config(model_type).to_dict(), source="tiny"), tokens=1, runtime="llminfer")
