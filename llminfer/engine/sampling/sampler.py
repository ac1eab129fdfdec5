"""From logits to a token: a table of steps whose order is the contract, composed once per run.

The order and the arithmetic are those of `generate()`: logit bias, repetition penalty, bad words, the
least number of new tokens, temperature, top-k, top-p, min-p, typical-p, softmax, one draw. So with the
same seed the tokens are the same, on a CPU and on CUDA; on MPS the draw is the CPU's, so only greedy
tokens are. The presence and frequency penalties, which `generate()` lacks, stand where vLLM has them:
behind the repetition penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llminfer.engine.sampling.fast_draw import make_shortcut, nucleus_edge
from llminfer.errors import InvalidParams, NonFiniteLogits
from llminfer.params import SamplingParams

_MASKED = -math.inf


class History:
    """The sequence so far: its ids, which of them occurred, and how often each was generated.

    The tensors have shape [vocabulary]. They are made when a step first asks for them and kept up to
    date from then on, so a step costs the same however long the sequence is.
    """

    def __init__(self, ids: Iterable[int], vocabulary: int, device: torch.device) -> None:
        self.ids = list(ids)
        self.prompt_length = len(self.ids)
        self._vocabulary, self._device = vocabulary, device
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, token_id: int) -> None:
        """The sequence grew by one generated token."""
        self.ids.append(token_id)
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    @property
    def seen(self) -> Tensor:
        """Which ids occurred, the prompt's included."""
        if self._seen is None:
            self._seen = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
            self._seen[self._tensor(self.ids)] = True
        return self._seen

    @property
    def counts(self) -> Tensor:
        """How often each id was generated, as float32."""
        if self._counts is None:
            generated = self._tensor(self.ids[self.prompt_length :])
            self._counts = torch.bincount(generated, minlength=self._vocabulary).to(torch.float32)
        return self._counts

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self._device)


LogitsStep = Callable[[Tensor, History], Tensor]
"""Takes float32 logits of shape [1, vocabulary] and the history; returns new logits of the same shape."""


def repetition_penalty(penalty: float) -> LogitsStep:
    """Make every id seen less likely: positive logits divided, negative multiplied (Keskar et al., 2019)."""

    def apply(logits: Tensor, history: History) -> Tensor:
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(history.seen, penalised, logits)

    return apply


def logit_bias(biases: Mapping[int, float]) -> LogitsStep:
    """Add a number to the logits of single ids."""

    def apply(logits: Tensor, history: History) -> Tensor:
        vocabulary = logits.shape[-1]
        if beyond := [token_id for token_id in biases if token_id >= vocabulary]:
            raise InvalidParams(f"logit_bias names id {beyond[0]}, outside the vocabulary of {vocabulary}")
        bias = torch.zeros_like(logits)
        bias[..., list(biases)] = torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
        return logits + bias

    return apply


def presence_penalty(penalty: float) -> LogitsStep:
    """Subtract the penalty from every id that was generated."""
    return lambda logits, history: logits - penalty * (history.counts > 0)


def frequency_penalty(penalty: float) -> LogitsStep:
    """Subtract the penalty from every id, as often as it was generated."""
    return lambda logits, history: logits - penalty * history.counts


def bad_words(words: Sequence[Sequence[int]], eos_ids: frozenset[int]) -> LogitsStep:
    """Forbid the last id of every word whose other ids are the end of the sequence.

    An EOS alone cannot be forbidden, as in `generate()`.
    """
    usable = [tuple(word) for word in words if not (len(word) == 1 and word[0] in eos_ids)]

    def apply(logits: Tensor, history: History) -> Tensor:
        ended = [word[-1] for word in usable if tuple(history.ids[len(history.ids) - len(word) + 1 :]) == word[:-1]]
        return _without(logits, [token_id for token_id in ended if token_id < logits.shape[-1]])

    return apply


