"""The records of a run's tokens and of its end, made here for the loop, the batch and the loop with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import Draw, Sampler
from llminfer.engine.text.output import Output
from llminfer.events import Finished, FinishReason, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A token drawn from the logits of one position, the text that became final with it, and what each took."""

    draw: Draw
    text: str
    sampling_s: float
    text_s: float
    at_s: float

    @property
    def token_id(self) -> int:
        """The id that was drawn."""
        return self.draw.token_id


def draw_token(logits: Tensor, sample: Sampler, output: Output, clock: Clock) -> Drawn:
    """Sample from logits of shape [1, vocabulary], and tell the output."""
    draw = sample(logits)
    sampling_s = clock.lap()
    text = output.push(draw.token_id)
    text_s = clock.lap()
    return Drawn(draw=draw, text=text, sampling_s=sampling_s, text_s=text_s, at_s=clock.elapsed())


def make_step(
    drawn: Drawn,
    output: Output,
    *,
    index: int,
    cached_tokens: int,
    kv_bytes: int | None,
    output_s: float = 0.0,
    forward_s: float = 0.0,
    draft_s: float = 0.0,
    drafted: int = 0,
    accepted: int = 0,
    shared_forward: bool = False,
) -> Step:
    """The record of a token; the fields are those of `Step`."""
    return Step(
        index=index,
        token_id=drawn.token_id,
        token_text=output.token_text(drawn.token_id),
        text=drawn.text,
        logprob=drawn.draw.logprob,
        top_logprobs=drawn.draw.top,
        output_s=output_s,
        forward_s=forward_s,
        sampling_s=drawn.sampling_s,
        text_s=drawn.text_s,
        at_s=drawn.at_s,
        cached_tokens=cached_tokens,
        kv_bytes=kv_bytes,
        draft_s=draft_s,
        drafted=drafted,
        accepted=accepted,
        shared_forward=shared_forward,
    )


def make_finished(
    output: Output, broken: BaseException | None = None, *, cached_tokens: int, notes: Sequence[str] = ()
) -> Finished:
    """The end of a run with the text that was still held back; `broken` is what ended it before its time."""
    text = ""
    try:
        text = output.flush()
    except Exception as error:
        broken = broken or error
    reason: FinishReason | None = output.reason
    if broken is not None:
        reason = "interrupted" if isinstance(broken, KeyboardInterrupt) else "error"
    return Finished(
        reason=reason or "error",
        text=text,
        detail=output.detail,
        error=broken if isinstance(broken, Exception) else None,
        cached_tokens=cached_tokens,
        notes=tuple(notes),
    )
