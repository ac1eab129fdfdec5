"""Many prompts at once: each is prefilled alone, then all decode together; whoever ends makes room for the next.

Because a prefill is never padded and rows of the joined cache are independent, the tokens of every
prompt are in float32 those that it gets alone. In 16 bits a product may be rounded in another way when
it has more rows, as in every engine. Models whose caches cannot be joined run one after another.

What goes wrong with several rows at once ends none of them: their number is halved, down to one. A row
that has lost its cache so starts over: its prompt is fed, then token by token what it had generated,
as the first time, and it goes on where it was.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llminfer.engine.forward.forward import make_forward
from llminfer.engine.forward.protocol import Forward
from llminfer.engine.forward.turns import turn_of
from llminfer.engine.kv_cache.batched import JoinedCache, can_join, has_tokens
from llminfer.engine.kv_cache.tensors import cache_bytes, stateful_modules
from llminfer.engine.machine.clock import Clock
from llminfer.engine.machine.device import is_out_of_memory
from llminfer.engine.models.capabilities import forward_parameters, prepares_by_default
from llminfer.engine.models.protocols import CausalLM
from llminfer.engine.models.quirks import quirks_of
from llminfer.engine.records import draw_token, make_finished, make_step
from llminfer.engine.sampling.sampler import Sampler
from llminfer.engine.text.output import Output
from llminfer.events import Finished, Step


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

    @property
    def cached_tokens(self) -> int:
        """Tokens in its cache once the newest is drawn, which is fed next."""
        return len(self.prompt_ids) + len(self.ids) - 1

    @property
    def most_tokens(self) -> int:
        """Tokens in its cache at its limit."""
        return len(self.prompt_ids) + self.output.limit.tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """The joined cache after a step: rows, its length, and its bytes."""

    rows: int
    tokens: int
    kv_bytes: int


BatchEvent = tuple[int, Step | Finished] | BatchLoad
# (rows, bytes that the joined cache holds now) to whether these rows have room beside each other
Fits = Callable[[Sequence[Row], int], bool]


@torch.inference_mode()
def decode_batch(
    model: CausalLM,
    waiting: Iterable[Row],
    clock: Clock,
    *,
    batch_size: int,
    fits: Fits = lambda rows, held_bytes: True,
) -> Generator[BatchEvent, None, None]:
    """Yield `(key, Step)` and `(key, Finished)` for every row, and a `BatchLoad` after each joint step.

    At most `batch_size` rows decode together. They start in the order of `waiting`, which is read one at a
    time, when there is room; neighbours with one and the same object as prompt are prefilled once. A row
    that does not fit beside those under way waits until some have ended; one alone is tried all the same.
    An interrupt ends every row that was read with `interrupted`; the others are left alone.
    """
    batch = _Batch(model=model, clock=clock, waiting=iter(waiting), batch_size=batch_size, fits=fits)
    try:
        for event in _events(batch):
            if isinstance(event, tuple) and isinstance(event[1], Finished):
                batch.unfinished.pop(event[0], None)
            yield event
    except KeyboardInterrupt as interrupt:
        for row in batch.unfinished.values():
            yield _finish(row, interrupt)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What decodes together: row i of `active` is row i of `joined`.

    Rows that were put `aside` start before those `waiting`, and none start while more than `opens_at` rows
    are under way.
    """

    model: CausalLM
    clock: Clock
    waiting: Iterator[Row]
    batch_size: int
    fits: Fits
    opens_at: int = 0
    active: list[Row] = field(default_factory=list)
    joined: JoinedCache = field(default_factory=JoinedCache)
    aside: deque[Row] = field(default_factory=deque)
    unfinished: dict[int, Row] = field(default_factory=dict)


def _events(batch: _Batch) -> Iterator[BatchEvent]:
    while True:
        if len(batch.active) <= batch.opens_at:
            batch.opens_at = batch.batch_size - 1
            while len(batch.active) <= batch.opens_at and (starting := _next_rows(batch)):
                # a row that is to give no token has ended before it starts
                ended = starting[0].output.reason is not None
                yield from map(_finish, starting) if ended else _start(batch, starting)
        if batch.active:
            yield from _step(batch)
        elif not batch.aside:
            return


def _next_rows(batch: _Batch) -> list[Row]:
    """The rows to start next: one, with those behind it that have the same prompt, as far as they fit."""
    starting: list[Row] = []
    held_bytes = cache_bytes(batch.joined.cache) if batch.active else 0
    while len(batch.active) + len(starting) < batch.batch_size:
        row = batch.aside.popleft() if batch.aside else next(batch.waiting, None)
        if row is None:
            break
        batch.unfinished[row.key] = row
        beside = [*batch.active, *starting]
        fits = not beside or batch.fits([*beside, row], held_bytes)
        if not fits or (starting and (row.ids or row.prompt_ids is not starting[0].prompt_ids)):
            batch.aside.appendleft(row)
            if not fits and not starting:
                batch.opens_at = len(batch.active) - 1
            break
        starting.append(row)
        if row.ids:  # it starts over, from where none of the others is
            break
    return starting


