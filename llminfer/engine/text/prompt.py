"""From a prompt to ids: the chat template for chat models, exactly one BOS, nothing forged in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from llminfer.engine.text.detokenizer import special_tokens
from llminfer.engine.text.tokenizer import Tokenizer
from llminfer.errors import LlminferError, ModelNotAvailable, UsageError
from llminfer.text import reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model is fed: ids, the same as text, and what the user should know about them."""

    ids: tuple[int, ...]
    text: str
    notes: tuple[str, ...] = ()


def encode_prompt(tokenizer: Tokenizer, text: str, *, system: str | None = None, raw: bool = False) -> Prompt:
    """Encode a user's text: through the chat template when the tokenizer has one, else as it is.

    Control tokens written out in the user's text become control tokens, as the template's own text
    does; a note says so.

    Args:
        system: a system message, for chat models.
        raw: skip the chat template.

    Raises:
        UsageError: for a system message without a template, a template that refuses the messages,
            or a prompt without any token.
    """
    if tokenizer.chat_template and not raw:
        messages = [{"role": "user", "content": text}]
        if system is None:
            return _encode_messages(tokenizer, messages, "the prompt", hint="--raw skips the template")
        messages.insert(0, {"role": "system", "content": system})
        return _encode_messages(tokenizer, messages, "--system", hint="drop --system, or use --raw")
    if system is not None:
        reason = "--raw skips the chat template" if raw else "this model has no chat template"
        raise UsageError(f"a system message needs a chat template, and {reason}", hint="drop --system")
    return _prompt(tokenizer, list(tokenizer(text)["input_ids"]))


def encode_messages(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> Prompt:
    """Encode a conversation through the chat template, ready for the assistant's turn.

    Raises:
        UsageError: without a template, or for one that refuses the messages.
    """
    if not tokenizer.chat_template:
        raise UsageError("messages need a chat template, and this model has none", hint="give the text as a prompt")
    return _encode_messages(tokenizer, messages, "the conversation")


def _encode_messages(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], what: str, *, hint: str | None = None
) -> Prompt:
    """The conversation through the template; `what` a template that refuses would be refusing, with what to do then."""
    form = _read_form(tokenizer, messages)
    try:
        ids = list(_apply(tokenizer, [form(message) for message in messages], tokenize=True))
    except TemplateError as error:
        reason = error.message or type(error).__name__
        raise UsageError(f"the model's chat template refused {what}: {reason}", hint=hint) from error
    except Exception as error:  # a template is a program, and may raise whatever programs do
        raise LlminferError(f"the model's chat template failed: {reason_of(error)}", hint=hint) from error
    return _prompt(tokenizer, ids, notes=_forged(tokenizer, [message["content"] for message in messages]))


def _prompt(tokenizer: Tokenizer, ids: list[int], notes: tuple[str, ...] = ()) -> Prompt:
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise UsageError("the prompt is empty", hint="give some text")
    return Prompt(ids=tuple(ids), text=tokenizer.decode(ids), notes=notes)


def check_ids(prompt: Prompt, tokenizer: Tokenizer, embedded: int | None) -> Prompt:
    """The prompt itself, when each of its ids is among the `embedded` first, which are all where that is unknown.

    Raises:
        ModelNotAvailable: for a tokenizer larger than the model.
    """
    largest = max(prompt.ids)
    if embedded is not None and largest >= embedded:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelNotAvailable(
            f"the tokenizer is larger than the model: the prompt has id {largest} ({token!r}), and the model"
            f" embeds {embedded} ids",
            hint="take the tokenizer that belongs to these weights, or a prompt without this token",
        )
    return prompt


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
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


def _in_parts(message: Mapping[str, str]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


# digits, so that a template that changes the case of a text shows it all the same
_PROBE = "7391846205"


def _read_form(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """How the template reads content: as a text, or as a list of parts, as some of image-text models do.

    Those leave out a plain text without an error. So a probe takes the place of the newest message, and is
    looked for in what the template renders: never in what is decoded from ids, which tokenizers change.
    """
    probe = [*messages[:-1], {**messages[-1], "content": _PROBE}]
    for form in (dict, _in_parts):
        try:
            rendered = _apply(tokenizer, [form(message) for message in probe], tokenize=False)
        except Exception:  # the conversation itself is rendered next, and what is wrong said then
            continue
        # a template that adds texts together may write the whole list out, as Python or JSON does
        if _PROBE in rendered and not any(f"text{quote}: {quote}{_PROBE}" in rendered for quote in "'\""):
            return form
    return dict


def _apply(tokenizer: Tokenizer, messages: list[dict[str, Any]], *, tokenize: bool) -> Any:
    return tokenizer.apply_chat_template(messages, tokenize=tokenize, add_generation_prompt=True, return_dict=False)


def _forged(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[str, ...]:
    """Control tokens that the user's own text spells out."""
    tokens = special_tokens(tokenizer).values()
    found = sorted({token for token in tokens if any(token in text for text in texts)})
    return (f"the prompt spells out control tokens, which act as such: {', '.join(found)}",) if found else ()
