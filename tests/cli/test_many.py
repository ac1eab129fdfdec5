"""Many prompts and many samples: what each gives is what it gives alone."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llminfer.errors import LlminferError, UsageError
from llminfer.jobs import BadLine, Job, read_jobs
from llminfer.request import GenerationRequest

Cli = Callable[..., tuple[int, bytes, str]]


def records(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "first", "prompt": "hello", "max_new_tokens": 9, "seed": 3},
        {"prompt": "a much longer prompt than the others", "temperature": 0},
        {"messages": [{"role": "user", "content": "hi"}], "top_k": 5},
        {"id": 7, "prompt": "x", "max_new_tokens": 1},
        {"prompt": "last", "temperature": 1.5, "stop": ["q"], "logit_bias": {"5": -100}},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def alone(run_cli: Cli, folder: Path, record: dict[str, Any], *arguments: object) -> list[int]:
    code, out, _ = run_cli("generate", "-m", folder, "--json", "--seed", record["seed"], *arguments)
    assert code == 0
    return json.loads(out)["token_ids"]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_line_gets_the_tokens_it_gets_alone(
    run_cli: Cli, tiny_llama: Path, prompts: Path, batch_size: int
) -> None:
    code, out, err = run_cli("generate", "-m", tiny_llama, "--prompts", prompts, "-n", 6, "--batch-size", batch_size)
    found = records(out)
    assert (code, err) == (0, "")
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5]
    assert [record["id"] for record in found] == ["first", "2", "3", "7", "5"]
    expected = [
        ("hello", "-n", 9),
        ("a much longer prompt than the others", "-n", 6, "-t", "0"),
        ("hi", "-n", 6, "--top-k", 5),
        ("x", "-n", 1),
        ("last", "-n", 6, "-t", "1.5", "--stop", "q", "--logit-bias", "5=-100"),
    ]
    for record, arguments in zip(found, expected, strict=True):
        assert record["token_ids"] == alone(run_cli, tiny_llama, record, *arguments)


def test_a_text_file_has_a_prompt_on_every_line(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n{"prompt": "two"}\r\n')
    code, out, _ = run_cli("generate", "-m", tiny_llama, "--prompts", file, "-n", 3, "--raw")
    assert code == 0
    assert [(record["line"], record["prompt_tokens"]) for record in records(out)] == [(1, 4), (3, 18)]


BAD_LINES = [
    "nonsense",
    "[1, 2]",
    '{"text": "x"}',
    '{"prompt": "x", "messages": []}',
    '{"messages": [{"role": "user"}]}',
    '{"prompt": 5}',
    '{"prompt": "x", "top_p": 3}',
    '{"prompt": "x", "temperature": NaN}',
    '{"prompt": "x", "temperature": true}',
    '{"prompt": "x", "max_new_tokens": -1}',
    '{"prompt": "x", "logit_bias": [1]}',
    '{"prompt": "x", "stop": [1]}',
]


def test_bad_lines_are_named_and_do_not_stop_the_rest(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    good = '{"prompt": "good"}'
    file.write_text("\n".join([good, *BAD_LINES, json.dumps({"prompt": "y" * 600}), good]))
    code, out, err = run_cli("generate", "-m", tiny_llama, "--prompts", file, "-n", 2)
    found = records(out)
    assert code == 1
    assert [record["line"] for record in found] == list(range(1, len(BAD_LINES) + 4))
    assert ["error" in record for record in found] == [False, *[True] * (len(BAD_LINES) + 1), False]
    for line in range(2, len(BAD_LINES) + 3):
        assert f"error: line {line}: " in err
    assert "512" in found[-2]["error"]["message"]


@settings(max_examples=200, deadline=None)
@given(line=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)))
def test_no_line_breaks_the_reader(line: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("jobs") / "prompts.jsonl"
    file.write_bytes(line)
    try:
        jobs = list(read_jobs(file, GenerationRequest()))
    except UsageError:  # the whole file is in an encoding that it does not keep to, or UTF-16 without a mark
        assert b"\0" in line[:2] or line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return
    for job in jobs:
        assert isinstance(job, Job | BadLine)
        assert not isinstance(job, BadLine) or isinstance(job.error, LlminferError)


def test_resume_neither_redoes_nor_loses_a_line(run_cli: Cli, tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    options = ("generate", "-m", tiny_llama, "--prompts", prompts, "-n", 6, "--seed", 1)
    assert run_cli(*options, "-o", whole)[0] == 0
    lines = whole.read_text().splitlines(keepends=True)
    # an interrupted run: the third line is missing, the last was cut in the middle of a character
    part.write_bytes((lines[0] + lines[1] + lines[3]).encode() + lines[4].encode()[:20])
    marked = part.read_text().replace('"first"', '"kept"')
    part.write_text(marked)
    assert run_cli(*options, "-o", part)[0] == 2
    assert part.read_text() == marked
    assert run_cli(*options, "-o", part, "--resume")[0] == 0
    resumed = records(part.read_bytes())
    assert [record["line"] for record in resumed] == [1, 2, 3, 4, 5]
    assert resumed[0]["id"] == "kept"  # it was not done again
    original = records(whole.read_bytes())
    assert [record["token_ids"] for record in resumed] == [record["token_ids"] for record in original]
    before = part.read_bytes()
    assert run_cli(*options, "-o", part, "--resume")[0] == 0
    assert part.read_bytes() == before


def test_an_output_of_another_file_is_not_gone_on_with(
    run_cli: Cli, tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    options = ("generate", "-m", tiny_llama, "--prompts", prompts, "-n", 2, "-o", output)
    assert run_cli(*options)[0] == 0
    prompts.write_text(prompts.read_text().replace("hello", "goodbye"))
    code, _, err = run_cli(*options, "--resume")
    assert code == 2
    assert "line 1" in err
    output.write_text("no result\n")
    assert run_cli(*options, "--resume")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prompts", "/no/such/file"),
        ("--resume",),
        ("x", "--output", "/tmp/x"),
        ("x", "--num-samples", "0"),
        ("x", "--num-samples", "2", "--cache", "none"),
        ("x", "--logprobs", "3"),
        ("x", "--json", "--logprobs", "-1"),
        ("x", "--logit-bias", "a=1"),
        ("x", "--logit-bias", "3=nan"),
        ("x", "--logit-bias", "-3=1"),
        ("x", "--typical-p", "0"),
        ("x", "--presence-penalty", "nan"),
        ("x", "--frequency-penalty", "inf"),
        ("x", "--min-new-tokens", "-1"),
        ("x", "--max-time", "nan"),
        ("x", "--json", "--echo"),
        ("x", "--echo", "--print-token-ids"),
    ],
)
def test_contradictions_are_usage_errors_before_anything_loads(run_cli: Cli, arguments: tuple[str, ...]) -> None:
    code, _, err = run_cli("generate", "-m", "/no/such/model", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_samples_differ_and_each_is_that_of_its_own_seed(run_cli: Cli, tiny_llama: Path) -> None:
    options = ("generate", "hello", "-m", tiny_llama, "-n", 7, "-t", "1.2", "--json")
    code, out, _ = run_cli(*options, "--seed", 5, "--num-samples", 3)
    document = json.loads(out)
    assert code == 0
    assert [sample["seed"] for sample in document["samples"]] == [5, 6, 7]
    for sample in document["samples"]:
        assert sample["token_ids"] == json.loads(run_cli(*options, "--seed", sample["seed"])[1])["token_ids"]
    assert len({tuple(sample["token_ids"]) for sample in document["samples"]}) == 3
    assert document["kv_cache"]["kv_bytes"] == document["kv_cache"]["predicted_bytes"] > 0


def test_samples_as_text_are_one_after_another(run_cli: Cli, scripted: Callable[..., Path]) -> None:
    folder = scripted(["same", 1])
    code, out, err = run_cli("generate", "x", "-m", folder, "--raw", "-t", "0", "--num-samples", 2, "--seed", 4)
    assert (code, out) == (0, b"same\nsame\n")
    assert "sample 1 · seed 5 · 2 tokens · eos" in err


def test_log_probabilities_are_in_the_document(run_cli: Cli, tiny_llama: Path) -> None:
    code, out, _ = run_cli("generate", "x", "-m", tiny_llama, "--json", "-n", 3, "-t", "0", "--logprobs", 4)
    steps = json.loads(out)["steps"]
    assert code == 0
    for step in steps:
        assert len(step["top_logprobs"]) == 4
        assert step["top_logprobs"][0] == {"token_id": step["token_id"], "logprob": step["logprob"]}


def test_bad_words_and_the_least_number_of_tokens(run_cli: Cli, scripted: Callable[..., Path]) -> None:
    folder = scripted(["a", 1, "b", 1])
    greedy = ("-m", folder, "--raw", "-t", "0", "-n", 4, "--json")
    assert json.loads(run_cli("generate", "x", *greedy)[1])["finish_reason"] == "eos"
    longer = json.loads(run_cli("generate", "x", *greedy, "--min-new-tokens", 3)[1])
    assert longer["token_ids"][1] != 1
    assert len(longer["token_ids"]) >= 3
    without = json.loads(run_cli("generate", "x", *greedy, "--bad-words", "a")[1])
    assert without["text"][:1] != "a"
    assert without["sampling"]["bad_words"]["origin"] == "flag"


def test_echo_and_token_ids(run_cli: Cli, scripted: Callable[..., Path]) -> None:
    folder = scripted(["one", "two", 1])
    greedy = ("-m", folder, "--raw", "-t", "0", "-q")
    assert run_cli("generate", "x", *greedy, "--echo")[1] == b"xonetwo"
    code, out, _ = run_cli("generate", "x", *greedy, "--print-token-ids")
    document = json.loads(run_cli("generate", "x", *greedy, "--json")[1])
    assert (code, list(map(int, out.split()))) == (0, document["token_ids"])


def test_time_that_is_up_ends_the_run_after_a_whole_token(run_cli: Cli, tiny_llama: Path) -> None:
    code, out, _ = run_cli("generate", "x", "-m", tiny_llama, "--json", "-n", 50, "--ignore-eos", "--max-time", "0")
    document = json.loads(out)
    assert (code, document["finish_reason"], len(document["token_ids"])) == (0, "time", 1)


def test_the_real_model_answers_a_file_as_it_answers_alone(
    run_cli: Cli, default_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    texts = ["Name a colour.", "What is the capital of France? Answer with one word.", "Hi"]
    file.write_text("\n".join(texts))
    code, out, _ = run_cli("generate", "--prompts", file, "-n", 8, "-t", "0", "--dtype", "float32")
    assert code == 0
    for record, text in zip(records(out), texts, strict=True):
        assert record["token_ids"] == alone(run_cli, default_checkpoint, record, text, "-n", 8, "-t", "0")
