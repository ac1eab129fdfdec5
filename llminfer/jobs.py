"""Many prompts from a file: one job a line, as plain text or as JSON objects.

A line of a `.jsonl` file is an object with `prompt` (a text) or `messages` (a list of role and
content), and optionally `id`, `system`, `max_new_tokens`, `stop` and the sampling fields of
`SamplingParams`. In any other file a line is a prompt. Empty lines are no jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llminfer.errors import InvalidParams, LlminferError, UsageError
from llminfer.foreign import parse_json
from llminfer.params import SAMPLER_FIELDS, SAMPLING_RANGES, StopCriteria, check_range

_OWN_FIELDS = ("id", "prompt", "messages", "system", "max_new_tokens", "stop")
# what a line may set; bad words are texts on the command line and ids in a file would surprise
_SAMPLING_FIELDS = tuple(name for name in SAMPLER_FIELDS if name not in {"bad_words", "logprobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a file.

    Attributes:
        line: its line number, from 1.
        id: what its file calls it, else the line number.
        prompt: its text; None when it has `messages`.
        messages: a conversation for the chat template.
        digest: of the line as it stands, so that a changed file is noticed.
    """

    line: int
    id: str
    digest: str
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: StopCriteria = field(default_factory=StopCriteria)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is no job, and why."""

    line: int
    digest: str
    error: LlminferError

    @property
    def id(self) -> str:
        """Its line number, which is all that is known of it."""
        return str(self.line)


def read_jobs(path: Path, defaults: StopCriteria) -> Iterator[Job | BadLine]:
    """The jobs of a file in its order; `defaults` hold for lines that state nothing else.

    Raises:
        UsageError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.rstrip(b"\r\n")
                if line.strip():
                    yield _read_line(line, number, defaults, is_json=path.suffix.lower() in {".jsonl", ".ndjson"})
    except OSError as error:
        raise UsageError(f"cannot read --prompts {path}: {error.strerror}") from error


def _read_line(line: bytes, number: int, defaults: StopCriteria, *, is_json: bool) -> Job | BadLine:
    digest = hashlib.sha256(line).hexdigest()[:16]
    try:
        text = line.decode("utf-8")
        if not is_json:
            return Job(line=number, id=str(number), digest=digest, prompt=text, stop=defaults)
        return _read_object(parse_json(text), number, digest, defaults)
    except LlminferError as error:
        return BadLine(line=number, digest=digest, error=error)
    except ValueError as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON"
        return BadLine(line=number, digest=digest, error=UsageError(f"line {number} is {reason}"))


def _read_object(fields: Any, number: int, digest: str, defaults: StopCriteria) -> Job:
    if not isinstance(fields, dict):
        raise UsageError(f"line {number} is not a JSON object")
    unknown = sorted(fields.keys() - {*_OWN_FIELDS, *_SAMPLING_FIELDS})
    if unknown:
        known = ", ".join((*_OWN_FIELDS, *_SAMPLING_FIELDS))
        raise UsageError(f"line {number} has the unknown field {unknown[0]!r}", hint=f"known: {known}")
    if ("prompt" in fields) == ("messages" in fields):
        raise UsageError(f"line {number} must have prompt or messages, and not both")
    return Job(
        line=number,
        id=str(fields.get("id", number)),
        digest=digest,
        prompt=_text(fields, "prompt", number),
        messages=_messages(fields.get("messages"), number),
        system=_text(fields, "system", number),
        sampling=_sampling(fields, number),
        stop=StopCriteria(
            max_new_tokens=_number(fields.get("max_new_tokens", defaults.max_new_tokens), "max_new_tokens", number),
            stop=(*defaults.stop, *_stops(fields.get("stop", ()), number)),
            ignore_eos=defaults.ignore_eos,
            max_time_s=defaults.max_time_s,
        ),
    )


def _text(fields: Mapping[str, Any], name: str, number: int) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"line {number}: {name} is not a text")
    return value


def _messages(value: Any, number: int) -> tuple[Mapping[str, str], ...] | None:
    if value is None:
        return None
    whole = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
    if not whole or not value:
        raise UsageError(f"line {number}: messages is not a list of objects with role and content")
    return tuple(value)


def _stops(value: Any, number: int) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"line {number}: stop is not a text or a list of texts")
    return tuple(texts)


def _sampling(fields: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The sampling fields of a line, checked one by one so that the line's number can be named."""
    sampling: dict[str, Any] = {}
    for name in _SAMPLING_FIELDS:
        if fields.get(name) is None:
            continue
        value = fields[name]
        if name == "logit_bias":
            if not isinstance(value, dict) or not all(str(key).isdecimal() for key in value):
                raise UsageError(f"line {number}: logit_bias is not an object of ids and numbers")
            sampling[name] = {int(key): _number(bias, name, number) for key, bias in value.items()}
            continue
        sampling[name] = _number(value, name, number)
        low, high = SAMPLING_RANGES[name]
        try:
            check_range(name, sampling[name], low, high)
        except InvalidParams as error:
            raise InvalidParams(f"line {number}: {error.message}", hint=error.hint) from None
    return sampling


def _number(value: Any, name: str, number: int) -> Any:
    whole = {"max_new_tokens", "min_new_tokens", "top_k", "seed"}
    kinds = int if name in whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UsageError(f"line {number}: {name} is not a {'whole ' if name in whole else ''}number")
    return value
