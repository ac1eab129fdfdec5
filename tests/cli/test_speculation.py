"""Speculation on the command line: refused early, the same text, its figures in summary, table and JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_checkpoints import CHAT_TEMPLATE, byte_level_tokenizer, save_tiny_checkpoint
from tests.tiny_models import tiny_config

Cli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]
LOOKUP = ("--speculate", "prompt-lookup")
REPEATING = ["a", "b", "c", "d"] * 6


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speculate", "magic"),
        ("--speculate", "draft-model"),
        ("--draft-tokens", "4"),
        (*LOOKUP, "--draft", "./no-such-draft"),
        (*LOOKUP, "--draft-tokens", "0"),
        (*LOOKUP, "--draft-tokens", "65"),
        (*LOOKUP, "--num-samples", "2"),
        (*LOOKUP, "--prompts", "no-such-file"),
        (*LOOKUP, "--kv-window", "64"),
        (*LOOKUP, "--compile"),
        ("--draft", "./no-such-draft", "--kv-window", "64"),
        ("--draft", "./no-such-draft", "--num-samples", "2"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_loads(run_cli: Cli, arguments: tuple[str, ...]) -> None:
    code, out, err = run_cli("generate", "x", "--model", "./no-such-model", *arguments)
    assert (code, out) == (2, b"")
    assert "no-such" not in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2


def run(run_cli: Cli, folder: Path, *arguments: str | Path) -> tuple[bytes, str]:
    code, out, err = run_cli("generate", "x", "-m", folder, "--raw", "-t", "0", "-n", "20", *arguments)
    assert code == 0, err
    return out, err


def test_the_text_is_the_same_and_the_summary_says_what_was_drafted(run_cli: Cli, scripted: Scripted) -> None:
    folder = scripted(REPEATING)
    plain, _ = run(run_cli, folder)
    drafted, err = run(run_cli, folder, *LOOKUP, "-v")
    assert plain == drafted == b"abcd" * 5
    line = next(line for line in err.splitlines() if line.startswith("drafts"))
    assert "prompt-lookup" in line
    assert "(100.0%)" in line
    assert "tokens a forward" in line
    assert "draft " in next(line for line in err.splitlines() if line.startswith("of TPOT"))
    assert "equal to the byte" in err


def test_the_table_shows_which_tokens_shared_a_forward(run_cli: Cli, scripted: Scripted) -> None:
    _, err = run(run_cli, scripted(REPEATING), *LOOKUP, "--steps", "--draft-tokens", "3")
    header, *rows = [line.split() for line in err.splitlines() if line[:4] == "step" or line[:4].strip().isdigit()]
    assert header[-3:] == ["accepted", "draft", "ms"]
    assert len(rows) == 20
    assert [row[-2] for row in rows].count("3/3") >= 3
    assert [row[-2:] for row in rows].count(["-", "-"]) >= 9


def test_the_document_counts_drafts_and_forwards(run_cli: Cli, scripted: Scripted) -> None:
    folder = scripted(REPEATING)
    document = json.loads(run(run_cli, folder, *LOOKUP, "--json")[0])
    figures, steps = document["speculation"], document["steps"]
    assert (figures["kind"], figures["draft_model"], figures["draft_tokens"]) == ("prompt-lookup", None, 15)
    assert figures["drafted"] == sum(step["drafted"] for step in steps) > 0
    assert figures["accepted"] == sum(step["accepted"] for step in steps)
    assert figures["decode_forwards"] == sum(not step["shared_forward"] for step in steps[1:])
    assert figures["tokens_per_forward"] == 19 / figures["decode_forwards"]
    parts = document["timing"]["decode_parts_s"]
    assert sum(parts.values()) == pytest.approx(document["timing"]["decode_s"])
    assert parts["draft"] > 0
    assert document["kv_cache"]["predicted_bytes"] == document["kv_cache"]["measured_bytes"]
    plain = json.loads(run(run_cli, folder, "--json")[0])
    assert plain["speculation"] is None
    assert "drafted" not in plain["steps"][0]
    assert "draft" not in plain["timing"]["decode_parts_s"]
    assert plain["token_ids"] == document["token_ids"]


def test_a_model_drafts_and_its_cache_is_counted_too(
    run_cli: Cli, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llminfer.engine.speculative_loop.relative_cost", lambda draft, loaded: 0.0)
    tokenizer = byte_level_tokenizer()
    draft = save_tiny_checkpoint(tmp_path, tiny_config("gpt2", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    out, err = run(run_cli, tiny_llama, "--draft", draft, "--ignore-eos", "--json")
    figures = json.loads(out)["speculation"]
    assert (figures["kind"], figures["draft_model"]) == ("draft-model", draft.name)
    assert figures["draft_kv_predicted_bytes"] == figures["draft_kv_measured_bytes"] > 0
    _, err = run(run_cli, tiny_llama, "--draft", draft, "--ignore-eos", "-v")
    assert "its own KV cache of" in err


def test_a_draft_model_is_packed_as_the_other_is(run_cli: Cli, tiny_llama: Path) -> None:
    out, _ = run(run_cli, tiny_llama, "--draft", tiny_llama, "--weights", "int8", "--ignore-eos", "--json")
    document = json.loads(out)
    assert document["weights"] == "int8"
    assert document["speculation"]["draft_cost"] == 1.0


def test_a_chat_says_how_many_drafts_were_right(
    run_cli: Cli, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scripted([*"abcd"] * 50, positions=200, chat_template=CHAT_TEMPLATE)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"x\ny\n"), isatty=lambda: False))
    code, out, err = run_cli("chat", "-m", folder, "-t", "0", "-n", "20", *LOOKUP)
    assert code == 0
    assert [len(line) for line in out.splitlines()] == [20, 20]
    assert err.count("drafted tokens accepted") == 2


@pytest.mark.parametrize(("what", "code"), [("vocabulary", 2), ("recurrent", 4), ("missing", 3)])
def test_a_draft_model_that_does_not_fit_is_refused(
    run_cli: Cli, tiny_llama: Path, tmp_path: Path, what: str, code: int
) -> None:
    made: dict[str, Any] = {
        "vocabulary": (tiny_config("gpt2", vocab_size=300), byte_level_tokenizer(["more"])),
        "recurrent": (tiny_config("mamba2", vocab_size=259), byte_level_tokenizer()),
    }
    if what in made:
        config, tokenizer = made[what]
        save_tiny_checkpoint(tmp_path, config, tokenizer=tokenizer)
    found, out, err = run_cli("generate", "x", "-m", tiny_llama, "--draft", tmp_path)
    assert (found, out) == (code, b"")
    assert err.startswith("error: ")
