"""The loop: run the model, take the last position's logits, sample, append, until something ends it."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from llminfer.engine.forward.protocol import Forward
from llminfer.engine.machine.clock import Clock
from llminfer.engine.records import draw_token, make_finished, make_step
from llminfer.engine.sampling.sampler import Sampler
from llminfer.engine.text.output import Output
from llminfer.events import Finished, Step


@torch.inference_mode()
def decode(
    forward: Forward, sample: Sampler, output: Output, clock: Clock, *, prompt_ids: Sequence[int], cached: int = 0
) -> Generator[Step, None, Finished]:
    """Yield a `Step` for each generated token and return a `Finished`, whatever ends the run.

    `prompt_ids` are those still to be fed, after the `cached` tokens that the forward has already.
    An interrupt may come during a forward or be thrown in at a yield, and a forward may fail; both
    end in a `Finished` that carries what was still held back.
    """
    new_ids, fed = list(prompt_ids), cached + len(prompt_ids)
    broken: BaseException | None = None
    try:
        while output.reason is None:
            output_s = clock.lap()
            logits = forward(new_ids)
            forward_s = clock.lap()
            drawn = draw_token(logits, sample, output, clock)
            step = make_step(
                drawn,
                output,
                index=output.count - 1,
                cached_tokens=fed + output.count - 1,  # the newest token is not cached yet
                kv_bytes=forward.kv_bytes,
                output_s=output_s,
                forward_s=forward_s,
            )
            clock.lap()  # making the record is in no part of a step, so it shows as unaccounted
            yield step
            new_ids = [drawn.token_id]
    except (KeyboardInterrupt, Exception) as exception:
        broken = exception
    cached_tokens = fed + output.count - 1 if output.count else cached
    return make_finished(output, broken, cached_tokens=cached_tokens, notes=forward.notes)
