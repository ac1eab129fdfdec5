"""The quantized sizes against transformers' own `QuantizedCache`, where its backends are installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from tests.compilers import needs_torch_compiler

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def tensor_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def quantized_bytes(held: Any) -> int:
    """Packed data, scales and zeros of a quanto tensor, or of HQQ's pair of tensor and metadata."""
    if isinstance(held, tuple):
        packed, meta = held
        return tensor_bytes(packed) + tensor_bytes(meta["scale"]) + tensor_bytes(meta["zero"])
    return tensor_bytes(held._data._data) + tensor_bytes(held._scale) + tensor_bytes(held._shift)


def cache_bytes(cache: Any) -> int:
    return sum(
        quantized_bytes(layer._quantized_keys)
        + quantized_bytes(layer._quantized_values)
        + tensor_bytes(layer.keys)
        + tensor_bytes(layer.values)
        for layer in cache.layers
    )


@needs_torch_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "bits"),
    # hqq is no part of the test environment
    [("quanto", 4), ("quanto", 2), *((("hqq", 4), ("hqq", 8)) if importlib.util.find_spec("hqq") else ())],
)
def test_predicted_is_what_the_real_cache_holds(backend: str, bits: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

    config = LlamaConfig(**CONFIG)
    network = LlamaForCausalLM(config).eval()
    of = read_model({**config.to_dict(), "dtype": "float32"}, source="tiny")
    cache = QuantizedCache(backend, config=config, nbits=bits)
    asked: dict[str, Any] = {"runtime": "transformers-quantized", "dtype": f"int{bits}"}
    with torch.no_grad():
        network(torch.zeros(1, 300, dtype=torch.long), cache=cache, use_cache=True)
        assert cache_bytes(cache) == footprint(of, tokens=300, **asked).peaks[0].size_bytes
        for step in range(1, 129):
            network(torch.zeros(1, 1, dtype=torch.long), cache=cache, use_cache=True)
            found = footprint(of, tokens=300 + step, **asked)
            assert cache_bytes(cache) <= found.total_bytes
            if step == 127:
                assert cache_bytes(cache) == found.total_bytes
    assert cache_bytes(cache) == found.peaks[0].size_bytes
