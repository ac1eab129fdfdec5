"""Every kind of cache: its tokens against transformers' own, its bytes against its own tensors, its refusals."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.engine import load as load_module
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.kv_cache.kinds import (
    TokenSchedule,
    check_cache,
    chunk_sizes,
    predict_cache,
)
from llminfer.engine.models.quirks import QUIRKS
from llminfer.errors import InvalidParams, LlminferError, UnsupportedArchitecture, UsageError
from llminfer.kv.quantizers import quantizer
from llminfer.kv.rules.families import read_model
from llminfer.params import KV_BITS, SINK_TOKENS, CacheOptions
from tests.compilers import needs_torch_compiler
from tests.engine.forward.test_forward import steps_of
from tests.tiny_checkpoints import save_tiny_checkpoint
from tests.tiny_models import VOCABULARY, tiny_config, tiny_model

PROMPT, NEW = 23, 8  # the prompt is longer than the tiny models' windows


@pytest.fixture(scope="module")
def models() -> Any:
    """Tiny models by type, made once."""
    made: dict[str, Any] = {}

    def get(model_type: str) -> Any:
        if model_type not in made:
            made[model_type] = fresh(model_type)
        return made[model_type]

    return get


def fresh(model_type: str) -> Any:
    torch.manual_seed(0)
    model = tiny_model(tiny_config(model_type), torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def transformers_tokens(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, disable_compile=True, **options)
    saved, model.generation_config = model.generation_config, GenerationConfig()
    try:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.generation_config = saved
    return output[0, len(prompt) :].tolist()


def check_run(model: Any, options: CacheOptions, prompt: list[int], count: int) -> list[int]:
    """The tokens of a run, whose bytes were predicted after the prefill and after every step."""
    kv = replace(read_model(model.config.to_dict(), source="tiny"), dtype="float32")
    room = len(prompt) + count - 1
    forward = make_forward(model, options=options, max_tokens=room)
    steps = steps_of(forward, prompt, count)
    assert len(steps) == count
    pieces = chunk_sizes(len(prompt), options.prefill_chunk)
    for step in steps:
        predicted = predict_cache(options, kv, TokenSchedule(prompt=pieces, steps=step.index, room=room))
        assert predicted is not None
        assert step.kv_bytes == predicted.total_bytes
    return [step.token_id for step in steps]


# Static


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [3, PROMPT])
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "mistral", "gemma3_text", "lfm2_moe", "qwen3_next", "deepseek_v3", "jamba"]
)
def test_a_static_cache_gives_the_tokens_of_generate(models: Any, model_type: str, length: int) -> None:
    model, prompt = models(model_type), prompt_of(length)
    tokens = check_run(model, CacheOptions(kind="static"), prompt, NEW)
    assert tokens == [step.token_id for step in steps_of(make_forward(model), prompt, NEW)]
    assert tokens == transformers_tokens(model, prompt, NEW, cache_implementation="static")


def test_a_static_cache_is_allocated_once(models: Any) -> None:
    forward = make_forward(models("llama"), options=CacheOptions(kind="static"), max_tokens=30)
    steps_of(forward, prompt_of(5), 1)
    before = [layer.keys.data_ptr() for layer in forward.cache.layers]
    steps_of(forward, [7], 20)
    assert [layer.keys.data_ptr() for layer in forward.cache.layers] == before


# Quantized


def wide_llama() -> Any:
    """Two heads of 32 dimensions, so a group of 64 elements a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@needs_torch_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [bits for bits in KV_BITS if bits != 8 or importlib.util.find_spec("hqq")])
@pytest.mark.parametrize("length", [7, 40])
def test_a_quantized_cache_gives_the_tokens_of_generate(bits: int, length: int) -> None:
    library, axis = quantizer(bits)
    model, prompt = wide_llama(), prompt_of(length)
    # over the length at which all that waits is quantized
    tokens = check_run(model, CacheOptions(kind="quantized", bits=bits), prompt, 135)
    options = {"backend": library, "nbits": bits, "axis_key": axis, "axis_value": axis}
    assert tokens == transformers_tokens(model, prompt, 135, cache_implementation="quantized", cache_config=options)


@needs_torch_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [1, 50, 130])
def test_the_bytes_of_a_quantized_cache_follow_the_chunks(chunk: int) -> None:
    options = CacheOptions(kind="quantized", prefill_chunk=chunk)
    check_run(wide_llama(), options, prompt_of(280), 5)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_missing_quantizer_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        quantizer(bits)
    assert caught.value.hint in ("pip install hqq", "pip install optimum-quanto")


# Window


def windowed_logits(model: Any, ids: list[int], window: int) -> Tensor:
    """Without a cache: the whole sequence under the mask that the rule describes."""
    places = torch.arange(len(ids))
    query = places[:, None]
    seen = (places <= query) & ((places > query - (window - SINK_TOKENS)) | (places < SINK_TOKENS))
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(
        input_ids=torch.tensor([ids]), attention_mask=mask[None, None], position_ids=places[None], use_cache=False
    ).logits[:, -1]


def check_window(model: Any, options: CacheOptions, prompt: list[int], count: int) -> None:
    tokens = check_run(model, options, prompt, count)
    ids = list(prompt)
    with torch.inference_mode():
        for token in tokens:
            assert token == int(windowed_logits(model, ids, options.window or 0).argmax())
            ids.append(token)


@pytest.mark.parametrize("chunk", [None, 1, 9])
@pytest.mark.parametrize("length", [2, 10, 11, PROMPT])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3"])
def test_a_window_sees_the_first_tokens_and_the_newest(
    models: Any, model_type: str, length: int, chunk: int | None
) -> None:
    check_window(models(model_type), CacheOptions(window=10, prefill_chunk=chunk), prompt_of(length), 12)


