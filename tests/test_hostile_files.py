"""Files that others wrote, mutated: each is answered or refused by our own error, in bounded time and memory.

Every target runs in a process of its own, whose memory is limited and whose inputs are stopped by an
alarm on processor time (generous here: it guards against hangs; `tests/fuzz_parsers.py` measures).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llminfer.errors import MOST_CHARACTERS, LlminferError, ModelNotAvailable, UnsupportedArchitecture
from llminfer.foreign import MOST_DIGITS, MOST_JSON_DEPTH, MOST_JSON_VALUES, parse_json, read_json_object
from llminfer.kv.config import MOST_LAYERS
from llminfer.kv.rules.families import read_model
from tests.fuzz_parsers import LIGHT, Target, attempt

ROOT = Path(__file__).resolve().parent.parent
SWEEP = {
    "config": 3000,
    "gguf": 5000,
    "weights": 2500,
    "index": 2000,
    "prompts": 2500,
    "chat": 2000,
    "adapter": 1000,
    "load-config": 500,
    "load-tokenizer": 300,
    "load-tokenizer-config": 200,
    "load-generation-config": 200,
    "load-template": 200,
    "load-weights": 200,
    "convert-gguf": 200,
    "prompt-cache": 200,
}


def findings(target: str, inputs: int) -> list[dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz_parsers", target, "--inputs", str(inputs), "--cpu-s", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # libraries print, too


@pytest.mark.parametrize("target", LIGHT)
def test_a_few_mutations_are_answered_or_refused(target: str) -> None:
    assert findings(target, 60) == []


def test_the_sweep_is_twenty_thousand_inputs() -> None:
    assert sum(SWEEP.values()) == 20_000


@pytest.mark.slow
@pytest.mark.parametrize("target", SWEEP)
def test_mutations_are_answered_or_refused(target: str) -> None:
    assert findings(target, SWEEP[target]) == []


# The bounds, one by one


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9" * (MOST_DIGITS + 1), f"an integer of {MOST_DIGITS + 1} digits"),
        ("9" * 5001, "an integer of 5001 digits"),
        ("[" * (MOST_JSON_DEPTH + 1) + "]" * (MOST_JSON_DEPTH + 1), "nested more than"),
        ('{"a":' * 200_000 + "1" + "}" * 200_000, "nested more than"),
        ("[" + "0," * MOST_JSON_VALUES + "0]", "values"),
    ],
    ids=["digits", "more digits than Python reads", "depth", "more depth than Python has", "values"],
)
def test_json_beyond_the_bounds_is_refused_with_the_bound(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_json_within_the_bounds_is_what_json_says() -> None:
    deep = "[" * MOST_JSON_DEPTH + "]" * MOST_JSON_DEPTH
    for text in (deep, "9" * MOST_DIGITS, '{"a": 1, "a": [1.5, null, "\\ud83d\\ude00"]}', "[NaN, Infinity]", "-0"):
        assert repr(parse_json(text)) == repr(json.loads(text))
        assert repr(parse_json(text.encode())) == repr(json.loads(text))


def test_an_error_has_an_end() -> None:
    error = LlminferError("x" * 10**6, hint="y" * 10**6)
    assert len(error.message) == len(error.hint or "") == len(str(error)) == MOST_CHARACTERS


PART = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "num_hidden_layers": MOST_LAYERS + 1, "hidden_size": 8, "num_attention_heads": 1},
        {"model_type": "blt", "encoder_config": {**PART, "num_hidden_layers": 2**40}, "decoder_config": PART},
        {"model_type": "dory", "num_hidden_layers": 4, "hidden_size": 8, "n_recurrent_loops": 2**40},
        {"model_type": "recurrent_gemma", "num_hidden_layers": 4, "hidden_size": 8, "block_types": []},
        {"model_type": "jamba", "num_hidden_layers": 4, "hidden_size": 8, "attn_layer_period": 0},
    ],
    ids=lambda fields: str(fields["model_type"]),
)
def test_no_count_of_a_config_is_taken_on_trust(fields: dict[str, object]) -> None:
    with pytest.raises(UnsupportedArchitecture):
        read_model(fields, source="config.json")


# Files that are not what their names say

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
OTHERS = [
    (POINTER, "is a Git LFS pointer"),
    (PAGE, "is a web page"),
    (b"", "is empty"),
    (b"PK\x03\x04..", "is a zip archive"),
]


@pytest.mark.parametrize(("content", "what"), OTHERS, ids=[what for _, what in OTHERS])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "m.gguf", "generation_config.json"]
)
def test_a_file_of_another_kind_is_named(
    tiny_llama: Path,
    tmp_path: Path,
    run_cli: Callable[..., tuple[int, bytes, str]],
    name: str,
    content: bytes,
    what: str,
) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content)
    model = tmp_path / name if name.endswith(".gguf") else tmp_path
    code, out, err = run_cli("generate", "hello", "-m", model, "-n", "1")
    assert (code, out) == (3, b"")
    assert f"{name} {what}" in err
    assert "hint: " in err


def test_a_config_of_another_kind_is_named_by_kv_size_too(tmp_path: Path) -> None:
    for content, what in OTHERS:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelNotAvailable, match=what):
            read_json_object(tmp_path / "config.json")


def test_the_harness_reports_what_breaks(tmp_path: Path) -> None:
    def found(read: Callable[[Path], object]) -> str:
        target = Target(file="f", seeds=list, read=read)
        return (attempt(target, tmp_path, b"", cpu_s=0.05) or {"error": "nothing"})["error"].split(":")[0]

    def refuse(folder: Path) -> None:
        raise ModelNotAvailable("no")

    def hang(folder: Path) -> None:
        while True:
            pass

    assert found(refuse) == found(lambda folder: None) == "nothing"
    assert found(lambda folder: {}["a"]) == "KeyError"
    assert found(hang) == "TookTooLong"
