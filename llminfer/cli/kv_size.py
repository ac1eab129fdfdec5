"""`llminfer kv-size`: what a model's cache weighs, without its weights and without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from llminfer.cli.errors import say, writing
from llminfer.cli.standard_streams import write_text
from llminfer.errors import DoesNotFit, InvalidParams, LlminferError, UnsupportedArchitecture, UsageError
from llminfer.units import format_bytes, parse_bytes, parse_counts, to_json

if TYPE_CHECKING:
    from llminfer.kv.budget import Memory
    from llminfer.kv.layer import ModelKV
    from llminfer.kv.query import Question
    from llminfer.kv.results import Answer
    from llminfer.sources import Source

# formats by name, each with the module that renders it
FORMATS = {
    "table": "llminfer.render.kv_table",
    "plain": "llminfer.render.kv_plain",
    "json": "llminfer.render.kv_json",
    "csv": "llminfer.render.kv_csv",
    "markdown": "llminfer.render.kv_markdown",
}
ALL = "all"
AUTO = "auto"
Parsed = TypeVar("Parsed")


def kv_size(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json, - for standard input, a .gguf file, a shipped config, or a Hub id.",
            show_default=False,
        ),
    ] = None,
    *,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            "-N",
            metavar="N",
            help="Cached tokens per sequence: 8192, 8k (8000), 8Ki (8192), 1k,8k,128k, 1k..128k*2, 1k..8k+1k. "
            "The model's own limit when not given.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="B", help="Sequences; a list, as for --tokens.")] = "1",
    layers: Annotated[int | None, typer.Option("--layers", metavar="L", help="Layers, when no MODEL is named.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", metavar="H", help="Key-value heads, likewise.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", metavar="D", help="Width of a head, likewise.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "--kv-dtype",
            metavar="TYPE",
            help="Element type of the cache (the model's own by default): float32, bfloat16, float16, fp8, int8, int4, "
            "or a block type of llama.cpp: q8_0, q5_1, q5_0, q4_1, q4_0.",
        ),
    ] = None,
    k_dtype: Annotated[str | None, typer.Option("--k-dtype", metavar="TYPE", help="Type of the keys.")] = None,
    v_dtype: Annotated[str | None, typer.Option("--v-dtype", metavar="TYPE", help="Type of the values.")] = None,
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="transformers, transformers-static, transformers-quantized, llminfer, vllm, llama.cpp, ideal, or all.",
        ),
    ] = "transformers",
    tp: Annotated[
        str, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks; sizes are those of one rank.")
    ] = "1",
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Show what fits into this (24GiB, 80GB); exit with 5 if not."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="SIZE", help="Subtract the weights; auto reads their files.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option("--reserve", metavar="SIZE", help="Subtract this, too, for everything else.")
    ] = None,
    layers_table: Annotated[
        bool, typer.Option("--layers-table", help="Show every layer, and where each field comes from.")
    ] = False,
    output: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table, plain, json, csv or markdown.")] = (
        "table"
    ),
    only_bytes: Annotated[bool, typer.Option("--bytes", help="Print only the bytes, one answer a line.")] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw bytes against context: .png, .svg, .html, or -.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the real classes, run without weights (imports torch).")
    ] = False,
    list_configs: Annotated[bool, typer.Option("--list", help="List the shipped configs and exit.")] = False,
) -> None:
    """Size a model's KV cache, exactly and per layer, as seven runtimes hold it. No weights are needed.

    Exit codes: 2 usage, 3 no such model, 4 an architecture or config that cannot be sized, 5 does not fit.
    """
    if list_configs:
        _print_list(output)
        return
    from llminfer.kv.query import answers

    _check_output(output, only_bytes, plot)
    dtypes = {"--dtype": dtype, "--k-dtype": k_dtype, "--v-dtype": v_dtype}
    question = _question(tokens=tokens, batch=batch, dtypes=dtypes, runtime=runtime, tp=tp)
    room = _room(memory, weights=weights, reserve=reserve, ranks=max(setup.tp for setup in question.setups))
    bare = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    found: list[Answer] = []
    for model, source in _models(models or [], bare, dtype):
        path, config = (source.path, source.config) if source else (None, None)
        left = None if room is None else room(path, name=model.name, config=config)
        for answer in answers(model, question, memory=left):
            found.append(_verified(answer, source) if verify else answer)
    _warn(question, found)
    _print(found, output, only_bytes=only_bytes, layers=layers_table)
    if plot is not None:
        _plot(found, plot)
    _fail_if_needed(found)


def _question(*, tokens: str | None, batch: str, dtypes: Mapping[str, str | None], runtime: str, tp: str) -> Question:
    from llminfer.kv.query import Question
    from llminfer.kv.runtimes.table import RUNTIMES
    from llminfer.kv.setup import CacheSetup

    if runtime not in RUNTIMES and runtime != ALL:
        raise UsageError(f"--runtime: unknown runtime {runtime!r}", hint=f"known: {', '.join((*RUNTIMES, ALL))}")
    for flag, name in dtypes.items():
        if name is not None:
            _parse(flag, name, _cache_type)
    names = RUNTIMES if runtime == ALL else [runtime]
    ranks, batches = _parse("--tp", tp, parse_counts), _parse("--batch", batch, parse_counts)
    dtype, k_dtype, v_dtype = dtypes.values()
    return Question(
        setups=tuple(
            CacheSetup(runtime=name, tp=rank, batch=count, dtype=dtype, k_dtype=k_dtype, v_dtype=v_dtype)
            for name, rank, count in product(names, ranks, batches)
        ),
        tokens=None if tokens is None else tuple(_parse("--tokens", tokens, parse_counts)),
        keep_refusals=runtime == ALL,
    )


def _room(memory: str | None, *, weights: str | None, reserve: str | None, ranks: int) -> Callable[..., Memory] | None:
    """What gives a model's memory, once its name and the place of its weights are known."""
    from llminfer.kv.query import memory_of

    if memory is None:
        if weights is not None or reserve is not None:
            raise UsageError("--weights and --reserve need --memory")
        return None
    total_bytes = _parse("--memory", memory, parse_bytes)
    if total_bytes == 0:
        raise InvalidParams("--memory: nothing fits in 0 bytes")
    if memory.strip().isdecimal() and total_bytes < 1 << 20:
        raise InvalidParams(f"--memory {memory}: that is in bytes", hint=f"write it like {memory}GiB or {memory}GB")
    return partial(
        memory_of,
        total_bytes=total_bytes,
        weights=None if weights == AUTO else _parse("--weights", weights or "0", parse_bytes),
        reserve_bytes=_parse("--reserve", reserve or "0", parse_bytes),
        ranks=ranks,
    )


