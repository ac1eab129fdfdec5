"""Bytes that are no Unicode: refused at the command line before a model is looked for, and fine in names of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]
LONE = "x\udcff"
NO_MODEL = ("-m", "/no/such/model")


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        ((LONE, *NO_MODEL), 2, "the prompt is not valid UTF-8"),
        (("hi", "--system", LONE, *NO_MODEL), 2, "--system is not valid UTF-8"),
        (("hi", "--stop", "END", "--stop", LONE, *NO_MODEL), 2, "--stop is not valid UTF-8"),
        (("hi", "--bad-words", LONE, *NO_MODEL), 2, "--bad-words is not valid UTF-8"),
        (("hi", "--logit-bias", f"1={LONE}", *NO_MODEL), 2, "--logit-bias is not valid UTF-8"),
        (("hi", "--device", LONE, *NO_MODEL), 2, "--device is not valid UTF-8"),
        (("hi", "--revision", LONE, *NO_MODEL), 2, "--revision is not valid UTF-8"),
        (("hi", "-m", LONE), 3, "--model x\\udcff: its name is not valid UTF-8"),
        (("hi", "--draft", LONE, *NO_MODEL), 3, "--draft x\\udcff: its name is not valid UTF-8"),
        (("hi", "--tokenizer", LONE, *NO_MODEL), 3, "--tokenizer x\\udcff: its name is not valid UTF-8"),
    ],
)
def test_texts_are_unicode(run_cli: Cli, arguments: tuple[str, ...], code: int, what: str) -> None:
    assert run_cli("generate", *arguments)[:2] == (code, b"")
    returned, out, err = run_cli("generate", *arguments, "--json")
    assert returned == code
    assert err.splitlines()[0] == f"error: {what}"
    assert json.loads(out.decode())["error"]["exit_code"] == code


def test_a_model_from_the_environment_is_unicode(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMINFER_MODEL", LONE)
    for command in (("generate", "x"), ("chat",)):
        code, out, err = run_cli(*command)
        assert (code, out) == (3, b"")
        assert err.startswith("error: --model x\\udcff: its name is not valid UTF-8\n")


def test_values_that_are_no_numbers_are_one_line(run_cli: Cli) -> None:
    for arguments in (("hi", "-n", LONE), ("hi", f"--{LONE}"), ("hi", f"-{LONE}")):
        code, out, err = run_cli("generate", *arguments)
        assert (code, out) == (2, b"")
        assert err.startswith("error: ")


def test_files_may_have_any_name(run_cli: Cli, scripted: Scripted, tmp_path: Path) -> None:
    folder, prompt = scripted(["a", 1]), tmp_path / f"prompt{LONE}"
    prompt.write_text("x\n")
    greedy = ("--raw", "-t", "0", "-q", "-m", folder)
    assert run_cli("generate", "--prompt-file", prompt, *greedy) == (0, b"a", "")
    output = tmp_path / f"out{LONE}"
    assert run_cli("generate", "--prompts", prompt, "--output", output, *greedy) == (0, b"", "")
    assert json.loads(output.read_bytes().decode())["text"] == "a"
    named = folder.rename(tmp_path / f"model{LONE}")
    code, out, _ = run_cli("kv-size", named, "-N", 8, "--format", "json")
    assert (code, json.loads(out.decode())["results"][0]["tokens"]) == (0, 8)
    assert run_cli("kv-size", named, "-N", 8, "--format", "plain")[0] == 0
    os.chdir(named)
    try:
        code, out, _ = run_cli("generate", "x", "--raw", "-t", "0", "-m", ".", "--json")
    finally:
        os.chdir(tmp_path)
    assert code in (0, 3)
    assert json.loads(out.decode()).get("text", "a") == "a"


def test_utf_8_is_read_where_the_locale_knows_none() -> None:
    program = (
        "import sys, llminfer.cli.generate as g; from llminfer.cli.app import run\n"
        "g.run = lambda command: print(ascii(command.request.text), ascii(command.request.stop.stop))\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", "hé", "--stop", "日", "-q"],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "'h\\xe9' ('\\u65e5',)\n"


@pytest.mark.parametrize("prompt", ["-5 + 3 =", "- milk\n- eggs", "--what is this?", "-"])
def test_a_prompt_that_begins_with_a_dash_has_a_hint(run_cli: Cli, prompt: str) -> None:
    if prompt != "-":
        code, out, err = run_cli("generate", prompt, *NO_MODEL)
        assert (code, out) == (2, b"")
        assert "llminfer generate -- " in err
        assert "milk" not in err
        assert "what" not in err
    assert run_cli("generate", *NO_MODEL, "--", prompt if prompt != "-" else "-x")[0] == 3
