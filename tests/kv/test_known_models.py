"""The bytes of well-known models, derived here by hand from their published sizes, for each runtime.

Every expected number is for one sequence of 8192 tokens in bfloat16, written as the product it is:
layers · tensors · heads · head size · token slots · bytes an element. None: the runtime cannot.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llminfer.errors import UnsupportedArchitecture
from llminfer.kv.config import load_config
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from llminfer.kv.runtimes.table import RUNTIMES
from llminfer.sources import shipped_configs

Sizes = tuple[int | None, ...]


def same_in_all(layers: int, heads: int, dim: int, *, vllm_heads: int | None = None) -> Sizes:
    """Full attention only: one number everywhere, but for the quantized cache (and Falcon-40B's heads)."""
    lean = layers * 2 * (vllm_heads or heads) * dim * 8192 * 2
    dense = layers * 2 * heads * dim * 8192 * 2
    return (dense, dense, quantized(layers, heads, dim), lean, lean, lean)


def quantized(layers: int, heads: int, dim: int) -> int:
    """8065 tokens in 4 bit, two groups of 64 in a row of 64 bytes, 2 · 2 bytes a group; 127 tokens in bfloat16."""
    groups = heads * dim * 8065 // 64
    return layers * 2 * (math.ceil(groups / 2) * 64 + groups * 2 * 2 + heads * dim * 127 * 2)


ORDER = ("transformers", "transformers-static", "transformers-quantized", "vllm", "llama.cpp", "ideal")
EXPECTED: dict[str, Sizes] = {
    "llama-3.1-8b": same_in_all(32, 8, 128),
    "llama-3.1-70b": same_in_all(80, 8, 128),
    "llama-3.2-1b": same_in_all(16, 8, 64),
    "llama-2-7b": same_in_all(32, 32, 128),
    "smollm2-135m": same_in_all(30, 3, 64),
    "smollm3-3b": same_in_all(36, 4, 128),
    "qwen3-0.6b": same_in_all(28, 8, 128),
    "qwen2.5-7b": same_in_all(28, 4, 128),
    "qwen3-30b-a3b": same_in_all(48, 4, 128),
    "gpt2": same_in_all(12, 12, 64),
    "falcon-7b": same_in_all(32, 1, 64),
    # transformers caches all 128 query heads, the others the 8 that there are
    "falcon-40b": same_in_all(60, 128, 64, vllm_heads=8),
    "mixtral-8x7b": same_in_all(32, 8, 128),
    "phi-4": same_in_all(40, 10, 128),
    "olmo-2-7b": same_in_all(32, 32, 128),
    "starcoder": same_in_all(40, 1, 128),
    "mpt-7b": same_in_all(32, 32, 128),
    # a window of 4096 in every layer: kept tokens window − 1, window, blocks of window − 1 + 2048, all, window
    "mistral-7b-v0.1": (
        32 * 2 * 8 * 128 * 4095 * 2,
        32 * 2 * 8 * 128 * 4096 * 2,
        None,
        32 * 2 * 8 * 128 * 385 * 16 * 2,
        32 * 2 * 8 * 128 * 8192 * 2,
        32 * 2 * 8 * 128 * 4096 * 2,
    ),
    "phi-3-mini-4k": (
        32 * 2 * 32 * 96 * 2046 * 2,
        32 * 2 * 32 * 96 * 2047 * 2,
        None,
        32 * 2 * 32 * 96 * 257 * 16 * 2,
        32 * 2 * 32 * 96 * 8192 * 2,
        32 * 2 * 32 * 96 * 2047 * 2,
    ),
    "gemma-2-9b": (
        21 * 2 * 8 * 256 * (8192 + 4095) * 2,
        21 * 2 * 8 * 256 * (8192 + 4096) * 2,
        None,
        21 * 2 * 8 * 256 * (8192 + 385 * 16) * 2,
        21 * 2 * 8 * 256 * (8192 + 4608) * 2,
        21 * 2 * 8 * 256 * (8192 + 4096) * 2,
    ),
    # vLLM adds a padding layer to make the 29 sliding layers six groups of five
    "gemma-3-4b": (
        2 * 4 * 256 * (5 * 8192 + 29 * 1023) * 2,
        2 * 4 * 256 * (5 * 8192 + 29 * 1024) * 2,
        None,
        2 * 4 * 256 * (5 * 8192 + 30 * 193 * 16) * 2,
        2 * 4 * 256 * (5 * 8192 + 29 * 1536) * 2,
        2 * 4 * 256 * (5 * 8192 + 29 * 1024) * 2,
    ),
    # and eight to make 52 six groups of ten
    "gemma-3-27b": (
        2 * 16 * 128 * (10 * 8192 + 52 * 1023) * 2,
        2 * 16 * 128 * (10 * 8192 + 52 * 1024) * 2,
        None,
        2 * 16 * 128 * (10 * 8192 + 60 * 193 * 16) * 2,
        2 * 16 * 128 * (10 * 8192 + 52 * 1536) * 2,
        2 * 16 * 128 * (10 * 8192 + 52 * 1024) * 2,
    ),
    "gpt-oss-20b": (
        12 * 2 * 8 * 64 * (8192 + 127) * 2,
        12 * 2 * 8 * 64 * (8192 + 128) * 2,
        None,
        12 * 2 * 8 * 64 * (8192 + 137 * 16) * 2,
        12 * 2 * 8 * 64 * (8192 + 768) * 2,
        12 * 2 * 8 * 64 * (8192 + 128) * 2,
    ),
    # chunks of 8192: transformers keeps one token less of the 36 chunked layers
    "llama-4-maverick": (
        2 * 8 * 128 * (12 * 8192 + 36 * 8191) * 2,
        48 * 2 * 8 * 128 * 8192 * 2,
        None,
        48 * 2 * 8 * 128 * 8192 * 2,
        48 * 2 * 8 * 128 * 8192 * 2,
        48 * 2 * 8 * 128 * 8192 * 2,
    ),
    # the latent of 512 and the rotary key of 64, once
    "deepseek-v3": (
        61 * 576 * 8192 * 2,
        61 * 576 * 8192 * 2,
        61 * (8 * 8065 * (32 + 4) + (4033 * 64 + 8065 * 4) + 576 * 127 * 2),
        61 * 576 * 8192 * 2,
        61 * 576 * 8192 * 2,
        61 * 576 * 8192 * 2,
    ),
    "deepseek-v2-lite": (
        27 * 576 * 8192 * 2,
        27 * 576 * 8192 * 2,
        27 * (8 * 8065 * (32 + 4) + (4033 * 64 + 8065 * 4) + 576 * 127 * 2),
        27 * 576 * 8192 * 2,
        27 * 576 * 8192 * 2,
        27 * 576 * 8192 * 2,
    ),
    # vLLM and llama.cpp expand its heads, for which there is no rule here
    "minicpm3-4b": (
        62 * 288 * 8192 * 2,
        62 * 288 * 8192 * 2,
        # 8065 · 32 elements are half a group more than 4032 groups: the last one is counted whole
        62 * (4 * 8065 * (32 + 4) + (2017 * 64 + 4033 * 4) + 288 * 127 * 2),
        None,
        None,
        62 * 288 * 8192 * 2,
    ),
    # 28 states of 8192 · 4 and 8192 · 16 (float32); vLLM's attention block of 80 tokens makes a page of 327680
    "jamba-1.5-mini": (
        4 * 2 * 8 * 128 * 8192 * 2 + 28 * (8192 * 4 * 2 + 8192 * 16 * 4),
        4 * 2 * 8 * 128 * 8192 * 2 + 28 * (8192 * 4 * 2 + 8192 * 16 * 4),
        None,
        (4 * 103 + 28) * 80 * 2 * 8 * 128 * 2,
        4 * 2 * 8 * 128 * 8192 * 2 + 28 * (8192 * 3 * 4 + 8192 * 16 * 4),
        4 * 2 * 8 * 128 * 8192 * 2 + 28 * (8192 * 3 * 2 + 8192 * 16 * 2),
    ),
    # conv of 2 · 16 · 128 + 32 · 128 channels, 32 states of 128 · 128; vLLM's block is 544 tokens
    "qwen3-next-80b-a3b": (
        12 * 2 * 2 * 256 * 8192 * 2 + 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4),
        12 * 2 * 2 * 256 * 8192 * 2 + 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4),
        None,
        (12 * 16 + 36) * 544 * 2 * 2 * 256 * 2,
        12 * 2 * 2 * 256 * 8192 * 2 + 36 * (8192 * 3 * 4 + 32 * 128 * 128 * 4),
        12 * 2 * 2 * 256 * 8192 * 2 + 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 2),
    ),
    "mamba-2.8b": (
        64 * (5120 * 4 * 2 + 5120 * 16 * 4),
        64 * (5120 * 4 * 2 + 5120 * 16 * 4),
        None,
        64 * (5120 * 3 * 2 + 5120 * 16 * 2),
        64 * (5120 * 3 * 4 + 5120 * 16 * 4),
        64 * (5120 * 3 * 2 + 5120 * 16 * 2),
    ),
    # 24 of 52 layers are Mamba-2 (conv 8192 + 2 · 8 · 128 channels), 4 attention; vLLM keeps their state in float32
    "nemotron-h-8b": (
        4 * 2 * 8 * 128 * 8192 * 2 + 24 * (10240 * 4 * 2 + 128 * 64 * 128 * 4),
        4 * 2 * 8 * 128 * 8192 * 2 + 24 * (10240 * 4 * 2 + 128 * 64 * 128 * 4),
        None,
        (4 * 8 + 24) * 1040 * 2 * 8 * 128 * 2,
        4 * 2 * 8 * 128 * 8192 * 2 + 24 * (10240 * 3 * 4 + 128 * 64 * 128 * 4),
        4 * 2 * 8 * 128 * 8192 * 2 + 24 * (10240 * 3 * 2 + 128 * 64 * 128 * 2),
    ),
    # attention and Mamba-2 (1536 + 2 · 128 channels) side by side in all 36 layers
    "falcon-h1-0.5b": (
        36 * (2 * 2 * 64 * 8192 * 2 + 1792 * 4 * 2 + 24 * 64 * 128 * 4),
        36 * (2 * 2 * 64 * 8192 * 2 + 1792 * 4 * 2 + 24 * 64 * 128 * 4),
        None,
        36 * (11 + 1) * 800 * 2 * 2 * 64 * 2,
        36 * (2 * 2 * 64 * 8192 * 2 + 1792 * 3 * 4 + 24 * 64 * 128 * 4),
        36 * (2 * 2 * 64 * 8192 * 2 + 1792 * 3 * 2 + 24 * 64 * 128 * 2),
    ),
    "granite-4.0-h-tiny": (
        4 * 2 * 4 * 128 * 8192 * 2 + 36 * (3328 * 4 * 2 + 48 * 64 * 128 * 4),
        4 * 2 * 4 * 128 * 8192 * 2 + 36 * (3328 * 4 * 2 + 48 * 64 * 128 * 4),
        None,
        (4 * 21 + 36) * 400 * 2 * 4 * 128 * 2,
        4 * 2 * 4 * 128 * 8192 * 2 + 36 * (3328 * 3 * 4 + 48 * 64 * 128 * 4),
        4 * 2 * 4 * 128 * 8192 * 2 + 36 * (3328 * 3 * 2 + 48 * 64 * 128 * 2),
    ),
    # 10 short convolutions of 2048 · 3; vLLM pads them to 12, each with an attention page of 16 tokens
    "lfm2-1.2b": (
        6 * 2 * 8 * 64 * 8192 * 2 + 10 * 2048 * 3 * 2,
        6 * 2 * 8 * 64 * 8192 * 2 + 10 * 2048 * 3 * 2,
        None,
        (6 * 512 + 12) * 16 * 2 * 8 * 64 * 2,
        6 * 2 * 8 * 64 * 8192 * 2 + 10 * 2048 * 2 * 4,
        6 * 2 * 8 * 64 * 8192 * 2 + 10 * 2048 * 2 * 2,
    ),
}

