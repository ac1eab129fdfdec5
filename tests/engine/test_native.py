"""The native engine against float64 products and transformers' own forward."""

from __future__ import annotations

import copy
import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.engine.backend import prepare_execution
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.kv_cache.kinds import make_cache
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.native import build, decoder, packed
from llminfer.engine.native import library as library_module
from llminfer.engine.native.decoder import FAMILIES, why_not_native
from llminfer.engine.native.forward import NativeForward
from llminfer.engine.native.library import FORMATS, Library, library
from llminfer.engine.native.packed import NATIVE_KERNELS, NativeLinear, pack
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.speculative_loop import decode_drafts
from llminfer.engine.weights.packed_layer import LazyWeight
from llminfer.engine.weights.packing import pack_model
from llminfer.errors import LlminferError, UsageError
from llminfer.events import Step
from llminfer.params import CacheOptions, Execution, SamplingParams
from tests.parity import output_of
from tests.tiny_models import tiny_config, tiny_ids, tiny_model

# the largest error of a weight, as a share of the largest weight of its block
_ROUNDING = {"float32": 0.0, "float16": 2**-11, "int8": 0.5 / 127 + 2**-11, "int4": 1.1 / 15}


def random_weight(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=generator) * 0.05


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 70),
    columns=st.integers(1, 130),
    tokens=st.integers(0, 40),
    bias=st.booleans(),
)
def test_a_packed_layer_is_a_product_with_what_it_holds(
    kind: str, rows: int, columns: int, tokens: int, bias: bool
) -> None:
    weight, offsets = random_weight(rows, columns), torch.randn(rows) if bias else None
    layer = pack(weight, offsets, kind)
    held = layer.dequantized()
    largest = weight.abs().max()
    assert (held - weight).abs().max() <= 2 * _ROUNDING[kind] * largest
    x = torch.randn(tokens, columns)
    expected = x.double() @ held.double().T + (offsets.double() if offsets is not None else 0.0)
    assert torch.allclose(layer(x).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("tokens", [1, 4, 7, 31, 32, 121, 250])
def test_few_and_many_vectors_take_different_roads_to_the_same_product(kind: str, tokens: int) -> None:
    layer = pack(random_weight(49, 1100), None, kind)
    x = torch.randn(tokens, 1100)
    assert torch.allclose(layer(x).double(), x.double() @ layer.dequantized().double().T, rtol=1e-4, atol=1e-3)


def test_blocks_of_gguf_files_keep_their_values() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = (torch.rand(40, 3, 1, generator=generator) * 0.01 + 0.001).half().float()
    eight = torch.randint(-127, 128, (40, 3, 32), generator=generator).float()
    eight[..., 0] = 127
    four = torch.randint(0, 16, (40, 3, 32), generator=generator).float()
    four[..., 0], four[..., 1] = 0, 15
    minima = (-torch.rand(40, 3, 1, generator=generator)).half().float()
    for kind, values in {
        "int8": eight * scales,  # q8_0
        "int4": four * scales + minima,  # q4_1
    }.items():
        weight = values.reshape(40, 96)
        assert torch.allclose(pack(weight, None, kind).dequantized(), weight, rtol=0, atol=1e-7)
    signed = (four - 8) * scales  # q4_0: the extreme is eight scales below zero
    weight = signed.reshape(40, 96)
    assert torch.allclose(pack(weight, None, "int4").dequantized(), weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_rows_are_looked_up_where_they_are(kind: str) -> None:
    layer = pack(random_weight(37, 50), None, kind)
    ids = torch.tensor([[0, 36, 7], [8, 8, 15]])
    assert torch.equal(layer.embedded(ids), layer.dequantized()[ids])
    with pytest.raises(IndexError):
        layer.embedded(torch.tensor([37]))


def test_zeros_and_extremes_pack() -> None:
    for kind in FORMATS:
        assert torch.equal(pack(torch.zeros(9, 40), None, kind).dequantized(), torch.zeros(9, 40))
        assert torch.isfinite(pack(torch.full((3, 33), 60000.0), None, kind).dequantized()).all()


def packed_pair(model_type: str, kind: str, **overrides: Any) -> tuple[Any, Any]:
    """A tiny model with packed weights, and one of transformers with the very values that are held."""
    model = tiny_model(tiny_config(model_type, **overrides), torch.float32)
    reference = copy.deepcopy(model)
    pack_model(model, kind, NATIVE_KERNELS)
    held = dict(model.named_modules())
    with torch.no_grad():
        for name, layer in reference.named_modules():
            if type(layer) is torch.nn.Linear:
                layer.weight.copy_(held[name].dequantized())
    return model, reference


def native_forward(model: Any) -> NativeForward:
    return NativeForward(
        model, decoder=decoder.Decoder(model), cache=make_cache(CacheOptions(kind="growing"), model, None)
    )


# tokens fed by each call: a prompt through either road, then one by one and several at once
_CALLS = ((3, 1, 1, 4, 1, 16, 1, 1, 1), (1, 1, 1, 1), (20, 1, 2, 1, 9, 1, 1))


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_logits_are_those_of_transformers(model_type: str, kind: str) -> None:
    assert why_not_native(tiny_config(model_type)) is None
    model, reference = packed_pair(model_type, kind)
    ids = tiny_ids(model.config, 1, 64)[0].tolist()
    with torch.inference_mode():
        for calls in _CALLS:
            ours, theirs, fed = native_forward(model), make_forward(reference), 0
            for count in calls:
                logits, expected = ours(ids[fed : fed + count]), theirs(ids[fed : fed + count])
                fed += count
                assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()
            assert list(ours.ids) == ids[:fed]


def test_attention_logits_are_capped() -> None:
    model, reference = packed_pair("gemma2", "float32", attn_logit_softcapping=0.5, final_logit_softcapping=0.7)
    ids = tiny_ids(model.config, 1, 12)[0].tolist()
    with torch.inference_mode():
        logits, expected = native_forward(model)(ids), make_forward(reference)(ids)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("olmo", {"clip_qkv": 0.02}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"hidden_act": "gelu", "tie_word_embeddings": True}),
        ("granite", {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0}),
    ],
)
def test_variants_within_a_family(model_type: str, overrides: dict[str, Any]) -> None:
    model, reference = packed_pair(model_type, "float32", **overrides)
    ids = tiny_ids(model.config, 1, 40)[0].tolist()
    with torch.inference_mode():
        ours, theirs = native_forward(model), make_forward(reference)
        for start, end in itertools.pairwise((0, 5, 6, 22, 40)):
            logits, expected = ours(ids[start:end]), theirs(ids[start:end])
            assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_ids_without_an_embedding_are_refused_and_nothing_is_read(dtype: torch.dtype, tied: bool) -> None:
    model = tiny_model(tiny_config("llama", tie_word_embeddings=tied), dtype)
    decoder_of = prepare_execution(model, Execution(engine="native", weights="float16"), "a model").factory
    assert decoder_of is not None
    size, cache = model.config.vocab_size, make_cache(CacheOptions(kind="growing"), model, None)
    with torch.inference_mode():
        for wrong in (size, -1, 2**40, -(2**40)):
            with pytest.raises(IndexError):
                decoder_of(model, cache=cache).last([3, wrong], 1)
        first = decoder_of(model, cache=make_cache(CacheOptions(kind="growing"), model, None)).last([3, size - 1], 1)
        assert torch.equal(decoder_of(model, cache=cache).last([3, size - 1], 1), first)