def _cache_type(name: str) -> str:
    """The name of an element type that keys and values may have: any but that of ids."""
    from llminfer.kv.dtypes import ELEMENT_TYPES, element_type

    try:
        found = element_type(name).name
    except InvalidParams:
        found = "unknown"
    known = [row for row in ELEMENT_TYPES if row != "int64"]
    if found not in known:
        raise InvalidParams(f"unknown element type {name!r}", hint=f"known: {', '.join(known)}")
    return found


def _parse(flag: str, text: str, parser: Callable[[str], Parsed]) -> Parsed:
    """`text` parsed; what is wrong with it is said with the flag's name."""
    try:
        return parser(text)
    except InvalidParams as error:
        raise InvalidParams(f"{flag}: {error.message}", hint=error.hint) from None


def _check_output(output: str, only_bytes: bool, plot: str | None) -> None:
    if output not in FORMATS:
        raise UsageError(f"--format: unknown format {output!r}", hint=f"known: {', '.join(FORMATS)}")
    if plot == "-" and (only_bytes or output not in ("table", "plain")):
        other = "--bytes" if only_bytes else f"--format {output}"
        raise UsageError(f"--plot - and {other} cannot be combined", hint="plot to a file instead")
    if only_bytes and output != "table":
        raise UsageError("--bytes and --format cannot be combined")
    if plot is not None and plot != "-":
        from llminfer.params import check_writable
        from llminfer.render.kv_plot import SUFFIXES

        if Path(plot).suffix.lower() not in SUFFIXES:
            raise UsageError(f"--plot: {plot!r} has no known ending", hint=f"known: {', '.join(SUFFIXES)}, -")
        check_writable("--plot", Path(plot))


def _models(
    models: list[str], bare: Mapping[str, int | None], dtype: str | None
) -> Iterator[tuple[ModelKV, Source | None]]:
    """The named models with their sources, or the one that the flags describe."""
    given = {flag: value for flag, value in bare.items() if value is not None}
    if models and given:
        raise UsageError(f"{', '.join(given)} cannot be combined with a MODEL: they describe one of their own")
    if models.count("-") > 1:
        raise UsageError("standard input holds one config, but - is named more than once")
    if not models:
        yield _bare_model(bare, given, dtype), None
    if models:
        from llminfer.api import kv_model
        from llminfer.sources import find_source

        for source in [find_source(name) for name in models]:
            model = kv_model(source)
            if model.method == "dry run":
                say(f"note: {model.model_type} is not in the tables: its classes were run without weights")
            yield model, source


