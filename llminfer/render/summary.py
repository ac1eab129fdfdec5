"""A run's cost in one glance: lines for people, on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.text import Text

from llminfer.events import Finished, Started, Trace, percentile
from llminfer.params import SAMPLING_RANGES, SINK_TOKENS, SamplingParams
from llminfer.render.console import make_console
from llminfer.render.fit import broken, width_of
from llminfer.units import format_bytes, format_seconds, visible

_LABEL_WIDTH = 9
_PERCENTILES = (50, 95, 99)


def started_line(started: Started) -> str:
    """What is about to run, and the cache it may come to hold."""
    tokens = f"{len(started.prompt_ids)} prompt tokens"
    if started.reused_tokens:
        tokens += f", {started.reused_tokens} of them cached"
    kv = started.kv_at_limit
    cache = (
        f"KV cache up to {format_bytes(kv.total_bytes)} ({kv.total_bytes} B) predicted for {kv.tokens} tokens"
        if kv
        else f"KV cache not predicted: {started.kv_unpredicted}"
    )
    return f"{started.model} · {started.device} · {started.dtype} · {tokens} · {cache}"


def summary(trace: Trace, *, short: bool = False) -> Iterator[Text]:
    """The lines of the summary; in short how fast it was, why it stopped, what the cache holds, and the notes.

    Args:
        trace: a run that has started and finished.
    """
    started, finished = trace.started, trace.finished
    if started is None or finished is None:
        return
    if not short:
        yield _line("model", *_model_parts(started))
        if started.weights_bytes is not None:
            engine = () if started.engine == "transformers" else (f"{started.engine} engine",)
            yield _line("weights", started.weights or started.dtype, f"{_bytes(started.weights_bytes)} held", *engine)
        before = {**started.startup_s, "tokenize": started.tokenize_s}
        if started.compile_s is not None:
            before["compile"] = started.compile_s
        yield _line("start", *(f"{name} {format_seconds(value)}" for name, value in before.items()))
        yield from _speed_lines(trace, len(started.prompt_ids) - started.reused_tokens)
    elif trace.ttft_s is not None:
        yield _line("speed", *_speed_parts(trace, trace.ttft_s))
    yield _line("stopped", _stop_text(started, finished, len(trace.steps)))
    if short:
        yield next(_cache_lines(trace, started, finished))
    else:
        yield _line("sampler", *_sampler_parts(started.sampling))
        yield from _cache_lines(trace, started, finished)
    yield from (_line("note", note) for note in dict.fromkeys((*started.notes, *finished.notes)))


def _speed_parts(trace: Trace, ttft_s: float) -> Iterator[str]:
    yield f"TTFT {format_seconds(ttft_s)}"
    if trace.decode_tokens_per_s is not None:
        gaps = trace.itl_s
        ranks = ", ".join(f"p{rank} {format_seconds(percentile(gaps, rank) or 0.0)}" for rank in (50, 95))
        yield f"{trace.decode_tokens_per_s:.2f} tokens/s"
        yield f"steps {ranks}, worst {format_seconds(max(gaps))}"
    if trace.drafted:
        yield f"{trace.accepted} of {trace.drafted} drafted tokens accepted"


def print_lines(lines: Iterable[Text], stream: TextIO) -> None:
    """Lines of a summary, fitted to the terminal: what a line says goes on below its beginning, not below its label."""
    console, width = make_console(stream), width_of(stream)
    for line in lines:
        first, *others = broken(line.plain, width, indent=_LABEL_WIDTH + 1)
        text = Text(first)
        text.stylize("cyan", 0, _LABEL_WIDTH)
        console.print(text)
        for other in others:
            console.print(Text(other))


def turn_line(trace: Trace) -> Text:
    """One turn of a conversation: what the cache saved, what it holds now, and how fast it went."""
    started, finished, last = trace.started, trace.finished, trace.steps[-1] if trace.steps else None
    parts = []
    if started is not None and last is not None and last.kv_bytes is not None:
        parts.append(f"{started.reused_tokens} tokens reused")
        parts.append(f"{last.cached_tokens - started.reused_tokens} newly cached")
        parts.append(f"{last.cached_tokens} cached in {_bytes(last.kv_bytes)}")
    if trace.ttft_s is not None:
        parts.append(f"TTFT {format_seconds(trace.ttft_s)}")
    if trace.decode_tokens_per_s is not None:
        parts.append(f"{trace.decode_tokens_per_s:.2f} tokens/s")
    if trace.drafted:
        parts.append(f"{trace.accepted} of {trace.drafted} drafted tokens accepted")
    if started is not None and finished is not None:
        parts.append(_stop_text(started, finished, len(trace.steps)))
    return _line("turn", *parts)


def _line(label: str, *parts: str) -> Text:
    return Text(f"{label:<{_LABEL_WIDTH}} {visible(' · '.join(parts))}")


def _model_parts(started: Started) -> Iterator[str]:
    yield started.model
    yield f"{started.device} ({started.device_name})"
    yield started.dtype
    if started.threads is not None:
        yield f"{started.threads} thread{'s' if started.threads != 1 else ''}"


def _speed_lines(trace: Trace, prompt_tokens: int) -> Iterator[Text]:
    if not trace.steps or trace.ttft_s is None:
        return
    first = trace.steps[0]
    prefill = [f"{prompt_tokens} tokens in {format_seconds(first.forward_s)}"]
    if trace.prefill_tokens_per_s:
        prefill.append(f"{trace.prefill_tokens_per_s:.1f} tokens/s")
    yield _line("prefill", *prefill, f"TTFT {format_seconds(trace.ttft_s)}")
    if trace.tpot_s is None or trace.decode_s is None or trace.decode_tokens_per_s is None:
        yield _line("decode", "1 token, so there is no time per output token")
        return
    gaps = trace.itl_s
    ranks = [f"p{rank} {format_seconds(percentile(gaps, rank) or 0.0)}" for rank in _PERCENTILES]
    yield _line(
        "decode",
        f"{len(gaps)} tokens after the first in {format_seconds(trace.decode_s)}",
        f"{trace.decode_tokens_per_s:.2f} tokens/s",
        f"TPOT {format_seconds(trace.tpot_s)}",
    )
    yield from _speculation_lines(trace)
    yield _line("ITL", *ranks, f"worst {format_seconds(max(gaps))}")
    shares = (
        f"{name} {format_seconds(part_s / len(gaps))} ({part_s / trace.decode_s:.1%})"
        for name, part_s in trace.decode_parts_s().items()
    )
    yield _line("of TPOT", *shares)


def _speculation_lines(trace: Trace) -> Iterator[Text]:
    """How many of the drafts were right, and what a forward gave."""
    started, finished = trace.started, trace.finished
    if started is None or started.speculation is None or trace.tokens_per_forward is None:
        return
    accepted = f"{trace.accepted} of {trace.drafted} drafted tokens accepted"
    if trace.acceptance_rate is not None:
        accepted += f" ({trace.acceptance_rate:.1%})"
    yield _line(
        "drafts",
        started.draft_model or started.speculation.kind,
        accepted,
        f"{trace.tokens_per_forward:.2f} tokens a forward, {trace.decode_forwards} forwards",
    )
    cache = finished.draft_cache if finished is not None else None
    if cache is not None:
        parts = [f"its own KV cache of {cache.cached_tokens} tokens"]
        if cache.kv is not None:
            parts.append(f"predicted {_bytes(cache.kv.total_bytes)}")
        yield _line("", *parts, f"measured {_bytes(cache.kv_bytes)}")


def _stop_text(started: Started, finished: Finished, tokens: int) -> str:
    details = {
        "eos": f"eos, id {finished.detail}",
        "stop": f"stop, {finished.detail!r}{' (model)' if started.stop.stop_from_model else ''}",
        "length": f"length, the limit of {_tokens(started.stop.max_new_tokens)}",
        "time": f"time, the limit of {started.stop.max_time_s} s",
        "context": f"context, the model's limit of {started.context_limit} tokens",
    }
    return f"{details.get(finished.reason, finished.reason)}, after {_tokens(tokens)}"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _sampler_parts(sampling: SamplingParams) -> Iterator[str]:
    if sampling.greedy:
        yield f"greedy, temperature 0 ({sampling.origins.get('temperature', 'default')})"
    unused = {"top_k", "top_p", "min_p", "typical_p", "temperature", "seed"} if sampling.greedy else set()
    for name in SAMPLING_RANGES:
        origin = sampling.origins.get(name, "default")
        if name not in unused and (origin != "default" or name == "temperature"):
            value = sampling.seed if name == "seed" else f"{getattr(sampling, name):g}"
            yield f"{name.replace('_', '-')} {value} ({origin})"


def _cache_lines(trace: Trace, started: Started, finished: Finished) -> Iterator[Text]:
    measured = trace.steps[-1].kv_bytes if trace.steps else None
    if measured is None:
        yield _line("KV cache", "none was kept" if trace.steps else "nothing was cached")
        yield from () if trace.steps else _limit_lines(started)
        return
    if finished.kv is None:
        yield _line("KV cache", f"measured {_bytes(measured)}", f"not predicted: {started.kv_unpredicted}")
        return
    predicted = finished.kv.total_bytes
    verdict = "equal to the byte" if predicted == measured else f"they differ by {measured - predicted:+d} B"
    yield _line("KV cache", f"predicted {_bytes(predicted)}", f"measured {_bytes(measured)}", verdict)
    yield _line("", f"{finished.cached_tokens} tokens cached (prompt + generated − 1): {finished.kv.formula}")
    yield from _kind_lines(started)
    yield from _limit_lines(started)


def _limit_lines(started: Started) -> Iterator[Text]:
    if started.kv_at_limit is not None:
        limit = started.kv_at_limit
        yield _line("", f"at the limit, {limit.tokens} tokens: {_bytes(limit.total_bytes)} predicted")


def _kind_lines(started: Started) -> Iterator[Text]:
    """What is special about the cache, where it is not the plain dynamic one."""
    kinds = {
        "growing": "growing, written in place in buffers of whole blocks of tokens",
        "static": "static, allocated before the first token",
        "quantized": f"quantized to {started.kv_bits} bits, the newest tokens in {started.dtype}",
        "window": f"a window: the first {SINK_TOKENS} tokens and the newest {(started.kv_window or 0) - SINK_TOKENS}",
    }
    if started.cache in kinds:
        yield _line("", kinds[started.cache])
    if started.reused_tokens:
        yield _line("", f"{started.reused_tokens} tokens of the prompt were cached before and not fed again")


def _bytes(size_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} ({size_bytes} B)" if size_bytes >= 1024 else f"{size_bytes} B"
