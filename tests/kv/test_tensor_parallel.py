"""Tensor parallelism: heads dealt out, held several times, or refused."""

from __future__ import annotations

import pytest

from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.kv.footprint import footprint
from llminfer.kv.layer import LayerKV, PerToken, State
from llminfer.kv.runtimes.table import RUNTIMES
from tests.kv.models import attention, model, recurrent


@pytest.mark.parametrize(("ranks", "heads", "all_ranks"), [(1, 2, 1), (2, 1, 1), (4, 1, 2), (8, 1, 4)])
def test_more_ranks_than_heads_hold_heads_several_times(ranks: int, heads: int, all_ranks: int) -> None:
    of = model(*[attention(2, 16)] * 3)
    found = footprint(of, tokens=100, tp=ranks)
    assert found.total_bytes == 3 * 2 * heads * 16 * 100 * 2
    assert found.all_ranks_bytes == all_ranks * footprint(of, tokens=100).total_bytes
    assert (f"2 heads on {ranks} ranks: each is held {ranks // 2} times" in found.notes) == (ranks > 2)


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_ranks_that_do_not_divide_are_refused(runtime: str) -> None:
    with pytest.raises(UsageError, match="--tp 3 does not divide 4") as caught:
        footprint(model(attention(4, 16)), tokens=100, tp=3, runtime=runtime)
    assert caught.value.exit_code == 2


def test_every_rank_holds_the_latent_whole() -> None:
    of = model(LayerKV(kind="latent", latent=True, tensors=(PerToken(name="latent", heads=1, dim=40),)))
    found = footprint(of, tokens=100, tp=8)
    assert found.total_bytes == footprint(of, tokens=100).total_bytes
    assert "every rank holds them whole" in found.notes[0]


def test_states_are_split_by_channels() -> None:
    of = model(recurrent(64, 4, 16))
    assert footprint(of, tokens=1, tp=4).total_bytes * 4 == footprint(of, tokens=1).total_bytes
    with pytest.raises(UsageError, match="does not divide the 64 rows"):
        footprint(of, tokens=1, tp=3)


def test_vllm_is_refused_where_ranks_do_not_divide_the_groups_of_mamba_2() -> None:
    # 4 heads of 16 with a state of 8, in 2 groups: 64 + 2 · 2 · 8 channels
    states = (
        State(name="conv", shape=(96, 4), role="conv", needed_columns=3),
        State(name="ssm", shape=(4, 16, 8), dtype="float32"),
    )
    of = model(LayerKV(kind="linear", states=states), model_type="mamba2")
    assert footprint(of, tokens=1, tp=2, runtime="vllm").total_bytes == (48 * 3 + 2 * 16 * 8) * 2
    with pytest.raises(UnsupportedArchitecture, match="2 state groups on 4 ranks"):
        footprint(of, tokens=1, tp=4, runtime="vllm")


def test_transformers_splits_the_heads_that_it_caches() -> None:
    tensors = tuple(PerToken(name=name, heads=8, dim=64, transformers_heads=128) for name in ("k", "v"))
    of = model(LayerKV(kind="full", tensors=tensors), model_type="falcon")
    assert footprint(of, tokens=1, tp=16).total_bytes == 2 * 8 * 64 * 2
    assert footprint(of, tokens=1, tp=16, runtime="ideal").total_bytes == 2 * 64 * 2
