"""Packed linear layers compute with the weights that they say they hold, and models run from them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from llminfer.engine.backend import prepare_execution
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.machine.clock import Clock
from llminfer.engine.model import LoadedModel
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.speculative_loop import decode_drafts
from llminfer.engine.weights import packed_linear
from llminfer.engine.weights.packed_layer import PackedLinear
from llminfer.engine.weights.packed_linear import FEW_TOKENS, TORCH_KERNELS
from llminfer.engine.weights.packing import NO_GAIN, READ_ELSEWHERE, Packing, held_bytes, held_parts, pack_model
from llminfer.params import MAX_DRAFT_TOKENS, WEIGHTS, CacheOptions, Execution, SamplingParams
from tests.parity import (
    CANNOT_RUN,
    GREEDY,
    LONG,
    assert_same,
    our_steps,
    output_of,
    prepare_for_comparison,
    prompt_of,
)
from tests.tiny_models import tiny_config, tiny_model

# largest error of an element against the largest of its row (int8) or of the span of its group (int4)
STEP = {"float32": 0.0, "float16": 2**-11, "int8": 0.51 / 127, "int4": 0.53 / 15}
# bfloat16 activations and products, where the kernels of a format have them
ROUNDING = {"float32": 1e-5, "float16": 1e-5, "int8": 0.02, "int4": 0.02}


def random_layer(rows: int, columns: int, *, biased: bool, seed: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return weight, torch.randn(rows, generator=generator) if biased else None


@pytest.mark.parametrize("name", WEIGHTS)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 100),
    columns=st.integers(1, 150),
    tokens=st.sampled_from((1, 2, 5, FEW_TOKENS, FEW_TOKENS + 1)),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_layer_computes_with_the_weight_that_it_shows(
    name: str, rows: int, columns: int, tokens: int, biased: bool, seed: int
) -> None:
    weight, bias = random_layer(rows, columns, biased=biased, seed=seed)
    layer = TORCH_KERNELS.make[name](weight, bias)
    shown = layer.dequantized()
    assert (layer.format, shown.shape, shown.dtype) == (name, weight.shape, torch.float32)
    span = weight.abs().amax(dim=1, keepdim=True) if name != "int4" else weight.amax() - weight.amin()
    # int4 has a zero point in bfloat16 besides
    offset = 2**-8 * weight.abs().amax() if name == "int4" else 0.0
    assert bool(((shown - weight).abs() <= STEP[name] * span + offset + 1e-6).all())
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    expected = nn.functional.linear(x, shown, bias)
    size = float((x.abs() @ shown.abs().T).amax()) + 1e-6
    assert float((layer(x) - expected).abs().amax()) <= ROUNDING[name] * size
    ids = torch.tensor([[0, rows - 1], [rows // 2, 0]])
    assert torch.equal(layer.embedded(ids), shown[ids])
    # what code gets that reads the weight past the layer
    assert (layer.weight.shape, layer.weight.dtype) == (weight.shape, torch.float32)
    assert torch.equal(layer.weight + 0, shown)
    assert torch.equal(nn.functional.embedding(ids, layer.weight), shown[ids])


@pytest.mark.parametrize("name", WEIGHTS)
def test_any_shape_and_type_of_input_comes_out_as_it_went_in(name: str) -> None:
    layer = TORCH_KERNELS.make[name](*random_layer(40, 64, biased=True, seed=0))
    for shape in ((1,), (2, 3), (2, 0), (4, FEW_TOKENS)):
        for dtype in (torch.float32, torch.bfloat16):
            y = layer(torch.randn(*shape, 64).to(dtype))
            assert (y.shape, y.dtype) == ((*shape, 40), dtype)
    # a view with gaps, as slices of a larger result are
    x = torch.randn(3, 100)[:, :64]
    assert torch.allclose(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_of_zeros_and_columns_of_one_value_stay_so(name: str) -> None:
    weight = torch.zeros(32, 64)
    weight[1] = 0.25
    assert torch.equal(TORCH_KERNELS.make[name](weight, None).dequantized(), weight) or name == "int8"
    assert torch.allclose(TORCH_KERNELS.make[name](weight, None).dequantized(), weight, rtol=4e-3)


def test_many_rows_are_dequantized_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(FEW_TOKENS + 1, 64)
    for name in ("int8", "int4"):
        layer = TORCH_KERNELS.make[name](*random_layer(300, 64, biased=True, seed=1))
        monkeypatch.setattr(packed_linear, "_PIECE_ELEMENTS", 2**22)
        whole = layer(x)
        monkeypatch.setattr(packed_linear, "_PIECE_ELEMENTS", 64 * 50)
        assert torch.allclose(layer(x), whole, atol=1e-5)


def test_without_a_kernel_the_same_weights_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = random_layer(70, 100, biased=True, seed=2)
    x = torch.randn(2, 100)
    fast = {name: TORCH_KERNELS.make[name](weight, bias) for name in ("float16", "int4")}
    monkeypatch.setattr(packed_linear, "int4_panel", lambda: None)
    monkeypatch.setattr(packed_linear, "has_fbgemm", lambda: False)
    for name, layer in fast.items():
        plain = TORCH_KERNELS.make[name](weight, bias)
        assert torch.equal(plain.dequantized(), layer.dequantized())
        assert torch.allclose(plain(x), nn.functional.linear(x, layer.dequantized(), bias), atol=1e-4)


def test_held_bytes_are_those_of_the_format() -> None:
    weight, _ = random_layer(128, 256, biased=False, seed=3)  # whole panels of every processor's layouts
    sizes = {name: TORCH_KERNELS.make[name](weight, None).held_bytes for name in WEIGHTS}
    elements = weight.numel()
    assert sizes == {
        "float32": 4 * elements,
        "float16": 2 * elements,
        "int8": elements + 2 * 128,
        "int4": elements // 2 + 2 * 2 * elements // 32,
    }


@pytest.mark.parametrize(("rows", "columns"), [(70, 700), (64, 1024), (33, 511), (100, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_holds_no_more_than_the_weight_did(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight, _ = random_layer(rows, columns, biased=False, seed=4)
    layer = TORCH_KERNELS.make["float16"](weight.to(dtype), None)
    assert 2 * weight.numel() <= layer.held_bytes <= dtype.itemsize * weight.numel()
    assert torch.equal(layer.dequantized(), weight.to(dtype).half().float())
    x = torch.randn(2, 3, columns)
    assert torch.allclose(layer(x), nn.functional.linear(x, layer.dequantized()), atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_token_beside_as_many_as_a_draft_has_is_computed_as_it_is_alone(name: str) -> None:
    layer = TORCH_KERNELS.make[name](*random_layer(200, 96, biased=True, seed=5))
    x = torch.randn(MAX_DRAFT_TOKENS + 1, 96)
    alone = torch.cat([layer(row) for row in x.split(1)])
    # a kernel gives the same bits; without one the sums of float32 products may come in another order
    for tokens in range(1, len(x) + 1):
        assert float((layer(x[:tokens]) - alone[:tokens]).abs().amax()) <= 1e-5 * float(alone.abs().amax())


def run(model: Any, ids: list[int]) -> Tensor:
    """The logits after a prompt and after each of three single tokens."""
    torch.manual_seed(0)
    with torch.no_grad():
        forward = make_forward(model)
        return torch.cat([forward(ids[:-3]), *(forward([token_id]) for token_id in ids[-3:])]).float()


def packed_model(model_type: str, name: str) -> tuple[Any, Packing]:
    model = tiny_model(tiny_config(model_type), torch.float32)
    prepare_for_comparison(model)
    return model, pack_model(model, name)


def with_shown_weights(packed: Any, model_type: str) -> Any:
    """The model with the same float32 layers in place of packed ones, whose weights are what those show."""
    model = tiny_model(tiny_config(model_type), torch.float32)
    prepare_for_comparison(model)
    layers = dict(packed.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(layers.get(name), PackedLinear):
            shown = layers[name].dequantized()
            module.weight.data.copy_(shown.T if type(module).__name__ == "Conv1D" else shown)
    return model


def check_format(model_type: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Packing:
    """The packed model's logits are those of a plain one that has the same weights."""
    monkeypatch.setattr(packed_linear, "FEW_TOKENS", 0)  # products in float32, so that rounding is all that differs
    packed, packing = packed_model(model_type, name)
    ids = prompt_of(LONG)
    got, expected = run(packed, ids), run(with_shown_weights(packed, model_type), ids)
    scale = float(expected[expected.isfinite()].std()) if bool(expected.isfinite().any()) else 1.0
    close = torch.allclose(got, expected, rtol=0, atol=1e-3 * scale, equal_nan=True)
    assert close, f"{model_type} {name}: off by {float((got - expected).abs().max() / scale)}"
    return packing


