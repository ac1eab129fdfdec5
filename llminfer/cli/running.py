"""What `llminfer generate` was asked for, and how it is carried out: one run, samples, or a file of prompts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llminfer.cli.errors import INTERRUPTED_EXIT_CODE, report, say
from llminfer.cli.loading import ModelChoice, load_model, load_with_draft, status
from llminfer.cli.prompts import ManyPrompts
from llminfer.cli.standard_streams import write_text
from llminfer.cli.stream import interrupts, stream, text_of
from llminfer.errors import LlminferError
from llminfer.params import (
    CacheOptions,
    Speculation,
    StopCriteria,
)
from llminfer.units import to_json

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel
    from llminfer.events import Finished, Step, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown of a run, and in which form."""

    steps: bool
    quiet: bool
    json: bool
    echo: bool
    token_ids: bool

    @property
    def verbose(self) -> bool:
        """Whether progress and summary go to standard error."""
        return not self.quiet and not self.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that the command line asked for; `text` is the prompt of a single run."""

    flags: Mapping[str, Any]
    system: str | None
    raw: bool
    choice: ModelChoice
    output: Shown
    bad_words: tuple[str, ...]
    num_samples: int
    many: ManyPrompts
    caching: CacheOptions
    stop: StopCriteria
    speculation: Speculation | None
    draft: str | None
    text: str = ""


def run(request: Request, *, debug: bool) -> int:
    """Run one prompt, once or in several samples, and return the exit code."""
    startup_s: dict[str, float] = {}
    loaded, draft = _load(request, startup_s)
    if request.num_samples > 1:
        return _run_samples(request, loaded, startup_s)
    from llminfer.engine.generate import generate as generate_events

    compiles = request.output.verbose and request.choice.execution.compiled
    with status("compiling the decode step", compiles):
        events = generate_events(
            loaded,
            request.text,
            sampling=request.flags,
            bad_words=request.bad_words,
            stop=request.stop,
            system=request.system,
            raw=request.raw,
            cache=request.caching,
            speculation=request.speculation,
            draft=draft,
        )
    if request.output.echo:
        write_text(request.text)
    output = request.output
    shown = None if output.json else _id_line if output.token_ids else text_of
    trace = stream(events, announce=output.verbose, show=shown)
    if shown is not None and trace.text and not trace.text.endswith("\n") and sys.stdout.isatty():
        write_text("\n")
    return _finish(trace, request.output, startup_s, debug=debug)


def _load(request: Request, startup_s: dict[str, float]) -> tuple[LoadedModel, LoadedModel | None]:
    """The model, and the one that drafts for it where one does."""
    if request.draft is not None and request.speculation is not None:
        return load_with_draft(
            request.choice, request.draft, startup_s, cache=request.caching, speculation=request.speculation
        )
    return load_model(request.choice, startup_s, cache=request.caching, speculation=request.speculation), None


def _id_line(event: Step | Finished) -> str:
    token_id = getattr(event, "token_id", None)
    return "" if token_id is None else f"{token_id}\n"


def _run_samples(request: Request, loaded: LoadedModel, startup_s: Mapping[str, float]) -> int:
    """Several samples of one prompt: each text on lines of its own, or all in one document."""
    from llminfer.engine.batch_generate import BatchPeak, run_samples
    from llminfer.render.document import samples_document

    peak = BatchPeak()
    traces = run_samples(
        loaded,
        request.text,
        request.num_samples,
        sampling=request.flags,
        bad_words=request.bad_words,
        stop=request.stop,
        system=request.system,
        raw=request.raw,
        peak=peak,
    )
    if request.output.json:
        write_text(to_json(samples_document(traces, startup_s, asdict(peak))) + "\n")
    for number, trace in enumerate(traces if not request.output.json else ()):
        if request.output.verbose and trace.started is not None and trace.finished is not None:
            seed, reason = trace.started.sampling.seed, trace.finished.reason
            say(f"sample {number} · seed {seed} · {len(trace.steps)} tokens · {reason}")
        shown = "".join(f"{token_id}\n" for token_id in trace.token_ids) if request.output.token_ids else trace.text
        write_text((request.text if request.output.echo else "") + shown + "\n")
    if request.output.verbose:
        predicted = "not predicted" if peak.predicted_bytes is None else f"predicted {peak.predicted_bytes} B"
        say(f"KV cache at most {peak.kv_bytes} B for {peak.rows} samples of {peak.tokens} tokens · {predicted}")
    reasons = [trace.finished.reason for trace in traces if trace.finished is not None]
    return INTERRUPTED_EXIT_CODE if "interrupted" in reasons else int("error" in reasons)


def run_many(request: Request) -> int:
    """Run a file of prompts and return the exit code."""
    from llminfer.cli.prompts import write_results
    from llminfer.engine.batch_generate import run_jobs
    from llminfer.engine.prompt_cache import model_digest

    many, output = request.many, request.output
    settings = _settings(request)
    jobs = many.jobs(request.stop, settings)
    if not jobs:
        if output.verbose:
            say(f"nothing to do: {many.output} has every line")
        return 0
    startup_s: dict[str, float] = {}
    loaded = load_model(request.choice, startup_s, cache=request.caching)
    origin = {"settings": settings}
    if many.output is not None and loaded.folder is not None:
        origin["model_digest"] = model_digest(loaded.folder)
        note = many.check_model(loaded.name, origin["model_digest"])
        if note is not None and output.verbose:
            say(f"note: {note}")
    results = run_jobs(
        loaded,
        jobs,
        sampling=request.flags,
        bad_words=request.bad_words,
        system=request.system,
        raw=request.raw,
        batch_size=many.batch_size,
    )
    with interrupts() as interrupt:
        interrupt.may_wait = True
        lines = [job.line for job in jobs]
        return write_results(results, lines, many, interrupt, verbose=output.verbose, origin=origin)


def _settings(request: Request) -> str:
    """A digest of the options that shape a result of --prompts; those that say nothing are left out."""
    stated = {
        **request.flags,
        **asdict(request.stop),
        "bad_words": request.bad_words,
        "system": request.system,
        "raw": request.raw,
        "dtype": request.choice.dtype,
        "weights": request.choice.execution.weights,
        "tokenizer": request.choice.tokenizer and str(request.choice.tokenizer),
    }
    said = {name: value for name, value in stated.items() if value not in (None, ()) and value is not False}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _finish(trace: Trace, output: Shown, startup_s: Mapping[str, float], *, debug: bool) -> int:
    """The summary or the JSON document, then the exit code."""
    finished = trace.finished
    if finished is None:
        raise KeyboardInterrupt
    if output.json:
        from llminfer.render.document import run_document

        write_text(to_json(run_document(trace, startup_s)) + "\n")
    if output.verbose or output.steps:
        from llminfer.render.console import make_console
        from llminfer.render.steps import step_table
        from llminfer.render.summary import summary

        console = make_console(sys.stderr)
        drafts = trace.started is not None and trace.started.speculation is not None
        for line in step_table(trace.steps, drafts=drafts) if output.steps else ():
            console.print(line)
        for text in summary(trace, startup_s) if output.verbose else ():
            console.print(text)
    if isinstance(finished.error, LlminferError):
        if debug:
            raise finished.error
        return report(finished.error)
    return INTERRUPTED_EXIT_CODE if finished.reason == "interrupted" else 0
