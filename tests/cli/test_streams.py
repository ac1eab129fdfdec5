"""Standard streams that are closed, full, broken or of another encoding: data stays data, and errors say the cause."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llminfer.cli import standard_streams
from llminfer.cli.app import run

Cli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]
KV_SIZE = ("kv-size", "llama-3.1-8b", "-N", "8k")
FULL = "cannot write to standard output: No space left on device"
CLOSED = "cannot write to standard output: it is closed"


def shell(redirection: str, *arguments: str | Path, **environment: str) -> tuple[int, bytes, str]:
    """Exit code, standard output and standard error of `llminfer ARGUMENTS REDIRECTION` in a shell."""
    command = f'exec "$0" -m llminfer "$@" {redirection}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, *map(str, arguments)],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


# Standard output


@pytest.mark.parametrize(("redirection", "reason"), [(">&-", CLOSED), ("> /dev/full", FULL), ("1< /dev/null", "")])
@pytest.mark.parametrize(
    "arguments", [KV_SIZE, (*KV_SIZE, "--format", "json"), ("--help",), ("kv-size", "--help"), ("--version",)], ids=str
)
def test_data_that_cannot_be_written_is_said_in_one_line(
    arguments: tuple[str, ...], redirection: str, reason: str
) -> None:
    code, out, err = shell(redirection, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith("note:")]
    assert (code, out) == (1, b"")
    assert len(lines) == 1
    assert lines[0].startswith(f"error: cannot write to standard output: {reason.partition(': ')[2]}")


@pytest.mark.parametrize("flags", [("-q",), ("--json",)])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_closed_standard_output_is_said_before_a_model_is_looked_for(command: str, flags: tuple[str, ...]) -> None:
    if command == "chat" and "--json" in flags:
        return
    arguments = (command, *(["hi"] if command == "generate" else []), "-m", "/no/such/model", *flags)
    assert shell(">&-", *arguments) == (1, b"", f"error: {CLOSED}\n")


def test_a_full_disk_under_a_model_s_text_or_document(scripted: Scripted) -> None:
    code = """
import sys
from llminfer.cli import standard_streams
from llminfer.cli.app import run
for flags in (["-q"], ["--json"], ["--num-samples", "2"]):
    sys.stdout = sys.__stdout__
    standard_streams.set_up_streams()
    print(run(["generate", "x", "--raw", "-t", "0", "-m", sys.argv[1], *flags]), file=sys.stderr)