def test_more_tokens_than_a_step_takes_are_refused() -> None:
    model, _ = packed_pair("llama", "float32")
    native = decoder.Decoder(model)
    with pytest.raises(IndexError):
        native.step([3] * (native.most_tokens + 1), make_cache(CacheOptions(kind="growing"), model, None), 0)


def test_several_last_logits_are_those_of_single_steps() -> None:
    model, _ = packed_pair("qwen3", "int8")
    ids = tiny_ids(model.config, 1, 20)[0].tolist()
    with torch.inference_mode():
        ours = native_forward(model)
        ours(ids[:10])
        several = ours.last(ids[10:15], 4)
        assert ours.crop(10)
        single = torch.cat([ours(ids[place : place + 1]) for place in range(10, 15)])
    assert (several - single[1:]).abs().max() < 1e-5 * single.abs().max()


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_what_is_no_number_is_not_rounded_away(kind: str) -> None:
    model, _ = packed_pair("llama", kind)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.nan
    ids = tiny_ids(model.config, 1, 6)[0].tolist()
    with torch.inference_mode():
        assert not torch.isfinite(native_forward(model)(ids)).all()
        assert not torch.isfinite(pack(random_weight(9, 40), None, kind)(torch.full((1, 40), torch.inf))).all()


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_a_model_with_a_layer_that_no_format_holds_is_run_by_transformers(kind: str) -> None:
    model = tiny_model(tiny_config("llama"), torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    prepared = prepare_execution(model, Execution(engine="native", weights=kind), "a model")
    assert prepared.factory is None
    assert any("not all of its linear layers are packed" in note for note in prepared.notes)


class HalfRight:
    """Drafts what will come, and then something else; so a draft is always taken back in part."""

    forward = None
    notes: tuple[str, ...] = ()

    def __init__(self, whole: list[int]) -> None:
        self._whole = whole

    def __call__(self, ids: Sequence[int], most: int) -> Sequence[int]:
        right = self._whole[len(ids) : len(ids) + 3]
        return [*right, *((token_id + 1) % 90 for token_id in self._whole[len(ids) + 3 : len(ids) + 6])][:most]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_speculation_changes_no_token(model_type: str) -> None:
    model, _ = packed_pair(model_type, "float32")
    params, prompt = SamplingParams(temperature=0.9, seed=5), list(range(3, 15))
    plain = our_steps_of(native_forward(model), params, prompt)
    whole = [*prompt, *(step.token_id for step in plain)]
    steps = list(
        decode_drafts(
            native_forward(model),
            HalfRight(whole),
            make_sampler(params, prompt, model.device),
            output_of(24),
            Clock(),
            prompt_ids=prompt,
            draft_tokens=6,
        )
    )
    assert [step.token_id for step in steps] == whole[len(prompt) :]
    assert sum(step.drafted for step in steps) > sum(step.accepted for step in steps) > 8


def our_steps_of(forward: NativeForward, params: SamplingParams, prompt: list[int]) -> list[Step]:
    sample = make_sampler(params, prompt, torch.device("cpu"))
    return list(decode(forward, sample, output_of(24), Clock(), prompt_ids=prompt))


def test_what_has_no_native_decoder_says_why() -> None:
    for model_type, overrides, why in (
        ("gpt2", {}, "gpt2 is not one of"),
        ("llama", {"head_dim": 12}, "not a multiple of 8"),
        ("llama", {"hidden_act": "relu"}, "relu has no kernel"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rotations"),
    ):
        assert why in (why_not_native(tiny_config(model_type, **overrides)) or "")


@pytest.fixture
def threads() -> Iterator[Any]:
    yield library().threads
    library().threads(torch.get_num_threads())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_logits(count: int, threads: Any) -> None:
    model, reference = packed_pair("llama", "int4")
    ids = tiny_ids(model.config, 1, 30)[0].tolist()
    threads(count)
    with torch.inference_mode():
        ours, theirs = native_forward(model), make_forward(reference)
        for start, end in itertools.pairwise((0, 3, 4, 5, 20, 30)):
            logits, expected = ours(ids[start:end]), theirs(ids[start:end])
            assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("record", ["MatrixRecord", "LayerRecord", "ModelRecord"])
def test_records_of_other_sizes_than_those_in_c_are_refused(monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    path = str(build.native_library())
    longer = type(record, (getattr(library_module, record),), {"_fields_": [("one_more", ctypes.c_int64)]})
    records = [longer if kind.__name__ == record else kind for kind in library_module._RECORDS]
    monkeypatch.setattr(library_module, "_RECORDS", tuple(records))
    with pytest.raises(LlminferError, match="records of other sizes"):
        Library(path)


@pytest.mark.slow
def test_without_vector_instructions_the_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = Library(str(build.native_library(portable=True)))
    assert portable.vectors() in (b"portable", b"NEON")
    weights = {kind: random_weight(43, 100) for kind in FORMATS}
    x = {tokens: torch.randn(tokens, 100) for tokens in (1, 5, 50)}
    expected = {(kind, tokens): pack(weights[kind], None, kind)(x[tokens]) for kind in FORMATS for tokens in x}
    held = {kind: pack(weights[kind], None, kind).packed for kind in FORMATS}
    for module in (packed, decoder):
        monkeypatch.setattr(module, "library", lambda: portable)
    for kind in FORMATS:
        layer = pack(weights[kind], None, kind)
        assert torch.equal(layer.packed, held[kind])
        for tokens in x:
            assert torch.allclose(layer(x[tokens]), expected[kind, tokens], rtol=1e-4, atol=1e-5)
    model, reference = packed_pair("gemma3_text", "int4")
    ids = tiny_ids(model.config, 1, 20)[0].tolist()
    with torch.inference_mode():
        logits, wanted = native_forward(model)(ids[:9]), make_forward(reference)(ids[:9])
    assert (logits - wanted).abs().max() < 2e-4 * wanted.abs().max()


def test_a_tied_head_is_held_once() -> None:
    model = tiny_model(tiny_config("llama", tie_word_embeddings=True), torch.float32)
    pack_model(model, "int4", NATIVE_KERNELS)
    assert isinstance(model.get_input_embeddings().__dict__["weight"], LazyWeight)
    assert isinstance(model.get_output_embeddings(), NativeLinear)
    assert model.get_output_embeddings().format == "int8"
    assert not any(parameter.dim() == 2 for parameter in model.parameters())


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler that writes `built` and takes no time, and an empty cache; returns the cache."""
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho built > "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_library_and_its_folders_are_closed_to_others(fake_compiler: Path) -> None:
    before = os.umask(0)
    try:
        library_file = build.native_library()
    finally:
        os.umask(before)
    for path in (library_file, library_file.parent, library_file.parent.parent):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_library_that_others_can_write_is_built_again(fake_compiler: Path, mode: int) -> None:
    library_file = build.native_library()
    library_file.write_text("planted")
    library_file.parent.chmod(mode)
    library_file.chmod(mode)
    assert build.native_library() == library_file
    assert library_file.read_text() == "built\n"
    assert library_file.parent.stat().st_mode & 0o022 == 0
    library_file.write_text("kept")
    assert build.native_library().read_text() == "kept"


def test_a_folder_of_another_user_or_a_link_is_refused(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library_file = build.native_library()
    with monkeypatch.context() as other:
        other.setattr(build.os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(LlminferError, match="belongs to another user"):
            build.native_library()
    moved = library_file.parent.rename(tmp_path / "elsewhere")
    library_file.parent.symlink_to(moved)
    with pytest.raises(LlminferError, match="no code is loaded from it"):
        build.native_library()


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler"):
        build.native_library()


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'engine.cpp:1: error: no such processor' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(LlminferError, match="no such processor"):
        build.native_library()
    assert not list((tmp_path / "cache").rglob("engine.so"))
