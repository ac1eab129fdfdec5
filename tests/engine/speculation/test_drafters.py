"""What is drafted: the index of runs against a search by hand, how long a draft is, a model that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.engine.forward.cache_reuse import common_prefix
from llminfer.engine.speculation.drafters import (
    CHECK_COSTS,
    LONGEST_NGRAM,
    Acceptance,
    CheckCost,
    DraftModel,
    NgramIndex,
    PromptLookup,
    best_length,
    check_cost,
    copied,
    relative_cost,
)
from llminfer.params import Execution
from tests.tiny_models import tiny_config, tiny_model

sequences = st.lists(st.integers(0, 3), min_size=1, max_size=40)
MOST = 8
CPU, CUDA = CHECK_COSTS["cpu"], CHECK_COSTS["cuda"]


def searched(ids: Sequence[int]) -> tuple[int, int] | None:
    """The longest run at the end that was there before, found by looking everywhere, newest place first."""
    for length in range(min(LONGEST_NGRAM, len(ids) - 1), 0, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[len(ids) - length :]:
                return length, end
    return None


@settings(max_examples=300, deadline=None)
@given(ids=sequences, cuts=st.sets(st.integers(1, 40)))
def test_the_index_finds_what_a_search_finds_however_the_sequence_grew(ids: list[int], cuts: set[int]) -> None:
    index = NgramIndex()
    for length in sorted({cut for cut in cuts if cut < len(ids)} | {len(ids)}):
        assert index.find(ids[:length]) == searched(ids[:length])


def test_an_id_is_looked_at_once() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def, override]
            Counting.read += 1
            return super().__getitem__(key)

    index, ids = NgramIndex(), Counting(number % 7 for number in range(1000))
    index.find(ids)
    before = Counting.read
    for token_id in range(50):
        ids.append(token_id)
        index.find(ids)
    assert Counting.read - before <= 50 * 2 * LONGEST_NGRAM


@given(ids=sequences, start=st.integers(0, 39), count=st.integers(0, 12))
def test_a_copy_goes_on_over_the_end(ids: list[int], start: int, count: int) -> None:
    start %= len(ids)
    expected = list(ids)
    for place in range(start, start + count):
        expected.append(expected[place])
    assert copied(ids, start, count) == expected[len(ids) :]


@given(guess=st.lists(st.integers(0, 2), max_size=8), came=st.lists(st.integers(0, 2), max_size=8))
def test_a_guess_is_right_up_to_the_first_difference(guess: list[int], came: list[int]) -> None:
    right = common_prefix(guess, came)
    assert guess[:right] == came[:right]
    assert right == min(len(guess), len(came)) or guess[right] != came[right]


@given(outcomes=st.lists(st.booleans(), max_size=60), first=st.floats(0.0, 1.0))
def test_a_rate_stays_a_rate_and_a_draft_within_its_bound(outcomes: list[bool], first: float) -> None:
    acceptance = Acceptance(first)
    for right in outcomes:
        acceptance.learn([1], [1 if right else 0])
        assert 0 <= acceptance.rate <= 1
        assert 0 <= best_length(acceptance.rate, MOST, CPU) <= MOST


def test_drafts_grow_where_they_are_right_and_end_where_they_are_not() -> None:
    acceptance = Acceptance(0.5)
    first = best_length(acceptance.rate, MOST, CPU)
    acceptance.learn([1] * 20, [1] * 20)
    assert first < best_length(acceptance.rate, MOST, CPU) == MOST
    for _ in range(20):
        acceptance.learn([1], [0])
    assert best_length(acceptance.rate, MOST, CPU) == 0


def drafts_along(ids: list[int], prompt: int) -> tuple[int, int]:
    """Ids drafted, and right among them, when this text is what the model says after its first `prompt` ids."""
    lookup, drafted, right, place = PromptLookup(), 0, 0, prompt
    while place < len(ids):
        draft = lookup(ids[:place], min(MOST, len(ids) - place))
        accepted = common_prefix(draft, ids[place:])
        drafted, right, place = drafted + len(draft), right + accepted, place + accepted + 1
    return drafted, right


def test_a_text_that_repeats_itself_is_copied_nearly_whole() -> None:
    passage = [(number * 7919) % 997 for number in range(60)]
    drafted, right = drafts_along([*passage, *passage], len(passage))
    assert right >= 0.8 * len(passage)
    assert right == drafted


def test_a_text_without_repetition_is_never_drafted() -> None:
    assert drafts_along(list(range(200)), 50) == (0, 0)


def test_a_text_whose_repetitions_mislead_soon_is_not_drafted() -> None:
    # every id comes again and again, but never with the same one behind it
    ids = [id_ for step in range(1, 40) for number in range(40) for id_ in (number, 100 + (number * step) % 997)]
    drafted, _ = drafts_along(ids, 100)
    assert drafted < 0.1 * len(ids)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_is_drafted_than_may_be(most: int) -> None:
    lookup = PromptLookup()
    for length in range(2, 40):
        assert len(lookup([1, 2, 3, 4] * 10, most)) <= most or length > 40


# What a draft costs


def time_per_token(rate: float, count: int, check: CheckCost, guess_cost: float) -> float:
    """In forwards, by adding up how a forward with a draft of `count` ids may end."""
    right = [rate**accepted * ((1 - rate) if accepted < count else 1) for accepted in range(count + 1)]
    tokens = sum(share * (accepted + 1) for accepted, share in enumerate(right))
    cost = 1 + guess_cost * count + (check.draft + check.per_id * count if count else 0)
    return cost / tokens


@given(
    rate=st.floats(0, 1),
    guess_cost=st.floats(0, 1.5),
    draft=st.floats(0, 1),
    per_id=st.floats(0, 0.2),
    most=st.integers(0, 20),
)
def test_a_draft_is_as_long_as_costs_least_for_a_token(
    rate: float, guess_cost: float, draft: float, per_id: float, most: int
) -> None:
    check = CheckCost(draft=draft, per_id=per_id)
    best = best_length(rate, most, check, guess_cost)
    assert 0 <= best <= most
    costs = [time_per_token(rate, count, check, guess_cost) for count in range(most + 1)]
    assert costs[best] <= min(costs) * (1 + 1e-9)


def test_the_drafts_own_cost_counts() -> None:
    assert best_length(0.7, 15, CPU, 0.0) == 7, "a draft for nothing"
    assert best_length(0.7, 15, CPU, 0.01) in (5, 6, 7)
    assert best_length(0.7, 15, CPU, 0.3) == 0, "7 ids would take 1.33 times as long as none"
    assert best_length(0.95, 15, CPU, 0.3) > 0


def test_where_checking_is_nearly_free_more_is_drafted() -> None:
    assert best_length(0.4, 15, CPU, 0.0) == 0
    assert best_length(0.4, 15, CUDA, 0.0) >= 3
    assert best_length(0.7, 15, CUDA, 0.3) > best_length(0.7, 15, CPU, 0.3)
    assert check_cost("cuda") is CUDA
    assert check_cost("mps") is check_cost("cpu") is CPU


def loaded_like(model_type: str, **sizes: Any) -> Any:
    """What a drafter asks of a loaded model."""
    model = tiny_model(tiny_config(model_type, **sizes), torch.float32)
    return SimpleNamespace(
        model=model, execution=Execution(), context_limit=None, forward_factory_for=lambda options: None
    )


class Scripted:
    """A draft model's forward that always says the next number, and counts how often it ran."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache = None
        self.runs = 0

    def __call__(self, new_ids: Sequence[int]) -> torch.Tensor:
        self.ids += new_ids
        self.runs += 1
        return torch.nn.functional.one_hot(torch.tensor([(self.ids[-1] + 1) % 99]), 99).float()

    def crop(self, tokens: int) -> bool:
        del self.ids[tokens:]
        return True


