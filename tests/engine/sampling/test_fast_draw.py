"""The short way of drawing against the plain one: the same id, the same generator afterwards, or none at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.engine.sampling import fast_draw
from llminfer.engine.sampling.fast_draw import likely_ids, make_shortcut, nucleus_edge
from llminfer.engine.sampling.sampler import History, compose_steps, draw, make_sampler
from llminfer.params import SamplingParams

CPU = torch.device("cpu")
# few different values, so that ids tie, and nothing but masked ones besides
scores = st.one_of(
    st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -math.inf, -math.inf, 88.0, -90.0])
)
rows = st.lists(scores, min_size=1, max_size=400).filter(lambda row: any(math.isfinite(value) for value in row))
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.7, 0.05, 1e-3, 30.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 50, 500]),
        "top_p": st.sampled_from([1.0, 0.0, 1e-9, 0.25, 0.5, 0.9, 0.999, 0.9999999]),
        "min_p": st.sampled_from([0.0, 1e-30, 0.05, 0.5, 1.0]),
    }
)


def plain_draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    _, steps = compose_steps(params, frozenset())
    return draw(logits, steps, History([], logits.shape[-1], CPU), generator)


def check_against_plain(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Compare three draws in a row; return whether the short way gave all of them."""
    short, plain = torch.Generator().manual_seed(params.seed), torch.Generator().manual_seed(params.seed)
    shortcut = make_shortcut(params, short)
    assert shortcut is not None
    given_all = True
    for _ in range(3):
        before = short.get_state()
        drawn = shortcut(logits)
        if drawn is None:
            assert torch.equal(short.get_state(), before), "whoever declines must not have drawn"
            given_all, drawn = False, plain_draw(logits, params, short)
        assert drawn == plain_draw(logits, params, plain)
        assert torch.equal(short.get_state(), plain.get_state())
    return given_all


@settings(max_examples=600, deadline=None)
@given(row=rows, filters=filters, seed=st.integers(0, 2**32))
def test_it_draws_what_the_plain_way_draws(row: list[float], filters: dict[str, Any], seed: int) -> None:
    check_against_plain(torch.tensor([row]), SamplingParams(**filters, seed=seed))


@pytest.mark.parametrize("vocabulary", [5000, 49152, 50257])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.8},
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.95, "min_p": 0.02},
        {"min_p": 0.05},
    ],
    ids=str,
)
def test_a_vocabulary_of_real_size_is_nearly_always_drawn_from_the_short_way(
    vocabulary: int, filters: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    given_all = 0
    for number in range(10):
        # from nearly flat to certain
        logits = torch.randn(1, vocabulary, generator=generator) * (0.5 + number)
        given_all += check_against_plain(logits, SamplingParams(**filters, seed=number))
    assert given_all >= 9


@settings(max_examples=200, deadline=None)
@given(row=st.lists(scores, min_size=1, max_size=700), count=st.integers(1, 40))
def test_likely_ids_hold_the_largest_and_all_that_tie_with_one_of_them(row: list[float], count: int) -> None:
    values = np.array(row, dtype=np.float32)
    ids = likely_ids(values, count)
    assert len(ids) >= min(count, len(row))
    assert (np.diff(ids) > 0).all()
    left_out = np.delete(values, ids)
    with np.errstate(over="ignore"):
        assert not len(left_out) or (left_out / np.float32(0.3)).max() < (values[ids] / np.float32(0.3)).min()


@settings(max_examples=200, deadline=None)
@given(row=st.lists(scores, min_size=1, max_size=700), k=st.integers(1, 40), temperature=st.floats(0.1, 10))
def test_top_k_keeps_the_ids_that_sorting_keeps(row: list[float], k: int, temperature: float) -> None:
    values = np.array(row, dtype=np.float32)
    divided = (torch.tensor(row) / temperature).tolist()
    smallest_kept = sorted(divided, reverse=True)[: min(k, len(row))][-1]
    found = fast_draw.shortlist(values, SamplingParams(top_k=k, temperature=temperature))
    assert found is not None
    assert found.ids is not None
    assert sorted(found.ids.tolist()) == [i for i, value in enumerate(divided) if value >= smallest_kept]
    assert found.scores.tolist() == [divided[i] for i in found.ids]
    assert sorted(found.scores.tolist(), reverse=True) == found.scores.tolist()


@settings(max_examples=200, deadline=None)
@given(row=rows, p=st.floats(0.0, 0.9999))
def test_the_edge_of_a_nucleus_is_where_the_sorted_ids_have_it(row: list[float], p: float) -> None:
    logits = torch.tensor([row])
    ascending, order = torch.sort(logits)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - p
    removed[..., -1] = False
    kept = logits[~removed.scatter(-1, order, removed)]
    edge = nucleus_edge(np.sort(logits.numpy()[0]), p)
    if edge is None:
        assert len(kept) < int((logits >= kept.min()).sum()), "it may decline ties alone"
    else:
        assert edge == kept.min()
        assert len(kept) == int((logits >= edge).sum())


def test_a_build_that_draws_otherwise_goes_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    params, logits = SamplingParams(seed=3, top_k=5), torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    expected = make_sampler(params, [], CPU)(logits)
    monkeypatch.setattr(fast_draw, "draws_by_uniforms", lambda vocabulary: False)
    assert make_shortcut(params, torch.Generator())(logits) is None  # type: ignore[misc]
    assert make_sampler(params, [], CPU)(logits) == expected


def test_this_build_draws_by_uniforms() -> None:
    assert fast_draw.draws_by_uniforms(49152)
    # and one that drew by other numbers would be noticed
    fast_draw.draws_by_uniforms.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "log1p", torch.exp)
        assert not fast_draw.draws_by_uniforms(64)
    fast_draw.draws_by_uniforms.cache_clear()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(typical_p=0.5)])
def test_what_it_cannot_do_it_does_not_offer(params: SamplingParams) -> None:
    assert make_shortcut(params, torch.Generator()) is None
