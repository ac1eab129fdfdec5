"""`llminfer generate --prompts`: many prompts in, one JSON object a line out, in the input's order."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llminfer.atomic import replacing
from llminfer.cli.errors import INTERRUPTED_EXIT_CODE, say, writing
from llminfer.cli.standard_streams import write_text
from llminfer.cli.stream import Interrupt
from llminfer.errors import LlminferError, UsageError
from llminfer.jobs import BadLine, Job, read_jobs
from llminfer.params import check_range, check_writable
from llminfer.request import GenerationRequest
from llminfer.units import to_json

if TYPE_CHECKING:
    from llminfer.engine.batch_generate import BatchResult

_OTHER_OUTPUT = "name another --output"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyPrompts:
    """What `--prompts` was given with: where jobs come from and where results go."""

    file: Path
    batch_size: int
    output: Path | None
    resume: bool

    def check(self) -> None:
        """Refuse what cannot be read or written, before anything is loaded.

        Raises:
            UsageError: for a file that is not there, or an output that would be lost.
        """
        check_range("--batch-size", self.batch_size, 1, 4096)
        if not self.file.exists():
            raise UsageError(f"cannot read --prompts {self.file}: no such file")
        if self.output is not None:
            check_writable("--output", self.output, streams=not self.resume)
            if self.output.exists() and not self.resume and self.output.stat().st_size:
                raise UsageError(f"{self.output} exists", hint=f"--resume continues it; or {_OTHER_OUTPUT}")

    def jobs(self, defaults: GenerationRequest, settings: str) -> list[Job | BadLine]:
        """The jobs that are still to do.

        Args:
            settings: a digest of all that shapes a result beside the model and the line.

        Raises:
            UsageError: when the file has none, or is not the one that the output was made from, or not so.
        """
        jobs = list(read_jobs(self.file, defaults))
        if not jobs:
            raise UsageError(f"--prompts {self.file} has no prompt")
        done = self.done()
        by_line = {job.line: job for job in jobs}
        for line, record in done.items():
            if line not in by_line or by_line[line].digest != record.get("digest"):
                reason = f"{self.output} was not made from {self.file} as it is now (line {line})"
                raise UsageError(reason, hint=_OTHER_OUTPUT)
            if record.get("settings", settings) != settings:
                reason = f"{self.output} was made with other options (line {line})"
                raise UsageError(reason, hint=f"give the same options, or {_OTHER_OUTPUT}")
        return [job for job in jobs if job.line not in done]

    def check_model(self, name: str, digest: str) -> str | None:
        """Refuse to go on with the results of another model; a note where they do not say of which they are.

        Raises:
            UsageError: naming both.
        """
        done = self.done()
        for line, record in done.items():
            if record.get("model_digest", digest) != digest:
                was = record.get("model")
                other = f"{was}, not with {name}" if was != name else f"other weights or files of {name}"
                raise UsageError(f"{self.output} was made with {other} (line {line})", hint=_OTHER_OUTPUT)
        if all("model_digest" in record for record in done.values()):
            return None
        return f"{self.output} does not say with which model and options all of it was made; continuing all the same"

    def done(self) -> dict[int, dict[str, Any]]:
        """The results of the output by line number; what is cut off, broken or interrupted is dropped from the file."""
        if self.output is None or not self.resume or not self.output.exists():
            return {}
        return _tidy(self.output, lambda record: "error" not in record and record.get("finish_reason") != "interrupted")


def write_results(
    results: Generator[BatchResult, None, None],
    jobs: Sequence[Job | BadLine],
    many: ManyPrompts,
    interrupt: Interrupt,
    *,
    verbose: bool,
    origin: Mapping[str, str],
) -> int:
    """Write each result when all before it are written; whatever ends the run, those that are ready are written.

    `jobs` are those that run, in order; `origin` goes into every record, for a later --resume.
    """
    from llminfer.render.document import job_record
    from llminfer.render.progress import count_bar

    with writing(many.output):
        stream = None if many.output is None else many.output.open("a", encoding="utf-8")
    failed = interrupted = 0
    waiting: dict[int, str] = {}
    order = (job.line for job in jobs)
    due = next(order, None)
    try:
        with count_bar("prompts", shown=verbose) as advance:
            for result in _drain(results, interrupt):
                job = jobs[result.index]
                record = {**job_record(job, result.trace, result.error), **origin}
                reason = record.get("finish_reason")
                interrupted += reason == "interrupted"
                if "error" in record:
                    failed += 1
                    say(f"error: line {job.line}: {record['error']['message']}")
                waiting[job.line] = to_json(record)
                advance()
                while due in waiting:
                    _write_line(stream, many.output, waiting.pop(due))
                    due = next(order, None)
    finally:
        if stream is None or not stream.closed:  # closed where the disk is full
            for line in sorted(waiting):
                _write_line(stream, many.output, waiting[line])
        if stream is not None and many.output is not None:
            with writing(many.output):
                stream.close()
                if many.output.is_file():  # what went into a pipe or a device is gone
                    _tidy(many.output)
    return INTERRUPTED_EXIT_CODE if interrupted or interrupt.pending else int(failed > 0)


def _drain(results: Generator[BatchResult, None, None], interrupt: Interrupt) -> Iterator[BatchResult]:
    """The results; an interrupt is handed to the run, which then ends what is under way."""
    thrown = False
    result = next(results, None)
    while result is not None:
        yield result
        if interrupt.pending and not thrown:
            thrown = True
            try:
                result = results.throw(KeyboardInterrupt())
            except StopIteration:
                return
        else:
            result = next(results, None)


def _write_line(stream: TextIO | None, output: Path | None, line: str) -> None:
    if stream is None:
        write_text(line + "\n")
        return
    try:
        with writing(output):
            stream.write(line + "\n")
            stream.flush()
    except LlminferError:
        with suppress(OSError):  # what could not be written is still in its buffer
            stream.close()
        raise


def _tidy(output: Path, kept: Callable[[dict[str, Any]], bool] = lambda record: True) -> dict[int, dict[str, Any]]:
    """The records that are kept, by line; the file then has these alone, in the order of their lines.

    Raises:
        UsageError: for a line that is no result of ours. A last one that was cut off is dropped.
    """
    data = output.read_bytes()
    records: dict[int, dict[str, Any]] = {}
    texts: dict[int, bytes] = {}
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(text)
            line = int(record["line"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise UsageError(f"{output}, line {number}, is not a result of --prompts", hint=_OTHER_OUTPUT) from None
        if kept(record):
            records[line], texts[line] = record, text + b"\n"
    tidy = b"".join(texts[line] for line in sorted(texts))
    if tidy != data:
        with replacing(output) as beside:
            beside.write_bytes(tidy)
    return records
