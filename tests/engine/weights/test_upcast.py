"""16-bit models on CPUs without 16-bit arithmetic: float32 products for prompts, the same cache, errors no larger."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.kv_cache.tensors import cache_bytes
from llminfer.engine.load import load
from llminfer.engine.weights import upcast
from llminfer.engine.weights.upcast import WIDE_FROM_TOKENS, WideLinear, widen_slow_products
from tests.tiny_models import tiny_config, tiny_model

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
PROMPT = list(range(3, 40))


@pytest.fixture(autouse=True)
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A CPU with the named abilities; without any at first."""

    def pretend(*abilities: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(abilities, True), raising=False)

    pretend()
    return pretend


def tiny(model_type: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return tiny_model(tiny_config(model_type), torch.float32).to(dtype).eval()


@torch.inference_mode()
def run(model: Any) -> tuple[torch.Tensor, int | None]:
    """The last logits after a prompt and a token more, and the bytes of the cache."""
    forward = make_forward(model)
    first = forward(PROMPT).float()
    return torch.cat([first, forward([7]).float()]), cache_bytes(forward.cache)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "gemma2", "mamba"])
def test_errors_are_no_larger_and_the_cache_is_the_same(model_type: str, dtype: torch.dtype) -> None:
    narrow = tiny(model_type, dtype)
    # the same rounded weights in float32: what an exact computation would give
    exact, _ = run(copy.deepcopy(narrow).float())
    wide = copy.deepcopy(narrow)
    assert widen_slow_products(wide)
    (narrow_logits, narrow_bytes), (wide_logits, wide_bytes) = run(narrow), run(wide)
    # a rounding of the results remains, which may fall either way
    epsilon = torch.finfo(dtype).eps * exact.abs().max()
    assert (wide_logits - exact).abs().mean() <= (narrow_logits - exact).abs().mean() + epsilon / 4
    assert wide_bytes == narrow_bytes


@given(tokens=st.integers(1, 9), rows=st.integers(1, 3), bias=st.booleans(), dtype=st.sampled_from(SIXTEEN_BITS))
def test_a_linear_layer_rounds_its_exact_result_once(tokens: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    model = nn.Sequential(nn.Linear(24, 10, bias=bias)).to(dtype)
    x = torch.randn(rows, tokens, 24).to(dtype)
    widen_slow_products(model)
    with torch.inference_mode():
        result, narrow = model(x), nn.functional.linear(x, model[0].weight, model[0].bias)
        exact = nn.functional.linear(x.double(), model[0].weight.double(), None if not bias else model[0].bias.double())
    assert result.dtype is dtype
    assert result.shape == (rows, tokens, 10)
    if rows * tokens < WIDE_FROM_TOKENS:
        assert torch.equal(result, narrow)
    else:
        torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_weights_keep_their_type_names_and_place(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Conv1D(4, 8)).to(dtype)
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.state_dict().items()}
    assert widen_slow_products(model) == (
        f"prompts are multiplied in float32, since this CPU has no fast {str(dtype)[6:]}",
    )
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize(
    ("dtype", "abilities"),
    [
        (torch.float32, ()),
        (torch.bfloat16, ("avx512_bf16",)),
        (torch.bfloat16, ("amx_bf16",)),
        (torch.bfloat16, ("bf16",)),
        (torch.float16, ("avx512_fp16",)),
    ],
)
def test_what_is_fast_stays_as_it_is(
    slow_cpu: Callable[..., None], dtype: torch.dtype, abilities: tuple[str, ...]
) -> None:
    slow_cpu(*abilities)
    model = nn.Sequential(nn.Linear(8, 8)).to(dtype)
    assert widen_slow_products(model) == ()
    assert type(model[0]) is nn.Linear


def test_a_layer_with_a_product_of_its_own_stays_as_it_is() -> None:
    class Packed(nn.Linear):
        pass

    model = nn.Sequential(Packed(8, 8)).to(torch.bfloat16)
    assert widen_slow_products(model) == ()
    assert type(model[0]) is Packed


def test_a_load_widens_and_says_so(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(inspect_checkpoint(tiny_llama), device="cpu", dtype="bfloat16")
    kinds = {type(module) for module in loaded.model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {WideLinear}
    assert any("no fast bfloat16" in note for note in loaded.notes)
    monkeypatch.setattr(upcast, "computes_fast", lambda dtype, device: True)
    assert not any("bfloat16" in note for note in load(inspect_checkpoint(tiny_llama), dtype="bfloat16").notes)
