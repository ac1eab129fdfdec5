"""Predicted bytes are measured bytes, for every causal language model of the installed transformers.

Each type runs as a tiny random model with its real classes: two dtypes, two batch sizes, a prompt
shorter and one longer than its window, then decode steps, compared layer by layer after each. A
representative of every kind of cache runs always; all of them run in the sweep (`-m slow`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llminfer.engine.kv_cache.dry_run import decode, decode_plainly, measure_model
from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import FAMILIES, read_model
from tests.tiny_models import WINDOW, tiny_config, tiny_fields, tiny_ids, tiny_model, tiny_text_model

# types that transformers cannot run alone, whatever we predict
CANNOT_RUN = {
    "gemma3n": "its vision tower needs timm and Pillow; its language model is gemma3n_text",
    "gemma4_assistant": "a drafter that reads the cache of the model it drafts for",
    "gemma4_unified_assistant": "a drafter that reads the cache of the model it drafts for",
}
# types whose own code mixes 32 bit into a 16-bit model and fails
FLOAT32_ONLY = {
    "reformer": "its layer norms get 32-bit input",
    "xlnet": "its relative positions stay in 32 bit",
}
# types whose class defaults describe no model, so that a file that states nothing more is refused
STATES_NOTHING = {
    "nemotron_h": "its pattern is what it is",
    "qwen4_exp_text": "its indexer has no default sizes",
}
MUSIC_DECODERS = ("musicgen_decoder", "musicgen_melody_decoder")
# one type at least of every kind of cache
REPRESENTATIVES = (
    "llama",  # grouped
    "gpt2",  # every head, old names
    "gpt_bigcode",  # one head
    "falcon",
    "gemma2",  # sliding and full
    "llama4_text",  # chunked
    "gemma3n_text",  # shared
    "gemma4_text",  # layers with their own head width
    "mimo_v2_flash",  # values narrower than keys
    "deepseek_v3",  # latent
    "glm_moe_dsa",  # latent with an indexer
    "deepseek_v4",  # compressed
    "mamba",
    "zamba2",  # Mamba-2 beside attention
    "qwen3_next",  # gated DeltaNet
    "kimi_linear",  # delta attention and latent
    "lfm2",  # short convolution
    "minimax",  # lightning attention
    "rwkv",
    "xlstm",
    "recurrent_gemma",  # states in modules
    "inkling2_loop_text",  # loops, windows and convolutions in one layer
    "longcat_flash",  # two caches a layer
    "cpmant",  # a learned prefix
    "xlnet",
    "openai-gpt",  # no cache
)
# types whose cache depends on where the prompt ended, so that a short one may not grow past a chunk
NO_CROSSING = {"reformer": "its buckets change type when decoding passes the chunk's length"}
SETUPS = ((1, 5, 4), (2, 13, 2))  # batch, prompt, steps: into the window, and from beyond it


def every_type() -> list[Any]:
    """The types of the mapping; those that represent no kind of cache are slow."""
    return [
        pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in CANNOT_RUN
    ]


def as_json(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it comes out of a file."""
    return json.loads(json.dumps(config, default=str))


@pytest.mark.parametrize("model_type", every_type())
def test_predicts_what_is_measured(model_type: str) -> None:
    config = tiny_config(model_type)
    model = read_model(as_json(config.to_dict()), source=model_type)
    for dtype in (torch.float32, *(() if model_type in FLOAT32_ONLY else (torch.bfloat16,))):
        name = str(dtype).removeprefix("torch.")
        tiny = tiny_model(config, dtype)
        for batch, prompt, most in SETUPS:
            steps = WINDOW - 1 - prompt if model_type in NO_CROSSING and prompt < WINDOW else most
            with torch.no_grad():
                for tokens, cache in decode(tiny, tiny_ids(config, batch, prompt), steps=steps):
                    measured = [layer.size_bytes for layer in measure_model(tiny, cache)]
                    predicted = footprint(model, tokens=tokens, batch=batch, dtype=name).layer_bytes
                    assert [*predicted] == measured, f"{name}, batch {batch}, prompt {prompt}, {tokens} tokens"


def text_types() -> list[str]:
    """Types of the table that occur inside image-text models only; MusicGen's decoders run above."""
    return sorted(FAMILIES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {*MUSIC_DECODERS})


@pytest.mark.parametrize("model_type", text_types())
def test_predicts_what_is_measured_without_a_head(model_type: str) -> None:
    config = tiny_config(model_type)
    model = read_model(as_json(config.to_dict()), source=model_type)
    stated = read_model(as_json({**tiny_fields(model_type), "model_type": model_type}), source="stated")
    assert stated.layers == model.layers
    tiny = tiny_text_model(config, torch.bfloat16)
    with torch.no_grad():
        for tokens, cache in decode_plainly(tiny, tiny_ids(config, 2, 13), steps=2):
            measured = [layer.size_bytes for layer in measure_model(tiny, cache)]
            assert [*footprint(model, tokens=tokens, batch=2, dtype="bfloat16").layer_bytes] == measured


