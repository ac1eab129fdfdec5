"""`llminfer generate`: continue a prompt, stream the text, show what every step cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llminfer.cli import options
from llminfer.cli.loading import ModelChoice, check_choice, check_known, load_model
from llminfer.cli.options import check_flags
from llminfer.cli.stream import stream, write_text
from llminfer.errors import LlminferError, UsageError
from llminfer.params import CACHES, StopCriteria

if TYPE_CHECKING:
    from llminfer.events import Trace

_INTERRUPTED_EXIT_CODE = 130


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or a pipe reads standard input.", show_default=False)
    ] = None,
    *,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    model: options.ModelName = None,
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    max_new_tokens: options.MaxNewTokens = 256,
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
    cache: options.Cache = "dynamic",
    steps: Annotated[bool, typer.Option("--steps", help="Print the table of all steps to standard error.")] = False,
    quiet: options.Quiet = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output in place of the text.")
    ] = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> int:
    """Continue a prompt, stream the text, and show what every step cost.

    The text goes to standard output, the summary to standard error.
    """
    flags = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    output = _Output(steps=steps, quiet=quiet, json=json_output)
    request = _Request(
        flags=flags,
        system=system,
        raw=raw,
        cache=cache,
        choice=ModelChoice(
            model=model,
            revision=revision,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            talks=output.talks,
        ),
        output=output,
    )
    try:
        check_flags(flags, max_new_tokens)
        _check_choices(request)
        request = replace(
            request,
            stop=StopCriteria(max_new_tokens=max_new_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos),
            text=read_prompt(prompt, prompt_file),
        )
        return _run(request, debug=debug)
    except LlminferError as error:
        if json_output and not debug:
            from llminfer.render.document import error_document, to_json

            print(to_json(error_document(error)))
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    steps: bool
    quiet: bool
    json: bool

    @property
    def talks(self) -> bool:
        """Whether progress and summary go to standard error."""
        return not self.quiet and not self.json


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    flags: Mapping[str, float | None]
    system: str | None
    raw: bool
    cache: str
    choice: ModelChoice
    output: _Output
    stop: StopCriteria = field(default_factory=StopCriteria)
    text: str = ""


def _check_choices(request: _Request) -> None:
    check_choice(request.choice)
    check_known("--cache", request.cache, CACHES)
    if request.output.json and request.output.steps:
        raise UsageError("--json holds all steps already", hint="drop --steps")


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text. Standard input is read only for `-`, or when it is no terminal and nothing else is given.

    One line break at the end of a file or of standard input is not part of the prompt.

    Raises:
        UsageError: for two prompts, none, or one that is not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise UsageError("two prompts: an argument and --prompt-file", hint="give one of them")
    if prompt_file is not None:
        try:
            return _decode(prompt_file.read_bytes(), str(prompt_file))
        except OSError as error:
            raise UsageError(f"cannot read --prompt-file {prompt_file}: {error.strerror}") from error
    if prompt is not None and prompt != "-":
        if not _encodable(prompt):
            raise UsageError("the prompt is not valid UTF-8")
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise UsageError("no prompt", hint='try: llminfer generate "What is the capital of France?"')
    text = _decode(sys.stdin.buffer.read(), "standard input")
    if not text and prompt is None:
        raise UsageError("no prompt, and standard input is empty", hint="give the prompt as an argument")
    return text


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _run(request: _Request, *, debug: bool) -> int:
    startup_s: dict[str, float] = {}
    loaded = load_model(request.choice, startup_s)
    from llminfer.engine.run import generate as generate_events

    events = generate_events(
        loaded,
        request.text,
        sampling=request.flags,
        stop=request.stop,
        system=request.system,
        raw=request.raw,
        cache=request.cache,
    )
    trace = stream(events, announce=request.output.talks, show_text=not request.output.json)
    if not request.output.json and trace.text and not trace.text.endswith("\n") and sys.stdout.isatty():
        write_text("\n")
    return _finish(trace, request.output, startup_s, debug=debug)


def _finish(trace: Trace, output: _Output, startup_s: Mapping[str, float], *, debug: bool) -> int:
    """The summary or the JSON document, then the exit code."""
    finished = trace.finished
    if finished is None:
        raise KeyboardInterrupt
    if output.json:
        from llminfer.render.document import run_document, to_json

        print(to_json(run_document(trace, startup_s)), flush=True)
    if output.talks or output.steps:
        from llminfer.render.console import make_console
        from llminfer.render.steps import step_table
        from llminfer.render.summary import summary

        console = make_console(sys.stderr)
        for line in step_table(trace.steps) if output.steps else ():
            console.print(line)
        for text in summary(trace, startup_s) if output.talks else ():
            console.print(text)
    if isinstance(finished.error, LlminferError):
        from llminfer.cli.app import report

        if debug:
            raise finished.error
        return report(finished.error)
    return _INTERRUPTED_EXIT_CODE if finished.reason == "interrupted" else 0
