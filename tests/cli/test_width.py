"""In a terminal of any width no word and no number is broken; in a pipe nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.terminal import run_in_terminal

Cli = Callable[..., tuple[int, bytes, str]]
WIDTHS = (60, 80, 120, 200)
KV_SIZES = {
    "three models and lengths": ("llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "-N", "1k,8k,128k"),
    "all runtimes": ("llama-3.1-8b", "--runtime", "all"),
    "memory": ("llama-3.1-8b", "qwen3-0.6b", "--memory", "24GiB", "--weights", "4GiB", "-N", "8k"),
    "layers": ("deepseek-v3", "--layers-table", "-N", "8k"),
    "ranks": ("llama-3.1-8b", "--tp", "1,2,4", "--batch", "1,8", "-N", "8k"),
    "help": ("--help",),
}
RUNS = {
    "summary": (),
    "everything": ("--verbose", "--steps"),
    "drafts": ("--steps", "--speculate", "prompt-lookup", "--verbose"),
}
NOT_RUN = {
    "help": ("--help",),
    "an error": ("--kv-window", "32", "--cache", "static"),
    "no such option": ("--temprature",),
}


def check(written: list[str], screen: list[str], width: int) -> None:
    """What was written stands on the screen line by line: the terminal had nothing to break."""
    for line in written:
        assert cell_len(line) <= width, line
    shown = [line for line in screen if line]
    assert shown == [line.rstrip() for line in written if line.strip()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("asked", KV_SIZES.values(), ids=KV_SIZES.keys())
def test_sizes_fit(asked: tuple[str, ...], width: int) -> None:
    shown = run_in_terminal("kv-size", *asked, width=width)
    assert shown.code == 0
    check(shown.written, shown.screen, width)
    assert len([line for line in shown.written if line]) > 5


@pytest.mark.parametrize(
    ("options", "width"),
    [
        pytest.param(
            options, width, marks=() if (name, width) in {("summary", 60), ("drafts", 80)} else pytest.mark.slow
        )
        for name, options in RUNS.items()
        for width in WIDTHS
    ],
)
def test_a_run_fits(tiny_llama: Path, options: tuple[str, ...], width: int) -> None:
    run = ("--temperature", "0", "--ignore-eos", "--max-new-tokens", "12", "--print-token-ids")
    folder = tiny_llama.parent
    prompt = ("generate", "x y x y x", "--model", tiny_llama.name)
    shown = run_in_terminal(*prompt, *run, *options, width=width, folder=folder)
    check(shown.written, shown.screen, width)
    assert shown.code == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", NOT_RUN.values(), ids=NOT_RUN.keys())
def test_help_and_errors_fit(options: tuple[str, ...], width: int) -> None:
    shown = run_in_terminal("generate", "x", *options, width=width)
    check(shown.written, shown.screen, width)
    assert shown.code == (0 if options == ("--help",) else 2)


def test_what_every_answer_shares_is_said_once_and_a_narrow_table_keeps_the_bytes() -> None:
    shown = run_in_terminal("kv-size", "llama-3.1-8b", "-N", "1k,8k", width=60)
    assert "transformers" in shown.written[0]
    assert "batch 1" in " ".join(shown.written[:2])
    assert any("131072000" in line for line in shown.written)


def test_equal_layers_are_one_row() -> None:
    shown = run_in_terminal("kv-size", "llama-3.1-8b", "--layers-table", "-N", "8k", width=80)
    assert sum("full" in line for line in shown.written) == 1
    assert any(line.startswith("0–31, each") for line in shown.written)


def test_in_a_pipe_everything_is_there(run_cli: Cli) -> None:
    _, out, _ = run_cli("kv-size", "llama-3.1-8b", "gemma-3-27b", "-N", "1k,8k")
    lines = out.decode().splitlines()
    for heading in ("total", "bytes", "next token", "peak"):
        assert heading in lines[1]
    assert max(map(len, lines)) > 80
