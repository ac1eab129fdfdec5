"""`llminfer chat` as scripts and people use it: lines of a pipe, and a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from llminfer.errors import LlminferError, UsageError
from llminfer.transcript import Message, Transcript, read_transcript, write_transcript
from tests.tiny_checkpoints import CHAT_TEMPLATE, byte_level_tokenizer, save_tiny_checkpoint

Cli = Callable[..., tuple[int, bytes, str]]
Chat = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
POSITIONS = 26 * 8
# BOS, <|user|>, a letter, the end of the turn, <|assistant|>
FIRST_PROMPT = 1 + len("<|user|>") + 1 + 1 + len("<|assistant|>")
NEXT_TURN = 1 + len("<|user|>") + 1 + 1 + len("<|assistant|>")


def said(prompt_tokens: int, tokens: int) -> str:
    """What the model of `letters` answers to a prompt: the letter at each position."""
    return "".join(ALPHABET[(prompt_tokens - 2 + index) % 26] for index in range(tokens))


@pytest.fixture(scope="session")
def letters(scripted: Scripted) -> Path:
    """A model with a chat template that recites the alphabet by position."""
    return scripted([*ALPHABET] * 8, positions=POSITIONS, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, run_cli: Cli, letters: Path) -> Chat:
    """Runs a chat whose messages come from a pipe; five tokens an answer."""

    def call(lines: str | bytes, *arguments: object, model: Path = letters) -> tuple[int, bytes, str]:
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))
        return run_cli("chat", "-m", model, "-t", "0", "-n", "5", *arguments)

    return call


# Turns


def test_each_line_is_answered_and_only_new_tokens_are_fed(chat: Chat) -> None:
    code, out, err = chat("x\ny\r\nz")
    lengths = [FIRST_PROMPT, FIRST_PROMPT + 5 + NEXT_TURN, FIRST_PROMPT + 2 * (5 + NEXT_TURN)]
    assert code == 0
    assert out.decode() == "".join(f"{said(length, 5)}\n" for length in lengths)
    reused = [0, *(length + 4 for length in lengths[:-1])]
    turns = [line for line in err.splitlines() if line.startswith("turn ")]
    for line, length, kept in zip(turns, lengths, reused, strict=True):
        assert f"{kept} tokens reused · {length + 4 - kept} newly cached · {length + 4} cached in " in line
        assert "length, the limit of 5 tokens, after 5 tokens" in line


def test_quiet_leaves_the_answers_alone(chat: Chat) -> None:
    assert chat("x\n", "--quiet") == (0, f"{said(FIRST_PROMPT, 5)}\n".encode(), "")


def test_empty_lines_say_nothing_and_the_end_of_the_pipe_ends_the_chat(chat: Chat) -> None:
    assert chat("\n  \n\n", "-q") == (0, b"", "")
    assert chat("", "-q") == (0, b"", "")
    assert chat("/exit\nx\n", "-q") == (0, b"", "")


def test_an_answer_with_markup_and_a_line_break_at_its_end_is_written_as_it_is(chat: Chat, scripted: Scripted) -> None:
    pieces = ["-"] * (FIRST_PROMPT - 2) + ["[bold]", " :smile: ", "\n", 1]
    model = scripted(pieces, positions=64, chat_template=CHAT_TEMPLATE)
    code, out, _ = chat("x\n", model=model)
    assert (code, out) == (0, b"[bold] :smile: \n")


def test_an_empty_answer_still_has_its_line(chat: Chat, scripted: Scripted) -> None:
    model = scripted(["-"] * (FIRST_PROMPT - 2) + [1], positions=64, chat_template=CHAT_TEMPLATE)
    assert chat("x\n", "-q", model=model) == (0, b"\n", "")


def test_two_slashes_begin_a_message_with_one(chat: Chat, tmp_path: Path) -> None:
    code, _, _ = chat(f"//x\n/save {tmp_path / 'chat.json'}\n")
    assert code == 0
    assert read_transcript(tmp_path / "chat.json").messages[0].content == "/x"


def test_the_system_message_is_in_front(chat: Chat) -> None:
    _, out, _ = chat("x\n", "--system", "abc")
    assert out.decode() == said(FIRST_PROMPT + len("<|system|>abc") + 1, 5) + "\n"


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from llminfer.cli import stream

    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(stream, "write_text", write)
    code, _, err = chat(f"x\ny\n/save {tmp_path / 'chat.json'}\n", "-n", "9")
    assert code == 0
    assert "interrupted, after 3 tokens" in err
    second = FIRST_PROMPT + 3 + NEXT_TURN
    assert f"{FIRST_PROMPT + 2} tokens reused" in err
    answers = [message.content for message in read_transcript(tmp_path / "chat.json").messages[1::2]]
    assert answers == [said(FIRST_PROMPT, 3), said(second, 9)]
    assert "".join(written) == "".join(answers)


# Commands


def test_a_saved_conversation_goes_on_where_it_was(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "chat [x].json"
    whole = chat("x\ny\n", "-q")[1]
    first = chat(f"x\n/save {file}\n", "-q")[1]
    document = json.loads(file.read_text())
    assert document == {
        "schema_version": 1,
        "model": document["model"],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": said(FIRST_PROMPT, 5)},
        ],
    }
    assert chat("y\n", "-q", "--load", file)[1] == whole.removeprefix(first)
    assert chat(f"/load {file}\ny\n", "-q")[1] == whole.removeprefix(first)
    # once more over the same file
    assert chat(f"/load {file}\ny\n/save {file}\n", "-q")[0] == 0
    assert len(read_transcript(file).messages) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


def test_a_conversation_held_with_another_model_is_said(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    write_transcript(file, Transcript(model="other", messages=(Message(role="system", content="abc"),)))
    code, out, err = chat("x\n/reset\nx\n", "--load", file)
    assert code == 0
    assert "loaded 1 message\n" in err
    assert "note: this conversation was held with other, and goes on with scripted" in err
    # its system message stays over a reset
    assert out.decode() == 2 * (said(FIRST_PROMPT + len("<|system|>abc") + 1, 5) + "\n")


def test_reset_and_system_begin_anew(chat: Chat) -> None:
    code, out, err = chat("x\n/reset\nx\n/system  abc\nx\n/system\nx\n")
    with_system = FIRST_PROMPT + len("<|system|>abc") + 1
    assert code == 0
    expected = [said(length, 5) for length in (FIRST_PROMPT, FIRST_PROMPT, with_system, FIRST_PROMPT)]
    assert out.decode().splitlines() == expected
    assert "a new conversation with that system message" in err
    assert "a new conversation without a system message" in err
    # after the reset all but the last token of the same prompt are there
    assert f"{FIRST_PROMPT - 1} tokens reused" in err


@pytest.mark.parametrize("kind", ["dynamic", "growing"])
def test_stats_show_the_cache_predicted_and_measured(chat: Chat, tiny_llama: Path, kind: str) -> None:
    code, _, err = chat("/stats\nx\ny\n/stats\n", "--cache", kind, model=tiny_llama)
    assert code == 2
    assert "error: nothing was answered yet" in err
    cache = next(line for line in err.splitlines() if line.startswith("KV cache"))
    assert "predicted" in cache
    assert "measured" in cache
    assert "equal to the byte" in cache
    assert re.search(r"\d+ tokens of the prompt were cached before", err)


def test_help_lists_every_command(chat: Chat) -> None:
    _, out, err = chat("/help\n", "-q")
    assert out == b""
    for name in ("/reset", "/system", "/save", "/load", "/stats", "/help", "/exit"):
        assert re.search(rf"^{name} ", err, flags=re.MULTILINE), name


@pytest.mark.parametrize(
    ("line", "message", "expected"),
    [
        ("/nope", "error: there is no such command\nhint: /help lists the commands", 2),
        ("/save", "error: /save needs the name of a file", 2),
        ("/load", "error: /load needs the name of a file", 2),
        ("/load /no/such/file", "error: cannot read /no/such/file: No such file", 2),
        ("/save /no/such/folder/x", "error: cannot write /no/such/folder/x: No such file", 1),
        (b"caf\xe9", "error: a line of standard input is not UTF-8 text (byte 3)", 2),
        ("x" * POSITIONS, f"tokens, and the model's context is {POSITIONS}\nhint: shorten the message", 2),
    ],
)
def test_what_fails_is_said_and_the_chat_goes_on(chat: Chat, line: str | bytes, message: str, expected: int) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    code, out, err = chat(b"x\n" + data + b"\ny\n")
    assert code == expected
    assert message in err
    second = FIRST_PROMPT + 5 + NEXT_TURN
    assert out.decode().splitlines() == [said(FIRST_PROMPT, 5), said(second, 5)]


# Refusals


def test_a_model_without_a_template_is_refused_with_a_hint(chat: Chat, scripted: Scripted) -> None:
    code, out, err = chat("x\n", "-q", model=scripted(["a", 1]))
    assert (code, out) == (2, b"")
    assert re.fullmatch(
        r"error: .* has no chat template, so it cannot chat\nhint: try: llminfer generate --raw .*\n", err
    )


def test_two_beginnings_are_refused(chat: Chat, tmp_path: Path) -> None:
    assert chat("x\n", "--system", "a", "--load", tmp_path / "chat.json")[0] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a JSON document"),
        (b"\xff", "is not a JSON document"),
        (b"[" * 100_000, "is not a JSON document"),
        (b"[]", "schema_version is None"),
        (b'{"schema_version": 2, "messages": []}', "schema_version is 2, not 1"),
        (b'{"schema_version": 1}', "messages is not a list"),
        (b'{"schema_version": 1, "messages": [{"role": "user"}]}', "message 0 lacks a role"),
        (b'{"schema_version": 1, "messages": [{"role": "x", "content": "y"}]}', "message 0 lacks a role"),
        (b'{"schema_version": 1, "messages": [{"role": "user", "content": "\\ud800"}]}', "message 0 is not valid"),
    ],
)
def test_a_file_that_holds_no_conversation_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_transcript(file)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat.json"
    link = tmp_path / "link.json"
    link.symlink_to(file)
    kept = Transcript(model="m", messages=(Message(role="user", content="é"),))
    write_transcript(link, kept)
    assert link.is_symlink()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(LlminferError, match="No space left on device"):
        write_transcript(link, Transcript(model="m", messages=()))
    assert read_transcript(link) == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chat.json", "link.json"]


# A terminal

_CLAIM_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_PATIENCE_S = 300


class Terminal:
    """The far side of a terminal in which a chat runs; its standard output goes to a file."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process, self._master, self._seen = process, master, b""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> None:
        """Read on until the text has come, and forget all up to its end."""
        deadline = time.monotonic() + _PATIENCE_S
        while text.encode() not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._master, 65536)
        self._seen = self._seen.partition(text.encode())[2]


