"""Image-text models continue a text without an image, and what cannot is refused before weights load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.api import generate
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.load import load
from llminfer.engine.models.quirks import QUIRKS
from llminfer.engine.models.support import check_direction, check_inputs, check_model_type, read_architecture
from llminfer.engine.text.prompt import encode_prompt
from llminfer.errors import UnsupportedArchitecture
from llminfer.events import Finished, Started, Step
from llminfer.kv.rules.families import read_model
from llminfer.params import StopCriteria
from tests.parity import (
    CANNOT_RUN,
    GREEDY,
    IMAGE_TEXT_TYPES,
    SAMPLED,
    check_batch,
    check_footprint,
    check_tokens,
    expected_tokens,
    new_tokens,
)
from tests.tiny_checkpoints import BOS, byte_level_tokenizer
from tests.tiny_models import tiny_config, tiny_image_text_model

QUICK = ("llava", "qwen2_5_vl", "mistral3", "idefics3", "exaone4_5", "paligemma")


def types() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in IMAGE_TEXT_TYPES]


@pytest.fixture(scope="module", params=types())
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_image_text_model(tiny_config(request.param), torch.float32)


def test_text_alone_gives_the_tokens_of_generate(model: Any) -> None:
    check_tokens(model, GREEDY, new_tokens())
    check_tokens(model, SAMPLED, new_tokens())


def test_rows_of_a_batch_get_the_tokens_they_get_alone(model: Any) -> None:
    assert check_batch(model, SAMPLED)


def test_the_cache_is_that_of_the_language_model(model: Any) -> None:
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    check_footprint(model, read_model(config, source="tiny"), new_tokens())


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl", "mistral3", "gemma3", "llama4"])
def test_a_checkpoint_loads_and_continues_a_text(tmp_path: Path, model_type: str) -> None:
    tokenizer = byte_level_tokenizer(chat_template=None)
    tiny_image_text_model(tiny_config(model_type), torch.float32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load(inspect_checkpoint(tmp_path), device="cpu")
    # ids beyond the tiny vocabulary: only what the tokenizer makes of control characters stays inside
    events = list(
        generate(loaded, "\t\n\r", sampling={"temperature": 0}, stop=StopCriteria(max_new_tokens=4, ignore_eos=True))
    )
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert finished.error is None
    steps = [event for event in events if isinstance(event, Step)]
    expected = expected_tokens(loaded.model, list(started.prompt_ids), 4, GREEDY)
    assert [step.token_id for step in steps] == [token_id for token_id, _ in expected]
    assert steps[-1].kv_bytes == finished.kv.total_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("blip-2", "cannot run without an image"),
        ("instructblip", "cannot run without an image"),
        ("idefics", "cannot run without an image"),
        ("diffusion_gemma", "does not write token by token"),
        ("florence2", "is an encoder-decoder model"),
        ("pix2struct", "is an encoder-decoder model"),
        ("udop", "is an encoder-decoder model"),
        ("t5gemma2", "is an encoder-decoder model"),
        ("musicgen", "writes sound, not text"),
        ("gemma4_assistant", "is a drafter"),
    ],
)
def test_what_cannot_is_refused_by_its_config_alone(tmp_path: Path, model_type: str, reason: str) -> None:
    config = {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture) as caught:
        read_architecture(tmp_path, config, trust_remote_code=False)
    assert caught.value.message == f"{tmp_path}: {model_type} {reason}" or reason == "is a drafter"
    assert f"{model_type} {reason}" in caught.value.message


@pytest.mark.slow  # it imports the code of every type
def test_types_that_run_are_not_refused() -> None:
    for name in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *IMAGE_TEXT_TYPES):
        if name not in CANNOT_RUN:
            check_model_type({"model_type": name}, name, trust_remote_code=False)
            check_inputs(tiny_config(name), name)
    for name in IMAGE_TEXT_TYPES:
        check_direction(tiny_config(name), name)


def test_what_is_refused_by_name_is_what_cannot_run() -> None:
    refused = {name for name, quirks in QUIRKS.items() if quirks.not_alone}
    assert refused & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= CANNOT_RUN.keys()


IN_PARTS = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% endfor %}"
)
REFUSES_TEXT = "{{ bos_token }}{% for message in messages %}{{ message['content'][0]['text'].strip() }}{% endfor %}"


@pytest.mark.parametrize(("template", "expected"), [(IN_PARTS, f"{BOS}[user]hello"), (REFUSES_TEXT, f"{BOS}hello")])
def test_a_template_that_reads_parts_gets_parts(template: str, expected: str) -> None:
    assert encode_prompt(byte_level_tokenizer(chat_template=template), "hello").text == expected
