"""`llminfer chat`: a conversation whose KV cache is kept from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llminfer.cli import options
from llminfer.cli.chat_input import Reader, make_reader
from llminfer.cli.errors import report, say
from llminfer.cli.loading import load as load_models
from llminfer.cli.standard_streams import write_text
from llminfer.cli.stream import stream, text_of
from llminfer.errors import LlminferError, UsageError
from llminfer.exclusions import check_together
from llminfer.params import CacheOptions, StopCriteria, check_known
from llminfer.request import GenerationRequest, make_speculation
from llminfer.transcript import Message, Transcript, read_transcript, write_transcript

if TYPE_CHECKING:
    from llminfer.engine.conversation import Conversation
    from llminfer.events import Trace


def chat(
    context: typer.Context,
    *,
    model: options.ModelName = None,
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    system: options.System = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Continue a conversation that /save wrote.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    engine: options.Engine = "transformers",
    compiled: options.Compile = False,
    threads: options.Threads = None,
    speculate: options.Speculate = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = None,
    cache: options.Cache = None,
    quiet: options.Quiet = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> int:
    """Talk with a model that keeps its KV cache, so that each turn feeds only what is new.

    Answers go to standard output, everything else to standard error. Ctrl-C stops an answer, Ctrl-D
    ends the chat, Alt-Enter begins a new line, /help lists the commands. From a pipe, each line is a
    message, and the exit code is that of the first error.
    """
    sampling = options.read_sampling(context.params)
    choice = options.read_load_request(context.params)
    if cache is not None:
        check_known("--cache", cache, ("dynamic", "growing", "none"))
    check_together({"chat"} | options.given(context) | choice.execution.given())
    request = GenerationRequest(
        sampling=sampling,
        stop=StopCriteria(max_new_tokens=max_new_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos),
        cache=CacheOptions(kind=cache or choice.execution.default_cache),
        speculation=make_speculation(speculate, drafts=draft is not None, draft_tokens=draft_tokens),
    )
    begin = _system_messages(system)
    transcript = read_transcript(load) if load is not None else None
    read = make_reader()
    small = choice.of_draft(draft) if draft is not None else None
    loaded, drafts = load_models(
        choice, verbose=not quiet, cache=request.cache, speculation=request.speculation, draft=small
    )
    from llminfer.engine.conversation import Conversation

    conversation = Conversation(loaded, request, messages=begin, draft=drafts)
    session = _Session(conversation=conversation, model=loaded.name, begin=begin, verbose=not quiet, debug=debug)
    element = str(loaded.dtype).removeprefix("torch.")
    limit = f"context of {loaded.context_limit} tokens" if loaded.context_limit else "no stated context limit"
    session.say(f"{loaded.name} · {loaded.device} · {element} · {limit} · /help lists the commands")
    if transcript is not None:
        session.go_on_with(transcript)
    return _talk(session, read)


@dataclass(slots=True, kw_only=True)
class _Session:
    """A chat under way; `begin` is what a new conversation begins with, `exit_code` that of the first error."""

    conversation: Conversation
    model: str
    begin: tuple[Message, ...]
    verbose: bool
    debug: bool
    last: Trace | None = None
    said_notes: set[str] = field(default_factory=set)
    exit_code: int = 0

    def say(self, text: str) -> None:
        """Tell the user something, unless only the answers are wanted."""
        if self.verbose:
            say(text)

    def go_on_with(self, transcript: Transcript) -> None:
        """Take up a saved conversation."""
        messages = transcript.messages
        self.conversation.restart(messages)
        self.begin = messages[:1] if messages and messages[0].role == "system" else ()
        self.say(f"loaded {_count(messages)}")
        if transcript.model != self.model:
            self.say(f"note: this conversation was held with {transcript.model}, and continues with {self.model}")


def _talk(session: _Session, read: Reader) -> int:
    """Read and answer until there is nothing more to read; the code to exit with."""
    terminal = sys.stdin.isatty()
    while True:
        try:
            text = read()
            if not _respond(session, text):
                break
        except EOFError:
            break
        except KeyboardInterrupt:
            if not terminal:
                raise
        except LlminferError as error:
            _report(session, error)
    return 0 if terminal else session.exit_code


def _respond(session: _Session, text: str) -> bool:
    """Do what a command says or answer a message; False ends the chat."""
    if not text.strip():
        return True
    if text.startswith("/") and not text.startswith("//"):
        name, *argument = text.split(maxsplit=1)
        if name == "/exit":
            return False
        command = _COMMANDS.get(name)
        if command is None:
            hint = "/help lists the commands; a message that begins with a slash is written with two"
            raise UsageError("no such command", hint=hint)
        command.run(session, "".join(argument).strip())
        return True
    _answer(session, text.removeprefix("/") if text.startswith("//") else text)
    return True


def _answer(session: _Session, text: str) -> None:
    """Stream the answer; it ends with a line break, so that the next thing stands on a line of its own."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the message is not valid UTF-8") from None
    try:
        trace = stream(session.conversation.ask(text), announce=False, show=text_of)
    except KeyboardInterrupt:
        write_text("\n")
        session.say("interrupted")
        return
    if not trace.text.endswith("\n"):
        write_text("\n")
    session.last = trace
    if session.verbose:
        _print_turn(session, trace)
    error = trace.finished.error if trace.finished is not None else None
    if isinstance(error, LlminferError):
        raise error


