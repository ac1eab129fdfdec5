"""The sampler's short way on a CPU: filter and draw among the few ids that can win, in place of all.

What comes out is what the plain steps and `torch.multinomial` give for the same scores and generator,
or None: where rounding could decide otherwise, the caller goes the plain way. Two facts carry it:

- `torch.multinomial` takes the id with the largest p / q, where every id of the vocabulary has a q of
  its own, −log(1 − u) of the generator's next uniform double u. So all u are needed, and the
  generator is left where the plain way leaves it, but logarithms only for those that can win.
- Whatever all p are divided by changes nothing, so what the filters leave need not sum to 1 again.

Work on a whole vocabulary is done by numpy, or by operations of torch that stay on one thread: that
takes microseconds, and a second thread that has to be waited for takes milliseconds on a busy machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llminfer.params import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# a sum of probabilities this near p is decided by the plain arithmetic, whose own error is 1.4e-5 at most
_NUCLEUS_MARGIN = 5e-5
# two weights this near each other, as a share of them, are left to the plain way, which errs by 5e-6 at most
_RATIO_MARGIN = 2e-5
# top-p looks at about so many most likely ids first
_NUCLEUS_IDS = 256
# a vocabulary is seen as a table of so many rows, in whose columns the largest are looked for
_TABLE_ROWS = 64

Shortcut = Callable[[Tensor], int | None]
"""Takes float32 scores on the CPU, shape [1, vocabulary], and draws an id, or declines."""


def make_shortcut(params: SamplingParams, generator: torch.Generator) -> Shortcut | None:
    """Temperature, top-k, top-p, min-p and the draw in one; None when `params` ask for something else."""
    if params.greedy or params.typical_p != 1.0 or generator.device.type != "cpu":
        return None
    uniforms = torch.empty(0, dtype=torch.float64)

    def draw(scores: Tensor) -> int | None:
        nonlocal uniforms
        vocabulary = scores.shape[-1]
        if not draws_by_uniforms(vocabulary):
            return None
        with np.errstate(all="ignore"):  # what is not finite in the end is declined
            found = shortlist(scores.numpy()[0], params)
            if found is None:
                return None
            if len(uniforms) != vocabulary:
                uniforms = torch.empty(vocabulary, dtype=torch.float64)
            before = generator.get_state()
            uniforms.uniform_(generator=generator)
            place = winner(found.weights, uniforms.numpy() if found.ids is None else uniforms.numpy()[found.ids])
        if place is None:
            generator.set_state(before)
            return None
        return place if found.ids is None else int(found.ids[place])

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """What can still be drawn.

    Attributes:
        ids: most likely first; None for the whole vocabulary in its own order.
        scores: divided by the temperature, in the order of `ids`.
        weights: their probabilities, but for a factor that is common to all.
    """

    ids: Ids | None
    scores: Floats
    weights: Floats


def shortlist(row: Floats, params: SamplingParams) -> Shortlist | None:
    """What the filters leave of a row of scores; None where rounding could decide."""
    temperature = np.float32(params.temperature)
    if params.top_k:
        left = _top_k(row, params.top_k, temperature)
    else:
        scores = row if temperature == 1 else row / temperature
        left = Shortlist(ids=None, scores=scores, weights=softmax(scores))
    if params.top_p < 1:
        nucleus = _top_p(left, params.top_p, len(row))
        if nucleus is None:
            return None
        left = nucleus
    return _min_p(left, params.min_p) if params.min_p else left


def softmax(scores: Floats) -> Floats:
    """Probabilities of one row; torch does this on one thread."""
    probabilities: Floats = torch.from_numpy(scores).softmax(dim=-1).numpy()
    return probabilities


def _top_k(row: Floats, k: int, temperature: np.float32) -> Shortlist:
    """The k largest and those that tie with the last of them once they are divided."""
    ids = likely_ids(row, k)
    scores = row[ids] / temperature
    order = np.argsort(scores)[::-1]
    ids, scores = ids[order], scores[order]
    count = min(k, len(ids))
    while count < len(ids) and scores[count] == scores[count - 1]:
        count += 1
    scores = scores[:count]
    return Shortlist(ids=ids[:count], scores=scores, weights=softmax(scores))


def _at(left: Shortlist, places: Ids) -> Shortlist:
    """What is at these places of it, in their order."""
    ids = places if left.ids is None else left.ids[places]
    return Shortlist(ids=ids, scores=left.scores[places], weights=left.weights[places])


def _top_p(left: Shortlist, p: float, vocabulary: int) -> Shortlist | None:
    """The most likely ids that reach p; None when ids tie at their edge."""
    likely = left
    if left.ids is None:
        ids = likely_ids(left.scores, _NUCLEUS_IDS)
        likely = _at(left, ids[np.argsort(left.scores[ids])[::-1]])
    count = _reaching(likely.weights, p)
    if count is not None:
        ties = count < len(likely.scores) and likely.scores[count] == likely.scores[count - 1]
        return None if ties else _at(likely, np.arange(count))
    # so many ids, or a sum so near p, that the plain arithmetic decides, on scores sorted without their ids
    ascending = np.full(vocabulary, -np.inf, dtype=np.float32)
    ascending[vocabulary - len(left.scores) :] = np.sort(left.scores)
    edge = nucleus_edge(ascending, p)
    return None if edge is None else _at(left, np.flatnonzero(left.scores >= edge))


def _reaching(probabilities: Floats, p: float) -> int | None:
    """How many of the probabilities, largest first, reach p; None when they do not or a sum is too near it."""
    cumulative = probabilities.cumsum(dtype=np.float64)
    last = int(cumulative.searchsorted(p))
    if last == len(cumulative) or cumulative[last] - p < _NUCLEUS_MARGIN:
        return None
    return None if last and p - cumulative[last - 1] < _NUCLEUS_MARGIN else last + 1


def _min_p(left: Shortlist, p: float) -> Shortlist | None:
    """Those whose weight is at least p times the largest; None when one is too near that."""
    least = np.float32(p) * left.weights.max()
    if (np.abs(left.weights - least) <= _RATIO_MARGIN * least).any():
        return None
    return _at(left, np.flatnonzero(left.weights >= least))


def likely_ids(row: Floats, count: int) -> Ids:
    """All ids whose score reaches a bound just below one that at least `count` ids reach, in ascending order.

    When `count` columns of a table have a largest score of b or more, so many scores are b or more.
    Just below, so that what ties with them after a division is among them.
    """
    columns = len(row) // _TABLE_ROWS
    if columns <= count:
        return np.arange(len(row))
    table, rest = row[: _TABLE_ROWS * columns].reshape(_TABLE_ROWS, columns), row[_TABLE_ROWS * columns :]
    peaks = table.max(axis=0)
    reached = np.partition(peaks, columns - count)[columns - count]
    bound = reached - np.abs(reached) * np.float32(1e-6) - np.float32(1e-30)
    high = np.flatnonzero(peaks >= bound)
    rows, places = np.divmod(np.flatnonzero(table.take(high, axis=1) >= bound), len(high))
    return np.concatenate([rows * columns + high[places], np.flatnonzero(rest >= bound) + table.size])


def nucleus_edge(ascending: Floats, p: float) -> float | None:
    """The least score that top-p keeps of sorted ones, by the plain arithmetic; None when ids tie there.

    Sorting values alone is many times faster than sorting ids by them.
    """
    cumulative = torch.from_numpy(ascending).softmax(dim=-1).cumsum(dim=-1).numpy()
    removed = min(int(np.count_nonzero(cumulative <= np.float32(1 - p))), len(ascending) - 1)
    edge = float(ascending[removed])
    return None if removed and ascending[removed - 1] == edge else edge


def winner(weights: Floats, uniforms: NDArray[np.float64]) -> int | None:
    """The place of the largest weight / −log(1 − uniform); None where rounding could decide."""
    # −log(1 − u) is at least u, so this is at least as large as what is compared
    bounds = weights / uniforms
    first = int(bounds.argmax())
    reached = -weights[first] / np.log1p(-uniforms[first])
    close = np.flatnonzero(bounds >= reached * (1 - _RATIO_MARGIN))
    ratios = -weights[close] / np.log1p(-uniforms[close])
    near = np.flatnonzero(ratios >= ratios.max(initial=0) * (1 - _RATIO_MARGIN))
    return int(close[near[0]]) if len(near) == 1 and np.isfinite(ratios[near[0]]) else None


@functools.cache
def draws_by_uniforms(vocabulary: int) -> bool:
    """Whether this build of torch draws from so many ids as the top of this file says; tried once."""
    plain, ours = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)

    def our_exponentials() -> Tensor:
        return -torch.log1p(-torch.empty(vocabulary, dtype=torch.float64).uniform_(generator=ours)).float()

    if not torch.allclose(torch.empty(vocabulary).exponential_(generator=plain), our_exponentials(), rtol=1e-6, atol=0):
        return False
    weights = torch.arange(vocabulary, 0, -1, dtype=torch.float32)
    drawn = torch.multinomial(weights, 1, generator=plain)
    return bool((weights / our_exponentials()).argmax() == drawn) and torch.equal(plain.get_state(), ours.get_state())
