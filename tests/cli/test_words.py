"""The words that users of other programs bring: the same where they mean the same, a hint where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from llminfer.cli.app import COMMANDS, app
from llminfer.cli.help import _OF_THE_CALCULATOR, ALIASES, GROUPS, MEANT, MEANT_COMMANDS, main_name
from llminfer.errors import InvalidParams
from llminfer.units import parse_bytes

Cli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[[Sequence[int | str]], Path]


def options_of(command: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    parameters = group.commands[command].params
    return {main_name(parameter): parameter for parameter in parameters if parameter.param_type_name == "option"}


def test_every_alias_and_every_group_is_of_an_option() -> None:
    known = {name for command in COMMANDS for name in options_of(command)}
    assert ALIASES.keys() <= known
    assert {meant.split()[0] for meant in MEANT.values()} <= known
    assert {name for names in (*GROUPS.values(), *_OF_THE_CALCULATOR.values()) for name in names} <= known
    assert set(MEANT_COMMANDS.values()) <= COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_alias_takes_nobody_elses_name_and_stays_out_of_the_help(run_cli: Cli, command: str) -> None:
    options = options_of(command)
    names = [name for parameter in options.values() for name in parameter.opts]
    assert len(names) == len(set(names))
    _, out, _ = run_cli(command, "--help")
    for main, aliases in ALIASES.items():
        for alias in aliases:
            assert (main in options) == (alias in names)
            assert f"{alias} " not in out.decode()
            assert alias not in MEANT


def test_words_of_others_mean_what_ours_do(run_cli: Cli, tiny_llama: Path) -> None:
    ours = ("--model", tiny_llama, "--max-new-tokens", 4, "--temperature", 0.5, "--seed", 3, "--dtype", "bfloat16")
    theirs = ("--model-id", tiny_llama, "--n-predict", 4, "--temp", 0.5, "--random-seed", 3, "--dtype", "bf16")
    expected = json.loads(run_cli("generate", "hi", *ours, "--json")[1])
    found = json.loads(run_cli("generate", "-p", "hi", *theirs, "--json")[1])
    for name in ("prompt_text", "token_ids", "dtype", "max_new_tokens", "seed", "sampling"):
        assert found[name] == expected[name]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("generate", "--tmp", "1"), "did you mean --temperature?"),
        (("generate", "--max-new-token", "1"), "did you mean --max-new-tokens?"),
        (("generate", "--num-predict", "1"), "did you mean --max-new-tokens?"),
        (("generate", "--verbos"), "did you mean --verbose?"),
        (("kv-size", "--max-model-len", "1"), "did you mean --tokens?"),
        (("genrate", "hi"), "did you mean llminfer generate?"),
        (("run", "hi"), "did you mean llminfer generate?"),
        (("kv", "x"), "did you mean llminfer kv-size?"),
        (("generate", "x", "-m", "100"), "tokens to generate are -n"),
    ],
)
def test_what_was_meant_is_suggested(run_cli: Cli, typed: tuple[str, ...], meant: str) -> None:
    code, out, err = run_cli(*typed)
    assert code in (2, 3)
    assert out == b""
    assert meant in err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("generate", "x", "--n-predict", "x"), "error: --max-new-tokens must be a whole number"),
        (("generate", "x", "--threads", "1.5"), "error: --threads must be a whole number"),
        (("generate", "x", "--temp", "warm"), "error: --temperature must be a number"),
        (("kv-size", "--layers", "many"), "error: --layers must be a whole number"),
        (("kv-size", "gpt2", "--memory", "0"), "error: --memory: nothing fits in 0 bytes"),
        (("generate", "x", "-p", "y"), "error: a prompt and --prompt cannot be combined"),
        (("generate", "x", "--dtype", "bf8"), "error: --dtype bf8: unknown"),
    ],
)
def test_a_wrong_value_is_named_by_our_word(run_cli: Cli, typed: tuple[str, ...], said: str) -> None:
    code, _, err = run_cli(*typed)
    assert (code, err.splitlines()[0]) == (2, said)


def test_a_temperature_that_was_meant_as_threads_is_noted(run_cli: Cli, tiny_llama: Path) -> None:
    options = ("-m", tiny_llama, "-n", 1, "-t", 8)
    code, _, err = run_cli("generate", "x", *options)
    assert code == 0
    assert "note: at temperature 8 a text is mostly noise; the number of threads is --threads" in err
    assert run_cli("generate", "x", *options, "-q")[2] == ""


def test_threads_are_those_that_are_asked_for(run_cli: Cli, tiny_llama: Path) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        code, out, _ = run_cli("generate", "x", "-m", tiny_llama, "-n", 1, "--threads", 1, "--json")
        assert code == 0
        assert json.loads(out)["device"]["threads"] == 1
    finally:
        torch.set_num_threads(before)
    code, _, err = run_cli("generate", "x", "-m", tiny_llama, "--threads", 0)
    assert (code, err.splitlines()[0].startswith("error: --threads must be")) == (2, True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("24g", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5T", 3 << 39),
        ("64k", 1 << 16),
    ],
)
def test_sizes_are_read_as_they_are_written(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_memory_of_a_few_bytes_is_asked_about(run_cli: Cli) -> None:
    code, _, err = run_cli("kv-size", "gpt2", "--memory", "24")
    assert code == 2
    assert err == "error: --memory 24: that is in bytes\nhint: write it like 24GiB or 24GB\n"
    assert run_cli("kv-size", "gpt2", "-N", "10", "--memory", str(8 << 30))[0] == 0
    with pytest.raises(InvalidParams):
        parse_bytes("24X")


def test_the_text_and_the_report_share_no_line(scripted: Scripted, tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = scripted(["ab", 1])
    command = [sys.executable, "-m", "llminfer", "generate", "x", "--raw", "-t", "0", "-m", str(folder)]
    both = tmp_path / "both.txt"
    with both.open("wb") as file:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=True)
    lines = both.read_text().splitlines()
    assert lines[1] == "ab"
    assert lines[2].startswith("speed ")
    apart = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert apart.stdout == b"ab"
    assert apart.stderr.splitlines()[1].startswith(b"speed ")
    echoed = subprocess.run(
        [*command, "--echo"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    assert echoed.stdout.splitlines()[1] == b"xab"
