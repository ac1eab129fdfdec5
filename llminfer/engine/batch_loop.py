"""Many prompts at once: each is prefilled alone, then all decode together; whoever ends makes room for the next.

Because a prefill is never padded and rows of the joined cache are independent, the tokens of every
prompt are those that it gets alone. Models whose caches cannot be joined run one after another.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llminfer.engine.forward.forward import Forward, make_forward
from llminfer.engine.kv_cache.batched import JoinedCache, can_join, has_tokens
from llminfer.engine.kv_cache.tensors import cache_bytes, stateful_modules
from llminfer.engine.machine.clock import Clock
from llminfer.engine.models.capabilities import forward_parameters, prepares_by_default
from llminfer.engine.models.protocols import CausalLM
from llminfer.engine.models.quirks import quirks_of
from llminfer.engine.sampling.sampler import Sampler
from llminfer.engine.text.output import Output
from llminfer.events import Finished, FinishReason, Step


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence of a batch: what it was asked for, how it draws, and how far it is.

    `key` names it in the events.
    """

    key: int
    prompt_ids: Sequence[int]
    sample: Sampler
    output: Output
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """The joined cache after a step: rows, its length, and its bytes."""

    rows: int
    tokens: int
    kv_bytes: int


BatchEvent = tuple[int, Step | Finished] | BatchLoad


@torch.inference_mode()
def decode_batch(
    model: CausalLM, waiting: Iterable[Row], clock: Clock, *, batch_size: int, samples: int = 1
) -> Generator[BatchEvent, None, None]:
    """Yield `(key, Step)` and `(key, Finished)` for every row, and a `BatchLoad` after each joint step.

    Args:
        waiting: rows in the order in which they start; read one at a time, when there is room.
        batch_size: rows that decode together at most.
        samples: with more than 1, `waiting` holds that many rows with one prompt, which is
            prefilled once.

    An interrupt ends every row that has started with `interrupted`; those waiting are left alone.
    """
    unfinished: dict[int, Row] = {}
    try:
        for event in _events(_Batch(model=model, clock=clock), waiting, batch_size, samples, unfinished):
            if isinstance(event, tuple) and isinstance(event[1], Finished):
                unfinished.pop(event[0], None)
            yield event
    except KeyboardInterrupt:
        for row in unfinished.values():
            yield _finish(row, "interrupted")


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What decodes together: row i of `active` is row i of `joined`."""

    model: CausalLM
    clock: Clock
    active: list[Row] = field(default_factory=list)
    joined: JoinedCache = field(default_factory=JoinedCache)


def _events(
    batch: _Batch, waiting: Iterable[Row], batch_size: int, samples: int, unfinished: dict[int, Row]
) -> Iterator[BatchEvent]:
    queue = iter(waiting)
    while True:
        while len(batch.active) < batch_size and (row := next(queue, None)) is not None:
            starting = [row, *(next(queue) for _ in range(samples - 1))]
            unfinished.update((started.key, started) for started in starting)
            yield from _start(batch, starting)
        if not batch.active:
            return
        yield from _step(batch)


def _start(batch: _Batch, starting: list[Row]) -> Iterator[BatchEvent]:
    """Prefill rows of one prompt, draw the first token of each, and join those that go on."""
    model, clock = batch.model, batch.clock
    forward = make_forward(model)
    output_s = clock.lap()
    try:
        logits = forward(starting[0].prompt_ids)
    except Exception as error:
        for row in starting:
            yield _finish(row, "error", error)
        return
    forward_s = clock.lap()
    going = []
    for row in starting:
        if (yield from _draw(row, logits, clock, output_s, forward_s)):
            going.append(row)
    cache = forward.cache
    if going and not (can_join(cache, len(starting[0].prompt_ids)) and _knows_places(model, cache)):
        for row in going:
            yield from _alone(model, row, forward if len(starting) == 1 else None, clock)
        return
    if going:
        batch.joined.join(cache, len(starting[0].prompt_ids), copies=len(going))
        batch.active.extend(going)


def _knows_places(model: CausalLM, cache: Any) -> bool:
    """Whether the model can be told where each row is, which the joined cache's own length does not say."""
    places = quirks_of(model.config.model_type).places
    if stateful_modules(model) or places == "own":
        return False
    if "position_ids" in forward_parameters(model) or places == "distances":
        return True
    return not has_tokens(cache)


