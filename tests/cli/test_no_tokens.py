"""`-n 0`: no text and no forward, but the prompt's tokens are counted and their cache is predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, bytes, str]]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--cache", "growing"),
        ("--cache", "static"),
        ("--cache", "none"),
        ("--speculate", "prompt-lookup"),
        ("--kv-window", "8"),
    ],
    ids=str,
)
def test_the_cache_of_the_prompt_is_predicted_and_nothing_runs(
    run_cli: Cli, tiny_llama: Path, flags: tuple[str, ...]
) -> None:
    arguments = ("generate", "some prompt", "-m", tiny_llama, "--seed", 1, "--json", *flags)
    code, out, err = run_cli(*arguments, "-n", 0)
    document = json.loads(out)
    assert (code, err, document["text"], document["token_ids"]) == (0, "", "", [])
    assert (document["finish_reason"], document["steps"]) == ("length", [])
    # after one token the cache holds the prompt and no more
    measured = json.loads(run_cli(*arguments, "-n", 1)[1])["kv_cache"]["measured_bytes"]
    assert document["kv_cache"]["predicted_bytes_at_limit"] == measured


def test_the_summary_says_so(run_cli: Cli, tiny_llama: Path) -> None:
    code, out, err = run_cli("generate", "hi", "-m", tiny_llama, "-n", 0, "--steps", "-v")
    assert (code, out) == (0, b"")
    assert "length, the limit of 0 tokens, after 0 tokens" in err
    assert "at the limit, 25 tokens: " in err


def test_many_prompts_and_samples_and_chats_have_no_tokens_either(
    run_cli: Cli, tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a", "max_new_tokens": 0}\n{"prompt": "b", "max_new_tokens": 2}\n')
    code, out, _ = run_cli("generate", "--prompts", file, "-m", tiny_llama, "--seed", 1, "--ignore-eos", "-q")
    assert (code, [len(json.loads(line)["token_ids"]) for line in out.splitlines()]) == (0, [0, 2])
    code, out, _ = run_cli("generate", "hi", "--num-samples", 2, "-n", 0, "-m", tiny_llama, "--json")
    assert (code, [sample["text"] for sample in json.loads(out)["samples"]]) == (0, ["", ""])
    assert run_cli("generate", "hi", "--num-samples", 2, "-n", 0, "-m", tiny_llama)[0] == 0


def test_a_prompt_cache_is_left_as_it_was(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    for _ in range(2):
        assert run_cli("generate", "hi", "-n", 0, "-m", tiny_llama, "--prompt-cache", file, "-q")[:2] == (0, b"")
        assert not file.exists()


def test_less_than_none_is_refused(run_cli: Cli) -> None:
    code, _, err = run_cli("generate", "hi", "-n", -1)
    assert code == 2
    assert "at least 0" in err
