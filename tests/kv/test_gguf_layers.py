"""GGUF metadata to layers, as llama.cpp reads them; benchmarks/llamacpp_kv.py compares with llama.cpp itself."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.footprint import footprint
from llminfer.kv.gguf import GgufHeader
from llminfer.kv.gguf_layers import model_from_header
from llminfer.kv.layer import ModelKV


def read(architecture: str, **values: Any) -> ModelKV:
    """The model of a header; `attention__head_count` stands for `<architecture>.attention.head_count`."""
    metadata = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    return model_from_header(
        GgufHeader(
            path=Path("model.gguf"),
            version=3,
            architecture=architecture,
            metadata=MappingProxyType(metadata),
            tensors=(),
            data_offset=0,
            file_bytes=0,
        )
    )


def kinds(of: ModelKV) -> list[str]:
    return [layer.kind for layer in of.layers]


SIZES = {"embedding_length": 64, "attention__head_count": 4}


def test_keys_and_values_have_their_own_lengths() -> None:
    of = read(
        "llama",
        block_count=2,
        **SIZES,
        attention__head_count_kv=2,
        attention__key_length=32,
        attention__value_length=16,
    )
    assert footprint(of, tokens=256, runtime="llama.cpp").total_bytes == 256 * 2 * 2 * (32 + 16) * 2
    assert footprint(of, tokens=256, runtime="llama.cpp", dtype="q8_0", v_dtype="f16").total_bytes == (
        256 * 2 * 2 * (34 + 16 * 2)
    )


def test_absent_lengths_are_embedding_over_heads_and_absent_kv_heads_all_heads() -> None:
    of = read("gpt2", block_count=1, **SIZES, context_length=1024)
    (layer,) = of.layers
    assert [(tensor.heads, tensor.dim) for tensor in layer.tensors] == [(4, 16), (4, 16)]
    assert (of.context_limit, of.dtype) == (1024, "float16")


def test_the_weights_type_has_no_say() -> None:
    of = read("llama", block_count=1, **SIZES)
    assert footprint(of, tokens=1).dtype == "float16"
    assert {field.name: field.origin for field in of.fields}["dtype"] == "llama.cpp's default cache type"


def test_heads_may_be_given_layer_by_layer_with_zeros() -> None:
    of = read(
        "deci", block_count=3, embedding_length=64, attention__head_count=(4, 4, 4), attention__head_count_kv=(2, 0, 1)
    )
    assert footprint(of, tokens=256, runtime="llama.cpp").layer_bytes == (
        256 * 2 * 2 * 16 * 2,
        0,
        256 * 2 * 16 * 2,
    )


@pytest.mark.parametrize(
    ("architecture", "pattern", "expected"),
    [
        ("gemma2", None, "sfsfsf"),
        ("gpt-oss", None, "sfsfsf"),
        ("gemma3", None, "sssssf"),
        ("cohere2", None, "sssfss"),
        ("gemma3", (True, False, True, True, False, True), "sfssfs"),
        ("gemma3", 3, "ssfssf"),
    ],
)
def test_window_patterns(architecture: str, pattern: Any, expected: str) -> None:
    more = {} if pattern is None else {"attention__sliding_window_pattern": pattern}
    of = read(architecture, block_count=6, **SIZES, attention__sliding_window=600, **more)
    assert "".join(kind[0] for kind in kinds(of)) == expected
    found = footprint(of, tokens=4000, runtime="llama.cpp")
    assert {row.slots for row in found.layer_rows} == {4096, 1280}  # 600 + 512, padded


def test_a_window_of_zero_or_none_is_no_window() -> None:
    assert set(kinds(read("gemma3", block_count=6, **SIZES, attention__sliding_window=0))) == {"full"}
    assert set(kinds(read("olmo2", block_count=6, **SIZES))) == {"full"}
    assert kinds(read("llama4", block_count=4, **SIZES)) == ["chunked"] * 3 + ["full"]


def test_latents_have_one_tensor_and_no_values() -> None:
    mla = {"attention__head_count_kv": 1, "attention__key_length": 576, "attention__key_length_mla": 192}
    of = read("deepseek2", block_count=3, embedding_length=64, attention__head_count=16, **mla)
    assert footprint(of, tokens=256, runtime="llama.cpp").total_bytes == 3 * 576 * 256 * 2
    old = {"attention__head_count_kv": 16, "attention__key_length": 192, "attention__value_length": 128}
    of = read("deepseek2", block_count=3, embedding_length=64, attention__head_count=16, **old)
    assert footprint(of, tokens=256, runtime="llama.cpp").total_bytes == 3 * 16 * (192 + 128) * 256 * 2


def test_blocks_that_predict_further_tokens_are_not_in_the_trunk() -> None:
    assert len(read("glm4moe", block_count=5, **SIZES, nextn_predict_layers=1).layers) == 4


SSM = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16}


def test_recurrent_models() -> None:
    of = read("mamba", block_count=4, embedding_length=64, **SSM)
    # the bytes that llama.cpp allocates for this model: 38912
    assert footprint(of, tokens=999, runtime="llama.cpp").total_bytes == 4 * (3 * 128 + 16 * 128) * 4 == 38912
    of = read("mamba2", block_count=1, embedding_length=64, **SSM, ssm__group_count=2)
    assert footprint(of, tokens=1, runtime="llama.cpp").total_bytes == (3 * (128 + 2 * 2 * 16) + 16 * 128) * 4


def test_hybrid_models() -> None:
    heads = {"embedding_length": 64, "attention__head_count": 4}
    of = read("jamba", block_count=3, **heads, attention__head_count_kv=(0, 2, 0), **SSM)
    assert kinds(of) == ["mamba", "full", "mamba"]
    of = read(
        "nemotron_h", block_count=3, **heads, attention__head_count_kv=(0, 2, 0), feed_forward_length=(0, 0, 9), **SSM
    )
    assert kinds(of) == ["mamba", "full", "none"]
    assert kinds(read("qwen3next", block_count=4, **heads, **SSM)) == ["linear"] * 3 + ["full"]
    of = read("falcon-h1", block_count=2, **heads, **SSM)
    assert kinds(of) == ["hybrid"] * 2
    assert of.layers[0].tensors
    assert of.layers[0].states
    of = read("lfm2", block_count=2, **heads, attention__head_count_kv=(0, 2), shortconv__l_cache=3)
    assert footprint(of, tokens=256, runtime="llama.cpp").layer_bytes == (64 * 2 * 4, 256 * 2 * 2 * 16 * 2)


def test_layers_that_share_hold_nothing() -> None:
    of = read("gemma3n", block_count=5, **SIZES, attention__sliding_window=8, attention__shared_kv_layers=2)
    assert kinds(of) == ["sliding"] * 3 + ["none"] * 2


def test_an_unknown_architecture_names_the_known() -> None:
    with pytest.raises(UnsupportedArchitecture, match="'rwkv9'") as caught:
        read("rwkv9", block_count=1)
    assert "llama" in str(caught.value.hint)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"block_count": 0},
        {"block_count": True},
        {"block_count": 2},
        {"block_count": 2, "attention__head_count": 0, "embedding_length": 64},
        {"block_count": 2, "attention__head_count": 3, "embedding_length": 64},
        {"block_count": 2, "attention__head_count": (4,), "embedding_length": 64},
        {"block_count": 2, "attention__head_count": "four", "embedding_length": 64},
    ],
)
def test_missing_and_impossible_numbers_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(UnknownConfigField, match=r"model\.gguf: "):
        read("llama", **values)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        *(("llama", "block_count", count) for count in (2_001, 20_000_000, 2**31, 2**64 - 1)),
        ("llama", "attention.head_count_kv", 0),
        ("llama", "attention.head_count_kv", (2, 2, 2, 2, 2, 2, 2)),
        ("llama", "attention.head_count_kv", (2, 2, 2, 2, 2)),
        ("llama", "attention.head_count_kv", (0,) * 6),
        ("llama", "attention.key_length", 2**63),
        ("deepseek2", "nextn_predict_layers", 6),
        ("deepseek2", "nextn_predict_layers", 9),
        ("gemma3", "attention.sliding_window_pattern", (True, False)),
        ("gemma3", "attention.sliding_window_pattern", (True,) * 7),
        ("gemma3", "attention.sliding_window_pattern", 2**63),
        ("gemma3n", "attention.shared_kv_layers", 6),
        ("gemma3n", "attention.shared_kv_layers", 1000),
        ("qwen3next", "full_attention_interval", 0),
    ],
)
def test_no_count_from_a_file_is_taken_on_trust(architecture: str, key: str, value: Any) -> None:
    sound: dict[str, Any] = {"block_count": 6, **SIZES, "attention__sliding_window": 8}
    sound |= SSM if architecture == "qwen3next" else {}
    assert read(architecture, **sound).layers
    name = key.replace(".", "__")
    with pytest.raises(UnknownConfigField, match=f"{architecture}.{key} "):
        read(architecture, **{**sound, name: value})