def _bare_model(bare: Mapping[str, int | None], given: Mapping[str, int], dtype: str | None) -> ModelKV:
    """Plain attention layers of the stated sizes."""
    from llminfer.kv.config import MOST, MOST_LAYERS
    from llminfer.kv.layer import Field, LayerKV, ModelKV, PerToken

    if not given:
        raise UsageError(
            "no MODEL is named", hint="give one, or --layers, --kv-heads and --head-dim; --list shows the shipped ones"
        )
    missing = [flag for flag in bare if flag not in given]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: without a MODEL, all of {', '.join(bare)} are needed")
    for flag, value in given.items():
        most = MOST_LAYERS if flag == "--layers" else MOST
        if not 1 <= value <= most:
            raise InvalidParams(f"{flag} is {value}, not from 1 to {most}")
    layers, heads, dim = given.values()
    if dtype is None:
        say("note: no --dtype: counted as bfloat16, 2 bytes an element")
    tensors = (PerToken(name="k", heads=heads, dim=dim), PerToken(name="v", heads=heads, dim=dim))
    return ModelKV(
        name=f"{layers} layers, {heads} heads of {dim}",
        model_type="",
        layers=(LayerKV(kind="full", tensors=tensors),) * layers,
        dtype="bfloat16",
        fields=tuple(Field(name=flag, value=value, origin="command line") for flag, value in given.items()),
    )


def _verified(answer: Answer, source: Source | None) -> Answer:
    """The answer with what the real classes of the installed transformers hold beside it."""
    from llminfer.api import verify
    from llminfer.cli.loading import no_data

    setup = answer.setup
    if setup.runtime != "transformers" or answer.footprint is None:
        return answer
    if source is None or source.config is None or setup.tp != 1:
        raise UsageError("--verify needs a config and one rank", hint="name a folder, a config.json or a Hub id")
    with no_data():
        check = verify(source, tokens=answer.tokens, batch=setup.batch, dtype=answer.footprint.dtype)
    if check[0].real:
        how = f"checked in a real run of {check[0].tokens} tokens with zeros for weights"
        say(f"note: {answer.model.name} does not run without values: {how}")
    return replace(answer, check=check)


def _warn(question: Question, answers: list[Answer]) -> None:
    """Say on stderr what a reader of the numbers alone would miss."""
    from llminfer.kv.query import notes

    for note in notes(question, answers):
        say(f"note: {note}")


def _print(answers: list[Answer], output: str, *, only_bytes: bool, layers: bool) -> None:
    if only_bytes:
        text = "".join(f"{_total(answer)}\n" for answer in answers)
    else:
        from importlib import import_module

        text = import_module(FORMATS[output]).render(answers, layers=layers)
    write_text(text) if output in ("json", "csv") else sys.stdout.write(text)


def _total(answer: Answer) -> int:
    if answer.footprint is None:
        raise UnsupportedArchitecture(answer.refusal or "no answer", hint="name one --runtime for --bytes")
    return answer.footprint.total_bytes


def _plot(answers: list[Answer], target: str) -> None:
    from llminfer.kv.query import curves
    from llminfer.render import kv_plot
    from llminfer.render.console import wants_color

    drawn = curves(answers)
    if not drawn:
        raise UsageError("--plot: there is nothing to draw")
    budgets = [answer.budget for answer in answers if answer.budget]
    room = max(budgets[0].memory.cache_bytes, 0) if budgets else None
    if target == "-":
        picture = kv_plot.draw(drawn, memory_bytes=room, color=wants_color(sys.stdout))
        sys.stdout.write(picture)
    else:
        with writing(Path(target)):
            kv_plot.save(drawn, Path(target), memory_bytes=room)


def _fail_if_needed(answers: list[Answer]) -> None:
    """The exit codes that come after an answer: a check that failed, tokens that do not fit."""
    if any(not row.agrees for answer in answers for row in answer.check):
        raise LlminferError("prediction and measurement differ", hint="please report it, with the config")
    for answer in answers:
        found = answer.budget
        if found is not None and answer.footprint is not None and found.exceeded:
            needed, room = answer.footprint.total_bytes, max(found.memory.cache_bytes, 0)
            raise DoesNotFit(
                f"{answer.model.name}, {answer.setup.runtime}: {answer.tokens} tokens in batch {answer.setup.batch} "
                f"need {format_bytes(needed)} ({needed} B), {format_bytes(room)} ({room} B) are left",
                hint=f"longest context for this batch: {found.max_tokens}" if found.max_tokens else None,
            )


def _print_list(output: str) -> None:
    from llminfer.sources import shipped_configs

    names = list(shipped_configs())
    if output == "json":
        write_text(to_json({"schema_version": 1, "configs": names}, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{name}\n" for name in names))