# our growing cache, where it is not what transformers keeps: 8192 tokens are whole blocks of 256, but a window
# of w has ceil((w − 1 + 128) / 256) of them
GROWING: dict[str, int] = {
    "mistral-7b-v0.1": 32 * 2 * 8 * 128 * 17 * 256 * 2,
    "phi-3-mini-4k": 32 * 2 * 32 * 96 * 9 * 256 * 2,
    "gemma-2-9b": 21 * 2 * 8 * 256 * (8192 + 17 * 256) * 2,
    "gemma-3-4b": 2 * 4 * 256 * (5 * 8192 + 29 * 5 * 256) * 2,
    "gemma-3-27b": 2 * 16 * 128 * (10 * 8192 + 52 * 5 * 256) * 2,
    "gpt-oss-20b": 12 * 2 * 8 * 64 * (8192 + 256) * 2,
    "llama-4-maverick": 48 * 2 * 8 * 128 * 8192 * 2,
}

# the same totals, measured before this code was written
MEASURED = {
    "llama-3.1-8b": (1073741824, 1073741824),
    "qwen3-0.6b": (939524096, 939524096),
    "gpt2": (301989888, 301989888),
    "falcon-7b": (67108864, 67108864),
    "falcon-40b": (16106127360, 1006632960),
    "mistral-7b-v0.1": (536739840, 536870912),
    "gemma-2-9b": (2113757184, 2113929216),
    "gpt-oss-20b": (204447744, 204472320),
    "deepseek-v3": (575668224, 575668224),
    "jamba-1.5-mini": (150732800, 142934016),
    "qwen3-next-80b-a3b": (279183360, 240844800),
    "llama-4-maverick": (1610465280, 1610612736),
}


def test_every_shipped_config_has_its_bytes_here_and_its_source_named() -> None:
    configs = shipped_configs()
    assert set(configs) == set(EXPECTED)
    assert len(configs) >= 24
    sources = (next(iter(configs.values())).parent / "SOURCES.md").read_text(encoding="utf-8")
    for name in configs:
        assert f"| {name} | [" in sources


@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("name", list(EXPECTED))
def test_bytes_of(name: str, runtime: str) -> None:
    path = Path(shipped_configs()[name])
    model = read_model(load_config(path), source=str(path), name=name)
    if runtime == "llminfer":
        expected: int | None = GROWING.get(name, EXPECTED[name][0])
    else:
        expected = EXPECTED[name][ORDER.index(runtime)]
    if expected is None:
        with pytest.raises(UnsupportedArchitecture, match=name):
            footprint(model, tokens=8192, dtype="bfloat16", runtime=runtime)
        return
    assert footprint(model, tokens=8192, dtype="bfloat16", runtime=runtime).total_bytes == expected


@pytest.mark.parametrize("name", list(MEASURED))
def test_the_derivation_agrees_with_what_was_measured(name: str) -> None:
    assert (EXPECTED[name][0], EXPECTED[name][5]) == MEASURED[name]
