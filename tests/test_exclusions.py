"""One table says what cannot be combined: every row is refused, on the command line before any model is looked for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import typer.main

from llminfer.cli.app import app
from llminfer.errors import UsageError
from llminfer.exclusions import EXCLUDED, NEEDED, check_together
from llminfer.params import CacheOptions, Execution
from llminfer.request import GenerationRequest, make_request

Cli = Callable[..., tuple[int, bytes, str]]
PAIRS = [pair for these, those, _ in EXCLUDED for pair in product(these, those)]
# what options that take a value are given here, beside those that the table names
VALUES = {
    "--prompt": "Ho",
    "--prompt-file": "prompt.txt",
    "--prompts": "in.txt",
    "--num-samples": "2",
    "--kv-window": "32",
    "--prefill-chunk": "4",
    "--prompt-cache": "cache.safetensors",
    "--speculate": "prompt-lookup",
    "--draft": "other",
    "--system": "Be brief.",
    "--load": "chat.json",
    "--kv-bits": "4",
    "--draft-tokens": "3",
    "--logprobs": "2",
    "--output": "out.jsonl",
}


def words(option: str) -> list[str]:
    """An entry of the table as it is typed."""
    if option == "a prompt":
        return ["Hi"]
    return option.split() if " " in option else [option, *filter(None, [VALUES.get(option)])]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_each_pair_is_refused_by_name(one: str, other: str) -> None:
    with pytest.raises(UsageError, match=f"{one} and {other} cannot be combined"):
        check_together({one, other})


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_each_pair_is_refused_before_a_model_is_looked_for(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("prompt.txt", "in.txt", "chat.json"):
        (tmp_path / file).write_text("a\n")
    typed = [*words(one), *words(other)]
    chat = "chat" in (one, other) or "--load" in (one, other)
    command = ["chat", *(word for word in typed if word != "chat")] if chat else ["generate", *typed]
    known = {option for parameter in _parameters(command[0]) for option in parameter.opts}
    if not {word for word in typed if word.startswith("--")} <= known:
        assert chat  # which has fewer options: what is not there cannot be given
        return
    code, _, err = run_cli(*command, "-m", "/no/such/model")
    assert code == 2
    assert "/no/such/model" not in err
    assert "cannot be combined" in err or "unknown" in err


@pytest.mark.parametrize(("option", "needed"), NEEDED)
def test_what_an_option_needs_is_said(run_cli: Cli, option: str, needed: tuple[str, ...]) -> None:
    code, _, err = run_cli("generate", "-m", "/no/such/model", *words(option))
    assert code == 2
    assert err.startswith(f"error: {option} needs {' or '.join(needed)}\n")
    for other in needed:
        check_together({option, other, "--prompts"} if option == "--resume" else {option, other})


def _parameters(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    return list(group.commands[command].params)


def test_every_option_of_the_table_is_one_of_a_command() -> None:
    known = {option for name in ("generate", "chat") for parameter in _parameters(name) for option in parameter.opts}
    named = {*chain.from_iterable(PAIRS), *(option for option, _ in NEEDED)} - {"a prompt", "chat"}
    assert {option.split()[0] for option in named} <= known


def test_the_library_refuses_by_the_same_table() -> None:
    with pytest.raises(UsageError, match="--speculate and --kv-window cannot be combined"):
        make_request("x", speculate="prompt-lookup", cache=CacheOptions(window=32))
    with pytest.raises(UsageError, match="--kv-bits needs --cache quantized"):
        CacheOptions(bits=4)
    with pytest.raises(UsageError, match="--compile and --cache growing cannot be combined"):
        GenerationRequest(cache=CacheOptions(kind="growing")).cache_for(Execution(compiled=True))
