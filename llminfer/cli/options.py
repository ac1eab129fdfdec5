"""The options that several commands share: declared once, read and checked once, before anything is loaded.

An option without a name here has that of its parameter: `top_k` is `--top-k`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from llminfer.cli.errors import say
from llminfer.cli.help import main_name
from llminfer.params import SAMPLING_RANGES, Execution, SamplingOverrides, check_range
from llminfer.request import LoadRequest

ModelName = Annotated[
    str | None,
    Option(
        "--model",
        "-m",
        envvar="LLMINFER_MODEL",
        metavar="MODEL",
        help="A folder, a .gguf file or a Hub id. Without it, the built-in SmolLM2-135M-Instruct.",
    ),
]
Revision = Annotated[str | None, Option(metavar="REV", help="The revision of a Hub model.")]
Tokenizer = Annotated[Path | None, Option(metavar="FOLDER", help="Take the tokenizer from another folder.")]
System = Annotated[str | None, Option(metavar="TEXT", help="A system message, for chat models.")]
MaxNewTokens = Annotated[
    int, Option("--max-new-tokens", "-n", metavar="N", help="Generate at most N tokens, EOS included.")
]
Temperature = Annotated[
    float | None, Option("--temperature", "-t", metavar="T", help="Divides the logits; 0 takes the most likely token.")
]
TopK = Annotated[int | None, Option(metavar="K", help="Keep the K most likely tokens; 0 keeps all.")]
TopP = Annotated[
    float | None, Option(metavar="P", help="Keep the most likely tokens that reach probability P together.")
]
MinP = Annotated[float | None, Option(metavar="P", help="Drop tokens less likely than P times the most likely one.")]
RepetitionPenalty = Annotated[
    float | None, Option(metavar="R", help="Make tokens of the prompt and output R times less likely.")
]
Seed = Annotated[int | None, Option(metavar="N", help="Seed for sampling; if unset a random one, which is reported.")]
Stop = Annotated[list[str] | None, Option(metavar="TEXT", help="Stop at this text, which is not printed. Repeatable.")]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Keep generating past EOS tokens.")]
Device = Annotated[str, Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, Option(metavar="DTYPE", help="auto, float32, bfloat16, float16; or bf16, fp16, fp32.")]
Weights = Annotated[str | None, Option(metavar="FORMAT", help="Hold linear layers as float32, float16, int8 or int4.")]
Engine = Annotated[
    str, Option(metavar="ENGINE", help="transformers, or native: our compiled step, for common families.")
]
Speculate = Annotated[
    str | None, Option(metavar="KIND", help="prompt-lookup: draft what followed the same tokens earlier.")
]
Draft = Annotated[
    str | None,
    Option(metavar="MODEL", help="A smaller model with the same vocabulary drafts; the text stays the same."),
]
DraftTokens = Annotated[int | None, Option(metavar="N", help="Draft at most N tokens for a forward; 15 if unset.")]
Compile = Annotated[bool, Option("--compile", help="Run the decode step through torch.compile.")]
Cache = Annotated[
    str | None, Option(metavar="CACHE", help="dynamic, growing; none is the textbook loop without a cache.")
]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Show everything that was measured.")]
Threads = Annotated[int | None, Option(metavar="N", help="Threads of the processor; as torch chooses if unset.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print nothing but the text.")]
AllowPickle = Annotated[bool, Option("--allow-pickle", help="Read pickled weights, with torch's restricted unpickler.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run Python code from the model's repository.")]
Debug = Annotated[bool, Option("--debug", help="Show a traceback when something fails.")]


_UNUSUAL_TEMPERATURE = 2


def given(context: typer.Context) -> frozenset[str]:
    """The options that were given a value other than their default, and `a prompt`, for `check_together`."""
    found = set()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value and value != parameter.default:
            found.add("a prompt" if parameter.param_type_name == "argument" else main_name(parameter))
    return frozenset(found)


def read_sampling(values: Mapping[str, Any], **others: Any) -> SamplingOverrides:
    """What a command's options state of the sampling; `others` are fields of it that are not numbers.

    Raises:
        InvalidParams: naming the option and its range.
    """
    stated = {name: values[name] for name in SAMPLING_RANGES if values.get(name) is not None}
    for name, value in stated.items():
        check_range(f"--{name.replace('_', '-')}", value, *SAMPLING_RANGES[name])
    check_range("--max-new-tokens", values["max_new_tokens"], 0, math.inf)
    temperature = stated.get("temperature", 0)
    if temperature > _UNUSUAL_TEMPERATURE and not values.get("quiet"):
        say(f"note: at temperature {temperature:g} a text is mostly noise; the number of threads is --threads")
    return SamplingOverrides(**stated, **others)


def read_load_request(values: Mapping[str, Any]) -> LoadRequest:
    """Which model a command's options ask for, and how to load it.

    Raises:
        UsageError: for a value that is unknown, or options that cannot be combined.
    """
    names = ("model", "revision", "tokenizer", "device", "dtype", "allow_pickle", "trust_remote_code", "threads")
    execution = Execution(weights=values["weights"], engine=values["engine"], compiled=values["compiled"])
    return LoadRequest(**{name: values[name] for name in names}, execution=execution)
