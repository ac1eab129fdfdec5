"""Where the messages of a chat come from: a terminal with an editable line and a history, or lines of a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llminfer.cli.errors import say
from llminfer.errors import UsageError
from llminfer.text import decode_text, without_line_end

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Reader = Callable[[], str]
"""Gives the next message; raises EOFError after the last, KeyboardInterrupt at Ctrl-C."""


def make_reader() -> Reader:
    """The reader for this process's standard input.

    Raises:
        UsageError: when there is no standard input.
    """
    if sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    if sys.stdin.isatty() and sys.stderr.isatty():
        return _terminal_reader()
    return _read_line


def _read_line() -> str:
    """One message a line, without its line break.

    Raises:
        UsageError: for a line that is not UTF-8.
    """
    try:
        line: bytes = sys.stdin.buffer.readline()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "cannot read standard input") from error
    if not line:
        raise EOFError
    return without_line_end(decode_text(line, "a line of standard input"))


def _terminal_reader() -> Reader:
    """A line that can be edited, on standard error so that standard output has the answers alone."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def break_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    # many lines are allowed, so that those of a paste arrive as one message
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=bindings,
        history=_history(),
        output=create_output(stdout=sys.stderr),
    )
    return session.prompt


def _history() -> History:
    """What was typed in earlier chats too, in a file that only the user can read; for this one alone without it."""
    import platformdirs
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    file = Path(platformdirs.user_state_path("llminfer")) / "chat_history"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        say(f"note: no history is kept: cannot write {file}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(file))
