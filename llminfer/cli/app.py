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
from llminfer.cli.errors import INTERRUPTED_EXIT_CODE, as_ours, report, say
from llminfer.cli.generate import generate
from llminfer.cli.help import HelpfulCommand, main_name, nearest_command, nearest_option
from llminfer.cli.kv_size import kv_size
from llminfer.cli.standard_streams import check_stdout, quiet_libraries, set_up_streams, write_text
from llminfer.errors import LlminferError, ModelNotAvailable, UsageError
from llminfer.units import to_json

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
            return 0


class _Command(HelpfulCommand):
    """A command whose texts are Unicode, whose data can go somewhere, and whose JSON has its errors too."""

    def invoke(self, ctx: Any) -> Any:
        json_output = ctx.params.get("json_output") and not ctx.params.get("debug")
        try:
            for parameter in ctx.command.params:
                ctx.params[parameter.name] = _unicode(parameter, ctx.params.get(parameter.name))
            if ctx.params.get("output_file") is None:
                check_stdout()
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except Exception as error:
            if json_output:
                from llminfer.render.document import error_document

                write_text(to_json(error_document(as_ours(error))) + "\n")
            raise


# what these name are files, whose names may be any bytes, and only code of ours opens them
_FILES = frozenset({"models", "plot"})
_MODELS = frozenset({"model", "draft", "tokenizer"})


def _unicode(parameter: Any, value: Any) -> Any:
    """The value of an option or argument, in which every text is one.

    Raises:
        UsageError: for bytes that are not UTF-8; those of a file's name are let through.
        ModelNotAvailable: for a model's name, since the libraries that read its files take none of these.
    """
    if isinstance(value, list | tuple):
        return [_unicode(parameter, each) for each in value]
    model = parameter.name in _MODELS
    if not (isinstance(value, str) or (model and value is not None)) or parameter.name in _FILES:
        return value
    try:
        str(value).encode()
        return value
    except UnicodeEncodeError:
        pass
    what = main_name(parameter) if parameter.param_type_name == "option" else f"the {parameter.name}"
    if model:
        hint = "give the folder or file another name, or a link to it"
        raise ModelNotAvailable(f"{what} {value}: its name is not valid UTF-8", hint=hint)
    try:
        return os.fsencode(value).decode()  # UTF-8 after all, where the locale knows none
    except UnicodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None


app = typer.Typer(
    name="llminfer",
    cls=_Commands,
    help="Run a language model token by token and see what every step costs, down to the byte of the KV cache.",
    add_completion=False,
    rich_markup_mode=None,  # plain help: no escape codes in logs, and half the start-up time
    pretty_exceptions_enable=False,  # tracebacks with local variables would show prompts and tokens
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 1000},  # as wide as the terminal
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
    app.command(_name, cls=_Command)(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    set_up_streams()
    quiet_libraries(bars=sys.stderr.isatty() and arguments[:1] != ["kv-size"])
    code = run(arguments)
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
    except _UsageError as error:
        return _report_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return INTERRUPTED_EXIT_CODE
    except _FrameworkError as error:
        return report(LlminferError(error.format_message()))
    except Exception as error:
        if "--debug" in arguments:
            raise
        return report(as_ours(error))


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


_AFTER_DASHES = 'a prompt that begins with - follows two of them: llminfer generate -- "-1 is"'
# what the framework repeats of the command line in these may be words of a prompt: (its first words, ours, a hint)
_STRAY_PROMPTS = (
    ("Got unexpected extra argument", "more than one argument", "put the prompt in quotes"),
    ("No such command", "no such command", 'a prompt follows the command: llminfer generate "Why is the sea salty?"'),
)


def _report_usage(error: Any) -> int:
    message: str = error.format_message()
    about = f"see {error.ctx.command_path} --help" if error.ctx else None
    option = getattr(error, "option_name", None)
    if option is not None and message.startswith("No such option"):
        # one word may as well be an option gone wrong, which is worth seeing
        message = "no such option" if len(option.split()) > 1 else f"no such option: {option}"
        meant = nearest_option(option, error.ctx.command.params)
        if meant is not None:
            about = f"did you mean {meant}? {about} for all options"
        elif error.ctx.info_name == "generate":
            about = f"{about}; {_AFTER_DASHES}"
        return report(UsageError(message, hint=about))
    for start, ours, hint in _STRAY_PROMPTS:
        rest = message.removeprefix(start)
        words = rest.partition(".")[0].strip(" '()").split()
        meant = nearest_command(words[0], list(COMMANDS)) if len(words) == 1 and ours == "no such command" else None
        if rest != message and (meant or len(words) > 1):
            return report(UsageError(ours, hint=f"did you mean llminfer {meant}?" if meant else hint))
    if getattr(error, "param", None) is not None and "Input should be a valid" in message:  # in the validator's words
        kind = "whole number" if "valid integer" in message else "number"
        message = f"{main_name(error.param)} must be a {kind}"
    return report(UsageError(message, hint=about))