def _alone(model: CausalLM, row: Row, forward: Forward | None, clock: Clock) -> Iterator[BatchEvent]:
    """Decode one row to its end by itself, for caches that cannot be joined."""
    try:
        if forward is None:
            forward = make_forward(model)
            forward(row.prompt_ids)
        going = True
        while going:
            output_s = clock.lap()
            logits = forward([row.ids[-1]])
            going = yield from _draw(row, logits, clock, output_s, clock.lap())
    except Exception as error:
        yield _finish(row, "error", error)


def _step(batch: _Batch) -> Iterator[BatchEvent]:
    """One forward for all active rows, a token for each; rows that end leave the cache."""
    active, joined, clock = batch.active, batch.joined, batch.clock
    output_s = clock.lap()
    try:
        logits = _forward(batch.model, active, joined)
    except Exception as error:
        for row in active:
            yield _finish(row, "error", error)
        active.clear()
        joined.keep([])
        return
    forward_s = clock.lap()
    joined.grown()
    yield BatchLoad(rows=len(active), tokens=joined.total, kv_bytes=cache_bytes(joined.cache))
    staying = []
    for number, row in enumerate(active):
        if (yield from _draw(row, logits[number : number + 1], clock, output_s, forward_s)):
            staying.append(number)
    if len(staying) < len(active):
        joined.keep(staying)
        active[:] = [active[number] for number in staying]


def _forward(model: CausalLM, active: Sequence[Row], joined: JoinedCache) -> Tensor:
    """Logits after the newest token of every row, shape [rows, vocabulary]."""
    device = model.device
    mask, positions = joined.mask(device), joined.positions(device)
    accepted = forward_parameters(model)
    arguments: dict[str, Any] = {"use_cache": True, "cache": joined.cache}
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = 1
    if "attention_mask" in accepted:
        arguments["attention_mask"] = mask
    if "position_ids" in accepted:
        arguments["position_ids"] = positions
    if prepares_by_default(model):
        ids = torch.tensor([[row.ids[-1]] for row in active], device=device)
        inputs = {name: value for name, value in arguments.items() if name in accepted} | {"input_ids": ids}
    else:
        width = joined.total + 1
        sequences = [[*row.prompt_ids, *row.ids] for row in active]
        padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in sequences], device=device)
        if "position_ids" in accepted:
            places = torch.arange(width, device=device) - (joined.total - positions)
            arguments["position_ids"] = places.clamp(min=0)
        inputs = model.prepare_inputs_for_generation(
            padded, next_sequence_length=1, is_first_iteration=False, **arguments
        )
        if inputs.get("position_ids", positions) is None:
            # some unset them in favour of the cache's length, which is one number for all rows
            inputs["position_ids"] = positions
    logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
    return logits


def _draw(
    row: Row, logits: Tensor, clock: Clock, output_s: float, forward_s: float
) -> Generator[BatchEvent, None, bool]:
    """Sample the row's next token and yield its step, then its end if that was it; return whether it goes on."""
    try:
        draw = row.sample(logits)
    except Exception as error:
        yield _finish(row, "error", error)
        return False
    sampling_s = clock.lap()
    text = row.output.push(draw.token_id)
    text_s = clock.lap()
    row.ids.append(draw.token_id)
    index = len(row.ids) - 1
    yield (
        row.key,
        Step(
            index=index,
            token_id=draw.token_id,
            token_text=row.output.token_text(draw.token_id),
            text=text,
            logprob=draw.logprob,
            top_logprobs=draw.top,
            output_s=output_s,
            forward_s=forward_s,
            sampling_s=sampling_s,
            text_s=text_s,
            at_s=clock.elapsed(),
            cached_tokens=len(row.prompt_ids) + index,
            kv_bytes=None,  # the cache is shared; `BatchLoad` has its bytes
        ),
    )
    if row.output.reason is not None:
        yield _finish(row)
    return row.output.reason is None


def _finish(row: Row, broken: FinishReason | None = None, error: Exception | None = None) -> tuple[int, Finished]:
    text = row.output.flush()
    return row.key, Finished(
        reason=broken or row.output.reason or "error",
        text=text,
        detail=row.output.detail,
        error=error,
        cached_tokens=max(len(row.prompt_ids) + row.output.count - 1, 0),
    )