def test_a_window_as_long_as_the_text_changes_nothing(models: Any) -> None:
    model, prompt = models("llama"), prompt_of(PROMPT)
    tokens = check_run(model, CacheOptions(window=PROMPT + NEW), prompt, NEW)
    assert tokens == [step.token_id for step in steps_of(make_forward(model), prompt, NEW)]


def test_a_window_keeps_the_first_and_the_newest_keys(models: Any) -> None:
    model, prompt = models("llama"), prompt_of(PROMPT)
    full, window = make_forward(model), make_forward(model, options=CacheOptions(window=10))
    steps_of(full, prompt, 1)
    steps_of(window, prompt, 1)
    # the first layer's keys depend on a token and its position alone
    expected = full.cache.layers[0].keys[..., [0, 1, 2, 3, 17, 18, 19, 20, 21, 22], :]
    torch.testing.assert_close(window.cache.layers[0].keys, expected)


# Refusals


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("mistral", CacheOptions(window=10), "sliding_attention"),
        ("lfm2_moe", CacheOptions(window=10), "conv"),
        ("bloom", CacheOptions(window=10), "positions"),
        ("gemma3_text", CacheOptions(kind="quantized"), "sliding_attention"),
        ("mamba2", CacheOptions(kind="quantized"), "linear_attention"),
        ("llama", CacheOptions(kind="quantized"), "groups of 64"),
        ("xlnet", CacheOptions(kind="static"), "of their own"),
        ("rwkv", CacheOptions(kind="static"), "of their own"),
        ("deepseek_v32", CacheOptions(kind="static"), "indexed_attention"),
        ("deepseek_v4", CacheOptions(kind="static"), "heavily_compressed_attention"),
        ("xlm", CacheOptions(kind="static"), "mask"),
        ("mamba", CacheOptions(prefill_chunk=4), "in chunks"),
        ("deepseek_v32", CacheOptions(prefill_chunk=4), "in chunks"),
        ("xlnet", CacheOptions(file=Path("cache.safetensors")), "of their own"),
        ("blt", CacheOptions(file=Path("cache.safetensors")), "one pass"),
    ],
)
def test_what_a_model_cannot_do_is_told_from_its_config(model_type: str, options: CacheOptions, reason: str) -> None:
    config = tiny_config(model_type)
    if model_type == "llama":  # two heads of 12 dimensions
        config.head_dim = 12
    with pytest.raises(UnsupportedArchitecture, match=reason):
        check_cache(options, config, "tiny")


def test_a_refusal_comes_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_checkpoint(tmp_path, tiny_config("mistral", vocab_size=300))

    def never(*_: Any) -> None:
        pytest.fail("the weights were read")

    monkeypatch.setattr(load_module, "_load_weights", never)
    with pytest.raises(UnsupportedArchitecture, match="sliding_attention"):
        load_module.load(inspect_checkpoint(folder), cache=CacheOptions(window=64))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"kind": "paged"}, UsageError),
        ({"bits": 4}, UsageError),
        ({"kind": "quantized", "bits": 3}, UsageError),
        ({"kind": "static", "window": 10}, UsageError),
        ({"kind": "none", "window": 10}, UsageError),
        ({"window": SINK_TOKENS}, InvalidParams),
        ({"prefill_chunk": 0}, InvalidParams),
        ({"kind": "none", "prefill_chunk": 8}, UsageError),
        ({"kind": "quantized", "file": Path("x")}, UsageError),
        ({"kind": "none", "file": Path("x")}, UsageError),
        ({"file": Path("no/such/folder/x")}, UsageError),
        ({"file": Path(".")}, UsageError),
    ],
)
def test_options_that_contradict_each_other_are_refused(asked: dict[str, Any], error: type[LlminferError]) -> None:
    with pytest.raises(error):
        CacheOptions(**asked)


# The tables of exceptions, against every type


# they need another model's cache, an image library, or a row of ids a codebook
NOT_ALONE = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}


def every_type() -> list[str]:
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_ALONE)


def logits_of(model: Any, options: CacheOptions, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        forward = make_forward(model, options=options, max_tokens=len(prompt) + 3)
        return torch.cat([forward(prompt), forward([5]), forward([6]), forward([7])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", every_type())
def test_every_type_that_is_not_refused_has_right_caches(model_type: str) -> None:
    model, prompt = fresh(model_type), prompt_of(PROMPT)
    plain = logits_of(model, CacheOptions(), prompt)
    for options in (CacheOptions(kind="static"), CacheOptions(prefill_chunk=7)):
        try:
            check_cache(options, model.config, model_type, known=type(model))
        except UnsupportedArchitecture:
            continue
        torch.testing.assert_close(logits_of(model, options, prompt), plain, rtol=1e-4, atol=1e-4)
    window = CacheOptions(window=10)
    try:
        check_cache(window, model.config, model_type, known=type(model))
    except UnsupportedArchitecture:
        return
    with torch.inference_mode():
        expected = [windowed_logits(model, [*prompt, *([5, 6, 7][:count])], 10) for count in range(4)]
    torch.testing.assert_close(logits_of(model, window, prompt), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(name for name, quirks in QUIRKS.items() if quirks.not_static))
def test_what_has_no_static_cache_still_has_none(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = fresh(model_type), prompt_of(PROMPT)
    plain = logits_of(model, CacheOptions(), prompt)
    unbarred = {**QUIRKS, model_type: replace(QUIRKS[model_type], not_static=None)}
    monkeypatch.setattr("llminfer.engine.models.quirks.QUIRKS", unbarred)
    try:
        static = logits_of(model, CacheOptions(kind="static"), prompt)
    except Exception:
        return
    assert not torch.allclose(static, plain, rtol=1e-4, atol=1e-4)
