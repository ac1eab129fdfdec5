"""`llminfer generate`: continue a prompt, stream the text, show what every step cost."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from llminfer.cli import options
from llminfer.cli.errors import INTERRUPTED_EXIT_CODE, report, say
from llminfer.cli.loading import ModelChoice, check_choice, load_model, load_with_draft, status
from llminfer.cli.options import check_flags
from llminfer.cli.prompts import ManyPrompts
from llminfer.cli.standard_streams import read_stdin, write_text
from llminfer.cli.stream import interrupts, stream, text_of
from llminfer.errors import InvalidParams, LlminferError, UsageError
from llminfer.kv.quantizers import quantizer
from llminfer.params import (
    DEFAULT_KV_BITS,
    MAX_BIAS,
    CacheOptions,
    Execution,
    Speculation,
    StopCriteria,
    check_range,
    make_speculation,
)
from llminfer.text import decode_text, without_line_end
from llminfer.units import to_json

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel
    from llminfer.events import Finished, Step, Trace


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
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
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
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    engine: options.Engine = "transformers",
    compiled: options.Compile = False,
    speculate: options.Speculate = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="CACHE",
            help="dynamic, growing, static, quantized; none is the textbook loop. [default: dynamic]",
        ),
    ] = None,
    kv_bits: Annotated[
        int | None, typer.Option("--kv-bits", metavar="BITS", help="8, 4 or 2 bits for --cache quantized; 4 if unset.")
    ] = None,
    kv_window: Annotated[
        int | None,
        typer.Option("--kv-window", metavar="N", help="Keep the first 4 and the newest N - 4 tokens, and no others."),
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
        choice=ModelChoice(
            model=model,
            revision=revision,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            verbose=not quiet and not json_output,
        ),
        output=_Output(steps=steps, quiet=quiet, json=json_output, echo=echo, token_ids=print_token_ids),
        bad_words=tuple(bad_words or ()),
        num_samples=num_samples,
        many=many,
    )
    check_flags(flags, max_new_tokens)
    _check_choices(request)
    execution = Execution(weights=weights, engine=engine, compiled=compiled)
    # several sequences share a dynamic cache, and a window is kept in one of its own
    plain = many.file is not None or num_samples > 1 or kv_window is not None
    default_cache = "dynamic" if plain else execution.default_cache
    request = replace(
        request,
        caching=CacheOptions(kind=cache or default_cache, **cast(dict[str, Any], caching)),
        choice=replace(request.choice, execution=execution),
        speculation=make_speculation(speculate, drafts=draft is not None, draft_tokens=draft_tokens),
        draft=draft,
    )
    _check_caching(request)
    _check_speculation(request)
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
        return _run_many(request)
    return _run(replace(request, text=read_prompt(prompt, prompt_file)), debug=debug)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    steps: bool
    quiet: bool
    json: bool
    echo: bool
    token_ids: bool

    @property
    def verbose(self) -> bool:
        """Whether progress and summary go to standard error."""
        return not self.quiet and not self.json


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    flags: Mapping[str, Any]
    system: str | None
    raw: bool
    choice: ModelChoice
    output: _Output
    bad_words: tuple[str, ...]
    num_samples: int
    many: ManyPrompts
    caching: CacheOptions = field(default_factory=CacheOptions)
    stop: StopCriteria = field(default_factory=StopCriteria)
    speculation: Speculation | None = None
    draft: str | None = None
    text: str = ""


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
    check_choice(request.choice)
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
        "--prompts and --echo": request.many.file is not None and output.echo,
        "--prompts and --print-token-ids": request.many.file is not None and output.token_ids,
        "--output without --prompts": request.many.output is not None and request.many.file is None,
        "--resume without --output": request.many.resume and request.many.output is None,
    }
    for what, present in contradictions.items():
        if present:
            raise UsageError(f"{what}: these do not go together", hint="drop one of them, or add what is missing")


def _check_caching(request: _Request) -> None:
    """Several sequences share one dynamic cache: what is said about another one, or needs one, is for a single run."""
    caching = request.caching
    asked = {
        "--engine native": request.choice.execution.engine == "native",
        "--compile": request.choice.execution.compiled,
        f"--cache {caching.kind}": caching.kind != "dynamic",
        "--kv-window": caching.window is not None,
        "--prefill-chunk": caching.prefill_chunk is not None,
        "--prompt-cache": caching.file is not None,
    }
    several = {"--prompts": request.many.file is not None, "--num-samples": request.num_samples > 1}
    for flag in (name for name, given in several.items() if given):
        for option in (name for name, given in asked.items() if given):
            raise UsageError(f"{flag} and {option}: these do not go together", hint="drop one of them")
    if caching.kind == "quantized":
        quantizer(caching.bits or DEFAULT_KV_BITS)
    request.choice.execution.check_cache(caching)


def _check_speculation(request: _Request) -> None:
    """Drafts are for a single run, on a cache that can be cut back."""
    if request.speculation is None:
        return
    flag = "--draft" if request.draft is not None else f"--speculate {request.speculation.kind}"
    others = {
        "--prompts": request.many.file is not None,
        "--num-samples": request.num_samples > 1,
        "--cache quantized": request.caching.kind == "quantized",
        "--kv-window": request.caching.window is not None,
        "--compile": request.choice.execution.compiled,
    }
    for other in (name for name, given in others.items() if given):
        raise UsageError(f"{flag} and {other}: these do not go together", hint="drop one of them")


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
            return without_line_end(decode_text(prompt_file.read_bytes(), str(prompt_file)))
        except OSError as error:
            raise UsageError(f"cannot read --prompt-file {prompt_file}: {error.strerror}") from error
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no prompt", hint='try: llminfer generate "What is the capital of France?"')
    text = without_line_end(decode_text(read_stdin(), "standard input"))
    if not text and prompt is None:
        raise UsageError("no prompt, and standard input is empty", hint="give the prompt as an argument")
    return text


def _run(request: _Request, *, debug: bool) -> int:
    startup_s: dict[str, float] = {}
    loaded, draft = _load(request, startup_s)
    if request.num_samples > 1:
        return _run_samples(request, loaded, startup_s)
    from llminfer.engine.generate import generate as generate_events

    compiles = request.output.verbose and request.choice.execution.compiled
    with status("compiling the decode step", compiles):
        events = generate_events(
            loaded,
            request.text,
            sampling=request.flags,
            bad_words=request.bad_words,
            stop=request.stop,
            system=request.system,
            raw=request.raw,
            cache=request.caching,
            speculation=request.speculation,
            draft=draft,
        )
    if request.output.echo:
        write_text(request.text)
    output = request.output
    shown = None if output.json else _id_line if output.token_ids else text_of
    trace = stream(events, announce=output.verbose, show=shown)
    if shown is not None and trace.text and not trace.text.endswith("\n") and sys.stdout.isatty():
        write_text("\n")
    return _finish(trace, request.output, startup_s, debug=debug)


def _load(request: _Request, startup_s: dict[str, float]) -> tuple[LoadedModel, LoadedModel | None]:
    """The model, and the one that drafts for it where one does."""
    if request.draft is not None and request.speculation is not None:
        return load_with_draft(
            request.choice, request.draft, startup_s, cache=request.caching, speculation=request.speculation
        )
    return load_model(request.choice, startup_s, cache=request.caching, speculation=request.speculation), None


def _id_line(event: Step | Finished) -> str:
    token_id = getattr(event, "token_id", None)
    return "" if token_id is None else f"{token_id}\n"


def _run_samples(request: _Request, loaded: LoadedModel, startup_s: Mapping[str, float]) -> int:
    """Several samples of one prompt: each text on lines of its own, or all in one document."""
    from llminfer.engine.batch_generate import BatchPeak, run_samples
    from llminfer.render.document import samples_document

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
        write_text(to_json(samples_document(traces, startup_s, asdict(peak))) + "\n")
    for number, trace in enumerate(traces if not request.output.json else ()):
        if request.output.verbose and trace.started is not None and trace.finished is not None:
            seed, reason = trace.started.sampling.seed, trace.finished.reason
            say(f"sample {number} · seed {seed} · {len(trace.steps)} tokens · {reason}")
        shown = "".join(f"{token_id}\n" for token_id in trace.token_ids) if request.output.token_ids else trace.text
        write_text((request.text if request.output.echo else "") + shown + "\n")
    if request.output.verbose:
        predicted = "not predicted" if peak.predicted_bytes is None else f"predicted {peak.predicted_bytes} B"
        say(f"KV cache at most {peak.kv_bytes} B for {peak.rows} samples of {peak.tokens} tokens · {predicted}")
    reasons = [trace.finished.reason for trace in traces if trace.finished is not None]
    return INTERRUPTED_EXIT_CODE if "interrupted" in reasons else int("error" in reasons)


def _run_many(request: _Request) -> int:
    from llminfer.cli.prompts import write_results
    from llminfer.engine.batch_generate import run_jobs
    from llminfer.engine.prompt_cache import model_digest

    many, output = request.many, request.output
    settings = _settings(request)
    jobs = many.jobs(request.stop, settings)
    if not jobs:
        if output.verbose:
            say(f"nothing to do: {many.output} has every line")
        return 0
    startup_s: dict[str, float] = {}
    loaded = load_model(request.choice, startup_s, cache=request.caching)
    origin = {"settings": settings}
    if many.output is not None and loaded.folder is not None:
        origin["model_digest"] = model_digest(loaded.folder)
        note = many.check_model(loaded.name, origin["model_digest"])
        if note is not None and output.verbose:
            say(f"note: {note}")
    results = run_jobs(
        loaded,
        jobs,
        sampling=request.flags,
        bad_words=request.bad_words,
        system=request.system,
        raw=request.raw,
        batch_size=many.batch_size,
    )
    with interrupts() as interrupt:
        interrupt.may_wait = True
        lines = [job.line for job in jobs]
        return write_results(results, lines, many, interrupt, verbose=output.verbose, origin=origin)


def _settings(request: _Request) -> str:
    """A digest of the options that shape a result of --prompts; those that say nothing are left out."""
    stated = {
        **request.flags,
        **asdict(request.stop),
        "bad_words": request.bad_words,
        "system": request.system,
        "raw": request.raw,
        "dtype": request.choice.dtype,
        "weights": request.choice.execution.weights,
        "tokenizer": request.choice.tokenizer and str(request.choice.tokenizer),
    }
    said = {name: value for name, value in stated.items() if value not in (None, ()) and value is not False}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _finish(trace: Trace, output: _Output, startup_s: Mapping[str, float], *, debug: bool) -> int:
    """The summary or the JSON document, then the exit code."""
    finished = trace.finished
    if finished is None:
        raise KeyboardInterrupt
    if output.json:
        from llminfer.render.document import run_document

        write_text(to_json(run_document(trace, startup_s)) + "\n")
    if output.verbose or output.steps:
        from llminfer.render.console import make_console
        from llminfer.render.steps import step_table
        from llminfer.render.summary import summary

        console = make_console(sys.stderr)
        drafts = trace.started is not None and trace.started.speculation is not None
        for line in step_table(trace.steps, drafts=drafts) if output.steps else ():
            console.print(line)
        for text in summary(trace, startup_s) if output.verbose else ():
            console.print(text)
    if isinstance(finished.error, LlminferError):
        if debug:
            raise finished.error
        return report(finished.error)
    return INTERRUPTED_EXIT_CODE if finished.reason == "interrupted" else 0
