"""What may come next, guessed cheaply: from the text itself, or from a smaller model.

A drafter is called with the whole sequence and returns ids that may follow. Whether they did, it sees
at its next call, so nobody has to tell it. A forward over several ids costs more than one over one, and
a model that drafts has a cost of its own, so nothing is drafted where that would not pay, and otherwise
as much as pays best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llminfer.engine.forward.cache_reuse import common_prefix
from llminfer.engine.forward.protocol import Forward
from llminfer.engine.kv_cache.tensors import keep_past
from llminfer.engine.models.capabilities import text_config
from llminfer.engine.models.protocols import CausalLM
from llminfer.engine.weights.packing import held_bytes
from llminfer.errors import GenerationFailed
from llminfer.params import MAX_DRAFT_TOKENS

LONGEST_NGRAM = 3
# how configs name the experts that a token takes, and how many there are
_EXPERTS_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# what is assumed of a match of so many ids before anything is known, and for how many ids that counts
_FIRST_RATES, _FIRST_WEIGHT = {1: 0.1, 2: 0.4, 3: 0.7}, 2.0
_FIRST_RATE_OF_MODEL = 0.7
_PROBE_EVERY = 8  # steps between drafts of a model that is hardly ever right
_FORGET = 0.9  # an observation counts so much less with each later one


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCost:
    """What checking a draft adds to a forward, and each of its ids, in forwards over one id (docs/speculation.md)."""

    draft: float
    per_id: float


# by kind of device. On a CPU measured; on CUDA a forward over a few ids waits for the weights, or for
# kernels to be started, as one over a single id does, so next to nothing is assumed; others as on a CPU
_ON_CPU = CheckCost(draft=0.8, per_id=0.04)
CHECK_COSTS = {"cpu": _ON_CPU, "cuda": CheckCost(draft=0.05, per_id=0.005)}


def check_cost(device: str) -> CheckCost:
    """What checking costs on this kind of device."""
    return CHECK_COSTS.get(device, _ON_CPU)


def relative_cost(draft: CausalLM, model: CausalLM) -> float:
    """A forward of the draft model over one id, in forwards of the other: the bytes of weights that each reads."""
    return _read_bytes(draft) / max(_read_bytes(model), 1.0)


def _read_bytes(model: CausalLM) -> float:
    """All that the model holds but an embedding that is no output layer, and the experts that a token leaves out."""
    text = text_config(model.config)
    read = float(held_bytes(model))
    if not getattr(text, "tie_word_embeddings", False):
        read -= held_bytes(model.get_input_embeddings())
    taken, experts = (
        next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)
        for names in (_EXPERTS_TAKEN, _EXPERTS)
    )
    if taken and experts:
        expert_bytes = sum(held_bytes(module) for name, module in model.named_modules() if name.endswith(".experts"))
        read -= expert_bytes * (1 - min(taken / experts, 1.0))
    return read


class Drafter(Protocol):
    """Guesses what follows a sequence that only ever grows."""

    def __call__(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` ids that may follow `ids`; none when no guess is worth its cost."""

    @property
    def forward(self) -> Forward | None:
        """The forward of the draft model, whose cache is memory too; None without a model."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the drafts."""


