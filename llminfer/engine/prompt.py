"""From a prompt to ids: the chat template for chat models, exactly one BOS, nothing forged in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from llminfer.engine.detokenizer import special_token_ids
from llminfer.errors import LlminferError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model is fed: ids, the same as text, and what the user should know about them."""

    ids: tuple[int, ...]
    text: str
    notes: tuple[str, ...] = ()


def encode_prompt(tokenizer: Any, text: str, *, system: str | None = None, raw: bool = False) -> Prompt:
    """Encode a user's text: through the chat template when the tokenizer has one, else as it is.

    Control tokens written out in the user's text become control tokens, as the template's own text
    does; a note says so.

    Args:
        system: a system message, for chat models.
        raw: leave the chat template out.

    Raises:
        UsageError: for a system message without a template, a template that refuses the messages,
            or a prompt without any token.
    """
    chat = bool(tokenizer.chat_template) and not raw
    if system is not None and not chat:
        reason = "--raw leaves the chat template out" if raw else "this model has no chat template"
        raise UsageError(f"a system message needs a chat template, and {reason}", hint="drop --system")
    ids = _chat_ids(tokenizer, text, system) if chat else list(tokenizer(text)["input_ids"])
    return _prompt(tokenizer, ids, notes=_forged(tokenizer, text, system) if chat else ())


def encode_messages(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Prompt:
    """Encode a whole conversation through the chat template, up to where the next answer begins.

    The notes are about the newest message alone, since earlier ones had theirs.

    Raises:
        UsageError: for a tokenizer without a template, a template that refuses the messages, or a
            conversation without any token.
    """
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template", hint='try: llminfer generate --raw "Once upon a time"')
    try:
        ids = _template_ids(tokenizer, messages)
    except TemplateError as error:
        reason = error.message or type(error).__name__
        raise UsageError(f"the model's chat template refused the conversation: {reason}") from error
    except (TypeError, ValueError) as error:  # what a template's own expressions raise
        raise LlminferError(f"the model's chat template failed: {error}") from error
    return _prompt(tokenizer, ids, notes=_forged(tokenizer, messages[-1]["content"]) if messages else ())


def _prompt(tokenizer: Any, ids: list[int], *, notes: tuple[str, ...]) -> Prompt:
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise UsageError("the prompt is empty", hint="give some text")
    return Prompt(ids=tuple(ids), text=tokenizer.decode(ids), notes=notes)


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as it stands at the beginning of a text and after a space.

    Raises:
        UsageError: for a word that has no token.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            if not word or not ids:
                raise UsageError(f"the bad word {word!r} has no token in this vocabulary")
            found[ids] = None
    return tuple(found)


def _chat_ids(tokenizer: Any, text: str, system: str | None) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return _template_ids(tokenizer, messages)
    except TemplateError as error:
        culprit = "--system" if system is not None else "the prompt"
        raise UsageError(
            f"the model's chat template refused {culprit}: {error.message or type(error).__name__}",
            hint="--raw leaves the template out" if system is None else "drop --system, or use --raw",
        ) from error
    except (TypeError, ValueError) as error:  # what a template's own expressions raise
        raise LlminferError(
            f"the model's chat template failed: {error}", hint="--raw leaves the template out"
        ) from error


def _template_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    )


def _forged(tokenizer: Any, *texts: str | None) -> tuple[str, ...]:
    """Control tokens that the user's own text spells out."""
    tokens = {tokenizer.convert_ids_to_tokens(token_id) for token_id in special_token_ids(tokenizer)}
    found = sorted(token for token in tokens if any(text and token in text for text in texts))
    return (f"the prompt spells out control tokens, which act as such: {', '.join(found)}",) if found else ()
