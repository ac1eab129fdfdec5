"""The `llminfer` command: its subcommands, and the one place that prints errors and exits."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llminfer import __version__
from llminfer.cli.chat import chat
from llminfer.cli.generate import generate
from llminfer.cli.kv_size import kv_size
from llminfer.errors import LlminferError

INTERRUPTED_EXIT_CODE = 130

# the framework brings its own copy of click in some releases, so its classes are reached through its own
_UsageError: Any = typer.BadParameter.__bases__[0]
_FrameworkError: Any = _UsageError.__bases__[0]


class _Commands(TyperGroup):
    """The subcommands; a reader of standard output that leaves early ends them quietly."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # caught here, since the framework would turn it into exit code 1
            _silence_stdout()
            return 0


app = typer.Typer(
    name="llminfer",
    cls=_Commands,
    help="Run a language model token by token and see what every step costs, down to the byte of the KV cache.",
    add_completion=False,
    rich_markup_mode=None,  # plain help: no escape codes in logs, and half the start-up time
    pretty_exceptions_enable=False,  # tracebacks with local variables would show prompts and tokens
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llminfer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run a language model token by token and see what every step costs, down to the byte of the KV cache."""


COMMANDS: dict[str, Callable[..., object]] = {"generate": generate, "chat": chat, "kv-size": kv_size}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    # all is said: Ctrl-C while the interpreter takes itself apart would only change the exit code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "torch" in sys.modules and not _is_watched():
        _leave(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; errors become `error:` and `hint:` lines."""
    try:
        result = app(args=arguments or ["--help"], prog_name="llminfer", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except LlminferError as error:
        if "--debug" in arguments:
            raise
        return report(error)
    except _UsageError as error:
        return _report_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except _FrameworkError as error:
        return _print_error(error.format_message(), None, exit_code=error.exit_code)
    except Exception as error:
        if "--debug" in arguments:
            raise
        reason = (str(error).strip() or "no message").splitlines()[0]
        return _print_error(f"{type(error).__name__}: {reason}", "this is a fault of ours; --debug shows where", 1)


def _is_watched() -> bool:
    """Whether a debugger, profiler, coverage tool or thread still needs the interpreter's own way out."""
    threads = any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    monitoring = getattr(sys, "monitoring", None)  # where Python has it, from 3.12 on
    monitored = monitoring is not None and any(monitoring.get_tool(number) for number in range(6))
    return threads or monitored or sys.gettrace() is not None or sys.getprofile() is not None


def _leave(code: int) -> None:
    """End the process at once: to take torch and transformers apart, object by object, takes most of a second.

    What others asked to be done at exit is done, and what was written is out. Returns when it is not,
    so that the interpreter can say so in its own way.
    """
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def report(error: LlminferError) -> int:
    """Print an error for people and return its exit code."""
    return _print_error(error.message, error.hint, exit_code=error.exit_code)


# what the framework repeats of the command line in these are words of a prompt: (its first words, ours, a hint)
_STRAY_PROMPTS = (
    ("Got unexpected extra argument", "more than one argument", "put the prompt in quotes"),
    ("No such command", "no such command", 'a prompt follows the command: llminfer generate "Why is the sea salty?"'),
)


def _report_usage(error: Any) -> int:
    message = error.format_message()
    for start, ours, hint in _STRAY_PROMPTS:
        rest = message.removeprefix(start)
        # one word may as well be a command or an option gone wrong, which is worth seeing
        if rest != message and len(rest.split()) > 1:
            return _print_error(ours, hint, exit_code=2)
    hint_for_all = f"see {error.ctx.command_path} --help" if error.ctx else None
    return _print_error(message, hint_for_all, exit_code=2)


def _print_error(message: str, hint: str | None, exit_code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return exit_code


def _silence_stdout() -> None:
    """The reader has gone: let nothing more be written, not even what the interpreter flushes at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 — it stays open until the process ends