class NgramIndex:
    """Where each run of up to `LONGEST_NGRAM` ids last ended; an id is looked at once, however long the sequence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """The longest run at the end of `ids` that was there before: its length, and where its last repetition ended.

        `ids` must begin with those of the call before. What followed is at the returned index.
        """
        for end in range(self._indexed + 1, len(ids)):
            for length in range(1, min(LONGEST_NGRAM, end) + 1):
                self._ends[tuple(ids[end - length : end])] = end
        self._indexed = max(self._indexed, len(ids) - 1)
        for length in range(min(LONGEST_NGRAM, len(ids) - 1), 0, -1):
            if (found := self._ends.get(tuple(ids[-length:]))) is not None:
                return length, found
        return None


class Acceptance:
    """How often a guessed id was right, newer ones counting more; it begins with what is assumed."""

    def __init__(self, first_rate: float) -> None:
        self._right, self._weight = first_rate * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def rate(self) -> float:
        """Between 0 and 1."""
        return self._right / self._weight

    def learn(self, guess: Sequence[int], came: Sequence[int]) -> None:
        """Compare a guess with what came, up to the first difference: what was guessed behind it says nothing."""
        for guessed, drawn in zip(guess, came, strict=False):
            self._right = self._right * _FORGET + (guessed == drawn)
            self._weight = self._weight * _FORGET + 1
            if guessed != drawn:
                break


def best_length(rate: float, most: int, check: CheckCost, guess_cost: float = 0.0) -> int:
    """How many ids to draft so that a forward gives the most tokens for its cost, 0 where none pays.

    `rate` is the share of ids that are right, `guess_cost` what guessing one takes, in forwards.
    """
    best, best_gain = 0, 1.0
    tokens, likely = 1.0, 1.0
    for count in range(1, most + 1):
        likely *= rate  # an id is right only behind those that are
        tokens += likely
        gain = tokens / (1 + check.draft + (check.per_id + guess_cost) * count)
        if gain > best_gain:
            best, best_gain = count, gain
    return best


class PromptLookup:
    """Copies what followed when the last few ids were there before, in the prompt or the output.

    A guess is made at every step, though only what is worth it is drafted: so it costs nothing to
    learn that a text has begun to repeat itself.
    """

    forward = None
    notes: tuple[str, ...] = ()

    def __init__(self, check: CheckCost = _ON_CPU) -> None:
        self._check, self._index = check, NgramIndex()
        self._acceptance = {length: Acceptance(rate) for length, rate in _FIRST_RATES.items()}
        self._guess: Sequence[int] = ()
        self._length = self._start = 0

    def __call__(self, ids: Sequence[int], most: int) -> Sequence[int]:
        if self._guess:
            self._acceptance[self._length].learn(self._guess, ids[self._start :])
        found = self._index.find(ids)
        if found is None or most < 1:
            self._guess = ()
            return ()
        (self._length, end), self._start = found, len(ids)
        self._guess = copied(ids, end, most)
        return self._guess[: best_length(self._acceptance[self._length].rate, most, self._check)]


def copied(ids: Sequence[int], start: int, count: int) -> list[int]:
    """The `count` ids from `start` on; where the sequence ends, the copy itself goes on being copied."""
    copy = list(ids[start : start + count])
    period = len(ids) - start
    while len(copy) < count:
        copy.append(copy[len(copy) - period])
    return copy


class DraftModel:
    """Asks a smaller model for its most likely continuation, its own cache kept in step with the sequence."""

    def __init__(
        self, forward: Forward, *, vocabulary: int, longest: int | None, cost: float = 0.0, check: CheckCost = _ON_CPU
    ) -> None:
        """`vocabulary` is how many ids both models have, `longest` the tokens up to which this one's logits hold.

        `cost` is a forward of this model over one id, in forwards of the one that checks.
        """
        self.forward: Forward = forward
        self._usable, self._longest, self._cost, self._check = vocabulary, longest, cost, check
        self._acceptance = Acceptance(_FIRST_RATE_OF_MODEL)
        self._guess: Sequence[int] = ()
        self._start = self._passed = 0
        self.notes: tuple[str, ...] = ()

    def __call__(self, ids: Sequence[int], most: int) -> Sequence[int]:
        came = ids[self._start :]
        self._acceptance.learn(self._guess, came)
        right = common_prefix(self._guess, came)
        known = min(len(self.forward.ids), self._start + right if self._guess else len(ids), len(ids) - 1)
        count = min(self._count(most), self._room(len(ids)))
        self._guess = ()
        if count < 1 or self._unknown(ids[known:]):
            return ()
        if self.forward.ids and not self.forward.crop(known):
            raise GenerationFailed("the draft model's cache cannot be cut back to what was accepted")
        self._guess, self._start = self._continue(ids[known:], count), len(ids)
        return self._guess

    def _count(self, most: int) -> int:
        """Ids to draft; one now and then where drafts are hardly ever right, to notice when they become so."""
        if not best_length(1.0, MAX_DRAFT_TOKENS, self._check, self._cost):
            self.notes = (f"a forward of the draft model costs {self._cost:.2f} of the model's: no draft would pay",)
            return 0
        worthwhile = best_length(self._acceptance.rate, most, self._check, self._cost)
        self._passed = 0 if worthwhile else self._passed + 1
        return worthwhile or min(most, int(self._passed % _PROBE_EVERY == 0))

    def _room(self, length: int) -> int:
        """Ids that may be drafted before the draft model's own context is full: the last one is not fed to it."""
        if self._longest is None:
            return MAX_DRAFT_TOKENS
        if length > self._longest:
            self.notes = (f"beyond the draft model's {self._longest} tokens nothing was drafted",)
        return self._longest - length + 1

    def _unknown(self, new_ids: Sequence[int]) -> bool:
        """Whether the model that checks the drafts has drawn an id that the draft model does not have."""
        if all(new_id < self._usable for new_id in new_ids):
            return False
        self.notes = ("an id was drawn that the draft model does not have: nothing was drafted after it",)
        return True

    def _continue(self, new_ids: Sequence[int], count: int) -> list[int]:
        guess: list[int] = []
        for _ in range(count):
            is_first = not self.forward.ids
            logits = self.forward(new_ids)
            if is_first:
                keep_past(self.forward.cache, True)
            new_ids = [int(logits[0, : self._usable].argmax())]
            guess += new_ids
        return guess
