"""Many prompts, or many samples of one: from jobs to traces, through the batch decoder."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llminfer.engine.batch_loop import BatchLoad, Fits, Row, decode_batch
from llminfer.engine.generate import make_output, make_started, token_limit
from llminfer.engine.machine.clock import Clock
from llminfer.engine.machine.device import synchronizer
from llminfer.engine.machine.memory import available_bytes
from llminfer.engine.model import LoadedModel
from llminfer.engine.prediction import predict
from llminfer.engine.run_errors import explain
from llminfer.engine.sampling.resolve import effective_sampling, with_bad_words
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.text.prompt import Prompt, check_ids, encode_messages, encode_prompt
from llminfer.errors import GenerationFailed, LlminferError, UsageError
from llminfer.events import Finished, Started, Step, Trace
from llminfer.jobs import BadLine, Job
from llminfer.kv.footprint import footprint, total_bytes
from llminfer.kv.setup import CacheSetup
from llminfer.params import MAX_SEED, CacheOptions, StopCriteria
from llminfer.text import reason_of

_SHARE_FOR_CACHE = 0.9  # of the memory that is left; the rest is for what a forward computes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """A job that has ended: its trace, or the error that kept it from starting."""

    job: Job | BadLine
    trace: Trace | None = None
    error: LlminferError | None = None


@dataclass(slots=True, kw_only=True)
class BatchPeak:
    """The largest joined cache of a run, measured and predicted for its rows and length."""

    rows: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    predicted_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class _Running:
    """Rows under way: the trace of each, and when it began on the batch's clock."""

    jobs: dict[int, Job] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)
    refused: list[JobResult] = field(default_factory=list)


def run_jobs(
    loaded: LoadedModel,
    jobs: Iterable[Job | BadLine],
    *,
    sampling: Mapping[str, Any],
    bad_words: Sequence[str] = (),
    system: str | None = None,
    raw: bool = False,
    batch_size: int,
) -> Generator[JobResult, None, None]:
    """Run every job and yield its result when it has ended, in the order in which they end.

    Jobs that cannot start (a bad line, a prompt beyond the context) yield a result with an error
    and stop nothing. Without a seed each job draws its own.

    Args:
        sampling: values by name for jobs that state none of their own.
        system: a system message for jobs without one.
        batch_size: jobs that decode together at most.

    Raises:
        UsageError: for a compiled model, which steps over a static cache alone.
    """
    loaded.execution.check_cache(CacheOptions())
    clock = Clock(synchronizer(loaded.device))
    running = _Running()
    flags = with_bad_words(sampling, loaded.tokenizer, bad_words)
    rows = _rows(loaded, jobs, flags, system, raw, clock, running)
    events = decode_batch(loaded.model, rows, clock, batch_size=batch_size, fits=_fits(loaded))
    # an interrupt thrown in at a yield below goes to the decoder, which then ends what is under way
    event = next(events, None)
    while event is not None:
        interrupted = False
        for result in (*_take(running.refused), *_result(loaded, event, running)):
            try:
                yield result
            except KeyboardInterrupt:
                interrupted = True
        event = _throw(events) if interrupted else next(events, None)
    yield from _take(running.refused)


def run_samples(
    loaded: LoadedModel,
    text: str,
    count: int,
    *,
    sampling: Mapping[str, Any],
    bad_words: Sequence[str] = (),
    stop: StopCriteria | None = None,
    system: str | None = None,
    raw: bool = False,
    peak: BatchPeak | None = None,
) -> list[Trace]:
    """Several samples of one prompt: it is prefilled once, its cache is copied, all decode together.

    Sample i draws with the seed + i, so its tokens are those of a run of its own with that seed.

    Raises:
        UsageError: for a prompt that is empty or longer than the context, or a compiled model.
        InvalidParams: for a value out of its range.
    """
    loaded.execution.check_cache(CacheOptions())
    clock, stop = Clock(synchronizer(loaded.device)), stop or StopCriteria()
    prompt = encode_prompt(loaded.tokenizer, text, system=system, raw=raw)
    check_ids(prompt, loaded.tokenizer, loaded.model)
    tokenize_s = clock.lap()
    flags = with_bad_words(sampling, loaded.tokenizer, bad_words)
    first, notes = effective_sampling(flags, loaded.generation_defaults)
    limit = token_limit(len(prompt.ids), stop.max_new_tokens, loaded.context_limit)
    running, rows = _Running(), []
    for number in range(count):
        params = replace(first, seed=(first.seed + number) % (MAX_SEED + 1))
        started = make_started(loaded, prompt, params, stop, limit, "dynamic", tokenize_s, notes)
        rows.append(_row(loaded, number, prompt, started, limit, clock, running))
    for event in decode_batch(loaded.model, rows, clock, batch_size=count, fits=_fits(loaded)):
        for _ in _result(loaded, event, running, peak):
            pass
    traces = [running.traces[number] for number in range(count)]
    for trace in traces:
        if trace.finished is None:  # the user interrupted before there was room for it
            trace.add(Finished(reason="interrupted"))
    return traces