REPRESENTATIVES = ("llama", "gpt2", "gemma3_text", "mamba", "falcon_h1", "bloom", "cpmant", "qwen3_next", "xlnet")


def every_type() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow)
        for name in tiny_types()
        if name not in CANNOT_RUN
    ]


def tiny_types() -> tuple[str, ...]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", every_type())
def test_a_packed_model_is_the_plain_one_with_rounded_weights(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = check_format(model_type, "int4", monkeypatch)
    assert packing.layers or set(packing.left.values()) == {NO_GAIN}
    assert not packing.layers or packing.after_bytes < packing.before_bytes


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "mamba"])
@pytest.mark.parametrize("name", ["float16", "int8"])
def test_the_other_formats_are_too(model_type: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_format(model_type, name, monkeypatch)


@pytest.mark.parametrize("model_type", every_type())
def test_float32_weights_give_the_same_tokens(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type), torch.float32)
    prepare_for_comparison(model)
    packed = copy.deepcopy(model)
    pack_model(packed, "float32")
    # log-probabilities are compared as well, so one way to draw is enough
    plain = [(step.token_id, step.logprob) for step in our_steps(model, prompt_of(5), 3, GREEDY)]
    assert_same(our_steps(packed, prompt_of(5), 3, GREEDY), plain, model_type)


