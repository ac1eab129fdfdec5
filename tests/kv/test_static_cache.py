"""The static sizes against transformers' own `StaticCache`, on tiny models of each kind that it can hold."""

from __future__ import annotations

import pytest

from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from tests.tiny_models import tiny_config, tiny_ids, tiny_model

TYPES = ("llama", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "falcon", "deepseek_v3", "mamba2", "jamba")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize("model_type", TYPES)
def test_predicted_is_what_the_real_cache_allocates(model_type: str, length: int) -> None:
    import torch
    from transformers import StaticCache

    from llminfer.engine.kv_cache.dry_run import measure_cache

    config = tiny_config(model_type)
    network = tiny_model(config, torch.float32)
    of = read_model({**config.to_dict(), "dtype": "float32"}, source=model_type)
    cache = StaticCache(config=config, max_cache_len=length)
    with torch.no_grad():
        network(tiny_ids(config, 2, 4), cache=cache, use_cache=True)
    measured = tuple(layer.size_bytes for layer in measure_cache(cache))
    assert measured == footprint(of, tokens=length, batch=2, runtime="transformers-static").layer_bytes
