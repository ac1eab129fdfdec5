"""Reading configs: known sizes to the byte, where fields come from, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llminfer.errors import LlminferError, UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import FAMILIES, read_model

ROOT = Path(__file__).resolve().parents[3]
GROUPED = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "dtype": "bfloat16",
}
LATENT = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "torch_dtype": "float16",
}


def bytes_per_token(config: dict[str, Any], *, tokens: int = 100) -> int:
    """What one more token adds."""
    return footprint(read_model(config, source="config.json"), tokens=tokens).bytes_per_token


def origins(config: dict[str, Any]) -> dict[str, str]:
    """Every field that was used, and where it came from."""
    return {field.name: field.origin for field in read_model(config, source="config.json").fields}


@pytest.mark.parametrize(
    "model_type", [{}, {"model_type": "llama"}, {"model_type": "qwen3"}, {"model_type": "mistral"}]
)
def test_counts_kv_heads_and_the_stated_head_width(model_type: dict[str, str]) -> None:
    assert bytes_per_token({**GROUPED, **model_type, "sliding_window": None}) == 512


def test_without_kv_heads_every_head_has_its_own() -> None:
    config = {"model_type": "llama", **GROUPED}
    del config["num_key_value_heads"]
    assert bytes_per_token(config) == 1024


@pytest.mark.parametrize("config", [{"head_dim": None}, {}])
def test_without_a_head_width_hidden_size_is_split(config: dict[str, Any]) -> None:
    stated = {name: value for name, value in GROUPED.items() if name != "head_dim"}
    assert bytes_per_token({"model_type": "llama", **stated, **config}) == 2 * 2 * 2 * 16 * 2


def test_a_head_width_that_is_not_whole_is_an_error() -> None:
    config = {"model_type": "llama", **GROUPED, "head_dim": None, "hidden_size": 66}
    with pytest.raises(UnknownConfigField, match="66 is not a multiple of 4"):
        read_model(config, source="config.json")


def test_the_usual_eight_billion() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "torch_dtype": "bfloat16"}
    assert bytes_per_token({**config, "num_attention_heads": 32, "num_key_value_heads": 8}) == 131072


SLIDING = {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "dtype": "float16",
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}


@pytest.mark.parametrize("model_type", [None, "gemma2", "gpt_oss", "olmo3"])
def test_sliding_layers_keep_a_token_less_than_their_window(model_type: str | None) -> None:
    model = read_model({**SLIDING, "model_type": model_type}, source="config.json")
    assert footprint(model, tokens=100).total_bytes == 15488
    assert footprint(model, tokens=5).total_bytes == 4 * 5 * 128


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "mistral"])
def test_a_window_that_is_not_used_is_none(model_type: str | None) -> None:
    config = {**SLIDING, "model_type": model_type, "layer_types": None, "use_sliding_window": False}
    model = read_model(config, source="config.json")
    assert footprint(model, tokens=100).total_bytes == 51200
    assert {layer.kind for layer in model.layers} == {"full"}


def test_a_class_default_window_applies_to_a_file_without_one() -> None:
    config = {"model_type": "mistral", **GROUPED}
    assert {layer.window for layer in read_model(config, source="config.json").layers} == {4096}
    assert origins(config)["sliding_window"] == "class default of transformers 5.24.0"
    assert {layer.window for layer in read_model({**config, "sliding_window": None}, source="").layers} == {None}


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_latent_attention_caches_the_latent_and_the_rotary_key(model_type: str) -> None:
    model = read_model({**LATENT, "model_type": model_type}, source="config.json")
    assert footprint(model, tokens=10).bytes_per_token == 240
    assert {layer.kind for layer in model.layers} == {"latent"}


def test_latent_fields_of_no_stated_type_are_not_read_as_plain_attention() -> None:
    assert bytes_per_token(LATENT) == 240


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_model_inside_wins_over_what_is_beside_it(key: str) -> None:
    outside = {"model_type": "x-vl", "num_hidden_layers": 33, "vision_config": {"num_hidden_layers": 7}}
    assert bytes_per_token({**outside, key: GROUPED}) == 512
    assert bytes_per_token({**outside, "thinker_config": {"hidden_size": 5, key: GROUPED}}) == 512


def test_the_element_type_may_be_stated_outside_only() -> None:
    inner = {name: value for name, value in GROUPED.items() if name != "dtype"}
    assert bytes_per_token({"model_type": "x-vl", "torch_dtype": "bfloat16", "text_config": inner}) == 512


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": 2},
        {"model_type": "llama"},
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4},
        {"model_type": "gemma3", "num_hidden_layers": 2},
        {"model_type": "gemma3", "text_config": {}},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "llama", **GROUPED, "num_hidden_layers": 0},
        {"model_type": "llama", **GROUPED, "num_hidden_layers": 1e9},
        {"model_type": "llama", **GROUPED, "num_hidden_layers": 10**9},
        {"model_type": "llama", **GROUPED, "num_attention_heads": True},
        {"model_type": "llama", **GROUPED, "num_key_value_heads": 3},
        {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        {"model_type": "qwen3", **GROUPED, "layer_types": ["full_attention"]},
    ],
)
def test_missing_or_impossible_sizes_are_errors(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        read_model(config, source="models/config.json")
    assert caught.value.exit_code == 4
    assert caught.value.message.startswith("models/config.json: ")


def test_an_unknown_type_is_named_with_what_to_do() -> None:
    with pytest.raises(UnsupportedArchitecture, match="'tomorrow'") as caught:
        read_model({"model_type": "tomorrow", **GROUPED}, source="config.json")
    assert "--kv-heads" in str(caught.value.hint)


def test_more_heads_than_width_are_refused() -> None:
    config = {"model_type": "qwen2", **GROUPED, "head_dim": None, "hidden_size": 2}
    with pytest.raises(UnknownConfigField, match="hidden size 2 is less than 4 heads"):
        read_model(config, source="config.json")


def test_an_unknown_kind_of_layer_names_the_known() -> None:
    config = {"model_type": "llama", **GROUPED, "layer_types": ["full_attention", "quantum_attention"]}
    with pytest.raises(UnsupportedArchitecture, match="quantum_attention") as caught:
        read_model(config, source="config.json")
    assert "sliding_attention" in str(caught.value.hint)


def test_a_config_without_a_type_says_how_it_was_read() -> None:
    assert "attention of the stated sizes" in origins(GROUPED)["model_type"]
    with pytest.raises(UnsupportedArchitecture, match="state_size"):
        read_model({**GROUPED, "state_size": 16}, source="config.json")


def test_says_where_each_field_came_from() -> None:
    stated = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34}}
    found = origins(stated)
    assert found["num_hidden_layers"] == "file"
    assert found["num_key_value_heads"] == "class default of transformers 5.24.0"


def test_old_field_names() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    model = read_model(gpt2, source="config.json")
    assert (footprint(model, tokens=1024, dtype="float32").total_bytes, model.context_limit) == (75497472, 1024)


@pytest.mark.parametrize("name", ["head_dim", "attention_head_dim"])
def test_a_field_under_its_other_name(name: str) -> None:
    config = {field: value for field, value in GROUPED.items() if field != "head_dim"}
    assert bytes_per_token({"model_type": "hunyuan_vl_text", **config, name: 32}) == 512
    bloom = {"model_type": "bloom", "n_layer": 2, "n_embed": 64, "num_attention_heads": 4, "torch_dtype": "float16"}
    assert bytes_per_token(bloom) == 512


def test_says_that_the_element_type_is_assumed() -> None:
    stated = read_model({"model_type": "llama", **GROUPED}, source="config.json")
    silent = read_model({"model_type": "llama", **GROUPED, "dtype": None}, source="config.json")
    assert (stated.dtype, stated.notes) == ("bfloat16", ())
    assert silent.dtype == "float32"
    assert "states no dtype" in silent.notes[0]


def test_falcon_needs_fewer_heads_than_transformers_caches() -> None:
    config = {
        "model_type": "falcon",
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "multi_query": True,
        "torch_dtype": "bfloat16",
    }
    model = read_model(config, source="config.json")
    assert footprint(model, tokens=8192).total_bytes == 16106127360
    assert model.layers[0].elements_per_token * 60 * 8192 * 2 == 1006632960


def test_defaults_are_those_of_the_installed_transformers() -> None:
    spec = importlib.util.spec_from_file_location("generate_defaults", ROOT / "scripts" / "generate_defaults.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (ROOT / "llminfer" / "kv" / "defaults.json").read_text(encoding="utf-8")
    assert json.loads(written) == json.loads(script.render()), "run scripts/generate_defaults.py"


FIELD_NAMES = (
    *GROUPED,
    *LATENT,
    *SLIDING,
    *("text_config", "attn_config", "per_layer_config", "linear_attn_config", "layers_block_type", "block_types"),
    *("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_n_heads", "mamba_n_groups", "attn_layer_indices"),
    *("hybrid_override_pattern", "full_attn_idxs", "use_sliding_window", "max_window_layers", "indexer_types"),
    *("num_kv_shared_layers", "attn_layers", "n_layer", "n_head", "encoder_config", "decoder_config", "torch_dtype"),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.integers()
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "auto", "float16", "mamba", "full_attention", "sliding_attention", "M*-E", *FIELD_NAMES]),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from([*FIELD_NAMES, "0", "1", "x"]), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(
    model_type=st.sampled_from([*sorted(FAMILIES), "gemma3", "qwen2_vl", "llava", "", "x"]) | json_values,
    config=st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=12),
    whole=st.booleans(),
)
def test_garbage_is_an_error_of_ours(model_type: Any, config: dict[str, Any], whole: bool) -> None:
    try:
        model = read_model({**(GROUPED if whole else {}), **config, "model_type": model_type}, source="config.json")
    except LlminferError:
        return
    assert footprint(model, tokens=10).total_bytes >= 0
