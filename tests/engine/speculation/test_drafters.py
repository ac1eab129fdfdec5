"""What is drafted: the index of runs against a search by hand, how long a draft is, a model that drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.engine.forward.cache_reuse import common_prefix
from llminfer.engine.speculation.drafters import LONGEST_NGRAM, Acceptance, NgramIndex, PromptLookup, copied

sequences = st.lists(st.integers(0, 3), min_size=1, max_size=40)
MOST = 8


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
        assert 0 <= acceptance.worthwhile(MOST) <= MOST


def test_drafts_grow_where_they_are_right_and_end_where_they_are_not() -> None:
    acceptance = Acceptance(0.5)
    first = acceptance.worthwhile(MOST)
    acceptance.learn([1] * 20, [1] * 20)
    assert first < acceptance.worthwhile(MOST) == MOST
    for _ in range(20):
        acceptance.learn([1], [0])
    assert acceptance.worthwhile(MOST) == 0


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
