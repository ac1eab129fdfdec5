"""From logits to a token: a table of steps whose order is the contract, composed once per run.

The order and the arithmetic are those of `generate()`: repetition penalty, temperature, top-k,
top-p, min-p, softmax, one draw. So with the same seed on the same device the tokens are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llminfer.errors import NonFiniteLogits
from llminfer.params import SamplingParams

_MASKED = -math.inf


class History:
    """Which ids the sequence contains: a boolean mask of shape [vocabulary]."""

    __slots__ = ("seen",)

    def __init__(self, ids: Iterable[int], vocabulary: int, device: torch.device) -> None:
        self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.seen[torch.tensor(list(ids), dtype=torch.long, device=device)] = True

    def add(self, token_id: int) -> None:
        """The sequence grew by one token."""
        self.seen[token_id] = True


LogitsStep = Callable[[Tensor, History], Tensor]
"""Takes float32 logits of shape [1, vocabulary] and the history; returns new logits of the same shape."""


def repetition_penalty(penalty: float) -> LogitsStep:
    """Make every id seen less likely: positive logits divided, negative multiplied (Keskar et al., 2019)."""

    def apply(logits: Tensor, history: History) -> Tensor:
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(history.seen, penalised, logits)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRow:
    """One row: the params field, the value that switches it off, its step, whether greedy runs use it."""

    param: str
    off: float
    make: Callable[..., LogitsStep]
    when_greedy: bool = False


SAMPLER_STEPS: tuple[SamplerRow, ...] = (
    SamplerRow(param="repetition_penalty", off=1.0, make=repetition_penalty, when_greedy=True),
    SamplerRow(param="temperature", off=1.0, make=temperature),
    SamplerRow(param="top_k", off=0, make=top_k),
    SamplerRow(param="top_p", off=1.0, make=top_p),
    SamplerRow(param="min_p", off=0.0, make=min_p),
)


Sampler = Callable[[Tensor], tuple[int, float]]
"""Takes the last position's logits, [1, vocabulary]; returns a token id and its log-probability."""


def make_sampler(params: SamplingParams, prompt_ids: Iterable[int], device: torch.device) -> Sampler:
    """Compose the steps that `params` switches on into one function with its own random generator.

    The sampler raises `NonFiniteLogits` on a row with NaN or +inf, or with nothing but -inf.
    """
    steps = [
        row.make(getattr(params, row.param))
        for row in SAMPLER_STEPS
        if getattr(params, row.param) != row.off and (row.when_greedy or not params.greedy)
    ]
    # MPS has returned wrong draws without an error, so there the draw happens on the CPU
    draw_device = torch.device("cpu") if device.type == "mps" else device
    generator = torch.Generator(device=draw_device).manual_seed(params.seed)
    history: History | None = None
    prompt_ids = tuple(prompt_ids)

    def sample(logits: Tensor) -> tuple[int, float]:
        nonlocal history
        logits = logits.to(draw_device, torch.float32)
        best = check_finite(logits)
        if history is None:
            history = History(prompt_ids, logits.shape[-1], draw_device)
        scores = logits
        for step in steps:
            scores = step(scores, history)
        if params.greedy:
            token_id = int(scores.argmax(dim=-1).item()) if steps else best
        else:
            token_id = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).item())
        history.add(token_id)
        logprob = float((logits[0, token_id] - logits.logsumexp(dim=-1)).item())
        return token_id, logprob

    return sample


def check_finite(logits: Tensor) -> int:
    """The id of the largest logit of a [1, vocabulary] row.

    Raises:
        NonFiniteLogits: when the largest is not finite, which any NaN and any +inf cause.
    """
    best = int(logits.argmax(dim=-1).item())
    largest = float(logits[0, best].item())
    if not math.isfinite(largest):
        what = "only -inf" if largest == _MASKED else "NaN" if math.isnan(largest) else "+inf"
        raise NonFiniteLogits(f"the model returned {what} in its logits")
    return best
