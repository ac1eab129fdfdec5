"""`llminfer kv-size`: what a model's cache weighs, without its weights and without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from llminfer.errors import DoesNotFit, InvalidParams, LlminferError, UnsupportedArchitecture, UsageError
from llminfer.units import format_bytes, parse_bytes, parse_counts

if TYPE_CHECKING:
    from llminfer.kv.budget import Memory
    from llminfer.kv.layer import ModelKV
    from llminfer.kv.results import Answer, CheckRow
    from llminfer.sources import Source

FORMATS = ("table", "plain", "json", "csv", "markdown")
ALL = "all"
Parsed = TypeVar("Parsed")


def kv_size(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json, - for one on standard input, a .gguf file, a shipped config, or a Hub id.",
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
            "Without it, the model's own limit.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="B", help="Sequences; a list like --tokens.")] = "1",
    layers: Annotated[int | None, typer.Option("--layers", metavar="L", help="Layers, for no MODEL.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", metavar="H", help="Key-value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", metavar="D", help="Elements of a head.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "--kv-dtype",
            metavar="TYPE",
            help="Element type of the cache, the model's by default: float32, bfloat16, float16, fp8, int8, int4, "
            "or a block type of llama.cpp: q8_0, q5_1, q5_0, q4_1, q4_0.",
        ),
    ] = None,
    k_dtype: Annotated[str | None, typer.Option("--k-dtype", metavar="TYPE", help="That of the keys.")] = None,
    v_dtype: Annotated[str | None, typer.Option("--v-dtype", metavar="TYPE", help="That of the values.")] = None,
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="transformers, transformers-static, transformers-quantized, llminfer, vllm, llama.cpp, ideal, or all.",
        ),
    ] = "transformers",
    tp: Annotated[
        str, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks: the answer is for one of them.")
    ] = "1",
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="What fits in so much (24GiB, 80GB)? Exit code 5 if not."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="SIZE", help="Taken from --memory first; auto reads the files.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option("--reserve", metavar="SIZE", help="Taken from --memory too, for all else.")
    ] = None,
    layers_table: Annotated[
        bool, typer.Option("--layers-table", help="Every layer, and where each field came from.")
    ] = False,
    output: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table, plain, json, csv, markdown.")] = (
        "table"
    ),
    only_bytes: Annotated[bool, typer.Option("--bytes", help="Print the bytes alone, one answer a line.")] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw bytes against context: .png, .svg, .html, or -.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the real classes on the meta device and compare (imports torch).")
    ] = False,
    list_configs: Annotated[bool, typer.Option("--list", help="Name the shipped configs and exit.")] = False,
) -> None:
    """What a model's KV cache weighs: exact, per layer, for six runtimes. No weights are needed.

    Exit codes: 2 usage, 3 no such model, 4 an architecture or a config that cannot be sized, 5 does not fit.
    """
    if list_configs:
        _print_list(output)
        return
    question = _question(
        tokens=tokens,
        batch=batch,
        dtypes={"--dtype": dtype, "--k-dtype": k_dtype, "--v-dtype": v_dtype},
        runtime=runtime,
        tp=tp,
        memory=memory,
        weights=weights,
        reserve=reserve,
    )
    _check_output(output, only_bytes, plot)
    bare = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    answers: list[Answer] = []
    for source in _sources(models or [], bare):
        model = _bare_model(bare, dtype) if source is None else _model(source)
        answers += _answers(question, model, source, verify)
    _warn(question, answers)
    _print(answers, output, only_bytes, layers_table)
    if plot is not None:
        _plot(question, answers, plot)
    _fail_if_needed(question, answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The flags, parsed: what is asked of every model. `tokens` is None when none were stated."""

    tokens: list[int] | None
    batches: list[int]
    ranks: list[int]
    runtimes: list[str]
    all_runtimes: bool
    dtypes: dict[str, str | None]
    memory_bytes: int | None
    weights: str
    reserve_bytes: int


