"""`llminfer generate --prompts`: many prompts in, one JSON object a line out, in the input's order."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from llminfer.cli.errors import INTERRUPTED_EXIT_CODE, say, writing
from llminfer.cli.standard_streams import write_text
from llminfer.errors import LlminferError, UsageError
from llminfer.jobs import BadLine, Job, read_jobs
from llminfer.params import StopCriteria, check_range
from llminfer.units import to_json

if TYPE_CHECKING:
    from llminfer.engine.many import JobResult


class Interrupt(Protocol):
    """Whether the user has asked to stop."""

    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyPrompts:
    """What `--prompts` was given with: where jobs come from and where results go."""

    file: Path | None
    batch_size: int
    output: Path | None
    resume: bool

    def check(self, *, given_prompt: bool) -> None:
        """Refuse what contradicts itself, before anything is loaded.

        Raises:
            UsageError: for a prompt beside the file, a file that is not there, or an output that would be lost.
        """
        check_range("--batch-size", self.batch_size, 1, 4096)
        if given_prompt:
            raise UsageError("two prompts: an argument and --prompts", hint="give one of them")
        if self.file is None or not self.file.is_file():
            raise UsageError(f"cannot read --prompts {self.file}: no such file")
        if self.output is not None and self.output.exists() and not self.resume and self.output.stat().st_size:
            raise UsageError(f"{self.output} exists", hint="--resume goes on with it; or name another --output")

    def jobs(self, defaults: StopCriteria) -> list[Job | BadLine]:
        """The jobs that are still to do.

        Raises:
            UsageError: when the file has none, or is not the one that the output was made from.
        """
        if self.file is None:
            return []
        jobs = list(read_jobs(self.file, defaults))
        if not jobs:
            raise UsageError(f"--prompts {self.file} has no prompt")
        done = self._done()
        by_line = {job.line: job for job in jobs}
        for line, record in done.items():
            if line not in by_line or by_line[line].digest != record.get("digest"):
                raise UsageError(
                    f"{self.output} was not made from {self.file} as it is now (line {line})",
                    hint="name another --output",
                )
        return [job for job in jobs if job.line not in done]

    def _done(self) -> dict[int, dict[str, Any]]:
        """Whole records of the output by line number; a last line that was cut off is dropped from the file."""
        if self.output is None or not self.resume or not self.output.exists():
            return {}
        data = self.output.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        records: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                records[int(record["line"])] = record
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{self.output}, line {number}, is no result of --prompts") from None
        # what was interrupted or broke is done again
        kept = {
            line: record
            for line, record in records.items()
            if "error" not in record and record.get("finish_reason") != "interrupted"
        }
        if len(whole) < len(data) or len(kept) < len(records):
            _rewrite(self.output, kept)
        return kept


def write_results(
    results: Generator[JobResult, None, None],
    lines: Sequence[int],
    many: ManyPrompts,
    interrupt: Interrupt,
    *,
    talks: bool,
) -> int:
    """Write each result when all before it are written; sort the file at the end when a resume left gaps.

    `lines` are those of the jobs that run, in order. Results that are ready when the user interrupts
    are written too, so that a resume need not redo them.
    """
    from llminfer.render.document import job_record
    from llminfer.render.progress import count_bar

    with writing(many.output):
        stream = None if many.output is None else many.output.open("a", encoding="utf-8")
    failed = interrupted = 0
    waiting: dict[int, str] = {}
    order = iter(lines)
    due = next(order, None)
    with count_bar("prompts", shown=talks) as advance:
        for result in _drain(results, interrupt):
            record = job_record(result.job, result.trace, result.error)
            reason = record.get("finish_reason")
            interrupted += reason == "interrupted"
            if "error" in record:
                failed += 1
                say(f"error: line {result.job.line}: {record['error']['message']}")
            waiting[result.job.line] = to_json(record)
            advance()
            while due in waiting:
                _write_line(stream, many.output, waiting.pop(due))
                due = next(order, None)
    for line in sorted(waiting):
        _write_line(stream, many.output, waiting[line])
    if stream is not None and many.output is not None:
        with writing(many.output):
            stream.close()
            _sort(many.output)
    return INTERRUPTED_EXIT_CODE if interrupted or interrupt.pending else int(failed > 0)


def _drain(results: Generator[JobResult, None, None], interrupt: Interrupt) -> Iterator[JobResult]:
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


def _sort(output: Path) -> None:
    """Put the records of a finished or interrupted file into the order of their lines."""
    lines = output.read_text(encoding="utf-8").splitlines()
    records = {int(json.loads(line)["line"]): json.loads(line) for line in lines}
    if list(records) != sorted(records):
        _rewrite(output, records)


def _rewrite(output: Path, records: dict[int, dict[str, Any]]) -> None:
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        for line in sorted(records):
            file.write(to_json(records[line]) + "\n")
    os.replace(temporary, output)
