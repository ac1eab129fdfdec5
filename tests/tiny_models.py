"""Tiny random models of every causal language model type of the installed transformers.

A tiny model has its real class, real cache and real layer pattern; only widths and counts are
small. Sizes are chosen so that a wrong formula shows: heads, KV heads, head_dim and hidden size
are never a ratio of each other that hides a mistake, and no size is 1.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MusicgenForCausalLM,
    MusicgenMelodyForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
VOCABULARY = 96

# every field of a config class that has one of these names gets this size
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "attention_heads": 4,
    "attention_window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "kv_channels": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "hidden_size": 32,
    "hidden_size_global": 32,
    "n_embd": 32,
    "d_model": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    # a decoder alone gets a cache with as many layers as its config says the encoder has
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "d_inner": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "n_inner": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rotary_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unpadded_vocab_size": VOCABULARY,
    "max_window_layers": 2,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
_SHARED_KV = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}


def _sections(*sizes: int) -> dict[str, Any]:
    """Rotary positions of three axes (time, height, width), which share the half of a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sizes]}}


_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}

# what a type needs beyond the sizes to build and run, and to have every kind of layer it can have
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "linear_head_dim": 8},
    # as many as its encoder and decoder have, since the cache is made from the outer config
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA2},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "cpmant": {"vocab_size": VOCABULARY, "dim_head": 16, "dim_ff": 48, "prompt_length": 3, "prompt_types": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "dots3_note": {"vision_config": {"adapter_out_dim": 32}, "audio_config": {"adapter_out_dim": 32}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 28,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 12,
        "head_dim": 16,
        "shared_experts_intermediate_size": 16,
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "gemma3n_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, **_SHARED_KV},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **_MAMBA2},
    "helium": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 64, **_MAMBA2},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, **_SHARED_KV},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lara_mini": _LINEAR,
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "qwen4_exp_text": {**_INDEXER, **_LINEAR, "indexer_compress_ratio": 4},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (8, 24),
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "feed_forward_size": 48,
        "attention_head_size": 8,
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0, "chunk_size": 8, "num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    # the language models inside image-text models
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_sections(1, 1, 2)},
    "glm4v_moe_text": _sections(1, 1, 0),
    "glm4v_text": _sections(2, 1, 1),
    "glm_ocr_text": _sections(2, 1, 1),
    "hunyuan_vl_text": _sections(4, 2, 2),
    "paddleocr_vl_text": _sections(4, 2, 2),
    "qwen2_5_omni_text": _sections(2, 1, 1),
    "qwen2_5_vl_text": _sections(2, 1, 1),
    "qwen2_vl_text": _sections(2, 1, 1),
    "qwen3_omni_moe_text": _sections(2, 1, 1),
}
# drafters, and the type of the text config inside them
_ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_DECODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
for _name in _DECODERS:
    _OVERRIDES.setdefault(_name, {})["is_decoder"] = True


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A config of this model type with small sizes and every kind of layer that the type has."""
    return CONFIG_MAPPING[model_type](**{**tiny_fields(model_type), **overrides})


def tiny_fields(model_type: str) -> dict[str, Any]:
    """What `tiny_config` passes to the config class of a model type."""
    config_class = CONFIG_MAPPING[model_type]
    fields = _small_sizes(config_class) | _OVERRIDES.get(model_type, {})
    if model_type in _ASSISTANTS:
        text = tiny_fields(_ASSISTANTS[model_type]) | {"num_kv_shared_layers": 0}
        text |= dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0)
        return {"text_config": {"model_type": _ASSISTANTS[model_type], **text}}
    if config_class.sub_configs:
        default = config_class()
        for name in config_class.sub_configs.keys() - fields.keys():
            nested = getattr(default, name, None)
            if nested is not None:
                sizes = _small_sizes(type(nested)) | _OVERRIDES.get(nested.model_type, {})
                fields[name] = {"model_type": nested.model_type, **sizes}
    return fields


def _small_sizes(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config_class)}
    fields = {name: size for name, size in _SIZES.items() if name in names}
    if "kv_lora_rank" in names:
        # a latent model's head_dim is its rotary part, and every query head has its own key
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return fields


def tiny_ids(config: PreTrainedConfig, batch: int, tokens: int) -> torch.Tensor:
    """A prompt for a tiny model; a row for each codebook where the model reads several at once."""
    decoder = getattr(config, "decoder", config)
    rows = batch * getattr(decoder, "num_codebooks", 1) if config.model_type.startswith("musicgen") else batch
    return torch.randint(3, VOCABULARY - 8, (rows, tokens), generator=torch.Generator().manual_seed(0))


def tiny_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a config with random weights, ready to decode."""
    torch.manual_seed(0)
    if config.model_type in ("musicgen", "musicgen_melody"):
        # listed with the composite config, which their decoder class cannot be built from
        classes = {"musicgen": MusicgenForCausalLM, "musicgen_melody": MusicgenMelodyForCausalLM}
        return classes[config.model_type]._from_config(config.decoder, dtype=dtype).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def tiny_image_text_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The image-text model of a config with random weights, ready to decode."""
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()


def tiny_text_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The language model of a text config that only occurs inside an image-text one, without a head."""
    torch.manual_seed(0)
    if config.model_type in _TEXT_CLASSES:
        module, name = _TEXT_CLASSES[config.model_type]
        text_class = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
        return text_class._from_config(config, dtype=dtype).eval()
    return AutoModel.from_config(config, dtype=dtype).eval()


# those that AutoModel does not know
_TEXT_CLASSES = {
    "ernie4_5_vl_moe_text": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel"),
    "emu3_text_model": ("emu3", "Emu3TextModel"),
    "granite4_vision_text": ("granite4_vision", "Granite4VisionTextModel"),
    "mllama_text_model": ("mllama", "MllamaTextModel"),
    "paddleocr_vl_text": ("paddleocr_vl", "PaddleOCRTextModel"),
    "qwen2_5_omni_text": ("qwen2_5_omni", "Qwen2_5OmniThinkerTextModel"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
}