def _question(
    *,
    tokens: str | None,
    batch: str,
    dtypes: Mapping[str, str | None],
    runtime: str,
    tp: str,
    memory: str | None,
    weights: str | None,
    reserve: str | None,
) -> Question:
    from llminfer.kv.runtimes.table import RUNTIMES

    if memory is None and (weights is not None or reserve is not None):
        raise UsageError("--weights and --reserve are taken from --memory, which is not given")
    if runtime not in RUNTIMES and runtime != ALL:
        raise UsageError(f"--runtime: unknown runtime {runtime!r}", hint=f"known: {', '.join((*RUNTIMES, ALL))}")
    for flag, name in dtypes.items():
        if name is not None:
            _parse(flag, name, _cache_type)
    memory_bytes = None if memory is None else _parse("--memory", memory, parse_bytes)
    if memory_bytes == 0:
        raise InvalidParams("--memory: nothing fits in 0 bytes")
    return Question(
        tokens=None if tokens is None else _parse("--tokens", tokens, parse_counts),
        batches=_parse("--batch", batch, parse_counts),
        ranks=_parse("--tp", tp, parse_counts),
        runtimes=list(RUNTIMES) if runtime == ALL else [runtime],
        all_runtimes=runtime == ALL,
        dtypes={flag.removeprefix("--").replace("-", "_"): name for flag, name in dtypes.items()},
        memory_bytes=memory_bytes,
        weights=weights or "0",
        reserve_bytes=_parse("--reserve", reserve or "0", parse_bytes),
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
        raise UsageError("--plot - would mix a picture into the data on stdout", hint="plot to a file instead")
    if only_bytes and output != "table":
        raise UsageError("--bytes and --format contradict each other")
    if plot is not None and plot != "-":
        from llminfer.render.kv_plot import SUFFIXES

        if Path(plot).suffix.lower() not in SUFFIXES:
            raise UsageError(f"--plot: {plot!r} has none of the known endings", hint=f"known: {', '.join(SUFFIXES)}, -")


def _sources(models: list[str], bare: Mapping[str, int | None]) -> list[Source | None]:
    """The sources of the named models, or one None for a model that the flags describe."""
    given = [flag for flag, value in bare.items() if value is not None]
    if models and given:
        raise UsageError(f"{', '.join(given)} describe a model of their own, but a MODEL is named too")
    if models:
        if models.count("-") > 1:
            raise UsageError("standard input holds one config, but - is named more than once")
        from llminfer.sources import find_source

        return [find_source(name) for name in models]
    missing = [flag for flag, value in bare.items() if value is None]
    if not given:
        raise UsageError("no MODEL", hint="name one, or give --layers, --kv-heads and --head-dim, or see --list")
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: the formula needs all of {', '.join(bare)}")
    return [None]


def _bare_model(bare: Mapping[str, int | None], dtype: str | None) -> ModelKV:
    """Plain attention layers of the stated sizes."""
    from llminfer.kv.layer import Field, LayerKV, ModelKV, PerToken

    for flag, value in bare.items():
        if value is None or value < 1:
            raise InvalidParams(f"{flag} is {value}, not 1 or more")
    layers, heads, dim = (value or 0 for value in bare.values())
    if dtype is None:
        typer.echo("note: no --dtype: counted as bfloat16, 2 bytes an element", err=True)
    tensors = (PerToken(name="k", heads=heads, dim=dim), PerToken(name="v", heads=heads, dim=dim))
    return ModelKV(
        name=f"{layers} layers, {heads} heads of {dim}",
        model_type="",
        layers=(LayerKV(kind="full", tensors=tensors),) * layers,
        dtype="bfloat16",
        fields=tuple(Field(name=flag, value=value, origin="command line") for flag, value in bare.items()),
    )


def _model(source: Source) -> ModelKV:
    """The layers of a source: by formula, else by a dry run when transformers is installed."""
    if source.gguf is not None:
        from llminfer.kv.gguf_layers import read_gguf_model

        return read_gguf_model(source.gguf)
    from llminfer.errors import UnknownConfigField
    from llminfer.kv.rules.families import read_model

    config = source.config or {}
    name = "standard input" if source.name == "-" else source.name
    try:
        return read_model(config, source=name, name=name)
    except UnknownConfigField:
        raise
    except UnsupportedArchitecture:
        if not config.get("model_type"):
            raise
        model = _dry_model(config, name)
        if model is None:
            raise
        return model


def _dry_model(config: Mapping[str, Any], name: str) -> ModelKV | None:
    """What the real classes cache, None when transformers is not there or does not know the type either."""
    from importlib.util import find_spec

    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    try:
        from llminfer.engine.kv_cache.dry_run import dry_run_model
    except ImportError:
        return None
    typer.echo(f"note: {config['model_type']} is not in the tables: running its classes without weights", err=True)
    try:
        model: ModelKV = dry_run_model(dict(config), source=name, name=name)
    except UnsupportedArchitecture:
        return None
    return model


def _answers(question: Question, model: ModelKV, source: Source | None, verify: bool) -> list[Answer]:
    """One answer for each runtime, number of ranks, batch and length, in this order."""
    from llminfer.kv.tensor_parallel import shard

    answers: list[Answer] = []
    for runtime in question.runtimes:
        for ranks in question.ranks:
            shard(model, ranks=ranks, transformers_heads=False)  # a --tp that cannot be is an error for every runtime
            memory = _memory(question, model, source, ranks)
            for batch in question.batches:
                for tokens in _lengths(question, model, memory):
                    answers.append(_answer(question, model, runtime, ranks, batch, tokens, memory))
    return [_verified(answer, source) for answer in answers] if verify else answers


def _lengths(question: Question, model: ModelKV, memory: Memory | None) -> list[int | None]:
    """The lengths asked for; else, for a memory, the longest that fits (None); else the model's own limit."""
    if question.tokens is not None:
        return list(question.tokens)
    if memory is not None:
        return [None]
    if model.context_limit is None:
        raise UsageError(f"{model.name} states no context limit of its own", hint="give --tokens")
    typer.echo(f"note: no --tokens: {model.name}'s own limit, {model.context_limit}", err=True)
    return [model.context_limit]


def _memory(question: Question, model: ModelKV, source: Source | None, ranks: int) -> Memory | None:
    from llminfer.kv.budget import Memory

    if question.memory_bytes is None:
        return None
    if question.weights == "auto":
        from llminfer.kv.weights import weights_bytes

        if ranks > 1:
            raise UsageError("--weights auto counts all weights, --memory is one rank's", hint="give a rank's share")
        weights = weights_bytes(source.path if source else None, name=model.name)
    else:
        weights = _parse("--weights", question.weights, parse_bytes)
    return Memory(total_bytes=question.memory_bytes, weights_bytes=weights, reserve_bytes=question.reserve_bytes)


def _answer(
    question: Question,
    model: ModelKV,
    runtime: str,
    ranks: int,
    batch: int,
    tokens: int | None,
    memory: Memory | None,
) -> Answer:
    """The footprint, and what fits; with `all` runtimes one that cannot hold the model says why instead."""
    from llminfer.kv.budget import budget
    from llminfer.kv.footprint import footprint
    from llminfer.kv.results import Answer

    asked: dict[str, Any] = {"runtime": runtime, "tp": ranks, **question.dtypes}
    try:
        found = None if memory is None else budget(model, memory, tokens=tokens, batch=batch, **asked)
        if tokens is None:
            # nothing stated: show what fits; a cache that never fills the memory is shown at the model's limit
            fitting = found.max_tokens if found else None
            tokens = (model.context_limit or 1) if fitting is None else max(fitting, 1)
        sizes = footprint(model, tokens=tokens, batch=batch, **asked)
    except (UnsupportedArchitecture, UsageError) as error:
        if not question.all_runtimes:
            raise
        shown = tokens or model.context_limit or 1
        return Answer(
            model=model,
            runtime=runtime,
            tokens=shown,
            batch=batch,
            tp=ranks,
            footprint=None,
            refusal=error.message,
        )
    return Answer(model=model, runtime=runtime, tokens=tokens, batch=batch, tp=ranks, footprint=sizes, budget=found)


def _verified(answer: Answer, source: Source | None) -> Answer:
    """The answer with what the real classes of the installed transformers hold beside it."""
    from dataclasses import replace

    if answer.runtime != "transformers" or answer.footprint is None:
        return answer
    if source is None or source.config is None or answer.tp != 1:
        raise UsageError("--verify needs a config and one rank", hint="name a folder, a config.json or a Hub id")
    return replace(answer, check=tuple(_measure(answer, source.config)))


def _measure(answer: Answer, config: Mapping[str, Any]) -> list[CheckRow]:
    from llminfer.engine.kv_cache.dry_run import dry_run
    from llminfer.kv.footprint import footprint
    from llminfer.kv.results import CheckRow

    found = answer.footprint
    assert found is not None
    rows: list[CheckRow] = []
    for moment in dry_run(dict(config), tokens=answer.tokens, steps=2, batch=answer.batch, dtype=found.dtype):
        predicted = footprint(answer.model, tokens=moment.tokens, batch=answer.batch, dtype=found.dtype)
        # a storage that differs from the tensors is a peak, named by what came last: the prefill, or a step
        before, name = predicted, "storage after prefill"
        if rows:
            before = footprint(answer.model, tokens=moment.tokens - 1, batch=answer.batch, dtype=found.dtype)
            name = "storage after the next step"
        storage = next((peak.size_bytes for peak in before.peaks if peak.name == name), predicted.total_bytes)
        rows.append(
            CheckRow(
                tokens=moment.tokens,
                predicted_bytes=predicted.layer_bytes,
                measured_bytes=tuple(layer.size_bytes for layer in moment.layers),
                predicted_storage_bytes=storage,
                measured_storage_bytes=moment.storage_bytes,
            )
        )
    return rows


def _warn(question: Question, answers: list[Answer]) -> None:
    """Say on stderr what a reader of the numbers alone would miss."""
    said = {
        f"note: {answer.tokens} tokens are more than {answer.model.name}'s own limit of {answer.model.context_limit}"
        for answer in answers
        if answer.beyond_limit
    }
    if not any(question.dtypes.values()):
        said |= {
            f"note: {answer.model.name} states no element type: counted as {answer.model.dtype}; --dtype sets another"
            for answer in answers
            if any(field.name == "dtype" and field.origin.startswith("not in") for field in answer.model.fields)
        }
    for line in sorted(said):
        typer.echo(line, err=True)


def _print(answers: list[Answer], output: str, only_bytes: bool, layers: bool) -> None:
    if only_bytes:
        text = "".join(f"{_total(answer)}\n" for answer in answers)
    elif output == "table":
        from llminfer.render.console import wants_color
        from llminfer.render.kv_table import render as render_table

        text = render_table(answers, layers=layers, color=wants_color(sys.stdout))
    else:
        from importlib import import_module

        text = import_module(f"llminfer.render.kv_{output}").render(answers, layers=layers)
    typer.echo(text, nl=False, color=True)  # what may be coloured was decided above


def _total(answer: Answer) -> int:
    if answer.footprint is None:
        raise UnsupportedArchitecture(answer.refusal or "no answer", hint="name one --runtime for --bytes")
    return answer.footprint.total_bytes


def _plot(question: Question, answers: list[Answer], target: str) -> None:
    from llminfer.kv.footprint import total_bytes
    from llminfer.kv.results import Curve
    from llminfer.render import kv_plot
    from llminfer.render.console import wants_color

    drawn: dict[tuple[str, str, int, int], Answer] = {}
    for answer in answers:
        key = (answer.model.name, answer.runtime, answer.batch, answer.tp)
        if answer.footprint and (key not in drawn or answer.tokens > drawn[key].tokens):
            drawn[key] = answer
    if not drawn:
        raise UsageError("--plot: there is nothing to draw")
    curves = []
    for (name, runtime, batch, ranks), answer in drawn.items():
        size = total_bytes(answer.model, runtime=runtime, tp=ranks, **question.dtypes)
        windows = {layer.window for layer in answer.model.layers if layer.window is not None}
        label = (
            f"{name}, {runtime}" + (f", batch {batch}" if batch > 1 else "") + (f", tp {ranks}" if ranks > 1 else "")
        )
        curves.append(
            Curve(
                label=label,
                bytes_of=lambda tokens, size=size, batch=batch: size(tokens, batch),  # type: ignore[misc]
                last_tokens=answer.tokens,
                corners=tuple(sorted(windows)),
            )
        )
    budgets = [answer.budget for answer in answers if answer.budget]
    room = max(budgets[0].memory.cache_bytes, 0) if budgets else None
    if target == "-":
        picture = kv_plot.draw(curves, memory_bytes=room, color=wants_color(sys.stdout))
        typer.echo(picture, nl=False, color=True)
    else:
        kv_plot.save(curves, Path(target), memory_bytes=room)


def _fail_if_needed(question: Question, answers: list[Answer]) -> None:
    """The exit codes that come after an answer: a check that failed, tokens that do not fit."""
    if any(not row.agrees for answer in answers for row in answer.check):
        raise LlminferError("prediction and measurement differ", hint="please report the config that this is with")
    for answer in answers:
        found = answer.budget
        if found is None or answer.footprint is None:
            continue
        if found.fits is False or (question.tokens is None and found.max_tokens == 0):
            needed, room = answer.footprint.total_bytes, found.memory.cache_bytes
            raise DoesNotFit(
                f"{answer.model.name}, {answer.runtime}: {answer.tokens} tokens in batch {answer.batch} need "
                f"{format_bytes(needed)} ({needed} B), {format_bytes(max(room, 0))} ({max(room, 0)} B) are left",
                hint=f"longest context for this batch: {found.max_tokens}" if found.max_tokens else None,
            )


def _print_list(output: str) -> None:
    from llminfer.sources import shipped_configs

    names = list(shipped_configs())
    if output == "json":
        import json

        typer.echo(json.dumps({"schema_version": 1, "configs": names}, indent=2))
    else:
        typer.echo("".join(f"{name}\n" for name in names), nl=False)
