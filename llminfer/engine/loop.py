"""The loop: run the model, take the last position's logits, sample, append, until something ends it."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from llminfer.engine.forward.protocol import Forward
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import Sampler
from llminfer.engine.text.output import Output
from llminfer.events import Finished, FinishReason, Step


@torch.inference_mode()
def decode(
    forward: Forward, sample: Sampler, output: Output, clock: Clock, *, prompt_ids: Sequence[int], cached: int = 0
) -> Generator[Step, None, Finished]:
    """Yield a `Step` for each generated token and return a `Finished`, whatever ends the run.

    `prompt_ids` are those still to be fed, after the `cached` tokens that the forward has already.
    An interrupt may come during a forward or be thrown in at a yield, and a forward may fail; both
    end in a `Finished` that carries what was still held back.
    """
    new_ids, index = list(prompt_ids), 0
    broken: FinishReason | None = None
    error: Exception | None = None
    try:
        while output.reason is None:
            output_s = clock.lap()
            logits = forward(new_ids)
            forward_s = clock.lap()
            draw = sample(logits)
            sampling_s = clock.lap()
            text = output.push(draw.token_id)
            text_s = clock.lap()
            step = Step(
                index=index,
                token_id=draw.token_id,
                token_text=output.token_text(draw.token_id),
                text=text,
                logprob=draw.logprob,
                top_logprobs=draw.top,
                output_s=output_s,
                forward_s=forward_s,
                sampling_s=sampling_s,
                text_s=text_s,
                at_s=clock.elapsed(),
                cached_tokens=cached + len(prompt_ids) + index,  # the newest token is not cached yet
                kv_bytes=forward.kv_bytes,
            )
            clock.lap()  # making the record is in no part of a step, so it shows as unaccounted
            yield step
            new_ids, index = [draw.token_id], index + 1
    except KeyboardInterrupt:
        broken = "interrupted"
    except Exception as exception:
        broken, error = "error", exception
    text = output.flush()
    return Finished(
        reason=broken or output.reason or "error",
        text=text,
        detail=output.detail,
        error=error,
        cached_tokens=cached + len(prompt_ids) + output.count - 1 if output.count else cached,
        notes=forward.notes,
    )