def test_layers_whose_weights_the_code_reads_are_left_alone() -> None:
    model, packing = packed_model("mamba", "int8")
    assert {name.rsplit(".")[-1] for name in packing.left} == {"dt_proj"}
    assert set(packing.left.values()) == {READ_ELSEWHERE}
    # of its head the code reads the type alone
    assert isinstance(model.lm_head, PackedLinear)
    assert all(type(module).__name__ != "Watching" for module in model.modules())


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_tied_weight_is_held_once_or_said_to_be_held_twice(name: str) -> None:
    model, packing = packed_model("gpt2", name)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert packing.copied_bytes == 0  # FBGEMM's layout, whose rows cannot be read, is for wider layers
    ids = torch.arange(embedding.num_embeddings)
    assert torch.equal(embedding(ids), head.dequantized())
    assert held_bytes(model) == packing.after_bytes + packing.kept_bytes


@pytest.fixture(scope="module")
def teacher(smollm: LoadedModel) -> tuple[list[int], Tensor]:
    """Ids of a text, and the log-probabilities that float32 weights give for each next token."""
    text = "The tide rises twice a day because the moon pulls at the water on the near side."
    ids = smollm.tokenizer(text)["input_ids"]
    return ids, teacher_forced(smollm.model, ids)


def teacher_forced(model: Any, ids: list[int]) -> Tensor:
    """Log-probabilities after each id, fed one at a time, shape [ids, vocabulary]."""
    with torch.no_grad():
        forward = make_forward(model)
        return torch.cat([forward([token_id]) for token_id in ids]).log_softmax(dim=-1)


