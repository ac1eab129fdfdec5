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
            ids, weights = found
            if len(uniforms) != vocabulary:
                uniforms = torch.empty(vocabulary, dtype=torch.float64)
            before = generator.get_state()
            uniforms.uniform_(generator=generator)
            place = winner(weights, uniforms.numpy() if ids is None else uniforms.numpy()[ids])
        if place is None:
            generator.set_state(before)
            return None
        return place if ids is None else int(ids[place])

    return draw


def shortlist(row: Floats, params: SamplingParams) -> tuple[Ids | None, Floats] | None:
    """The ids that the filters leave, None for all of them, and their weights; None where rounding could decide.

    The weights are the probabilities of what is left, but for a common factor.
    """
    if params.temperature != 1:
        row = row / np.float32(params.temperature)
    ids = top_k_ids(row, params.top_k) if params.top_k else None
    weights = softmax(row if ids is None else row[ids])
    if params.top_p < 1:
        whole = ids is not None
        if ids is None:
            ids = likely_ids(row, _NUCLEUS_IDS)
        edge = _likely_edge(row[ids], weights if whole else weights[ids], params.top_p)
        if edge is None:
            edge = nucleus_edge(_ascending(row, ids if whole else None), params.top_p)
            if edge is None:
                return None
            ids = ids if whole else np.flatnonzero(row >= edge)
        kept = row[ids] >= edge
        weights = (weights if whole else weights[ids])[kept]
        ids = ids[kept]
    if params.min_p > 0:
        least = np.float32(params.min_p) * weights.max()
        if (np.abs(weights - least) <= _RATIO_MARGIN * least).any():
            return None
        kept = weights >= least
        ids = np.flatnonzero(kept) if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def softmax(row: Floats) -> Floats:
    """Probabilities of one row; torch does this on one thread."""
    probabilities: Floats = torch.from_numpy(row).softmax(dim=-1).numpy()
    return probabilities


def top_k_ids(row: Floats, k: int) -> Ids:
    """The ids of the k largest, and of those that tie with the smallest of them, in ascending order."""
    ids = likely_ids(row, k)
    if len(ids) <= k:
        return ids
    scores = row[ids]
    kept: Ids = ids[scores >= np.partition(scores, len(ids) - k)[len(ids) - k]]
    return kept


def likely_ids(row: Floats, count: int) -> Ids:
    """All ids whose score reaches a bound that at least `count` ids reach, in ascending order.

    When `count` columns of a table have a largest score of b or more, so many scores are b or more.
    """
    columns = len(row) // _TABLE_ROWS
    if columns <= count:
        return np.arange(len(row))
    table, rest = row[: _TABLE_ROWS * columns].reshape(_TABLE_ROWS, columns), row[_TABLE_ROWS * columns :]
    peaks = table.max(axis=0)
    bound = np.partition(peaks, columns - count)[columns - count]
    high = np.flatnonzero(peaks >= bound)
    rows, places = np.divmod(np.flatnonzero(table.take(high, axis=1) >= bound), len(high))
    return np.concatenate([rows * columns + high[places], np.flatnonzero(rest >= bound) + table.size])


def _likely_edge(scores: Floats, probabilities: Floats, p: float) -> float | None:
    """The least score that top-p keeps, from some most likely ids; None where they cannot tell.

    That is when they do not reach p, a sum comes near p at either side of the edge, or ids tie there.
    """
    order = np.argsort(scores)[::-1]
    cumulative = probabilities[order].cumsum(dtype=np.float64)
    last = int(np.searchsorted(cumulative, p))
    if last == len(order) or (np.abs(cumulative[max(last - 1, 0) : last + 1] - p) < _NUCLEUS_MARGIN).any():
        return None
    edge = float(scores[order[last]])
    return None if last + 1 < len(order) and scores[order[last + 1]] == edge else edge


def _ascending(row: Floats, ids: Ids | None) -> Floats:
    """All scores sorted, those of other ids than `ids` masked."""
    if ids is None:
        return np.sort(row)
    ascending = np.full_like(row, -np.inf)
    ascending[len(row) - len(ids) :] = np.sort(row[ids])
    return ascending


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