@pytest.mark.parametrize(
    ("cost", "drafts"),
    [(0.0, True), (0.05, True), (0.94, True), (1.0, False), (3.0, False)],
)
def test_a_model_drafts_as_its_cost_allows(cost: float, drafts: bool) -> None:
    forward = Scripted()
    drafter = DraftModel(forward, vocabulary=99, longest=None, cost=cost, check=CPU)
    ids, lengths = [0], []
    while len(ids) < 200:  # what comes is what the draft model says
        draft = drafter(ids, 15)
        lengths.append(len(draft))
        ids += range(ids[-1] + 1, ids[-1] + 2 + len(draft))
        ids = [token_id % 99 for token_id in ids]
    assert (forward.runs > 0) == drafts
    assert forward.runs == sum(lengths)
    if cost < 0.1:
        assert max(lengths) == 15
    if not drafts:
        assert drafter.notes == (f"a forward of the draft model costs {cost:.2f} of the model's: no draft would pay",)


def parameters_read(model: Any, share_of_experts: float = 1.0) -> float:
    """Bytes, by the names of the parameters: an input embedding is looked up, and a token takes some experts."""
    read = 0.0
    for name, parameter in model.named_parameters():
        embedding = parameter is model.get_input_embeddings().weight
        if not embedding or parameter is model.get_output_embeddings().weight:
            read += parameter.nbytes * (share_of_experts if ".experts." in name else 1)
    return read


@pytest.mark.parametrize(("small", "large", "share"), [("gpt2", "llama", 1.0), ("llama", "mixtral", 0.5)])
def test_a_draft_costs_what_its_forwards_read(small: str, large: str, share: float) -> None:
    draft, loaded = loaded_like(small), loaded_like(large, num_experts_per_tok=2, num_local_experts=4)
    buffers = 0.01  # tables of positions, which are not parameters
    expected = parameters_read(draft.model) / parameters_read(loaded.model, share)
    assert relative_cost(draft.model, loaded.model) == pytest.approx(expected, rel=buffers)
    assert relative_cost(loaded.model, loaded.model) == 1.0