@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_reads_every_form_of_a_config(model_type: str) -> None:
    """What was stated, what transformers writes to a file, and what it makes of both are one model."""
    config = tiny_config(model_type)
    whole = read_model(as_json(config.to_dict()), source="whole")
    written = read_model(as_json(config.to_diff_dict()), source="written")
    stated = read_model(as_json({**tiny_fields(model_type), "model_type": model_type}), source="stated")
    assert written.layers == whole.layers
    assert stated.layers == whole.layers


PATTERN_FIELDS = ("layer_types", "layers_block_type", "attention_types", "indexer_types")
COUNT_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def stated_with(model_type: str, layers: int) -> dict[str, Any]:
    """What a file states that gives its number of layers and not their kinds."""
    stated = {name: value for name, value in tiny_fields(model_type).items() if name not in PATTERN_FIELDS}
    return stated | {name: layers for name in COUNT_FIELDS if name in stated}


def patterns() -> list[tuple[str, int]]:
    """Types and numbers of layers, those left out that are no valid config of the type."""
    found = []
    for model_type in sorted(FAMILIES.keys() - STATES_NOTHING.keys()):
        for layers in (7, 13, 24):
            try:
                CONFIG_MAPPING[model_type](**stated_with(model_type, layers))
            except StrictDataclassClassValidationError:  # a number that its own pattern does not divide
                continue
            found.append((model_type, layers))
    return found


@pytest.mark.parametrize(("model_type", "layers"), patterns())
def test_derives_the_layer_pattern(model_type: str, layers: int) -> None:
    """Such a file has the kinds of layers that the class gives it."""
    stated = stated_with(model_type, layers)
    whole = read_model(as_json(CONFIG_MAPPING[model_type](**stated).to_dict()), source="whole")
    raw = read_model(as_json({**stated, "model_type": model_type}), source="stated")
    assert raw.layers == whole.layers


@pytest.mark.parametrize("model_type", CANNOT_RUN)
def test_what_cannot_run_still_cannot(model_type: str) -> None:
    config = tiny_config(model_type)
    with pytest.raises((ImportError, ValueError)), torch.no_grad():
        list(decode(tiny_model(config, torch.float32), tiny_ids(config, 1, 5), steps=1))


def test_drafters_hold_nothing() -> None:
    for model_type in ("gemma4_assistant", "gemma4_unified_assistant"):
        model = read_model(as_json(tiny_config(model_type).to_dict()), source=model_type)
        assert footprint(model, tokens=100).total_bytes == 0


@pytest.mark.parametrize("model_type", FLOAT32_ONLY)
def test_what_needs_32_bit_still_does(model_type: str) -> None:
    config = tiny_config(model_type)
    with pytest.raises(RuntimeError), torch.no_grad():
        list(decode(tiny_model(config, torch.bfloat16), tiny_ids(config, 1, 13), steps=1))


@pytest.mark.parametrize("model_type", STATES_NOTHING)
def test_a_default_that_is_no_model_is_refused(model_type: str) -> None:
    stated = {"model_type": model_type, "num_hidden_layers": 12, "num_attention_heads": 4, "hidden_size": 32}
    with pytest.raises(UnknownConfigField):
        read_model(stated, source=model_type)


def composites() -> list[str]:
    """Image-text types whose language model is of a type in the table."""
    found = []
    for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        nested = CONFIG_MAPPING[name].sub_configs.get("text_config")
        if nested is not None and name not in FAMILIES:
            found.append(name)
    return found


def known_by_default() -> set[str]:
    """Types whose class defaults are a model that the tables can read."""
    return FAMILIES.keys() - STATES_NOTHING.keys()


@pytest.mark.parametrize("model_type", composites())
def test_a_composite_is_its_language_model(model_type: str) -> None:
    composite = CONFIG_MAPPING[model_type]()
    text: PreTrainedConfig = composite.get_text_config(decoder=True)
    try:
        expected = read_model(as_json(text.to_dict()), source="text").layers
    except UnsupportedArchitecture:
        # no rule covers it, or its class defaults are no model: the composite is refused as well
        assert text.model_type not in known_by_default()
        with pytest.raises(UnsupportedArchitecture):
            read_model(as_json(composite.to_dict()), source="composite")
        return
    assert read_model(as_json(composite.to_dict()), source="composite").layers == expected


@pytest.mark.parametrize("model_type", composites())
def test_a_composite_leaves_out_class_defaults(model_type: str) -> None:
    """Composite files state their language model as differences from its class."""
    default: PreTrainedConfig = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    names = CONFIG_MAPPING[default.model_type].attribute_map
    stated = {"model_type": default.model_type, names.get("num_hidden_layers", "num_hidden_layers"): 12}
    if default.model_type not in known_by_default():
        with pytest.raises(UnsupportedArchitecture):
            read_model({"model_type": model_type, "text_config": stated}, source="stated")
        return
    composite = CONFIG_MAPPING[model_type](text_config=stated)
    expected = read_model(as_json(composite.to_dict()), source="whole").layers
    assert read_model({"model_type": model_type, "text_config": stated}, source="stated").layers == expected
    assert len(expected) >= 12