def _rows(
    loaded: LoadedModel,
    jobs: Iterable[Job | BadLine],
    flags: Mapping[str, Any],
    system: str | None,
    raw: bool,
    clock: Clock,
    running: _Running,
) -> Iterator[Row]:
    for key, job in enumerate(jobs):
        if isinstance(job, BadLine):
            running.refused.append(JobResult(job=job, error=job.error))
            continue
        running.began_s[key] = clock.elapsed()
        try:
            clock.lap()
            prompt = check_ids(_prompt(loaded, job, system, raw), loaded.tokenizer, loaded.model)
            tokenize_s = clock.lap()
            params, notes = effective_sampling({**flags, **job.sampling}, loaded.generation_defaults)
            limit = token_limit(len(prompt.ids), job.stop.max_new_tokens, loaded.context_limit)
            started = make_started(loaded, prompt, params, job.stop, limit, "dynamic", tokenize_s, notes)
            row = _row(loaded, key, prompt, started, limit, clock, running)
        except Exception as error:  # a line that breaks anything breaks itself alone
            running.refused.append(JobResult(job=job, error=_own_error(error)))
            continue
        running.jobs[key] = job
        yield row


def _own_error(error: Exception) -> LlminferError:
    return error if isinstance(error, LlminferError) else GenerationFailed(f"the job cannot start: {reason_of(error)}")


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


def _prompt(loaded: LoadedModel, job: Job, system: str | None, raw: bool) -> Prompt:
    if job.messages is None:
        return encode_prompt(loaded.tokenizer, job.prompt or "", system=job.system or system, raw=raw)
    if job.system is not None:
        raise UsageError("a system message beside messages", hint="put it into the messages")
    return encode_messages(loaded.tokenizer, job.messages)


def _row(
    loaded: LoadedModel, key: int, prompt: Prompt, started: Started, limit: Any, clock: Clock, running: _Running
) -> Row:
    running.traces[key] = Trace(started=started)
    return Row(
        key=key,
        prompt_ids=prompt.ids,
        sample=make_sampler(started.sampling, prompt.ids, loaded.device, loaded.eos_ids),
        output=make_output(loaded, started.stop, limit, clock, running.began_s.get(key, 0.0)),
    )


def _result(loaded: LoadedModel, event: Any, running: _Running, peak: BatchPeak | None = None) -> Iterator[JobResult]:
    """Take an event of the batch in; yield a result when it ends a job."""
    if isinstance(event, BatchLoad):
        if peak is not None and event.kv_bytes > peak.kv_bytes:
            peak.rows, peak.tokens, peak.kv_bytes = event.rows, event.tokens, event.kv_bytes
            peak.predicted_bytes = _predict_batch(loaded, event)
        return
    key, said = event
    trace = running.traces[key]
    if isinstance(said, Step):
        trace.add(replace(said, at_s=said.at_s - running.began_s.get(key, 0.0)))
        return
    trace.add(_explained(loaded, said, trace))
    if key in running.jobs:
        yield JobResult(job=running.jobs.pop(key), trace=running.traces.pop(key))


def _explained(loaded: LoadedModel, finished: Finished, trace: Trace) -> Finished:
    started = trace.started
    if started is None:
        return finished
    error = explain(finished.error, len(trace.steps), loaded, started) if finished.error else None
    kv = predict(loaded, finished.cached_tokens, started.cache) if trace.steps else None
    return replace(finished, error=error, kv=kv)


def _predict_batch(loaded: LoadedModel, load: BatchLoad) -> int | None:
    if loaded.kv is None:
        return None
    return footprint(loaded.kv, tokens=load.tokens, batch=load.rows, dtype=str(loaded.dtype)).total_bytes


def _take(results: list[JobResult]) -> list[JobResult]:
    taken = list(results)
    results.clear()
    return taken


def _throw(events: Generator[Any, None, None]) -> Any:
    try:
        return events.throw(KeyboardInterrupt())
    except StopIteration:
        return None