def _start(batch: _Batch, starting: list[Row]) -> Iterator[BatchEvent]:
    """Prefill rows of one prompt, draw the next token of each, and join those that go on."""
    model, clock = batch.model, batch.clock
    output_s = clock.lap()
    try:
        forward, logits = _prefill(model, starting[0])
        forward_s = clock.lap()
    except Exception as error:
        # alone in its forward: nothing but memory can be short because of the others
        yield from _put_aside(batch, starting, error, again=bool(batch.active) and is_out_of_memory(error))
        return
    going = []
    for row in starting:
        if (yield from _draw(row, logits, clock, output_s, forward_s)):
            going.append(row)
    if not going:
        return
    tokens = going[0].cached_tokens
    if not (can_join(forward.cache, tokens) and _knows_places(model, forward.cache)):
        for row in going:
            yield from _alone(model, row, forward if len(starting) == 1 else None, clock)
        return
    try:
        batch.joined.join(forward.cache, tokens, copies=len(going))
    except Exception as error:
        yield from _put_aside(batch, going, error, again=bool(batch.active) or len(going) > 1)
    else:
        batch.active.extend(going)


def _prefill(model: CausalLM, row: Row) -> tuple[Forward, Tensor]:
    """A forward that holds the row's prompt and what it has generated, and the logits after it."""
    forward = make_forward(model)
    logits = forward(row.prompt_ids)
    for token_id in row.ids:
        logits = forward([token_id])
    return forward, logits


def _put_aside(batch: _Batch, rows: Sequence[Row], error: Exception, *, again: bool) -> Iterator[BatchEvent]:
    """Rows that could not start beside the others start `again` when these have ended, or end here."""
    _let_go(error)
    if again:
        batch.aside.extendleft(reversed(rows))
        batch.opens_at = 0
        return
    for row in rows:
        yield _finish(row, error)


def _start_over(batch: _Batch, first: int) -> Iterator[BatchEvent]:
    """Drop the joined cache, which is torn: the `first` rows start over now, the others when those have ended."""
    rows = list(batch.active)
    batch.active.clear()
    batch.joined = JoinedCache()
    batch.aside.extendleft(reversed(rows[first:]))
    for row in rows[:first]:
        yield from _start(batch, [row])
    batch.opens_at = 0


def _let_go(error: Exception) -> None:
    """Free what the broken calls held, their tensors among it, while the error lives on."""
    traceback.clear_frames(error.__traceback__)


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
    going = True
    while going:
        output_s = clock.lap()
        try:
            if forward is None:
                forward, logits = _prefill(model, row)
            else:
                logits = forward([row.ids[-1]])
            forward_s = clock.lap()
        except Exception as error:
            _let_go(error)
            yield _finish(row, error)
            return
        going = yield from _draw(row, logits, clock, output_s, forward_s)


def _step(batch: _Batch) -> Iterator[BatchEvent]:
    """One forward for all active rows, a token for each; rows that end leave the cache."""
    active, clock = batch.active, batch.clock
    output_s = clock.lap()
    try:
        logits = _forward(batch.model, active, batch.joined)
        forward_s = clock.lap()
    except Exception as error:
        _let_go(error)
        if len(active) == 1:
            yield _finish(active.pop(), error)
        yield from _start_over(batch, len(active) // 2)
        return
    batch.joined.grown()
    yield BatchLoad(rows=len(active), tokens=batch.joined.total, kv_bytes=cache_bytes(batch.joined.cache))
    staying = []
    for number, row in enumerate(active):
        if (yield from _draw(row, logits[number : number + 1], clock, output_s, forward_s)):
            staying.append(number)
    if len(staying) < len(active):
        active[:] = [active[number] for number in staying]
        try:
            batch.joined.keep(staying)
        except Exception as error:
            _let_go(error)
            yield from _start_over(batch, (len(active) + 1) // 2)


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
    with turn_of(model):
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
    return logits


def _draw(
    row: Row, logits: Tensor, clock: Clock, output_s: float, forward_s: float
) -> Generator[BatchEvent, None, bool]:
    """Sample the row's next token and yield its step, then its end if that was it; return whether it goes on."""
    try:
        drawn = draw_token(logits, row.sample, row.output, clock)
        step = make_step(
            drawn,
            row.output,
            index=len(row.ids),
            cached_tokens=len(row.prompt_ids) + len(row.ids),
            kv_bytes=None,  # the cache is shared; `BatchLoad` has its bytes
            output_s=output_s,
            forward_s=forward_s,
        )
    except Exception as error:
        _let_go(error)
        yield _finish(row, error)
        return False
    row.ids.append(drawn.token_id)
    yield row.key, step
    if row.output.reason is not None:
        yield _finish(row)
    return row.output.reason is None


def _finish(row: Row, broken: BaseException | None = None) -> tuple[int, Finished]:
    return row.key, make_finished(row.output, broken, cached_tokens=row.cached_tokens if row.ids else 0)
