"""Conversations on disk: one JSON document, written whole or not at all, read with nothing taken on trust."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llminfer.atomic import replacing
from llminfer.errors import LlminferError, UsageError
from llminfer.foreign import MOST_JSON_BYTES, parse_json

SCHEMA_VERSION = 1
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: who said it, one of `ROLES`, and what."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A conversation and the name of the model that held it."""

    model: str
    messages: tuple[Message, ...]


def write_transcript(file: Path, transcript: Transcript) -> None:
    """Put the conversation in place of whatever the file held; a failure leaves that as it was.

    Raises:
        LlminferError: when it cannot be written.
    """
    document = {"schema_version": SCHEMA_VERSION, **asdict(transcript)}
    data = json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
    try:
        with replacing(file) as beside:
            beside.write_bytes(data)
    except OSError as error:
        raise LlminferError(f"cannot write {file}: {error.strerror}") from error


def read_transcript(file: Path) -> Transcript:
    """The conversation in the file.

    Raises:
        UsageError: for a file that cannot be read or holds no conversation.
    """
    try:
        with file.open("rb") as stream:
            document = parse_json(stream.read(MOST_JSON_BYTES + 1))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not a JSON document: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(f"{file} holds no conversation: schema_version is {version!r}, not {SCHEMA_VERSION}")
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise UsageError(f"{file} holds no conversation: messages is not a list")
    return Transcript(
        model=str(document.get("model") or "a model without a name"),
        messages=tuple(_message(file, index, entry) for index, entry in enumerate(messages)),
    )


def _message(file: Path, index: int, entry: Any) -> Message:
    role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
    if role not in ROLES or not isinstance(content, str):
        raise UsageError(f"{file}: message {index} lacks a role of {', '.join(ROLES)} and a text as its content")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{file}: message {index} is not valid Unicode") from error
    return Message(role=role, content=content)