# what a format may cost on this text: mean KL divergence and the share of most likely tokens that stay
BOUNDS = {"float32": (1e-6, 1.0), "float16": (1e-4, 1.0), "int8": (0.03, 0.75), "int4": (0.03, 0.75)}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_format_costs_the_real_model_no_more_than_its_bound(
    name: str, smollm: LoadedModel, teacher: tuple[list[int], Tensor]
) -> None:
    model = copy.deepcopy(smollm.model)
    pack_model(model, name)
    ids, expected = teacher
    got = teacher_forced(model, ids)
    divergence = float((expected.exp() * (expected - got)).sum(dim=-1).mean())
    agreement = float((got.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean())
    assert divergence <= BOUNDS[name][0], divergence
    assert agreement >= BOUNDS[name][1], agreement
    # FBGEMM fills this model's 576 columns up to 1024
    share = {"float32": 1.0, "float16": 0.84, "int8": 0.26, "int4": 0.18}[name]
    assert held_bytes(model) <= share * held_bytes(smollm.model)


# Nothing grows


SIZES = {"hidden_size": 64, "vocab_size": 320, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}


def in_type(model_type: str, dtype: torch.dtype, *, tied: bool) -> Any:
    model = tiny_model(tiny_config(model_type, **SIZES, tie_word_embeddings=tied), dtype)
    prepare_for_comparison(model)
    return model


def vectors(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)


@pytest.mark.parametrize("engine", ["transformers", "native"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_model_holds_no_more_than_its_checkpoint(
    model_type: str, tied: bool, dtype: torch.dtype, name: str, engine: str
) -> None:
    if name == "float32":
        dtype = torch.float32  # in which such a checkpoint is read
    model = in_type(model_type, dtype, tied=tied)
    before, copied = held_bytes(model), 2 * vectors(model)
    prepared = prepare_execution(model, Execution(weights=name, engine=engine), "a model")
    parts = held_parts(model)
    # of a 16-bit checkpoint half-precision layers hold as much, and vectors are float32 then
    assert sum(parts.values()) <= before + (copied if name == "float16" and dtype is torch.bfloat16 else 0)
    assert sum(parts.values()) == held_bytes(model)
    assert bool(parts["experts"]) == (model_type != "llama")
    assert any(note.startswith("held: linear layers ") for note in prepared.notes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("engine", ["transformers", "native"])
@pytest.mark.parametrize("name", ["float16", "int8", "int4"])
@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("llama", True), ("qwen3_moe", False)])
def test_a_16_bit_model_computes_with_what_it_holds(model_type: str, tied: bool, name: str, engine: str) -> None:
    model = in_type(model_type, torch.bfloat16, tied=tied)
    prepared = prepare_execution(model, Execution(weights=name, engine=engine), "a model")
    layers = dict(model.named_modules())
    plain = in_type(model_type, torch.bfloat16, tied=False).float()
    for path, module in plain.named_modules():
        held = layers[path]
        for own, parameter in module._parameters.items():
            if parameter is not None:
                shown = held.dequantized() if isinstance(held, PackedLinear) and own == "weight" else getattr(held, own)
                parameter.data.copy_(shown + 0)
    ids = prompt_of(LONG)
    with torch.no_grad():
        forward = make_forward(model, options=CacheOptions(kind="growing"), factory=prepared.factory)
        got = torch.cat([forward(ids[:-3]), *(forward([token_id]) for token_id in ids[-3:])])
    expected = run(plain, ids)
    rounding = 0.05 if engine == "transformers" and name in ("int8", "int4") else 1e-3
    assert (got - expected).abs().max() < rounding * expected.std() * 4


def test_a_tied_float32_weight_is_no_larger_in_half_precision() -> None:
    weight, _ = random_layer(96, 600, biased=False, seed=6)
    embedding, head = nn.Embedding(96, 600), nn.Linear(600, 96, bias=False)
    head.weight = embedding.weight
    embedding.weight.data.copy_(weight)
    packed = TORCH_KERNELS.make_tied["float16"](head.weight, None)
    copied = 0 if packed.finds_rows else 2 * weight.numel()
    assert packed.held_bytes + copied <= embedding.weight.nbytes
    assert torch.equal(packed.dequantized(), weight.half().float())


class AllRight:
    """Drafts what will come, as much of it as may be."""

    forward = None
    notes: tuple[str, ...] = ()

    def __init__(self, whole: list[int]) -> None:
        self._whole = whole

    def __call__(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return self._whole[len(ids) : len(ids) + most]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_longest_draft_changes_no_token(name: str) -> None:
    model = in_type("llama", torch.float32, tied=False)
    pack_model(model, name)
    prompt, params = prompt_of(5), SamplingParams(temperature=0.9, seed=5)
    plain = our_steps(model, prompt, 80, params)
    whole = [*prompt, *(step.token_id for step in plain)]
    drafted = list(
        decode_drafts(
            make_forward(model),
            AllRight(whole),
            make_sampler(params, prompt, model.device),
            output_of(80),
            Clock(),
            prompt_ids=prompt,
            draft_tokens=MAX_DRAFT_TOKENS,
        )
    )
    assert max(step.drafted for step in drafted) == MAX_DRAFT_TOKENS
    assert [step.token_id for step in drafted] == [step.token_id for step in plain]
    # attention adds up in another order, and a last bit of float32 may tip an activation's bfloat16
    for ours, theirs in zip(drafted, plain, strict=True):
        assert abs(ours.logprob - theirs.logprob) < 5e-3
