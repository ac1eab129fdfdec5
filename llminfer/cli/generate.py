"""`llminfer generate`: continue a prompt, stream the text, show what every step cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llminfer.cli import options
from llminfer.cli.loading import ModelChoice, check_choice
from llminfer.cli.options import check_flags
from llminfer.cli.prompts import ManyPrompts
from llminfer.cli.running import Request, Shown, run, run_many
from llminfer.cli.standard_streams import read_stdin
from llminfer.errors import InvalidParams, UsageError
from llminfer.kv.quantizers import quantizer
from llminfer.params import (
    DEFAULT_KV_BITS,
    MAX_BIAS,
    CacheOptions,
    Execution,
    StopCriteria,
    check_range,
    make_speculation,
)
from llminfer.text import decode_text, without_line_end

if TYPE_CHECKING:
    pass


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
    check_flags(flags, max_new_tokens)
    execution = Execution(weights=weights, engine=engine, compiled=compiled)
    # several sequences share a dynamic cache, and a window is kept in one of its own
    plain = prompts is not None or num_samples > 1 or kv_window is not None
    request = Request(
        flags={**flags, "logit_bias": parse_logit_bias(logit_bias or []) or None},
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
            execution=execution,
        ),
        output=Shown(steps=steps, quiet=quiet, json=json_output, echo=echo, token_ids=print_token_ids),
        bad_words=tuple(bad_words or ()),
        num_samples=num_samples,
        many=ManyPrompts(file=prompts, batch_size=batch_size, output=output_file, resume=resume),
        caching=CacheOptions(
            kind=cache or ("dynamic" if plain else execution.default_cache),
            bits=kv_bits,
            window=kv_window,
            prefill_chunk=prefill_chunk,
            file=prompt_cache,
        ),
        stop=StopCriteria(
            max_new_tokens=max_new_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos, max_time_s=max_time
        ),
        speculation=make_speculation(speculate, drafts=draft is not None, draft_tokens=draft_tokens),
        draft=draft,
    )
    _check(request)
    if prompts is not None:
        request.many.check(given_prompt=prompt is not None or prompt_file is not None)
        return run_many(request)
    return run(replace(request, text=read_prompt(prompt, prompt_file)), debug=debug)


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


def _check(request: Request) -> None:
    """Refuse what cannot be combined, before anything is loaded."""
    check_choice(request.choice)
    _check_output(request)
    _check_caching(request)
    _check_speculation(request)


def _check_output(request: Request) -> None:
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


def _check_caching(request: Request) -> None:
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


def _check_speculation(request: Request) -> None:
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
