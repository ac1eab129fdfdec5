"""Dry runs: models without weights hold the caches that the formulas say, and unknown ones can be read from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llminfer.engine.kv_cache.dry_run import dry_run, dry_run_model
from llminfer.errors import UnsupportedArchitecture
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import FAMILIES, read_model
from tests.tiny_models import tiny_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
# types whose forward looks at values, which tensors on the meta device do not have
LOOKS_AT_VALUES = ("blt", "jetmoe", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "xlm", "xmod")
# types that cannot run at all, or not in 16 bit (see the test of every architecture)
CANNOT_RUN = ("gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "xlnet")
KINDS = ("gpt2", "gemma3n_text", "llama4_text", "deepseek_v3", "deepseek_v4", "dbrx", "zamba2", "qwen3_next", "rwkv")


def config_of(model_type: str) -> dict[str, Any]:
    """A tiny config as it comes out of a file."""
    return json.loads(json.dumps(tiny_config(model_type).to_dict(), default=str))


def every_type() -> list[Any]:
    """The types of the mapping that can run without values, in the 16-bit type that tells pinned tensors apart."""
    left_out = {*LOOKS_AT_VALUES, *CANNOT_RUN}
    return [
        pytest.param(name, marks=() if name in KINDS else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in left_out
    ]


@pytest.mark.parametrize("model_type", every_type())
def test_a_model_without_weights_holds_what_is_predicted(model_type: str) -> None:
    config = config_of(model_type)
    model = read_model(config, source=model_type)
    for run in dry_run(config, tokens=13, steps=2, batch=2, dtype="bfloat16"):
        predicted = footprint(model, tokens=run.tokens, batch=2, dtype="bfloat16")
        assert tuple(layer.size_bytes for layer in run.layers) == predicted.layer_bytes


def test_a_real_size_takes_no_memory() -> None:
    prefill, step = dry_run(LLAMA, tokens=8191)
    assert (prefill.tokens, step.tokens) == (8191, 8192)
    assert step.size_bytes == 1073741824


def test_a_sliding_layer_keeps_the_prompt_allocated_until_the_next_step() -> None:
    prefill, step = dry_run(config_of("mistral"), tokens=100)
    per_token = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, bytes
    assert (prefill.size_bytes, prefill.storage_bytes) == (7 * per_token, 100 * per_token)
    assert (step.size_bytes, step.storage_bytes) == (7 * per_token, 8 * per_token)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma4_text", "deepseek_v32", "qwen3_next", "lfm2"])
def test_reads_the_records_of_a_model_from_its_dry_run(model_type: str) -> None:
    config = config_of(model_type)
    by_formula, by_run = read_model(config, source="x"), dry_run_model(config, source="x")
    assert by_run.method == "dry run"
    for tokens in (1, 7, 8, 500):
        for dtype in ("bfloat16", "float32"):
            expected = footprint(by_formula, tokens=tokens, dtype=dtype).layer_bytes
            assert footprint(by_run, tokens=tokens, dtype=dtype).layer_bytes == expected


@pytest.mark.parametrize("model_type", LOOKS_AT_VALUES)
def test_says_that_a_model_cannot_run_without_values(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match="a dry run of model type"):
        dry_run(config_of(model_type), tokens=13)


@pytest.mark.parametrize("config", [{}, {"model_type": "tomorrow"}, {"model_type": "vit"}, {"model_type": 3}])
def test_what_is_no_language_model_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitecture):
        dry_run(config, tokens=3)


# Image-text types whose language model no rule covers

WITHOUT_RULE = ("cosmos3_edge", "granite_docling", "hy_v4_vl", "kosmos-2.5", "mistral_large4")
NO_DRY_RUN = {
    "blip": "needs an image",
    "kosmos-2": "needs an image",
    "pix2struct": "needs an image",
    "pp_formulanet": "needs an image",
    "deepseek_ocr2": "its class defaults are no model",
    "diffusion_gemma": "its class defaults are no model",
    "step3p7": "its class defaults are no model",
    "unlimited_ocr": "keeps its whole prompt, and a window of what follows",
    "glm5_next": "its forward looks at the values of tensors",
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WITHOUT_RULE)
def test_what_no_rule_covers_is_read_from_a_run(model_type: str) -> None:
    config = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    with pytest.raises(UnsupportedArchitecture):
        read_model(config, source=model_type)
    model = dry_run_model(config, source=model_type)
    assert model.method == "dry run"
    assert len(model.layers) > 1
    (measured,) = dry_run(config, tokens=7, steps=0)
    assert footprint(model, tokens=7, dtype=model.dtype).total_bytes == measured.size_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model_type", NO_DRY_RUN)
def test_what_cannot_be_run_dry_is_refused(model_type: str) -> None:
    config = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    with pytest.raises(UnsupportedArchitecture):
        dry_run_model(config, source=model_type)


def test_every_language_model_without_a_rule_is_listed() -> None:
    found = set()
    for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        nested = CONFIG_MAPPING[name].sub_configs.get("text_config")
        text = CONFIG_MAPPING[name]().get_text_config(decoder=True) if nested is not None else None
        if text is not None and name not in FAMILIES and text.model_type not in FAMILIES:
            found.add(text.model_type)
    listed = {CONFIG_MAPPING[name]().get_text_config(decoder=True).model_type for name in (*WITHOUT_RULE, *NO_DRY_RUN)}
    assert found == listed
