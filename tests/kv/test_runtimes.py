"""Each runtime's rules on small models, with the bytes worked out in the test."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.errors import InvalidParams, UnsupportedArchitecture, UsageError
from llminfer.kv.footprint import Footprint, footprint, total_bytes
from llminfer.kv.layer import LayerKV, ModelKV, PerToken
from llminfer.kv.runtimes.table import RUNTIMES
from llminfer.kv.setup import CacheSetup
from tests.kv.models import any_model, attention, model, recurrent


def sizes(of: ModelKV, tokens: int, *, batch: int = 1, dtype: str | None = None) -> dict[str, int]:
    found = {}
    for name in RUNTIMES:
        try:
            found[name] = footprint(of, tokens=tokens, batch=batch, runtime=name, dtype=dtype).total_bytes
        except UnsupportedArchitecture:
            continue
    return found


def test_windows_are_kept_as_each_runtime_keeps_them() -> None:
    # three windows of 8 and one full layer, 2 heads of 16, 2 bytes: 128 bytes a token and layer
    windows = model(*[attention(2, 16, window=8)] * 3, attention(2, 16))
    assert sizes(windows, 100) == {
        "transformers": (3 * 7 + 100) * 128,  # 15488
        "transformers-static": (3 * 8 + 100) * 128,  # 15872
        "llminfer": 4 * 256 * 128,
        "vllm": (3 * (7 + 1) * 16 + 7 * 16) * 128,  # min(7 + 2048, 100) tokens are 7 blocks, and one more
        "llama.cpp": 4 * 256 * 128,
        "ideal": (3 * 8 + 100) * 128,
    }
    short = sizes(windows, 5)
    assert short["transformers"] == short["transformers-static"] == short["ideal"] == 4 * 5 * 128


def test_the_three_meanings_of_bytes_are_told_apart_where_they_differ() -> None:
    windows = model(*[attention(2, 16, window=8)] * 3, attention(2, 16))
    found = footprint(windows, tokens=100)
    assert {peak.name: peak.size_bytes for peak in found.peaks} == {
        "storage after prefill": 4 * 100 * 128,
        "storage after the next step": (3 * 8 + 101) * 128,
    }
    assert footprint(windows, tokens=6).peaks == ()
    # nothing is cut yet, but the next step cuts
    assert {peak.size_bytes for peak in footprint(windows, tokens=7).peaks} == {4 * 7 * 128, 4 * 8 * 128}
    assert footprint(model(attention(2, 16)), tokens=100).peaks == ()


def test_a_window_of_one_keeps_everything_in_transformers() -> None:
    assert footprint(model(attention(2, 16, window=1)), tokens=50).total_bytes == 50 * 128


def test_a_growing_layer_has_whole_blocks_and_a_window_stops_growing() -> None:
    full, window = model(attention(2, 16)), model(attention(2, 16, window=1000))

    def of(layers: ModelKV, tokens: int) -> int:
        return footprint(layers, tokens=tokens, runtime="llminfer").total_bytes // 128

    assert [of(full, tokens) for tokens in (0, 1, 256, 257, 8192, 8193)] == [0, 256, 256, 512, 8192, 8448]
    # 999 kept tokens and 128 to shift by are five blocks
    assert [of(window, tokens) for tokens in (256, 1000, 1025, 1281, 10**6)] == [256, 1024, 1280, 1280, 1280]
    assert of(model(attention(2, 16, window=1)), 600) == 768
    found = footprint(full, tokens=300, runtime="llminfer")
    assert (found.bytes_per_token, found.block_tokens) == (128, 256)


def test_what_growing_layers_do_not_hold_is_not_in_blocks() -> None:
    indexed = LayerKV(
        kind="latent",
        latent=True,
        tensors=(PerToken(name="latent", heads=1, dim=32), PerToken(name="indexer", heads=1, dim=8)),
    )
    hybrid = LayerKV(kind="hybrid", tensors=attention(2, 16).tensors, states=recurrent(64, 4, 16).states)
    assert footprint(model(indexed), tokens=10, runtime="llminfer").total_bytes == (256 * 32 + 10 * 8) * 2
    both = footprint(model(hybrid), tokens=10)
    assert footprint(model(hybrid), tokens=10, runtime="llminfer").total_bytes == both.total_bytes


def test_states_have_their_own_type_and_columns_in_each_runtime() -> None:
    states = model(recurrent(64, 4, 16))
    assert sizes(states, 10) == {
        "transformers": 64 * 4 * 2 + 64 * 16 * 4,
        "transformers-static": 64 * 4 * 2 + 64 * 16 * 4,
        "llminfer": 64 * 4 * 2 + 64 * 16 * 4,
        "vllm": 64 * 3 * 2 + 64 * 16 * 2,
        "llama.cpp": 64 * 3 * 4 + 64 * 16 * 4,
        "ideal": 64 * 3 * 2 + 64 * 16 * 2,
    }
    for runtime in sizes(states, 10):
        found = footprint(states, tokens=10, batch=3, runtime=runtime)
        assert found.state_bytes == found.total_bytes == sizes(states, 999, batch=3)[runtime]
        assert found.bytes_per_token == 0


def test_a_block_type_of_the_cache_leaves_states_in_the_models_type() -> None:
    both = model(attention(1, 32), recurrent(64, 4, 16))
    expected = 10 * 2 * 34 + 64 * 4 * 2 + 64 * 16 * 4
    assert footprint(both, tokens=10, dtype="q8_0").total_bytes == expected


@pytest.mark.parametrize(
    ("dtype", "size_bytes"),
    [
        ("float32", 4096),
        ("fp32", 4096),
        ("bfloat16", 2048),
        ("fp8", 1024),
        ("int8", 1024),
        ("int4", 512),
        ("q8_0", 1088),
        ("q5_1", 768),
        ("q5_0", 704),
        ("q4_1", 640),
        ("q4_0", 576),
    ],
)
def test_scales_of_block_types_are_counted(dtype: str, size_bytes: int) -> None:
    # 16 tokens of K and V, each of one head of 32: 1024 elements
    assert footprint(model(attention(1, 32)), tokens=16, dtype=dtype).total_bytes == size_bytes


def test_keys_and_values_may_differ_in_type() -> None:
    found = footprint(model(attention(1, 32)), tokens=16, k_dtype="q8_0", v_dtype="q4_0")
    assert found.total_bytes == 544 + 288
    assert (found.k_dtype, found.v_dtype, found.dtype) == ("q8_0", "q4_0", "bfloat16")


def test_latents_are_one_head_in_every_runtime_that_keeps_them() -> None:
    latent = LayerKV(
        kind="latent",
        latent=True,
        tensors=(PerToken(name="latent", heads=1, dim=32), PerToken(name="rope_key", heads=1, dim=8)),
    )
    of = model(*[latent] * 3, model_type="deepseek_v3")
    per_token = {name: size // 256 for name, size in sizes(of, 256).items() if name != "transformers-quantized"}
    assert set(per_token.values()) == {240}
    other = model(latent, model_type="minicpm3")
    transformers = {"transformers", "transformers-static", "transformers-quantized"}
    assert set(sizes(other, 256)) == {*transformers, "llminfer", "ideal"}


def test_vllm_raises_the_attention_block_until_a_state_fits_its_page() -> None:
    # a state of (64 · 3 + 64 · 16) · 2 = 2432 bytes; 2 heads of 16 are 128 bytes a token: 19 tokens, so 32
    hybrid = model(attention(2, 16), *[recurrent(64, 4, 16)] * 2)
    found = footprint(hybrid, tokens=100, runtime="vllm")
    assert found.layer_bytes == (4 * 32 * 128, 32 * 128, 32 * 128)
    assert found.block_tokens == 32
    assert found.notes == ("attention blocks of 32 tokens",)


def test_vllm_pads_groups_of_layers() -> None:
    found = footprint(model(*[attention(2, 16)] * 2, *[attention(2, 16, window=8)] * 5), tokens=64, runtime="vllm")
    # 5 windows make three groups of two: one layer more, of 4 blocks and one
    assert found.padding_bytes == 5 * 16 * 128
    # 2 and 3 are nearly alike: groups of three, so one more full layer
    found = footprint(model(*[attention(2, 16)] * 3, *[attention(2, 16, window=8)] * 4), tokens=64, runtime="vllm")
    assert found.padding_bytes == 4 * 16 * 128


def test_quantized_counts_scales_and_the_tokens_that_wait() -> None:
    of = model(attention(2, 32))
    found = footprint(of, tokens=1128, runtime="transformers-quantized")
    # 1001 tokens of 64 elements: one group each, K and V; quanto's rows hold two groups
    assert found.total_bytes == 2 * (math.ceil(1001 / 2) * 64 + 1001 * 4 + 127 * 64 * 2)
    after_prefill, during_a_step = found.peaks
    assert after_prefill.size_bytes == 1128 * 2 * 64 * 9 // 16
    assert during_a_step.size_bytes == found.total_bytes + 1128 * 2 * 64 * 2
    assert footprint(of, tokens=1, runtime="transformers-quantized").total_bytes == 2 * (64 + 4)
    for dtype, sixteenths in (("int2", 5), ("int4", 9), ("int8", 17)):
        found = footprint(of, tokens=1024, dtype=dtype, runtime="transformers-quantized")
        assert found.peaks[0].size_bytes == 1024 * 2 * 64 * sixteenths // 16


@pytest.mark.parametrize("layer", [attention(2, 32, window=8), recurrent(64, 4, 16), LayerKV(kind="none")])
def test_quantized_refuses_what_quantized_cache_refuses(layer: LayerKV) -> None:
    with pytest.raises(UnsupportedArchitecture, match="full attention"):
        footprint(model(attention(2, 32), layer), tokens=8, runtime="transformers-quantized")


def test_llama_cpp_uses_a_window_only_where_it_does() -> None:
    # 600 · 2 + 512 cells, padded, for two sequences of 4000 tokens
    assert (
        footprint(model(attention(1, 32, window=600)), tokens=4000, batch=2, runtime="llama.cpp").layer_rows[0].slots
        == 1792
    )
    found = footprint(model(attention(1, 32, window=600), model_type="mistral"), tokens=4000, runtime="llama.cpp")
    assert found.layer_rows[0].slots == 4096
    assert "does not use the window of mistral" in found.notes[0]


def test_llama_cpp_refuses_heads_that_are_no_whole_blocks() -> None:
    with pytest.raises(InvalidParams, match="heads of 16"):
        footprint(model(attention(2, 16)), tokens=8, dtype="q8_0", runtime="llama.cpp")


def test_vllm_names_the_types_it_has() -> None:
    with pytest.raises(UsageError, match="no q8_0") as caught:
        footprint(model(attention(2, 32)), tokens=8, dtype="q8_0", runtime="vllm")
    assert "fp8" in str(caught.value.hint)


def test_an_unknown_runtime_is_an_error_that_names_the_known() -> None:
    with pytest.raises(UsageError, match="'exllama'") as caught:
        footprint(model(attention(2, 16)), tokens=8, runtime="exllama")
    for name in RUNTIMES:
        assert name in str(caught.value.hint)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"tokens": -1}, "tokens"),
        ({"tokens": float("nan")}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"tokens": 1, "batch": 0}, "batch"),
        ({"tokens": 1, "tp": 0}, "tp"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(asked: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidParams, match=name):
        footprint(model(attention(2, 16)), **asked)


def test_the_formula_of_a_plain_model_has_letters_and_numbers() -> None:
    plain = model(*[attention(8, 128)] * 32)
    assert footprint(plain, tokens=8192).formula == (
        "2 · L · h_kv · d_h · N · b_e = 2 · 32 · 8 · 128 · 8192 · 2 B = 1.00 GiB"
    )
    assert footprint(plain, tokens=8192, batch=3).formula.startswith("B · 2 · L · h_kv · d_h · N · b_e = 3 · 2 · 32 ·")


@given(of=any_model(), tokens=st.integers(1, 3000), batch=st.integers(1, 4), runtime=st.sampled_from(list(RUNTIMES)))
@settings(max_examples=200, deadline=None)
def test_the_formula_is_the_total(of: ModelKV, tokens: int, batch: int, runtime: str) -> None:
    try:
        found = footprint(of, tokens=tokens, batch=batch, runtime=runtime)
    except UnsupportedArchitecture:
        return
    if runtime != "transformers-quantized":  # whose last group may be counted whole
        assert evaluated(found) == found.total_bytes
    assert sum(found.bytes_by_kind.values()) + found.padding_bytes == found.total_bytes
    assert found.peak_bytes >= found.total_bytes


@given(of=any_model(), tokens=st.integers(0, 3000), batch=st.integers(1, 5), runtime=st.sampled_from(list(RUNTIMES)))
@settings(max_examples=200, deadline=None)
def test_bytes_never_fall_with_tokens_or_batch(of: ModelKV, tokens: int, batch: int, runtime: str) -> None:
    size = total_bytes(of, CacheSetup(runtime=runtime))
    try:
        here = size(tokens, batch)
    except UnsupportedArchitecture:
        return
    assert here <= size(tokens + 1, batch)
    assert here <= size(tokens, batch + 1)
    if runtime != "vllm":  # which rounds up, and holds a chunk of prefill besides
        assert size(tokens, batch) >= total_bytes(of, CacheSetup(runtime="ideal"))(tokens, batch) // 8


def evaluated(found: Footprint) -> int:
    """The value of the formula's numbers, block types as fractions."""
    numbers = found.formula.rsplit(" B = ", 1)[0].rsplit(" = ", 1)[-1]
    numbers = re.sub(r"\([^)]*[a-z][^)]*\)", "", numbers)  # the labels
    total = 0.0
    for term in numbers.split(" + "):
        product = 1.0
        for factor in term.split(" · "):
            above, _, below = factor.strip().partition("/")
            product *= int(above) / int(below or 1)
        total += product
    return round(total)
