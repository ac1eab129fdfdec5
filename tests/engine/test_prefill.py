"""Prompts fed in chunks: the tokens of one pass, and never more in the model at once than a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from llminfer.api import generate
from llminfer.engine.forward import chunks as chunks_module
from llminfer.engine.forward.chunks import DEFAULT_PREFILL_CHUNK, prefill_chunk
from llminfer.engine.forward.forward import PlainForward, PreparedForward, make_forward
from llminfer.engine.models.quirks import QUIRKS
from llminfer.errors import UnsupportedArchitecture
from llminfer.events import Started, Step
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from llminfer.params import CacheOptions, StopCriteria
from tests.engine.forward.test_forward import steps_of
from tests.tiny_models import VOCABULARY, tiny_config, tiny_model


def prompt_of(length: int, vocabulary: int = VOCABULARY) -> list[int]:
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def tiny(model_type: str) -> Any:
    torch.manual_seed(0)
    model = tiny_model(tiny_config(model_type), torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@dataclass
class Seen:
    """What went into the model: tokens of each forward, positions whose logits were made."""

    fed: list[int]
    logits: list[int]


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    seen = Seen([], [])
    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.fed.append(inputs[0].shape[1])),
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: seen.logits.append(inputs[0].shape[1])
        ),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns; views count like the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


CHUNKED = (
    "llama",
    "gpt2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "lfm2_moe",
    "qwen3_next",
    "mamba2",
    "jamba",
    "deepseek_v3",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize("model_type", CHUNKED)
def test_chunks_give_the_tokens_of_one_pass(model_type: str, chunk: int) -> None:
    model, prompt = tiny(model_type), prompt_of(29)  # the windows are of 8 tokens
    way = type(make_forward(model)._forward)  # type: ignore[attr-defined]
    whole = [step.token_id for step in steps_of(way(model), prompt, 10)]
    with watched(model) as seen:
        forward = make_forward(model, options=CacheOptions(prefill_chunk=chunk))
        assert [step.token_id for step in steps_of(forward, prompt, 10)] == whole
    assert seen.fed[: -(-29 // chunk)] == [min(chunk, 29 - start) for start in range(0, 29, chunk)]
    assert set(seen.logits) == {1}


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "recurrent_gemma", "deepseek_v32"])
@pytest.mark.filterwarnings("ignore")
def test_what_takes_a_prompt_in_one_pass_gets_it_so_and_says_why_not(model_type: str) -> None:
    model, prompt = tiny(model_type), prompt_of(11)
    assert prefill_chunk(model, CacheOptions()) is None
    with watched(model) as seen:
        steps_of(make_forward(model), prompt, 1)
    assert seen.fed[0] >= len(prompt)
    with pytest.raises(UnsupportedArchitecture, match="cannot be fed in chunks"):
        make_forward(model, options=CacheOptions(prefill_chunk=4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["mamba", "recurrent_gemma"])
def test_what_cannot_take_several_tokens_after_others_takes_them_one_by_one(model_type: str) -> None:
    model, prompt = tiny(model_type), prompt_of(19)
    whole = [step.token_id for step in steps_of(make_forward(model), prompt, 6)]
    forward = make_forward(model)
    steps_of(forward, prompt[:12], 1)
    with watched(model) as seen:
        assert [step.token_id for step in steps_of(forward, prompt[12:], 6)] == whole
    assert set(seen.fed) == {1}


def test_a_checkpoints_own_code_is_not_fed_in_pieces_unless_asked() -> None:
    model = tiny("llama")
    model.__class__ = type("OwnCode", (type(model),), {"__module__": "transformers_modules.tiny.modeling"})
    assert prefill_chunk(model, CacheOptions()) is None
    assert prefill_chunk(model, CacheOptions(prefill_chunk=4)) == 4
    forward = make_forward(model)
    with watched(model) as seen:
        steps_of(forward, prompt_of(5), 1)
        steps_of(forward, prompt_of(3), 1)
    assert seen.fed == [5, 1, 1, 1]


def on_device(device: str, model_type: str = "llama", dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """A model that says it were on such a device; it has no weights."""
    config = tiny_config(model_type, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.__class__ = type("Placed", (type(model),), {"device": torch.device(device)})
    return model


@pytest.mark.parametrize(
    ("model", "options", "chunk"),
    [
        (on_device("cuda"), {}, 32768),
        (on_device("cuda:1", dtype=torch.float16), {"kind": "static"}, 32768),
        (on_device("cuda", "qwen3"), {"kind": "growing"}, 32768),
        (on_device("cpu"), {}, 2048),
        (on_device("mps"), {}, 2048),
        # no kernel without scores for grouped queries in float32, nor for heads this wide, nor for windows
        (on_device("cuda", dtype=torch.float32), {}, 2048),
        (on_device("cuda", head_dim=512), {}, 2048),
        (on_device("cuda", "mistral"), {}, 2048),
        (on_device("cuda", "gemma2"), {}, 2048),
        (on_device("cuda", "deepseek_v3"), {}, 2048),
        (on_device("cuda", "mamba2"), {}, 2048),
        (on_device("cuda"), {"window": 64}, 2048),
        (on_device("cuda"), {"prefill_chunk": 7}, 7),
        (on_device("cuda"), {"kind": "none"}, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else str(value),
)
def test_a_prompt_begins_with_as_much_as_attention_takes_without_a_mask(
    model: Any, options: dict[str, Any], chunk: int | None
) -> None:
    assert prefill_chunk(model, CacheOptions(**options)) == chunk


@pytest.mark.parametrize("kind", ["dynamic", "growing", "static"])
@pytest.mark.parametrize("length", [5, 24, 25, 70])
def test_a_longer_first_chunk_gives_the_tokens_and_bytes_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    model, prompt, options = tiny("llama"), prompt_of(length), CacheOptions(kind=kind)
    whole = steps_of(make_forward(model, options=options, max_tokens=100), prompt, 8)
    monkeypatch.setattr(chunks_module, "_FIRST_CHUNKS", {"cpu": (24, frozenset({torch.float32}))})
    monkeypatch.setattr(chunks_module, "DEFAULT_PREFILL_CHUNK", 10)
    with watched(model) as seen:
        steps = steps_of(make_forward(model, options=options, max_tokens=100), prompt, 8)
    first, rest = min(length, 24), max(length - 24, 0)
    assert seen.fed[:-7] == [first, *(10 for _ in range(rest // 10)), *([rest % 10] if rest % 10 else [])]
    assert [step.token_id for step in steps] == [step.token_id for step in whole]
    assert [step.kv_bytes for step in steps] == [step.kv_bytes for step in whole]


def long_llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1 << 16,
        **options,
    }
    config = MistralConfig(**sizes) if "sliding_window" in sizes else LlamaConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("window", [{}, {"sliding_window": 256}])
def test_32k_tokens_are_never_in_the_model_at_once(window: dict[str, int]) -> None:
    model, tokens = long_llama(**window), 1 << 15
    prompt = prompt_of(tokens, 8192)
    forward = make_forward(model)
    with watched(model) as seen, LargestTensor() as largest:
        (step,) = steps_of(forward, prompt, 1)
    assert seen.fed == [DEFAULT_PREFILL_CHUNK] * (tokens // DEFAULT_PREFILL_CHUNK)
    assert set(seen.logits) == {1}
    # a mask of a chunk against all, and nothing of [prompt, vocabulary] or [prompt, prompt]
    assert largest.elements <= DEFAULT_PREFILL_CHUNK * tokens < tokens * 8192
    kv = read_model(model.config.to_dict(), source="tiny")
    assert step.kv_bytes == footprint(kv, tokens=tokens, dtype="float32").total_bytes


@pytest.mark.slow
def test_8k_tokens_of_the_real_model_stay_within_the_footprint(smollm: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog, and then it rests. " * 533
    events = generate(smollm, text, raw=True, sampling={"temperature": 0}, stop=StopCriteria(max_new_tokens=2))
    with watched(smollm.model) as seen, LargestTensor() as largest:
        started, *steps = [event for event in events if isinstance(event, Started | Step)]
    assert isinstance(started, Started)
    tokens = len(started.prompt_ids)
    assert 7800 <= tokens <= 8191
    assert max(seen.fed) == DEFAULT_PREFILL_CHUNK
    assert set(seen.logits) == {1}
    assert largest.elements < tokens * 49152 // 8
    assert steps[-1].kv_bytes == footprint(smollm.kv, tokens=tokens + 1, dtype="float32").total_bytes


# The tables of exceptions are not stale


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(name for name, quirks in QUIRKS.items() if quirks.one_at_a_time))
def test_what_is_named_as_an_exception_still_is_one(model_type: str) -> None:
    model, prompt = tiny(model_type), prompt_of(23)
    way = PlainForward if type(make_forward(model)._forward) is PlainForward else PreparedForward  # type: ignore[attr-defined]
    with torch.inference_mode():
        whole = way(model)(prompt)
        try:
            forward = way(model)
            for start in range(0, 23, 7):
                logits = forward(prompt[start : start + 7])
        except Exception:
            return
    assert not torch.allclose(logits, whole, rtol=1e-4, atol=1e-4)