def _without(logits: Tensor, token_ids: list[int]) -> Tensor:
    if token_ids:
        logits = logits.clone()
        logits[..., token_ids] = _MASKED
    return logits


def min_new_tokens(count: int, eos_ids: frozenset[int]) -> LogitsStep:
    """Forbid every EOS until `count` tokens were generated."""

    def apply(logits: Tensor, history: History) -> Tensor:
        return _without(logits, list(eos_ids) if len(history.ids) - history.prompt_length < count else [])

    return apply


def temperature(value: float) -> LogitsStep:
    """Divide by the temperature: below 1 sharpens, above 1 flattens."""
    return lambda logits, history: logits / value


def top_k(k: int) -> LogitsStep:
    """Keep the k largest logits, and those that tie with the smallest kept (Fan et al., 2018)."""

    def apply(logits: Tensor, history: History) -> Tensor:
        smallest_kept = torch.topk(logits, min(k, logits.shape[-1])).values[..., -1, None]
        return logits.masked_fill(logits < smallest_kept, _MASKED)

    return apply


def top_p(p: float) -> LogitsStep:
    """Keep the smallest set of most likely ids with probability p or more, never none (Holtzman et al., 2020).

    The sum runs from the least likely upwards, and ids go while it is at most 1 − p.
    """

    def apply(logits: Tensor, history: History) -> Tensor:
        lowest_kept = nucleus_edge(np.sort(logits.numpy()[0]), p) if logits.device.type == "cpu" else None
        if lowest_kept is not None:
            return logits.masked_fill(logits < lowest_kept, _MASKED)
        ascending, order = torch.sort(logits, descending=False)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
        removed[..., -1] = False
        return logits.masked_fill(removed.scatter(-1, order, removed), _MASKED)

    return apply


def min_p(p: float) -> LogitsStep:
    """Drop ids less likely than p times the most likely one (Nguyen et al., 2024)."""

    def apply(logits: Tensor, history: History) -> Tensor:
        probabilities = logits.softmax(dim=-1)
        removed = probabilities < p * probabilities.amax(dim=-1, keepdim=True)
        # rounding must not drop the best one when p is 1
        removed.scatter_(-1, logits.argmax(dim=-1, keepdim=True), False)
        return logits.masked_fill(removed, _MASKED)

    return apply


def typical_p(p: float) -> LogitsStep:
    """Keep the ids whose surprise is nearest the entropy until they reach probability p (Meister et al., 2022)."""

    def apply(logits: Tensor, history: History) -> Tensor:
        log_probabilities = logits.log_softmax(dim=-1)
        entropy = -(log_probabilities * log_probabilities.exp()).nansum(dim=-1, keepdim=True)
        nearest, order = torch.sort((-log_probabilities - entropy).abs(), descending=False)
        cumulative = logits.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
        last = (cumulative < p).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
        removed = nearest > nearest.gather(-1, last)
        removed[..., 0] = False
        return logits.masked_fill(removed.scatter(-1, order, removed), _MASKED)

    return apply


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRow:
    """One row: the params field, the value that switches it off, and the step.

    `when_greedy` rows act at temperature 0 too, `needs_eos` rows are also given the EOS ids.
    """

    param: str
    off: object
    make: Callable[..., LogitsStep]
    when_greedy: bool = False
    needs_eos: bool = False


