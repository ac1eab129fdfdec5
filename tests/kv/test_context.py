"""What a config says of lengths and element types is read for what it means, and refused by its own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from llminfer.engine.load import context_limit
from llminfer.engine.models.support import check_direction
from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.footprint import footprint, total_bytes
from llminfer.kv.rules.direction import ENCODER_DECODERS
from llminfer.kv.rules.families import DECODER_LAYERS, FAMILIES, read_model
from llminfer.kv.setup import CacheSetup

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# the stated length, the scaling, and the length that vLLM derives from both
ROPES: list[tuple[str, int, dict[str, Any] | None, int]] = [
    ("llama", 128, None, 128),
    ("llama", 128, {"rope_type": "default", "rope_theta": 10000.0}, 128),
    ("qwen2", 32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ("qwen3", 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ("gpt_oss", 131072, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131072),
    ("llama", 4096, {"type": "linear", "factor": 4.0}, 16384),
    ("llama", 4096, {"rope_type": "dynamic", "factor": 2.0}, 8192),
    ("llama", 131072, LLAMA3, 131072),
    ("phi3", 131072, {"type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}, 131072),
    ("gemma3_text", 131072, {"rope_type": "linear", "factor": 8.0}, 131072),
]


@pytest.mark.parametrize(("model_type", "stated", "rope", "limit"), ROPES)
def test_the_context_is_the_scaled_one(model_type: str, stated: int, rope: dict[str, Any] | None, limit: int) -> None:
    config = {**LLAMA, "model_type": model_type, "sliding_window": 16, "max_position_embeddings": stated}
    config |= {"rope_scaling": rope}
    if model_type == "phi3":
        config["original_max_position_embeddings"] = 4096
    assert read_model(config, source="file").context_limit == limit
    loaded = AutoConfig.for_model(**config)
    assert context_limit(loaded) == limit
    # as transformers writes the same config
    assert read_model(loaded.to_dict(), source="written").context_limit == limit


@pytest.mark.parametrize("factor", [None, "4", True, float("inf"), float("nan"), 0.5, -1, 1e300])
def test_a_factor_that_is_none_scales_nothing(factor: object) -> None:
    config = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    assert read_model(config, source="file").context_limit == 128


@pytest.mark.parametrize("start", [0, -1, 10**400, True, "8", [8]])
@pytest.mark.parametrize("kind", ["yarn", [], {}, 3, None])
def test_a_scaling_that_is_none_is_no_failure(start: object, kind: object) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": start}
    assert read_model({**LLAMA, "rope_scaling": rope}, source="file").context_limit in (128, 256)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "bfloat16"),
    ],
)
def test_vllm_takes_the_type_that_a_quantized_checkpoint_states(quantization: dict[str, Any], dtype: str) -> None:
    model = read_model({**LLAMA, "quantization_config": quantization}, source="file")
    plain = read_model(LLAMA, source="file")
    found = footprint(model, tokens=64, runtime="vllm")
    assert found.total_bytes == footprint(plain, tokens=64, runtime="vllm", dtype=dtype).total_bytes
    assert total_bytes(model, CacheSetup(runtime="vllm"))(64, 1) == found.total_bytes
    stated = quantization.get("kv_cache_scheme") or "kv_cache_quant_algo" in str(quantization)
    assert bool(stated) == any("checkpoint" in note for note in found.notes)
    assert footprint(model, tokens=64, runtime="vllm", dtype="float32").k_dtype == "float32"
    assert footprint(model, tokens=64).k_dtype == "bfloat16"  # transformers does not follow it


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("stated", ["float8_e4m3fn", "torch.float8_e5m2", "int8", "uint8"])
def test_a_type_of_weights_is_not_that_of_the_cache(name: str, stated: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | {name: stated}
    model = read_model(config, source="file")
    assert model.dtype == "bfloat16"
    assert f"{name} is {stated}" in " ".join(model.notes)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_an_element_type_that_is_none_is_named_as_it_stands(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | {name: "half-ish"}
    with pytest.raises(UnknownConfigField, match=f"my file: {name} is 'half-ish'"):
        read_model(config, source="my file")


@pytest.mark.parametrize("name", ["num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer"])
def test_heads_listed_by_layer_are_summed(name: str) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "dtype": "bfloat16"}
    model = read_model({**config, name: [8, 4, 2, 1]}, source="file")
    assert footprint(model, tokens=10).layer_bytes == tuple(2 * heads * 8 * 10 * 2 for heads in (8, 4, 2, 1))
    with pytest.raises(UnsupportedArchitecture, match=f"{name} lists 3 of 4 layers"):
        read_model({**config, name: [8, 4, 2]}, source="file")


@pytest.mark.parametrize("name", ["num_key_value_heads", "num_kv_heads"])
def test_a_field_that_is_refused_is_named_as_it_stands(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    with pytest.raises(UnknownConfigField, match=rf"file: {name} is \[1, 2\]"):
        read_model({**config, name: [1, 2]}, source="file")


def test_the_encoder_decoders_are_those_of_transformers() -> None:
    assert MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys() == ENCODER_DECODERS


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()))
def test_what_generate_refuses_is_refused_or_labelled(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    refused = refusal_of(lambda: check_direction(config, "file"))
    if FAMILIES[model_type].layers is DECODER_LAYERS:
        assert "the decoder alone" in " ".join(read_model(config.to_dict(), source="file").notes)
        return
    ours = refusal_of(lambda: read_model(config.to_dict(), source="file"))
    assert ours == refused if refused else "does not continue" not in str(ours)


def refusal_of(read: Callable[[], object]) -> tuple[str, str | None] | None:
    """What a config is refused with, None when it is not."""
    try:
        read()
    except UnsupportedArchitecture as error:
        return error.message, error.hint
    return None


@pytest.mark.parametrize("model_type", ["t5", "mt5", "led", "t5gemma"])
def test_an_encoder_decoder_without_a_rule_is_named_as_one(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitecture) as refusal:
        read_model({"model_type": model_type}, source="file")
    assert (refusal.value.message, refusal.value.hint) == (f"file: {model_type} is an encoder-decoder model", None)


def test_a_prompt_beyond_the_unscaled_length_runs_in_transformers() -> None:
    import torch

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    config = AutoConfig.for_model(**{**LLAMA, "vocab_size": 96, "max_position_embeddings": 32}, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = model(torch.ones((1, 100), dtype=torch.long)).logits
    assert bool(torch.isfinite(logits).all())
    assert context_limit(config) == 128
