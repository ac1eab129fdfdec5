"""Each sampler step against transformers' own processor, and the corners that others get wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from llminfer.engine.sampling import sampler
from llminfer.engine.sampling.sampler import SAMPLER_STEPS, Draw, History, make_sampler
from llminfer.errors import InvalidParams, NonFiniteLogits
from llminfer.params import MAX_SEED, SamplingParams, StopCriteria

CPU = torch.device("cpu")
VOCABULARY = 23
rows = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, 1.0, -math.inf])),
    min_size=VOCABULARY,
    max_size=VOCABULARY,
).filter(lambda row: any(math.isfinite(value) for value in row))


def logits_of(row: list[float]) -> torch.Tensor:
    return torch.tensor([row], dtype=torch.float32)


def apply(step: sampler.LogitsStep, logits: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    return step(logits, History(seen, logits.shape[-1], CPU))


@settings(max_examples=150, deadline=None)
@given(row=rows, k=st.integers(1, 40))
def test_top_k_equals_transformers(row: list[float], k: int) -> None:
    expected = TopKLogitsWarper(k)(None, logits_of(row))
    assert torch.equal(apply(sampler.top_k(k), logits_of(row)), expected)


@settings(max_examples=150, deadline=None)
@given(row=rows, p=st.floats(0.0, 0.999))
def test_top_p_equals_transformers(row: list[float], p: float) -> None:
    expected = TopPLogitsWarper(p)(None, logits_of(row))
    assert torch.equal(apply(sampler.top_p(p), logits_of(row)), expected)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 20.0])
def test_top_p_of_a_large_vocabulary_equals_transformers(p: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(int(p * 1e4 + spread * 1e6))
    for _ in range(10):
        logits = torch.randn(1, 5000, generator=generator) * spread
        expected = TopPLogitsWarper(p)(None, logits)
        assert torch.equal(apply(sampler.top_p(p), logits), expected)


def test_top_p_mostly_needs_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = []
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda *arguments, **options: sorts.append(1) or sort(*arguments, **options))
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        apply(sampler.top_p(0.9), torch.randn(1, 5000, generator=generator) * 5)
    assert len(sorts) < 10
    apply(sampler.top_p(0.9), torch.zeros(1, 5000))  # all ids tie, so the sort decides
    assert sorts


@settings(max_examples=150, deadline=None)
@given(row=rows, p=st.floats(0.001, 1.0))
def test_min_p_equals_transformers(row: list[float], p: float) -> None:
    expected = MinPLogitsWarper(p)(None, logits_of(row))
    ours = apply(sampler.min_p(p), logits_of(row))
    if p < 1:
        assert torch.equal(ours, expected)
    assert torch.isfinite(ours).any()


@settings(max_examples=150, deadline=None)
@given(
    row=rows,
    penalty=st.floats(0.1, 5.0),
    seen=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=10),
)
def test_repetition_penalty_equals_transformers(row: list[float], penalty: float, seen: list[int]) -> None:
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits_of(row))
    assert torch.equal(apply(sampler.repetition_penalty(penalty), logits_of(row), seen), expected)


@settings(max_examples=100, deadline=None)
@given(
    row=rows,
    temperature=st.floats(0.05, 3.0),
    k=st.integers(1, VOCABULARY),
    p=st.floats(0.05, 0.99),
    min_p=st.floats(0.01, 0.5),
    seed=st.integers(0, 2**32),
)
def test_the_composed_sampler_draws_what_transformers_draws(
    row: list[float], temperature: float, k: int, p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=min_p, repetition_penalty=1.5, seed=seed)
    draw = make_sampler(params, [1, 2], CPU)(logits_of(row))
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.5),
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(k),
            TopPLogitsWarper(p),
            MinPLogitsWarper(min_p),
        ]
    )
    scores = processors(torch.tensor([[1, 2]]), logits_of(row))
    torch.manual_seed(seed)
    assert draw.token_id == torch.multinomial(scores.softmax(-1), 1).item()
    assert draw.logprob == pytest.approx(torch.log_softmax(logits_of(row), -1)[0, draw.token_id].item(), abs=1e-5)


@settings(max_examples=150, deadline=None)
@given(row=rows, p=st.floats(0.01, 0.99))
def test_typical_p_equals_transformers(row: list[float], p: float) -> None:
    expected = TypicalLogitsWarper(p)(None, logits_of(row))
    assert torch.equal(apply(sampler.typical_p(p), logits_of(row)), expected)


ids = st.integers(0, VOCABULARY - 1)


@settings(max_examples=150, deadline=None)
@given(
    row=rows,
    words=st.lists(st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=4),
    seen=st.lists(st.integers(0, 5), min_size=3, max_size=10),
)
def test_bad_words_equal_transformers(row: list[float], words: list[list[int]], seen: list[int]) -> None:
    words = [word for word in words if word != [1]] or [[2]]
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([1]))(torch.tensor([seen]), logits_of(row))
    ours = apply(sampler.bad_words(words, frozenset({1})), logits_of(row), seen)
    assert torch.equal(ours, expected)


@settings(max_examples=100, deadline=None)
@given(row=rows, biases=st.dictionaries(ids, st.floats(-50, 50, width=32), min_size=1, max_size=5))
def test_logit_bias_equals_transformers(row: list[float], biases: dict[int, float]) -> None:
    processor = SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()})
    expected = processor(torch.tensor([[0]]), logits_of(row))
    assert torch.equal(apply(sampler.logit_bias(biases), logits_of(row)), expected)


@pytest.mark.parametrize("generated", [0, 1, 2, 3])
def test_min_new_tokens_equals_transformers(generated: int) -> None:
    logits, eos = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 5])
    sequence = [3, 4, *([6] * generated)]
    expected = MinNewTokensLengthLogitsProcessor(2, 2, eos)(torch.tensor([sequence]), logits)
    history = History([3, 4], 9, CPU)
    for token_id in sequence[2:]:
        history.add(token_id)
    assert torch.equal(sampler.min_new_tokens(2, frozenset({2, 5}))(logits, history), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    history = History([0, 1, 1], 4, CPU)
    for token_id in (2, 2, 3):
        history.add(token_id)
    zeros = torch.zeros(1, 4)
    assert sampler.presence_penalty(0.5)(zeros, history).tolist() == [[0.0, 0.0, -0.5, -0.5]]
    assert sampler.frequency_penalty(0.5)(zeros, history).tolist() == [[0.0, 0.0, -1.0, -0.5]]


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidParams, match="99"):
        make_sampler(SamplingParams(logit_bias={99: 1.0}), [], CPU)(torch.zeros(1, 5))


def test_forbidding_everything_is_an_error_and_not_a_draw() -> None:
    words = tuple((token_id,) for token_id in range(5))
    with pytest.raises(NonFiniteLogits, match="the filters leave only -inf"):
        make_sampler(SamplingParams(bad_words=words), [], CPU)(torch.zeros(1, 5))


def test_log_probabilities_of_the_most_likely_are_in_order() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -math.inf]])
    draw = make_sampler(SamplingParams(temperature=0, logprobs=10), [], CPU)(logits)
    expected = logits.log_softmax(-1)[0]
    assert [token_id for token_id, _ in draw.top] == [1, 2, 0]
    assert draw.top[0] == (draw.token_id, draw.logprob)
    for token_id, logprob in draw.top:
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-6)


def test_repetition_penalty_by_hand() -> None:
    row = logits_of([2.0, -2.0, -math.inf, 1.0])
    assert apply(sampler.repetition_penalty(2.0), row, [0, 1, 2, 0]).tolist() == [[1.0, -4.0, -math.inf, 1.0]]


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.0, 1), (1e-8, 1), (0.5, 1), (0.79, 2), (0.81, 3), (0.999, 4)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: int) -> None:
    row = torch.tensor([[0.5, 0.3, 0.11, 0.09]]).log()
    survivors = torch.isfinite(apply(sampler.top_p(p), row))
    assert survivors.sum() == kept
    assert survivors[0, 0]


@pytest.mark.parametrize("row", SAMPLER_STEPS, ids=lambda row: row.param)
def test_every_step_is_off_at_its_neutral_value(row: Any) -> None:
    neutral = SamplingParams(seed=3)
    assert getattr(neutral, row.param) == row.off
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    drawn = make_sampler(neutral, [5], CPU)(logits).token_id
    torch.manual_seed(3)
    assert drawn == torch.multinomial(logits.softmax(-1), 1).item()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.3}, {"top_k": 5, "min_p": 0.5}])
def test_temperature_zero_is_argmax_whatever_the_filters_and_seed(filters: dict[str, Any]) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    drawn = {
        make_sampler(SamplingParams(temperature=0, seed=seed, **filters), [5], CPU)(logits).token_id
        for seed in range(5)
    }
    assert drawn == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_never_drawn_from(temperature: float, bad: float) -> None:
    row = torch.zeros(1, 10)
    row[0, 4] = bad
    with pytest.raises(NonFiniteLogits, match="NaN" if math.isnan(bad) else r"\+inf"):
        make_sampler(SamplingParams(temperature=temperature), [], CPU)(row)


@pytest.mark.parametrize("temperature", [0, 1])
def test_masked_logits_are_legal_but_not_all_of_them(temperature: float) -> None:
    sample = make_sampler(SamplingParams(temperature=temperature), [], CPU)
    row = torch.full((1, 10), -math.inf)
    with pytest.raises(NonFiniteLogits, match="only -inf"):
        sample(row)
    row[0, 7] = 0.0
    assert sample(row) == Draw(token_id=7, logprob=0.0)


def test_half_precision_logits_are_sampled_in_float32() -> None:
    row = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    params = SamplingParams(temperature=0.7, top_p=1e-8)
    assert make_sampler(params, [], CPU)(row) == make_sampler(params, [], CPU)(row.float())


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sample = make_sampler(SamplingParams(seed=0), [], CPU)
    draws, logits = 8000, probabilities.log()[None]
    counts = torch.bincount(torch.tensor([sample(logits).token_id for _ in range(draws)]), minlength=4)
    expected = probabilities * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("temperature", 1e-9),
        ("top_p", math.nan),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", math.nan),
        ("min_p", 2.0),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", -1.0),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidParams, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("seed", [0, 2**32, MAX_SEED])
def test_the_whole_range_of_seeds_is_accepted_by_torch(seed: int) -> None:
    assert make_sampler(SamplingParams(seed=seed), [], CPU)(torch.zeros(1, 5)).token_id in range(5)


@pytest.mark.parametrize("options", [{"max_new_tokens": -1}, {"max_new_tokens": -3}, {"stop": ("",)}])
def test_stop_criteria_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        StopCriteria(**options)
