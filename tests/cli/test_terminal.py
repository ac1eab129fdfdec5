"""What others wrote, on a terminal: control sequences are shown and not obeyed, and in a pipe nothing is changed."""

from __future__ import annotations

import json
import os
import pty
import tty
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llminfer.cli.app import run
from llminfer.units import to_json, visible

Cli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]
HOSTILE = "\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\rover\u202etxet\u2066"
SHOWN = "\\x1b[2J\\x1b]52;c;aGk=\\x07\\x9b31m\\x0dover\\u202etxet\\u2066"


def acts(character: str) -> bool:
    """An independent judgement: controls, other line ends, halves, and what Unicode calls embeddings and isolates."""
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    category = unicodedata.category(character)
    return category in {"Cc", "Zl", "Zp", "Cs"} or unicodedata.bidirectional(character) in directions


@given(st.text(st.characters()))
def test_visible_text_has_nothing_that_acts_and_other_text_is_unchanged(text: str) -> None:
    shown = visible(text)
    assert not any(map(acts, shown))
    assert (shown == text) is not any(map(acts, text))
    assert [c for c in shown if not c.isascii()] == [c for c in text if not c.isascii() and not acts(c)]
    kept = visible(text, keep="\n\t")
    assert [c for c in kept if c in "\n\t"] == [c for c in text if c in "\n\t"]
    assert not any(acts(c) for c in kept if c not in "\n\t")


@given(st.dictionaries(st.text(st.characters()), st.text(st.characters())))
def test_json_is_one_line_of_utf_8_that_says_the_same(document: dict[str, str]) -> None:
    text = to_json(document)
    assert json.loads(text.encode()) == document
    assert not any(map(acts, text))
    assert json.loads(to_json(document, indent=2)) == document


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Exit code, and what a terminal gets when standard output is one."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    with monkeypatch.context() as patched, os.fdopen(slave, "w", encoding="utf-8") as terminal:
        patched.setattr("sys.stdout", terminal)
        code = run(list(arguments))
        terminal.flush()
        seen = os.read(master, 100_000)
    os.close(master)
    return code, seen.decode()


def test_a_model_s_text_is_shown_on_a_terminal_and_exact_in_a_pipe(
    run_cli: Cli, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(scripted(["a\n\tb", HOSTILE, 1]))
    arguments = ("generate", "x", "--raw", "-t", "0", "-q", "-m", folder)
    assert run_cli(*arguments)[:2] == (0, f"a\n\tb{HOSTILE}".encode())
    assert on_a_terminal(monkeypatch, *arguments) == (0, f"a\n\tb{SHOWN}\n")
    code, document = on_a_terminal(monkeypatch, *arguments[:-3], "-m", folder, "--json")
    assert code == 0
    assert not any(map(acts, document.rstrip("\n")))
    assert json.loads(document)["text"] == f"a\n\tb{HOSTILE}"


@pytest.mark.parametrize("output", ["table", "plain", "markdown", "json"])
def test_names_in_tables_are_shown(run_cli: Cli, tmp_path: Path, output: str) -> None:
    folder = tmp_path / f"a{HOSTILE}"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "architectures": [HOSTILE],
    }
    (folder / "config.json").write_text(json.dumps(config))
    flags = ("--format", output, "--layers-table", "--dtype", "float16")
    code, out, err = run_cli("kv-size", folder, "-N", 8, "--runtime", "all", *flags)
    assert code == 0, err
    assert not any(acts(c) for c in out.decode() + err if c != "\n")
    assert b"x1b" in out or output == "json"


def test_names_and_messages_in_errors_and_summaries_are_shown(run_cli: Cli, scripted: Scripted, tmp_path: Path) -> None:
    named = tmp_path / f"m{HOSTILE}"
    named.symlink_to(scripted(["a", 1], chat_template="{{ raise_exception('no " + HOSTILE + "') }}"))
    resolved = scripted(["a", 1]).rename(tmp_path / f"n{HOSTILE}")
    refused = run_cli("generate", "x", "-m", named)
    ran = run_cli("generate", "x", "--raw", "-m", resolved, "--steps")
    missing = run_cli("generate", "x", "-m", f"./{HOSTILE}")
    assert (refused[0], ran[0], missing[0]) == (2, 0, 3)
    for _, _, err in (refused, ran, missing):
        assert "\\x1b[2J" in err
        assert not any(acts(c) for c in err if c != "\n")
