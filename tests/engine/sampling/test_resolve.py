"""What a generation_config states: every field of it is applied, named as not applied, or without a say in the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llminfer.engine.sampling.resolve import APPLIED, NOT_APPLIED, effective_sampling, effective_stop
from llminfer.errors import InvalidParams
from llminfer.params import SamplingOverrides, StopCriteria
from tests.tiny_checkpoints import save_tiny_checkpoint

Cli = Callable[..., tuple[int, bytes, str]]
# a run's own choice, with flags of its own: how long it is, which cache, how it is fed, compiled and drafted
OWN_CHOICE = """
    max_length max_new_tokens max_time use_cache cache_implementation cache_config max_cache_len prefill_chunk_size
    compile_config disable_compile continuous_batching_config low_memory use_mtp is_assistant num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size
    assistant_early_exit assistant_lookbehind target_lookbehind speculation_type
"""
# of beams, of outputs that are not text, of encoders, of prompts without a token, or only a record
WITHOUT_EFFECT = """
    early_stopping length_penalty diversity_penalty renormalize_logits output_attentions output_hidden_states
    output_scores output_logits return_dict_in_generate pad_token_id bos_token_id decoder_start_token_id
    _from_model_config transformers_version
"""


def test_every_field_of_a_generation_config_is_classified_once() -> None:
    classes = [set(APPLIED), set(NOT_APPLIED), set(OWN_CHOICE.split()), set(WITHOUT_EFFECT.split())]
    for field in GenerationConfig().to_dict():
        assert sum(field in of_class for of_class in classes) == 1, field


def test_what_is_stated_and_off_is_no_note() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    stated = {name: value for name, value in defaults.items() if value is not None and name != "do_sample"}
    params, notes = effective_sampling(SamplingOverrides(), {**stated, "do_sample": True})
    assert notes == ()
    assert params.top_k == 50


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watermarking_config", {"greenlist_ratio": 0.25}),
        ("token_healing", True),
        ("num_beams", 4),
        ("sequence_bias", [[[5], 2.0]]),
        ("suppress_tokens", [5]),
        ("dola_layers", "high"),
    ],
)
def test_what_changes_the_text_and_is_not_applied_is_named(field: str, value: object) -> None:
    _, notes = effective_sampling(SamplingOverrides(), {field: value})
    assert notes == (f"the model's generation_config also states {field}, not applied",)


def test_a_watermark_in_a_file_is_named(run_cli: Cli, tmp_path: Path) -> None:
    watermark = {"greenlist_ratio": 0.25, "bias": 2.0}
    folder = save_tiny_checkpoint(tmp_path, generation={"eos_token_id": 1, "watermarking_config": watermark})
    code, out, _ = run_cli("generate", "x", "-m", folder, "--json", "-n", 2)
    assert code == 0
    assert any("watermarking_config, not applied" in note for note in json.loads(out)["notes"])


# Sampling that is stated without do_sample


@pytest.mark.parametrize(
    ("flags", "stated", "noted"),
    [
        ({}, {"temperature": 0.6}, True),
        ({}, {"top_p": 0.9}, True),
        ({}, {"temperature": 0.6, "do_sample": True}, False),
        ({}, {"temperature": 0.6, "do_sample": False}, False),
        ({"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.9}, False),
        ({"top_p": 0.5}, {"temperature": 0.6}, True),
        ({}, {"repetition_penalty": 1.1}, False),
        ({}, {}, False),
    ],
)
def test_sampling_stated_without_do_sample_is_applied_and_noted(
    flags: dict[str, Any], stated: dict[str, Any], noted: bool
) -> None:
    params, notes = effective_sampling(SamplingOverrides(**flags), stated)
    assert any("no do_sample" in note for note in notes) == noted
    if noted:
        assert params.temperature == stated.get("temperature", 1.0)


def test_the_note_says_what_generate_does(run_cli: Cli, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path, generation={"temperature": 5.0, "eos_token_id": 1})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer("x")["input_ids"]])
    greedy = model.generate(prompt, max_new_tokens=6)[0, prompt.shape[1] :].tolist()
    runs = []
    for temperature in ([], ["-t", "0"]):
        out = run_cli("generate", "x", "--raw", "-m", folder, "--json", "-n", 6, "--seed", 1, *temperature)[1]
        runs.append(json.loads(out))
    assert runs[0]["token_ids"] != greedy == runs[1]["token_ids"]
    assert any("this run samples, generate() would not" in note for note in runs[0]["notes"])
    assert not any("do_sample" in note for note in runs[1]["notes"])


# Stop texts of the model


@pytest.mark.parametrize("stated", ["END", ["END", "STOP"]])
def test_stop_texts_of_the_model_hold_where_none_are_asked_for(stated: Any) -> None:
    texts = ("END",) if stated == "END" else ("END", "STOP")
    stop = effective_stop(StopCriteria(), {"stop_strings": stated})
    assert (stop.stop, stop.stop_from_model) == (texts, True)
    asked = StopCriteria(stop=("mine",))
    assert effective_stop(asked, {"stop_strings": stated}) == asked
    assert effective_stop(StopCriteria(), {}) == StopCriteria()


@pytest.mark.parametrize("stated", [5, [5], [""], {"a": 1}])
def test_stop_texts_that_are_none_are_refused(stated: Any) -> None:
    with pytest.raises(InvalidParams, match="stop_strings"):
        effective_stop(StopCriteria(), {"stop_strings": stated})


@pytest.mark.parametrize("pieces", [["a", "EN", "D", "b", "c"], ["a", "END"], ["a", "xEND", "b"]])
def test_a_model_stops_at_its_own_texts_where_generate_does(
    run_cli: Cli, scripted: Callable[..., Path], pieces: list[str]
) -> None:
    folder = scripted(pieces)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "stop_strings": ["END"]}))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer("x")["input_ids"]])
    expected = model.generate(prompt, max_new_tokens=9, tokenizer=tokenizer)[0, prompt.shape[1] :].tolist()
    code, out, _ = run_cli("generate", "x", "--raw", "-m", folder, "--json", "-n", 9, "-t", "0")
    document = json.loads(out)
    assert code == 0
    assert document["token_ids"] == expected
    assert document["finish_reason"] == "stop"
    assert (document["stop"], document["stop_from_model"]) == (["END"], True)
    assert document["text"] == "".join(pieces).partition("END")[0]
    _, _, err = run_cli("generate", "x", "--raw", "-m", folder, "-n", 9, "-t", "0")
    assert "stop, 'END' (model)" in err


# Stop texts that name special tokens


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("<|turn_end|>", "ab", "stop"),
        ("b<|turn_end|>", "a", "stop"),
        ("<|turn_end|>c", "ab", "stop"),
        ("b<|turn_end|>c", "a", "stop"),
        ("bc", "a", "stop"),  # what is seen, with a hidden token in it
        ("turn_end", "abcd", "length"),  # part of a token that nobody sees
        ("x<|turn_end|>", "abcd", "length"),
    ],
)
def test_a_stop_text_may_name_special_tokens(
    run_cli: Cli, scripted: Callable[..., Path], stop: str, text: str, reason: str
) -> None:
    folder = scripted(["a", "b", 2, "c", "d", "d"])
    code, out, _ = run_cli("generate", "x", "--raw", "-m", folder, "--json", "-n", 5, "-t", "0", "--stop", stop)
    document = json.loads(out)
    assert code == 0
    assert (document["text"], document["finish_reason"]) == (text, reason)
    assert document["finish_detail"] == (stop if reason == "stop" else None)
    code, out, _ = run_cli("generate", "x", "--raw", "-q", "-m", folder, "-n", 5, "-t", "0", "--stop", stop)
    assert out.decode().rstrip("\n") == text


def test_an_eos_that_is_a_stop_text_too_is_an_eos_unless_ignored(run_cli: Cli, scripted: Callable[..., Path]) -> None:
    folder = scripted(["a", 1, "c"])
    arguments = ["generate", "x", "--raw", "-m", folder, "--json", "-n", 3, "-t", "0", "--stop", "</s>"]
    assert json.loads(run_cli(*arguments)[1])["finish_reason"] == "eos"
    ignored = json.loads(run_cli(*arguments, "--ignore-eos")[1])
    assert (ignored["text"], ignored["finish_reason"]) == ("a", "stop")
