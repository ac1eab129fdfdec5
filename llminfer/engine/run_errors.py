"""What broke a run, in one line with what to try."""

from __future__ import annotations

from llminfer.engine.machine.device import is_out_of_memory
from llminfer.engine.model import LoadedModel
from llminfer.engine.prediction import predict
from llminfer.errors import GenerationFailed, LlminferError, NonFiniteLogits, OutOfMemory
from llminfer.events import Started
from llminfer.kv.footprint import Footprint
from llminfer.text import reason_of
from llminfer.units import format_bytes


def explain(
    error: Exception, step: int, loaded: LoadedModel, started: Started, *, now: Footprint | None = None
) -> LlminferError:
    """What broke, at which step, with what to try; `now` is the cache that the step would have had, unless dynamic."""
    if isinstance(error, NonFiniteLogits):
        explained: LlminferError = NonFiniteLogits(
            f"{error.message} at step {step}, computing in {started.dtype}",
            hint="try --dtype float32" if started.dtype != "float32" else "the weights may be damaged",
        )
    elif is_out_of_memory(error):
        if now is None and started.cache == "dynamic":
            now = predict(loaded, len(started.prompt_ids) + step, started.cache)
        explained = _out_of_memory(step, now, started)
    elif isinstance(error, LlminferError):
        return error
    else:
        explained = GenerationFailed(f"step {step} failed: {reason_of(error)}", hint="--debug shows where")
    explained.__cause__ = error
    return explained


def _out_of_memory(step: int, now: Footprint | None, started: Started) -> OutOfMemory:
    tokens, limit = len(started.prompt_ids) + step, started.kv_at_limit
    kv = ""
    if now is not None and limit is not None:
        kv = f", whose KV cache takes {format_bytes(now.total_bytes)}"
        kv += f" (predicted; {format_bytes(limit.total_bytes)} at the limit of {limit.tokens})"
    smaller = ["a shorter prompt", "a smaller --max-new-tokens"]
    if started.dtype == "float32":
        smaller.append("--dtype bfloat16")
    return OutOfMemory(
        f"out of memory on {started.device} at step {step}, with {tokens} tokens of context{kv}",
        hint=f"try {' or '.join(smaller)}",
    )
