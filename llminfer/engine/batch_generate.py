"""Many prompts, or many samples of one: from requests to traces, through the batch decoder."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from llminfer.engine.batch_loop import BatchEvent, BatchLoad, Fits, Row, decode_batch
from llminfer.engine.machine.clock import Clock
from llminfer.engine.machine.device import synchronizer
from llminfer.engine.machine.memory import available_bytes
from llminfer.engine.model import LoadedModel
from llminfer.engine.prediction import predict
from llminfer.engine.prepare import PreparedRun, prepare_run
from llminfer.engine.run_errors import explain
from llminfer.errors import GenerationFailed, LlminferError
from llminfer.events import Finished, Step, Trace
from llminfer.exclusions import check_together
from llminfer.kv.footprint import footprint, total_bytes
from llminfer.kv.setup import CacheSetup
from llminfer.params import MAX_SEED, CacheOptions
from llminfer.request import GenerationRequest
from llminfer.text import reason_of

_SHARE_FOR_CACHE = 0.9  # of the memory that is left; the rest is for what a forward computes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """A request that has ended, by its place among them: its trace, or the error that kept it from starting."""

    index: int
    trace: Trace | None = None
    error: LlminferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPeak:
    """The largest joined cache of a run, measured and predicted for its rows and length."""

    rows: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    predicted_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of one prompt, and the largest cache that they had together."""

    traces: tuple[Trace, ...]
    peak: BatchPeak


@dataclass(slots=True, kw_only=True)
class _Running:
    """Rows under way: each as it was prepared, and its trace; `refused` could not start."""

    loaded: LoadedModel
    clock: Clock
    runs: dict[int, PreparedRun] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)
    refused: list[BatchResult] = field(default_factory=list)

    def row(self, key: int, run: PreparedRun) -> Row:
        """The row of a run that begins."""
        self.runs[key], self.traces[key] = run, Trace(started=run.started)
        return Row(key=key, prompt_ids=run.started.prompt_ids, sample=run.make_sampler(), output=run.make_output())

    def take(self, event: BatchEvent) -> Iterator[BatchResult]:
        """Take an event of the batch in; yield a result when it ends a row."""
        if isinstance(event, BatchLoad):
            return
        key, said = event
        trace, run = self.traces[key], self.runs[key]
        if isinstance(said, Step):
            trace.add(replace(said, at_s=said.at_s - run.began_s))
            return
        error = explain(said.error, len(trace.steps), self.loaded, run.started) if said.error else None
        kv = predict(self.loaded, said.cached_tokens, run.started.cache) if trace.steps else None
        trace.add(replace(said, error=error, kv=kv))
        del self.runs[key], self.traces[key]
        yield BatchResult(index=key, trace=trace)

    def take_refused(self) -> list[BatchResult]:
        """The results of requests that could not start, once."""
        taken, self.refused = self.refused, []
        return taken


def generate_batch(
    loaded: LoadedModel, requests: Iterable[GenerationRequest | LlminferError], *, batch_size: int
) -> Generator[BatchResult, None, None]:
    """Run every request, as `llminfer.generate_batch` does."""
    _shared(GenerationRequest()).cache_for(loaded.execution)
    running = _Running(loaded=loaded, clock=Clock(synchronizer(loaded.device)))
    rows = _rows(running, requests)
    events = decode_batch(loaded.model, rows, running.clock, batch_size=batch_size, fits=_fits(loaded))
    # an interrupt thrown in at a yield below goes to the decoder, which then ends what is under way
    event = next(events, None)
    while event is not None:
        interrupted = False
        for result in (*running.take_refused(), *running.take(event)):
            try:
                yield result
            except KeyboardInterrupt:
                interrupted = True
        event = _throw(events) if interrupted else next(events, None)
    yield from running.take_refused()


def generate_samples(loaded: LoadedModel, request: GenerationRequest, count: int) -> Samples:
    """Several samples of one prompt, as `llminfer.generate_samples` gives them."""
    running, peak = _Running(loaded=loaded, clock=Clock(synchronizer(loaded.device))), BatchPeak()
    first = prepare_run(loaded, _shared(request), clock=running.clock)
    sampling = first.started.sampling
    seeds = [(sampling.seed + number) % (MAX_SEED + 1) for number in range(count)]
    runs = [replace(first, started=replace(first.started, sampling=replace(sampling, seed=seed))) for seed in seeds]
    rows = [running.row(number, run) for number, run in enumerate(runs)]
    traces = tuple(running.traces[number] for number in range(count))
    for event in decode_batch(loaded.model, rows, running.clock, batch_size=count, fits=_fits(loaded)):
        if isinstance(event, BatchLoad) and event.kv_bytes > peak.kv_bytes:
            peak = BatchPeak(rows=event.rows, tokens=event.tokens, kv_bytes=event.kv_bytes)
        list(running.take(event))
    for trace in traces:
        if trace.finished is None:  # the user interrupted before there was room for it
            trace.add(Finished(reason="interrupted"))
    if loaded.kv is not None and peak.rows:
        predicted = footprint(loaded.kv, tokens=peak.tokens, batch=peak.rows, dtype=str(loaded.dtype))
        peak = replace(peak, predicted_bytes=predicted.total_bytes)
    return Samples(traces=traces, peak=peak)


def _shared(request: GenerationRequest) -> GenerationRequest:
    """The request with the dynamic cache that all rows share.

    Raises:
        UsageError: for one that asks for a cache of its own, or drafts.
    """
    drafts = {request.speculation.option} if request.speculation is not None else set()
    check_together({"--prompts", *(request.cache.given() if request.cache else ()), *drafts})
    return request if request.cache is not None else replace(request, cache=CacheOptions())


def _rows(running: _Running, requests: Iterable[GenerationRequest | LlminferError]) -> Iterator[Row]:
    for key, request in enumerate(requests):
        try:
            if isinstance(request, LlminferError):
                raise request
            yield running.row(key, prepare_run(running.loaded, _shared(request), clock=running.clock))
        except Exception as error:  # a request that breaks anything breaks itself alone
            if not isinstance(error, LlminferError):
                error = GenerationFailed(f"the run cannot start: {reason_of(error)}")
            running.refused.append(BatchResult(index=key, error=error))


def _fits(loaded: LoadedModel) -> Fits:
    """Whether rows have room beside each other at their limits, each as long as the longest."""
    kv = loaded.kv
    if kv is None:  # nothing is known of its size
        return lambda rows, held_bytes: True
    size = total_bytes(kv, CacheSetup(dtype=str(loaded.dtype)))

    def fits(rows: Sequence[Row], held_bytes: int) -> bool:
        left_bytes = available_bytes(loaded.device)
        if left_bytes is None:
            return True
        at_limit = size(max(row.most_tokens for row in rows), len(rows))
        copied = 2 * at_limit // max(len(kv.layers), 1)  # while rows join, one layer is there up to three times
        return at_limit + copied - held_bytes <= left_bytes * _SHARE_FOR_CACHE

    return fits


def _throw(events: Generator[BatchEvent, None, None]) -> BatchEvent | None:
    try:
        return events.throw(KeyboardInterrupt())
    except StopIteration:
        return None
