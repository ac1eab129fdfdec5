"""Prompts: the chat template, exactly one BOS, control tokens spelled out, and templates that refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llminfer.engine.text.prompt import encode_messages, encode_prompt
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


# Templates and the tokenizers below them

ADDS_TEXTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
READS_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}|{% endfor %}"
)
CHANGES_TEXTS = "{% for m in messages %}{{ m.content.split('</think>')[-1] | upper | replace('A', '') }}|{% endfor %}"


def words_tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def tokenizer_with(normalizer: Any = None, token: Any = None) -> Any:
    backend = byte_level_tokenizer(chat_template=None).backend_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    if token is not None:
        backend.add_special_tokens([token])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "nfc": lambda: tokenizer_with(normalizers.NFC()),
    "nfkd": lambda: tokenizer_with(normalizers.NFKD()),
    "lower case": lambda: tokenizer_with(normalizers.Lowercase()),
    "no accents": lambda: tokenizer_with(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "digits go": lambda: tokenizer_with(normalizers.Replace("7", "")),
    "strips right": lambda: tokenizer_with(token=AddedToken("<|end|>", special=True, rstrip=True)),
    "strips left": lambda: tokenizer_with(token=AddedToken("<|end|>", special=True, lstrip=True)),
    "unknown words": words_tokenizer,
}
cached_tokenizer = cache(lambda name: TOKENIZERS[name]())
PROMPTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé\u0301İß \n\u212b\u2028")), max_size=20
) | st.sampled_from(["cafe\u0301", "Hello", "say <|end|> now", "", " ", "a</think>b"])


@pytest.mark.parametrize("template", [ADDS_TEXTS, CHAT_TEMPLATE, CHANGES_TEXTS], ids=["adds", "chat", "changes"])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(text=PROMPTS)
def test_ids_are_those_of_the_template_whatever_the_tokenizer_does_to_a_text(
    name: str, template: str, text: str
) -> None:
    tokenizer = cached_tokenizer(name)
    tokenizer.chat_template = template
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    if expected[:2] == [tokenizer.bos_token_id] * 2:
        expected = expected[1:]
    assert list(encode_prompt(tokenizer, text, system="Be brief.").ids) == expected
    assert list(encode_messages(tokenizer, messages).ids) == expected


@given(text=PROMPTS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_a_template_that_reads_parts_is_given_parts(text: str) -> None:
    tokenizer = cached_tokenizer("nfc")
    tokenizer.chat_template = READS_PARTS
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(encode_prompt(tokenizer, text).ids) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 7 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{% for i in range(1000000) %}x{% endfor %}", "OverflowError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError"),
        ("{{ {}['a']['b'] }}", "no attribute"),
    ],
)
def test_whatever_a_template_raises_is_a_template_error_in_one_line(template: str, reason: str) -> None:
    with pytest.raises(LlminferError, match=rf"chat template (failed|refused).*({reason})") as caught:
        encode_prompt(byte_level_tokenizer(chat_template=template), "ž")
    assert "\n" not in caught.value.message
    assert caught.value.exit_code in (1, 2)


def test_a_special_token_that_the_vocabulary_lacks_is_none(tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    file = model / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "bos_token": "", "tokenizer_class": "TokenizersBackend"})
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert None in tokenizer.all_special_ids
    ids = encode_prompt(tokenizer, "hello", raw=True).ids
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("hello")
