"""Prompts: the chat template, exactly one BOS, control tokens spelled out, and templates that refuse."""

from __future__ import annotations

from typing import Any

import pytest

from llminfer.engine.text.prompt import encode_prompt
from llminfer.errors import LlminferError, UsageError
from tests.tiny_checkpoints import CHAT_TEMPLATE, byte_level_tokenizer

REFUSES_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_exactly_one_bos_at_the_beginning(raw: bool, add_bos: bool) -> None:
    tokenizer = byte_level_tokenizer(add_bos=add_bos)
    ids = encode_prompt(tokenizer, "hi", raw=raw).ids
    assert ids.count(0) == (0 if raw and not add_bos else 1)
    assert ids[0] == (ord("h") + 3 if raw and not add_bos else 0)


def test_a_bos_typed_into_a_raw_prompt_is_not_doubled() -> None:
    tokenizer = byte_level_tokenizer()
    assert encode_prompt(tokenizer, "<s>hi", raw=True).ids == encode_prompt(tokenizer, "hi", raw=True).ids


@pytest.mark.parametrize("system", [None, "be brief"])
def test_chat_ids_are_those_of_the_template(system: str | None) -> None:
    tokenizer = byte_level_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    prompt = encode_prompt(tokenizer, "hi", system=system)
    assert list(prompt.ids) == expected
    assert prompt.text == tokenizer.decode(expected)


def test_a_base_model_gets_the_text_as_it_is() -> None:
    tokenizer = byte_level_tokenizer(chat_template=None)
    prompt = encode_prompt(tokenizer, "  hi\n")
    assert prompt.text == "<s>  hi\n"


@pytest.mark.parametrize(("template", "raw"), [(None, False), (CHAT_TEMPLATE, True)])
def test_a_system_message_is_never_dropped_in_silence(template: str | None, raw: bool) -> None:
    with pytest.raises(UsageError, match="chat template"):
        encode_prompt(byte_level_tokenizer(chat_template=template), "hi", system="S", raw=raw)


def test_a_template_that_refuses_says_why_and_what_caused_it() -> None:
    tokenizer = byte_level_tokenizer(chat_template=REFUSES_SYSTEM)
    with pytest.raises(UsageError, match="--system: System role not supported") as caught:
        encode_prompt(tokenizer, "hi", system="S")
    assert "\n" not in caught.value.message
    assert encode_prompt(tokenizer, "hi").ids


@pytest.mark.parametrize(
    "template", ["{% for message in messages %}", "{{ messages[9]['content'] + 1 }}", "{{ 1 + 'a' }}"]
)
def test_a_broken_template_is_one_line(template: str) -> None:
    with pytest.raises(LlminferError, match="template") as caught:
        encode_prompt(byte_level_tokenizer(chat_template=template), "hi")
    assert "\n" not in caught.value.message


def test_control_tokens_spelled_out_by_the_user_are_said() -> None:
    tokenizer = byte_level_tokenizer()
    prompt = encode_prompt(tokenizer, "say <|turn_end|> now")
    assert "<|turn_end|>" in prompt.notes[0]
    # the ids are those of the template, control token included, as its documentation says
    assert prompt.ids.count(2) == 2
    assert encode_prompt(tokenizer, "say it now").notes == ()


def test_an_empty_prompt_without_any_token_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        encode_prompt(byte_level_tokenizer(add_bos=False, chat_template=None), "")
    assert encode_prompt(byte_level_tokenizer(chat_template=None), "").ids == (0,)


def test_the_real_model_has_one_system_message_and_no_doubled_start(smollm: Any) -> None:
    prompt = encode_prompt(smollm.tokenizer, "Hello", system="Be brief.")
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    # without a message of ours its template brings its own, and its BOS once at the beginning
    default = encode_prompt(smollm.tokenizer, "Hello")
    assert default.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
