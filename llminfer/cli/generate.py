"""`llminfer generate`: continue a prompt, stream the text, show what every step cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from llminfer.cli import options
from llminfer.cli.prompts import ManyPrompts
from llminfer.cli.running import Command, Shown, run, run_many, run_samples
from llminfer.cli.standard_streams import read_stdin
from llminfer.errors import InvalidParams, UsageError
from llminfer.exclusions import check_together
from llminfer.kv.quantizers import quantizer
from llminfer.params import DEFAULT_KV_BITS, MAX_BIAS, CacheOptions, StopCriteria, check_range
from llminfer.request import GenerationRequest, make_speculation
from llminfer.text import decode_text, without_line_end


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, Argument(help="The prompt; - or a pipe reads standard input.", show_default=False)
    ] = None,
    *,
    prompt_option: Annotated[
        str | None, Option("--prompt", "-p", metavar="TEXT", help="The prompt, as an option.", show_default=False)
    ] = None,
    prompt_file: Annotated[Path | None, Option(metavar="FILE", help="Read the prompt from a file.")] = None,
    model: options.ModelName = None,
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    system: options.System = None,
    raw: Annotated[bool, Option("--raw", help="Skip the chat template.")] = False,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    typical_p: Annotated[
        float | None, Option(metavar="P", help="Keep tokens of typical surprise that reach probability P.")
    ] = None,
    presence_penalty: Annotated[
        float | None, Option(metavar="X", help="Subtract X from the logits of tokens in the output.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, Option(metavar="X", help="Subtract X for every time a token is in the output.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, Option(metavar="ID=X", help="Add X to the logit of a token id. Repeatable.")
    ] = None,
    bad_words: Annotated[list[str] | None, Option(metavar="TEXT", help="Never generate this text. Repeatable.")] = None,
    min_new_tokens: Annotated[int | None, Option(metavar="N", help="No EOS before N tokens.")] = None,
    logprobs: Annotated[
        int | None, Option(metavar="K", help="Add the K most likely tokens of each step to --json.")
    ] = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    max_time: Annotated[
        float | None, Option(metavar="SECONDS", help="Stop after the token at which time is up.")
    ] = None,
    num_samples: Annotated[int, Option(metavar="K", help="Draw K samples of one prompt, with seeds N, N + 1, ...")] = 1,
    prompts: Annotated[
        Path | None, Option(metavar="FILE", help="Many prompts: one per line, or JSON objects in .jsonl.")
    ] = None,
    batch_size: Annotated[int, Option(metavar="B", help="How many of --prompts decode together.")] = 8,
    output_file: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="Where results of --prompts go; standard output if unset."),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue an interrupted --output; nothing is done twice.")
    ] = False,
    echo: Annotated[bool, Option("--echo", help="Print the prompt before the text.")] = False,
    print_token_ids: Annotated[
        bool, Option("--print-token-ids", help="Print token ids, one per line, instead of the text.")
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    engine: options.Engine = "transformers",
    compiled: options.Compile = False,
    threads: options.Threads = None,
    speculate: options.Speculate = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = None,
    cache: Annotated[
        str | None,
        Option(
            metavar="CACHE", help="dynamic, growing, static, quantized; none is the textbook loop. [default: dynamic]"
        ),
    ] = None,
    kv_bits: Annotated[
        int | None, Option(metavar="BITS", help="8, 4 or 2 bits for --cache quantized; 4 if unset.")
    ] = None,
    kv_window: Annotated[
        int | None, Option(metavar="N", help="Keep the first 4 and the newest N - 4 tokens, and no others.")
    ] = None,
    prefill_chunk: Annotated[
        int | None, Option(metavar="N", help="Feed the prompt N tokens at a time; 2048 where that works.")
    ] = None,
    prompt_cache: Annotated[
        Path | None, Option(metavar="FILE", help="Reuse the tokens in this file, and save the cache there.")
    ] = None,
    steps: Annotated[bool, Option("--steps", help="Print the table of all steps to standard error.")] = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    json_output: Annotated[bool, Option("--json", help="Print one JSON document instead of the text.")] = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> int:
    """Continue a prompt, stream the text, and show what every step cost.

    The text goes to standard output, the summary to standard error.
    """
    sampling = options.read_sampling(
        context.params, logit_bias=parse_logit_bias(logit_bias or []) or None, bad_texts=tuple(bad_words or ())
    )
    check_range("--num-samples", num_samples, 1, 1024)
    load = options.read_load_request(context.params)
    # several sequences share a dynamic cache, and a window is kept in one of its own
    plain = prompts is not None or num_samples > 1 or kv_window is not None
    caching = CacheOptions(
        kind=cache or ("dynamic" if plain else load.execution.default_cache),
        bits=kv_bits,
        window=kv_window,
        prefill_chunk=prefill_chunk,
        file=prompt_cache,
    )
    check_together(options.given(context) | caching.given() | load.execution.given())
    if caching.kind == "quantized":
        quantizer(caching.bits or DEFAULT_KV_BITS)
    stop_criteria = StopCriteria(
        max_new_tokens=max_new_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos, max_time_s=max_time
    )
    command = Command(
        load=load,
        draft=load.of_draft(draft) if draft is not None else None,
        request=GenerationRequest(
            system=system,
            raw=raw,
            sampling=sampling,
            stop=stop_criteria,
            cache=caching,
            speculation=make_speculation(speculate, drafts=draft is not None, draft_tokens=draft_tokens),
        ),
        shown=Shown(steps=steps, verbose=verbose, quiet=quiet, json=json_output, echo=echo, token_ids=print_token_ids),
        debug=debug,
    )
    if prompts is not None:
        many = ManyPrompts(file=prompts, batch_size=batch_size, output=output_file, resume=resume)
        many.check()
        return run_many(command, many)
    command = replace(
        command,
        request=replace(
            command.request, text=read_prompt(prompt if prompt_option is None else prompt_option, prompt_file)
        ),
    )
    return run(command) if num_samples == 1 else run_samples(command, num_samples)


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


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text. Standard input is read only for `-`, or when it is no terminal and nothing else is given.

    One line break at the end of a file or of standard input is not part of the prompt.

    Raises:
        UsageError: for no prompt, or one that is not UTF-8.
    """
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
