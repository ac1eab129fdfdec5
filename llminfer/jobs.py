"""Many prompts from a file: one job a line, as plain text or as JSON objects.

A line of a `.jsonl` file is an object with `prompt` (a text) or `messages` (a list of role and
content), and optionally `id`, `system`, `max_new_tokens`, `stop` and the sampling fields of
`SamplingParams`. In any other file a line is a prompt. Lines end with LF or CR LF; empty ones are no jobs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llminfer.errors import LlminferError, UsageError
from llminfer.foreign import parse_json
from llminfer.params import SAMPLER_FIELDS, SamplingOverrides
from llminfer.request import GenerationRequest
from llminfer.text import to_utf8

_OWN_FIELDS = ("id", "prompt", "messages", "system", "max_new_tokens", "stop")
# what a line may set; bad words are texts on the command line and ids in a file would surprise
_SAMPLING_FIELDS = tuple(name for name in SAMPLER_FIELDS if name not in {"bad_words", "logprobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a file: its line number, from 1, what it is called, and a digest that shows a changed line."""

    line: int
    id: str
    digest: str
    request: GenerationRequest


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


def read_jobs(path: Path, defaults: GenerationRequest) -> Iterator[Job | BadLine]:
    """The jobs of a file or a pipe in its order; `defaults` hold for lines that state nothing else.

    Raises:
        UsageError: when it cannot be read.
    """
    try:
        data = to_utf8(path.read_bytes(), f"--prompts {path}")
    except OSError as error:
        raise UsageError(f"cannot read --prompts {path}: {error.strerror}") from error
    is_json = path.suffix.lower() in {".jsonl", ".ndjson"}
    for number, line in enumerate(data.replace(b"\r\n", b"\n").split(b"\n"), start=1):
        if line.strip():
            yield _read_line(line, number, defaults, is_json=is_json)


def _read_line(line: bytes, number: int, defaults: GenerationRequest, *, is_json: bool) -> Job | BadLine:
    digest = hashlib.sha256(line).hexdigest()[:16]
    try:
        text = line.decode("utf-8")
        if not is_json:
            return Job(line=number, id=str(number), digest=digest, request=replace(defaults, text=text))
        fields = parse_json(text)
        json.dumps(fields, ensure_ascii=False).encode("utf-8")  # half an emoji can be escaped, and is no text
        request = _read_object(fields, defaults)
        return Job(line=number, id=str(fields.get("id", number)), digest=digest, request=request)
    except LlminferError as error:
        return BadLine(line=number, digest=digest, error=error)
    except ValueError as error:
        reason = next((reason for kind, reason in _UNREADABLE.items() if isinstance(error, kind)), None)
        what = f"the line is {reason}" if reason else f"the line cannot be read: {error}"
        return BadLine(line=number, digest=digest, error=UsageError(what))


_UNREADABLE = {
    UnicodeDecodeError: "not UTF-8",
    UnicodeEncodeError: "not Unicode: it escapes half a character",
    json.JSONDecodeError: "not JSON",
}


def _read_object(fields: Any, defaults: GenerationRequest) -> GenerationRequest:
    """What a line asks for; where it is silent, what holds for all lines."""
    if not isinstance(fields, dict):
        raise UsageError("the line is not a JSON object")
    unknown = sorted(fields.keys() - {*_OWN_FIELDS, *_SAMPLING_FIELDS})
    if unknown:
        known = ", ".join((*_OWN_FIELDS, *_SAMPLING_FIELDS))
        raise UsageError(f"the line has the unknown field {unknown[0]!r}", hint=f"known: {known}")
    if ("prompt" in fields) == ("messages" in fields):
        raise UsageError("the line must have prompt or messages, and not both")
    messages = _messages(fields.get("messages"))
    # a system message for all lines is for prompts; a conversation has its own, or none
    common = defaults.system if messages is None else None
    return replace(
        defaults,
        text=_text(fields, "prompt") or "",
        messages=messages,
        system=_text(fields, "system") or common,
        sampling=_sampling(fields).over(defaults.sampling),
        stop=replace(
            defaults.stop,
            max_new_tokens=fields.get("max_new_tokens", defaults.stop.max_new_tokens),
            stop=(*defaults.stop.stop, *_stops(fields.get("stop", ()))),
        ),
    )


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name} is not a text")
    return value


def _messages(value: Any) -> tuple[Mapping[str, str], ...] | None:
    if value is None:
        return None
    whole = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
    if not whole or not value:
        raise UsageError("messages is not a list of objects with role and content")
    return tuple(value)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UsageError("stop is not a text or a list of texts")
    return tuple(texts)


def _sampling(fields: Mapping[str, Any]) -> SamplingOverrides:
    """The sampling fields of a line, made of what they may be made of."""
    stated: dict[str, Any] = {name: fields.get(name) for name in _SAMPLING_FIELDS}
    biases = stated["logit_bias"]
    if biases is not None:
        if not isinstance(biases, dict) or not all(key.isdecimal() for key in biases):
            raise UsageError("logit_bias is not an object of ids and numbers")
        stated["logit_bias"] = {int(key): bias for key, bias in biases.items()}
    return SamplingOverrides(**stated)
