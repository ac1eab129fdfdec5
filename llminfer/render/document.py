"""A run as one strict JSON document. `docs/metrics.md` defines every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llminfer.errors import LlminferError
from llminfer.events import Started, Step, Trace, percentile
from llminfer.jobs import BadLine, Job
from llminfer.params import SAMPLER_FIELDS

SCHEMA_VERSION = 1
_STEP_FIELDS = (
    *("index", "token_id", "token_text", "text", "logprob", "output_s", "forward_s", "sampling_s", "text_s", "at_s"),
    *("cached_tokens", "kv_bytes"),
)
_DRAFT_FIELDS = ("draft_s", "drafted", "accepted", "shared_forward")


def run_document(trace: Trace) -> dict[str, Any]:
    """The document of a run; with an `error` when it broke after it began.

    Args:
        trace: a run that has started and finished.
    """
    started, finished = trace.started, trace.finished
    if started is None or finished is None:
        raise ValueError("the run has not finished")
    document = {
        "schema_version": SCHEMA_VERSION,
        "model": started.model,
        "device": {"name": started.device, "hardware": started.device_name, "threads": started.threads},
        "dtype": started.dtype,
        "engine": started.engine,
        "weights": started.weights,
        "weights_bytes": started.weights_bytes,
        "weights_parts": None if started.weights_parts is None else dict(started.weights_parts),
        "prompt_text": started.prompt_text,
        "prompt_token_ids": list(started.prompt_ids),
        "text": trace.text,
        "token_ids": trace.token_ids,
        "finish_reason": finished.reason,
        "finish_detail": finished.detail,
        "eos_token_ids": list(started.eos_ids),
        "stop": list(started.stop.stop),
        "stop_from_model": started.stop.stop_from_model,
        "max_new_tokens": started.stop.max_new_tokens,
        "ignore_eos": started.stop.ignore_eos,
        "context_limit": started.context_limit,
        "seed": started.sampling.seed,
        "sampling": _sampling(started),
        "timing": _timing(trace, started),
        "kv_cache": _kv_cache(trace, started),
        "speculation": _speculation(trace, started),
        "notes": [*started.notes, *finished.notes],
        "steps": [_step(step, drafts=started.speculation is not None) for step in trace.steps],
    }
    if isinstance(finished.error, LlminferError):
        document["error"] = error_fields(finished.error)
    return document


def samples_document(traces: Sequence[Trace], cache_peak: Mapping[str, Any]) -> dict[str, Any]:
    """Several samples of one prompt: what they share once, then each."""
    documents = [run_document(trace) for trace in traces]
    own = ("text", "token_ids", "finish_reason", "finish_detail", "seed", "timing", "steps", "error")
    shared = {name: value for name, value in documents[0].items() if name not in (*own, "kv_cache")}
    samples = [
        {"index": number, **{name: document[name] for name in own if name in document}}
        for number, document in enumerate(documents)
    ]
    return {**shared, "kv_cache": {"kind": "dynamic", **cache_peak}, "samples": samples}


def job_record(job: Job | BadLine, trace: Trace | None, error: LlminferError | None) -> dict[str, Any]:
    """The result of one line of a file of prompts, as one line."""
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "id": job.id, "line": job.line, "digest": job.digest}
    if trace is None or trace.started is None or trace.finished is None:
        return {**record, "error": error_fields(error) if error else None}
    document = run_document(trace)
    kept = ("model", "text", "token_ids", "finish_reason", "finish_detail", "seed", "notes", "error")
    timing = document["timing"]
    return {
        **record,
        **{name: document[name] for name in kept if name in document},
        "prompt_tokens": len(trace.started.prompt_ids),
        "generated_tokens": len(trace.steps),
        "predicted_kv_bytes": document["kv_cache"]["predicted_bytes"],
        "timing": {name: timing[name] for name in ("tokenize_s", "prefill_s", "ttft_s", "decode_s", "tpot_s")},
        "logprobs": [step.logprob for step in trace.steps],
        "top_logprobs": [_alternatives(step) for step in trace.steps] if trace.started.sampling.logprobs else None,
    }


def error_document(error: LlminferError) -> dict[str, Any]:
    """The document of a run that failed before it began."""
    return {"schema_version": SCHEMA_VERSION, "error": error_fields(error)}


def error_fields(error: LlminferError) -> dict[str, Any]:
    """An error as data."""
    return {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def _sampling(started: Started) -> dict[str, Any]:
    values = {name: getattr(started.sampling, name) for name in SAMPLER_FIELDS}
    values["logit_bias"] = {str(token_id): bias for token_id, bias in started.sampling.logit_bias.items()}
    values["bad_words"] = [list(word) for word in started.sampling.bad_words]
    return {
        name: {"value": value, "origin": started.sampling.origins.get(name, "default")}
        for name, value in values.items()
    }


def _timing(trace: Trace, started: Started) -> dict[str, Any]:
    gaps = trace.itl_s
    return {
        "import_s": started.startup_s.get("import"),
        "convert_s": started.startup_s.get("convert"),
        "load_s": started.load_s,
        "tokenize_s": started.tokenize_s,
        "compile_s": started.compile_s,
        "ttft_s": trace.ttft_s,
        "prefill_s": trace.steps[0].forward_s if trace.steps else None,
        "prefill_tokens_per_s": trace.prefill_tokens_per_s,
        "decode_s": trace.decode_s,
        "decode_tokens_per_s": trace.decode_tokens_per_s,
        "tpot_s": trace.tpot_s,
        "itl_s": {**{f"p{rank}": percentile(gaps, rank) for rank in (50, 95, 99)}, "max": max(gaps, default=None)},
        "decode_parts_s": dict(trace.decode_parts_s()) if gaps else None,
    }


def _kv_cache(trace: Trace, started: Started) -> dict[str, Any]:
    cached = trace.finished.kv if trace.finished else None
    last = trace.steps[-1] if trace.steps else None
    return {
        "kind": started.cache,
        "bits": started.kv_bits,
        "window": started.kv_window,
        "prefill_chunk": started.prefill_chunk,
        "reused_tokens": started.reused_tokens,
        "cached_tokens": last.cached_tokens if last and last.kv_bytes is not None else None,
        "predicted_bytes": cached.total_bytes if cached else None,
        "measured_bytes": last.kv_bytes if last else None,
        "bytes_per_token": cached.bytes_per_token if cached else None,
        "limit_tokens": started.kv_at_limit.tokens if started.kv_at_limit else None,
        "predicted_bytes_at_limit": started.kv_at_limit.total_bytes if started.kv_at_limit else None,
        "formula": cached.formula if cached else None,
        "unpredicted_reason": started.kv_unpredicted,
    }


def _speculation(trace: Trace, started: Started) -> dict[str, Any] | None:
    if started.speculation is None:
        return None
    cache = trace.finished.draft_cache if trace.finished else None
    return {
        "kind": started.speculation.kind,
        "draft_model": started.draft_model,
        "draft_cost": started.draft_cost,
        "draft_tokens": started.speculation.draft_tokens,
        "drafted": trace.drafted,
        "accepted": trace.accepted,
        "acceptance_rate": trace.acceptance_rate,
        "decode_forwards": trace.decode_forwards,
        "tokens_per_forward": trace.tokens_per_forward,
        "draft_cached_tokens": cache.cached_tokens if cache else None,
        "draft_kv_predicted_bytes": cache.kv.total_bytes if cache and cache.kv else None,
        "draft_kv_measured_bytes": cache.kv_bytes if cache else None,
    }


def _step(step: Step, *, drafts: bool) -> dict[str, Any]:
    return {
        **{name: getattr(step, name) for name in (*_STEP_FIELDS, *(_DRAFT_FIELDS if drafts else ()))},
        **({"top_logprobs": _alternatives(step)} if step.top_logprobs else {}),
    }


def _alternatives(step: Step) -> list[dict[str, Any]]:
    return [{"token_id": token_id, "logprob": logprob} for token_id, logprob in step.top_logprobs]
