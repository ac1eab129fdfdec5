"""What `llminfer generate` was asked for, and how it is carried out: one run, samples, or a file of prompts."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from llminfer.cli.errors import INTERRUPTED_EXIT_CODE, report, say
from llminfer.cli.loading import load, status
from llminfer.cli.prompts import ManyPrompts, write_results
from llminfer.cli.standard_streams import begin_line, end_line, write_text
from llminfer.cli.stream import interrupts, stream, text_of
from llminfer.errors import LlminferError
from llminfer.jobs import BadLine
from llminfer.request import GenerationRequest, LoadRequest
from llminfer.units import to_json

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel
    from llminfer.events import Finished, Step, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown of a run, and in which form."""

    steps: bool
    verbose: bool
    quiet: bool
    json: bool
    echo: bool
    token_ids: bool

    @property
    def talks(self) -> bool:
        """Whether progress and summary go to standard error."""
        return not self.quiet and (self.verbose or not self.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """All that the command line asked for: which model, what of it, and what is shown."""

    load: LoadRequest
    draft: LoadRequest | None
    request: GenerationRequest
    shown: Shown
    debug: bool

    def load_models(self) -> tuple[LoadedModel, LoadedModel | None]:
        """The model, and the one that drafts for it where one does."""
        asked = {"cache": self.request.cache, "speculation": self.request.speculation, "draft": self.draft}
        return load(self.load, verbose=self.shown.talks, **asked)


def run(command: Command) -> int:
    """Run one prompt and return the exit code."""
    from llminfer.api import generate

    loaded, draft = command.load_models()
    shown = command.shown
    with status("compiling the decode step", shown.talks and command.load.execution.compiled):
        events = generate(loaded, command.request, draft=draft)
    show = None if shown.json else _id_line if shown.token_ids else text_of
    trace = stream(events, announce=shown.talks, show=show, echo=command.request.text if shown.echo else "")
    end_line()
    return _finish(trace, shown, debug=command.debug)


def _id_line(event: Step | Finished) -> str:
    token_id = getattr(event, "token_id", None)
    return "" if token_id is None else f"{token_id}\n"


def run_samples(command: Command, count: int) -> int:
    """Run several samples of one prompt: each text on lines of its own, or all in one document."""
    from llminfer.api import generate_samples

    loaded, _ = command.load_models()
    samples, shown = generate_samples(loaded, command.request, count), command.shown
    if shown.json:
        from llminfer.render.document import samples_document

        write_text(to_json(samples_document(samples.traces, asdict(samples.peak))) + "\n")
    for number, trace in enumerate(samples.traces if not shown.json else ()):
        if shown.talks and trace.started is not None and trace.finished is not None:
            seed, reason = trace.started.sampling.seed, trace.finished.reason
            say(f"sample {number} · seed {seed} · {len(trace.steps)} tokens · {reason}")
        text = "".join(f"{token_id}\n" for token_id in trace.token_ids) if shown.token_ids else trace.text
        write_text((command.request.text if shown.echo else "") + text + "\n")
    if shown.talks:
        peak = samples.peak
        predicted = "not predicted" if peak.predicted_bytes is None else f"predicted {peak.predicted_bytes} B"
        say(f"KV cache at most {peak.kv_bytes} B for {peak.rows} samples of {peak.tokens} tokens · {predicted}")
    reasons = [trace.finished.reason for trace in samples.traces if trace.finished is not None]
    return INTERRUPTED_EXIT_CODE if "interrupted" in reasons else int("error" in reasons)


def run_many(command: Command, many: ManyPrompts) -> int:
    """Run a file of prompts and return the exit code."""
    from llminfer.api import generate_batch

    verbose, settings = command.shown.talks, _settings(command)
    jobs = many.jobs(command.request, settings)
    if not jobs:
        if verbose:
            say(f"nothing to do: {many.output} has every line")
        return 0
    loaded, _ = command.load_models()
    origin = {"settings": settings}
    if many.output is not None and loaded.folder is not None:
        from llminfer.engine.prompt_cache import model_digest

        origin["model_digest"] = model_digest(loaded.folder)
        note = many.check_model(loaded.name, origin["model_digest"])
        if note is not None and verbose:
            say(f"note: {note}")
    asked = (job.error if isinstance(job, BadLine) else job.request for job in jobs)
    results = generate_batch(loaded, asked, batch_size=many.batch_size)
    with interrupts() as interrupt:
        interrupt.may_wait = True
        return write_results(results, jobs, many, interrupt, verbose=verbose, origin=origin)


def _settings(command: Command) -> str:
    """A digest of the options that shape a result of --prompts; those that say nothing are left out."""
    request, load = command.request, command.load
    stated = {
        **request.sampling.stated(),
        **asdict(request.stop),
        "bad_words": request.sampling.bad_texts,
        "system": request.system,
        "raw": request.raw,
        "dtype": load.dtype,
        "weights": load.execution.weights,
        "tokenizer": load.tokenizer and str(load.tokenizer),
    }
    said = {name: value for name, value in stated.items() if value not in (None, ()) and value is not False}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _finish(trace: Trace, shown: Shown, *, debug: bool) -> int:
    """The summary or the JSON document, then the exit code."""
    finished = trace.finished
    if finished is None:
        raise KeyboardInterrupt
    if shown.json:
        from llminfer.render.document import run_document

        write_text(to_json(run_document(trace)) + "\n")
    begin_line()
    if shown.steps:
        from llminfer.render.fit import width_of
        from llminfer.render.steps import step_table

        drafts = trace.started is not None and trace.started.speculation is not None
        for line in step_table(trace.steps, drafts=drafts, width=width_of(sys.stderr)):
            say(line)
    if shown.talks:
        from llminfer.render.summary import print_lines, summary

        print_lines(summary(trace, short=not shown.verbose), sys.stderr)
    if isinstance(finished.error, LlminferError):
        if debug:
            raise finished.error
        return report(finished.error)
    return INTERRUPTED_EXIT_CODE if finished.reason == "interrupted" else 0