@contextmanager
def terminal(out: Path, state: Path, *arguments: object) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 500, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
    environment |= {"XDG_STATE_HOME": str(state), "HOME": str(state)}
    command = [sys.executable, "-c", _CLAIM_TERMINAL, sys.executable, "-m", "llminfer", "chat", *map(str, arguments)]
    with open(out, "wb") as stdout:
        process = subprocess.Popen(
            command, stdin=slave, stdout=stdout, stderr=slave, env=environment, start_new_session=True
        )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_session_in_a_terminal(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=10_000_000,
    )
    model = save_tiny_checkpoint(tmp_path / "model", config, tokenizer=byte_level_tokenizer())
    out, saved = tmp_path / "out", tmp_path / "chat.json"
    flags = ("-m", model, "-t", "0", "--ignore-eos", "-n", 10_000_000)
    with terminal(out, tmp_path / "state", *flags) as session:
        session.expect(">")
        session.type("not this\x03")  # clears the line
        session.expect(">")
        session.type("one\x1b\rtwo\r")
        until_written(out)
        session.type("\x03")  # stops the answer
        session.expect("interrupted, after ")
        session.expect(">")
        session.type(f"/save {saved}\r")
        session.expect("saved 2 messages")
        session.expect(">")
        session.type("/reset\r")
        session.expect("a new conversation")
        session.expect(">")
        session.type("\x1b[200~pasted\nlines\x1b[201~\r")
        written = out.stat().st_size
        until_written(out, written)
        session.type("\x03")
        session.expect("interrupted, after ")
        session.expect(">")
        session.type("/exit\r")
        assert session.process.wait(_PATIENCE_S) == 0
    user, answer = read_transcript(saved).messages
    assert user.content == "one\ntwo"
    assert answer.content
    assert out.read_bytes().startswith(answer.content.encode())
    history = next((tmp_path / "state").rglob("chat_history"))
    assert "+one\n+two\n" in history.read_text()
    assert "+pasted\n+lines\n" in history.read_text()
    assert "not this" not in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def until_written(file: Path, size: int = 0) -> None:
    """Wait until the file has more bytes than that."""
    deadline = time.monotonic() + _PATIENCE_S
    while file.stat().st_size <= size:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_d_ends_the_chat(letters: Path, tmp_path: Path) -> None:
    with terminal(tmp_path / "out", tmp_path / "state", "-m", letters) as session:
        session.expect(">")
        session.type("\x04")
        assert session.process.wait(_PATIENCE_S) == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_a_history_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    from prompt_toolkit.history import InMemoryHistory

    from llminfer.cli import chat_input

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("platformdirs.user_state_path", lambda name: tmp_path / "file" / name)
    assert isinstance(chat_input._history(), InMemoryHistory)
    assert "note: no history is kept: cannot write" in capsys.readouterr().err