SAMPLER_STEPS: tuple[SamplerRow, ...] = (
    SamplerRow(param="logit_bias", off={}, make=logit_bias, when_greedy=True),
    SamplerRow(param="repetition_penalty", off=1.0, make=repetition_penalty, when_greedy=True),
    SamplerRow(param="presence_penalty", off=0.0, make=presence_penalty, when_greedy=True),
    SamplerRow(param="frequency_penalty", off=0.0, make=frequency_penalty, when_greedy=True),
    SamplerRow(param="bad_words", off=(), make=bad_words, when_greedy=True, needs_eos=True),
    SamplerRow(param="min_new_tokens", off=0, make=min_new_tokens, when_greedy=True, needs_eos=True),
    SamplerRow(param="temperature", off=1.0, make=temperature),
    SamplerRow(param="top_k", off=0, make=top_k),
    SamplerRow(param="top_p", off=1.0, make=top_p),
    SamplerRow(param="min_p", off=0.0, make=min_p),
    SamplerRow(param="typical_p", off=1.0, make=typical_p),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A drawn token, its log-probability under the model's own distribution, and the most likely ids with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Sampler = Callable[[Tensor], Draw]
"""Takes the last position's logits, shape [1, vocabulary], and draws a token."""


def make_sampler(
    params: SamplingParams, prompt_ids: Iterable[int], device: torch.device, eos_ids: frozenset[int] = frozenset()
) -> Sampler:
    """Compose the steps that `params` switches on into one function with its own random generator.

    The sampler raises `NonFiniteLogits` on a row with NaN or +inf, or with nothing but -inf.
    """
    penalties, filters = compose_steps(params, eos_ids)
    # MPS has returned wrong draws without an error, so there the draw happens on the CPU
    draw_device = torch.device("cpu") if device.type == "mps" else device
    generator = torch.Generator(device=draw_device).manual_seed(params.seed)
    shortcut = make_shortcut(params, generator)
    history: History | None = None
    prompt_ids = tuple(prompt_ids)

    def sample(logits: Tensor) -> Draw:
        nonlocal history
        logits = logits.to(draw_device, torch.float32)
        best = check_finite(logits)
        if history is None:
            history = History(prompt_ids, logits.shape[-1], draw_device)
        scores = logits
        for step in penalties:
            scores = step(scores, history)
        if penalties:
            best = check_finite(scores, "the filters leave")
        token_id = best if params.greedy else shortcut(scores) if shortcut is not None else None
        if token_id is None:
            token_id = draw(scores, filters, history, generator)
        history.add(token_id)
        logprobs = logits[0].log_softmax(dim=-1)
        top = _most_likely(logits, logprobs, params.logprobs)
        return Draw(token_id=token_id, logprob=logprobs[token_id].item(), top=top)

    return sample


def draw(scores: Tensor, filters: Sequence[LogitsStep], history: History, generator: torch.Generator) -> int:
    """Filter, softmax, and one draw from all that is left: what `generate()` does, step by step."""
    for step in filters:
        scores = step(scores, history)
    if filters:
        check_finite(scores, "the filters leave")
    return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).item())


def compose_steps(params: SamplingParams, eos_ids: frozenset[int]) -> tuple[list[LogitsStep], list[LogitsStep]]:
    """The steps that `params` switches on, in the table's order: those that a greedy run has too, then the others."""
    penalties: list[LogitsStep] = []
    filters: list[LogitsStep] = []
    for row in SAMPLER_STEPS:
        value = getattr(params, row.param)
        if value != row.off:
            step = row.make(value, eos_ids) if row.needs_eos else row.make(value)
            (penalties if row.when_greedy else filters).append(step)
    return penalties, filters


def _most_likely(logits: Tensor, logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    ids = torch.topk(logits[0], min(count, logits.shape[-1])).indices
    finite = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
    return tuple((token_id, logprob) for token_id, logprob in finite if logprob > _MASKED)


def check_finite(logits: Tensor, source: str = "the model returned") -> int:
    """The id of the largest logit of a [1, vocabulary] row.

    Raises:
        NonFiniteLogits: when the largest is not finite, which any NaN and any +inf cause.
    """
    # numpy finds it twenty times faster than torch does
    row = logits.numpy()[0] if logits.device.type == "cpu" else logits[0]
    best = int(row.argmax())
    largest = float(row[best])
    if not math.isfinite(largest):
        what = "only -inf" if largest == _MASKED else "NaN" if math.isnan(largest) else "+inf"
        raise NonFiniteLogits(f"{source} {what} in the logits")
    return best