def _print_turn(session: _Session, trace: Trace) -> None:
    from llminfer.render.summary import print_lines, turn_line

    print_lines([turn_line(trace)], sys.stderr)
    notes = (*(trace.started.notes if trace.started else ()), *(trace.finished.notes if trace.finished else ()))
    for note in notes:
        if note not in session.said_notes:
            session.said_notes.add(note)
            session.say(f"note: {note}")


def _report(session: _Session, error: LlminferError) -> None:
    """An error of one turn or command; the chat goes on."""
    if session.debug:
        raise error
    code = report(error)
    session.exit_code = session.exit_code or code


# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    run: Callable[[_Session, str], None]
    argument: str
    help: str


def _reset(session: _Session, argument: str) -> None:
    session.conversation.restart(session.begin)
    session.say("a new conversation" + (" with the same system message" if session.begin else ""))


def _system(session: _Session, argument: str) -> None:
    session.begin = _system_messages(argument or None)
    session.conversation.restart(session.begin)
    session.say(f"a new conversation {'with that' if argument else 'without a'} system message")


def _save(session: _Session, argument: str) -> None:
    file = _file(argument, "/save")
    write_transcript(file, Transcript(model=session.model, messages=session.conversation.messages))
    session.say(f"saved {_count(session.conversation.messages)} to {file}")


def _load(session: _Session, argument: str) -> None:
    session.go_on_with(read_transcript(_file(argument, "/load")))


def _stats(session: _Session, argument: str) -> None:
    from llminfer.render.summary import print_lines, summary

    if session.last is None:
        raise UsageError("no answer yet")
    print_lines(summary(session.last), sys.stderr)


def _help(session: _Session, argument: str) -> None:
    from llminfer.render.align import aligned

    rows = [(f"{name} {command.argument}".rstrip(), command.help) for name, command in _COMMANDS.items()]
    rows += [
        ("/exit", "End the chat; Ctrl-D does too."),
        ("Alt-Enter", "Begin a new line (Esc, then Enter, where Alt does not work)."),
        ("Ctrl-C", "Stop the answer, or clear the line."),
    ]
    for line in aligned(rows):
        say(line)


_COMMANDS = {
    "/reset": _Command(run=_reset, argument="", help="Start a new conversation with the same system message."),
    "/system": _Command(run=_system, argument="TEXT", help="Start a new conversation with this system message."),
    "/save": _Command(run=_save, argument="FILE", help="Write the conversation to a JSON file."),
    "/load": _Command(run=_load, argument="FILE", help="Continue a saved conversation."),
    "/stats": _Command(run=_stats, argument="", help="Show what the last answer cost, and its KV cache."),
    "/help": _Command(run=_help, argument="", help="Show this list."),
}


def _system_messages(text: str | None) -> tuple[Message, ...]:
    return () if text is None else (Message(role="system", content=text),)


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"{command} needs the name of a file", hint=f"try: {command} chat.json")
    return Path(argument).expanduser()


def _count(messages: tuple[Message, ...]) -> str:
    return f"{len(messages)} message{'' if len(messages) == 1 else 's'}"