"""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, str(scripted(["hello", 1]))],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:") or line.isdigit()]
    assert lines == [f"error: {FULL}", "1"] * 3
    assert done.returncode == 0  # and not 120, which Python gives when its last flush fails
    assert "fault" not in done.stderr


def test_a_reader_that_has_gone_ends_the_command_quietly() -> None:
    assert shell("> >(true)", *KV_SIZE, "--layers-table")[0] == 0


# Standard error and standard input


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full", "2> >(exec true)"])
def test_what_nobody_reads_on_standard_error_ends_nothing(redirection: str) -> None:
    expected = shell("", *KV_SIZE)[1]
    assert shell(redirection, *KV_SIZE)[:2] == (0, expected)
    assert shell(redirection, "kv-size", "no-such-model")[:2] == (3, b"")
    assert shell(redirection, "kv-size", "--no-such-option")[:2] == (2, b"")
    code, out, _ = shell(redirection, "generate", "x", "-m", "/no/such/model", "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (3, 3)


def test_a_model_s_text_without_standard_error(scripted: Scripted) -> None:
    folder = scripted(["hello", 1])
    assert shell("2>&-", "generate", "x", "--raw", "-t", "0", "-m", folder)[:2] == (0, b"hello")


@pytest.mark.parametrize(
    "arguments", [("kv-size", "-", "-N", "1"), ("generate", "-", "-m", "/no/such/model"), ("chat", "-m", "/no/model")]
)
def test_closed_standard_input_is_said_before_a_model_is_looked_for(arguments: tuple[str, ...]) -> None:
    code, out, err = shell("<&-", *arguments)
    assert (code, out) == (3 if "kv-size" in arguments else 2, b"")
    assert err == "error: cannot read standard input: it is closed\n"


def test_without_standard_input_there_is_no_prompt() -> None:
    code, out, err = shell("<&-", "generate", "-m", "/no/such/model")
    assert (code, out) == (2, b"")
    assert err.startswith("error: no prompt\nhint: ")


def test_files_do_not_take_the_place_of_closed_streams() -> None:
    program = (
        "from llminfer.cli.standard_streams import set_up_streams; set_up_streams(); print(open('/dev/null').fileno())"
    )
    command = ["bash", "-c", 'exec "$0" -c "$1" 2>&- <&-', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 2


# Files and faults


def test_a_full_disk_under_output_names_the_file(run_cli: Cli, scripted: Scripted, tmp_path: Path) -> None:
    prompts = tmp_path / "in.txt"
    prompts.write_text("x\n")
    code, _, err = run_cli("generate", "--prompts", prompts, "-o", "/dev/full", "--raw", "-q", "-m", scripted(["a", 1]))
    assert code == 1
    assert err.splitlines()[-1] == "error: cannot write /dev/full: No space left on device"


def test_a_full_disk_under_a_plot_names_the_file(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    for name in ("a.png", "a.svg", "a.html"):
        code, out, err = run_cli(*KV_SIZE, "--plot", tmp_path / name)
        assert code == 1
        assert b"llama" in out
        assert err.splitlines()[-1] == f"error: cannot write {tmp_path / name}: No space left on device"
    monkeypatch.undo()
    assert run_cli(*KV_SIZE, "--plot", tmp_path / "no" / "a.png")[0] == 2


@pytest.mark.parametrize(
    ("error", "message", "fault"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "/tmp/x: No space left on device", False),
        (OSError("the drive is gone"), "the drive is gone", False),
        (MemoryError(), "out of memory", False),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", True),
        (KeyError("a\x1b[2J"), "KeyError: 'a\\x1b[2J'", True),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_every_failure_is_one_line_and_with_json_one_document(
    run_cli: Cli, monkeypatch: pytest.MonkeyPatch, as_json: bool, error: Exception, message: str, fault: bool
) -> None:
    def fail(*arguments: Any, **options: Any) -> int:
        raise error

    monkeypatch.setattr("llminfer.cli.generate.run", fail)
    code, out, err = run_cli("generate", "x", *(["--json"] if as_json else []))
    assert code == 1
    assert err.splitlines()[0] == f"error: {message}"
    assert ("a bug" in err) is fault
    if as_json:
        assert json.loads(out)["error"]["message"] == message
        assert out.count(b"\n") == 1
    else:
        assert out == b""


@pytest.mark.parametrize("template", ["{{ 7 // 0 }}", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"])
def test_a_template_that_fails_is_one_document(run_cli: Cli, scripted: Scripted, template: str) -> None:
    code, out, err = run_cli("generate", "x", "--json", "-m", scripted(["a", 1], chat_template=template))
    assert code == 1
    assert json.loads(out)["error"]["message"].startswith("the model's chat template failed: ")
    assert err.startswith("error: the model's chat template failed: ")


def test_what_libraries_print_while_they_load_is_no_data(
    run_cli: Cli, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llminfer.engine import load

    real = load.load

    def noisy(*arguments: Any, **options: Any) -> Any:
        print("[ERROR] `audio` is not documented")
        return real(*arguments, **options)

    monkeypatch.setattr(load, "load", noisy)
    code, out, err = run_cli("generate", "x", "--raw", "-t", "0", "-q", "-m", scripted(["a", 1]))
    assert (code, out) == (0, b"a")
    assert "[ERROR]" in err


def test_python_without_docstrings_is_refused_with_the_cause() -> None:
    code, out, err = shell("", "generate", "x", "-q", PYTHONOPTIMIZE="2")
    assert (code, out) == (3, b"")
    assert "PYTHONOPTIMIZE=2" in err


def test_a_border_fails_once_and_then_takes_everything() -> None:
    class Full(io.RawIOBase):
        writes = 0

        def write(self, data: Any) -> int:
            self.writes += 1
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    raw = Full()
    stream = io.BufferedWriter(standard_streams._Border(raw, says_errors=True))
    stream.write(b"lost")
    with pytest.raises(OSError, match="Disk quota exceeded: 'cannot write to standard output'"):
        stream.flush()
    stream.write(b"more")
    stream.close()
    assert raw.writes == 1


# Encodings


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "koi8-r"])
@pytest.mark.parametrize("shown", ["table", "plain", "markdown", "json", "csv", "plot", "help"])
def test_a_console_of_another_encoding_is_no_error(encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"plot": (*KV_SIZE, "--plot", "-"), "help": ("generate", "--help")}
    command = arguments.get(shown, (*KV_SIZE, "--runtime", "all", "--layers-table", "--format", shown))

    def written(name: str) -> bytes:
        raw = io.BytesIO()
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=name))
            patched.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding=name))
            standard_streams.set_up_streams()
            assert run(list(command)) == 0
            sys.stdout.flush()
            return raw.getvalue()

    theirs, plain = written(encoding), written("utf-8")
    if shown in ("json", "csv", "help"):
        assert theirs == plain
    else:
        text = theirs.decode(encoding)
        assert len(text) == len(plain.decode())  # replacements are as wide as what they replace
        assert "\\u" not in text
        assert "\\x" not in text


def test_a_model_s_text_and_document_are_utf_8_on_any_console(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scripted(["ž🐙", "\n日", 1])
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    standard_streams.set_up_streams()
    assert run(["generate", "x", "--raw", "-t", "0", "--steps", "-m", str(folder)]) == 0
    assert raw.getvalue() == "ž🐙\n日".encode()
    assert run(["generate", "x", "--raw", "-t", "0", "--json", "-m", str(folder)]) == 0
    assert json.loads(raw.getvalue().removeprefix("ž🐙\n日".encode()))["text"] == "ž🐙\n日"


def test_what_a_tokenizer_prints_from_rust_is_no_data(tiny_llama: Path, tmp_path: Path) -> None:
    """tokenizers says by itself, past Python's streams, that it does not know an option."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    file = model / "tokenizer.json"
    written = json.loads(file.read_text())
    written["added_tokens"][0]["no_such_option"] = True
    file.write_text(json.dumps(written))
    command = [sys.executable, "-m", "llminfer", "generate", "x", "-m", str(model), "--raw", "-n", "1", "-t", "0", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    plain = subprocess.run(
        [part if part != str(model) else str(tiny_llama) for part in command], capture_output=True, timeout=120
    )
    assert done.returncode == 0
    assert "no_such_option" in done.stderr
    assert done.stdout.encode() == plain.stdout
