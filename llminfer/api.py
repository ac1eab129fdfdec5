"""The library: load a model, generate from it event by event, size a cache. The command line uses the same parts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture, UsageError
from llminfer.events import Event
from llminfer.kv.budget import Budget, budget
from llminfer.kv.footprint import Footprint, footprint
from llminfer.kv.gguf_layers import read_gguf_model
from llminfer.kv.layer import ModelKV
from llminfer.kv.query import compare, memory_of
from llminfer.kv.results import CheckRow
from llminfer.kv.rules.families import read_model, why_no_rule
from llminfer.kv.setup import CacheSetup, SetupOptions
from llminfer.params import (
    CacheOptions,
    Execution,
    SamplingParams,
    StopCriteria,
    make_speculation,
)
from llminfer.sources import Source, find_source
from llminfer.units import parse_bytes

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel

Progress = Callable[[str, int, int], None]
# what names a model whose cache is sized
CacheModel: TypeAlias = str | Path | Mapping[str, Any] | Source | ModelKV


def load(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    weights: str | None = None,
    engine: str = "transformers",
    compiled: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer.

    Args:
        model: a folder, a `.gguf` file (converted once) or a Hub id; the built-in model when not given.
        revision: the revision of a Hub model.
        tokenizer: a folder to take the tokenizer from, when not the model's own.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        allow_pickle: read pickled weights, with torch's restricted unpickler.
        trust_remote_code: run Python code that the model's repository brings.
        weights: `float32`, `float16`, `int8` or `int4`; the checkpoint's own when not given.
        engine: `transformers`, or `native` for our compiled step.
        compiled: run each token after the prompt through torch.compile, over a static cache.
        progress: hears of a conversion: stage, done, in all.

    Raises:
        ModelNotAvailable: when there is no such model, or not all of it.
        UnsupportedArchitecture: for a model that does not continue text.
        InvalidParams: for a device or dtype that is none.
    """
    from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
    from llminfer.engine.load import load as load_checkpoint

    execution = Execution(weights=weights, engine=engine, compiled=compiled)
    name, folder = _folder_of(model, revision, allow_pickle, trust_remote_code, progress)
    checkpoint = inspect_checkpoint(
        folder, tokenizer=Path(tokenizer) if tokenizer is not None else None, allow_pickle=allow_pickle
    )
    return load_checkpoint(
        checkpoint,
        name=name,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        execution=execution,
    )


def generate(
    model: LoadedModel,
    prompt: str,
    *,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    bad_words: Sequence[str] = (),
    stop: StopCriteria | None = None,
    system: str | None = None,
    raw: bool = False,
    cache: str | CacheOptions | None = None,
    speculate: str | None = None,
    draft: LoadedModel | None = None,
    draft_tokens: int | None = None,
) -> Generator[Event, None, None]:
    """Continue a prompt, event by event: one `Started`, a `Step` per token, one `Finished`.

    Args:
        model: from `load`.
        prompt: the user's text; chat models get it through their template.
        sampling: all values as `SamplingParams`, or some by name, and the model's own for the rest.
        bad_words: texts that are never completed.
        stop: when to end; 256 tokens when not given.
        system: a system message, for chat models.
        raw: leave the chat template out.
        cache: `dynamic`, `growing`, `static`, `quantized`, `none` for the textbook loop, or `CacheOptions` for more;
            when not given, static for a compiled model, growing for the native engine, dynamic for others.
        speculate: `prompt-lookup` drafts what followed the same ids before; the tokens stay the same.
        draft: a smaller model with the same vocabulary, from `load`, that drafts.
        draft_tokens: ids to draft for a forward at most.

    Raises:
        UsageError: before the first event, for a prompt that is empty or longer than the context, or a
            draft model with another vocabulary.
        InvalidParams: before the first event, for a value out of its range.
        UnsupportedArchitecture: before the first event, for a cache that the model cannot have.
    """
    from llminfer.engine.generate import generate as generate_events

    return generate_events(
        model,
        prompt,
        sampling=sampling,
        bad_words=bad_words,
        stop=stop,
        system=system,
        raw=raw,
        cache=cache,
        speculation=make_speculation(speculate, drafts=draft is not None, draft_tokens=draft_tokens),
        draft=draft,
    )


def kv_footprint(model: CacheModel, *, tokens: int, **setup: Unpack[SetupOptions]) -> Footprint:
    """What the KV cache of so many tokens weighs, to the byte; no weights are needed.

        >>> kv_footprint("llama-3.1-8b", tokens=8192, runtime="vllm", batch=4).total_bytes
        4294967296

    Args:
        model: a folder, a config.json, a GGUF file, a shipped config's name, a Hub id, a config as a
            mapping, or what `kv_model` gave.
        tokens: cached tokens per sequence.
        setup: the fields of `CacheSetup`: `runtime` (whose cache is sized: `transformers`, the default,
            `vllm`, `llama.cpp`, `ideal`, ...), `batch` (sequences), `dtype`, `k_dtype` and `v_dtype`
            (element types; the model's own when not given), `tp` (tensor-parallel ranks; the answer
            is for one of them).

    Raises:
        ModelNotAvailable: when there is no such model.
        UnsupportedArchitecture: for a model that no rule covers, or that the runtime cannot hold.
        InvalidParams, UsageError: for a number, a runtime or an element type that is none.
    """
    return footprint(kv_model(model), tokens=tokens, **setup)


def kv_budget(
    model: CacheModel,
    *,
    memory: int | str,
    weights: int | str = 0,
    reserve: int | str = 0,
    tokens: int | None = None,
    **setup: Unpack[SetupOptions],
) -> Budget:
    """The longest context and the largest batch whose cache fits into a memory.

        >>> found = kv_budget("llama-3.1-8b", memory="24GiB", weights="15GiB", reserve="1GiB")
        >>> found.max_tokens, found.memory.cache_bytes
        (65536, 8589934592)
        >>> kv_budget("llama-3.1-8b", memory="8GiB", tokens=8192).max_batch
        8

    Args:
        model: as in `kv_footprint`.
        memory: what one rank has, in bytes or as text (`24GiB`, `80GB`).
        weights: what the weights take of it; `auto` reads the tables of the model's files.
        reserve: what all else takes of it.
        tokens: the length for which a batch is looked for, and `fits` answered.
        setup: as in `kv_footprint`; the longest context is that of `batch` sequences.

    Raises:
        As `kv_footprint`, and ModelNotAvailable when `auto` finds no files of weights.
    """
    source = _source(model)
    asked = CacheSetup(**setup)
    room = memory_of(
        source.path,
        name=source.name,
        config=source.config,
        total_bytes=_bytes(memory),
        weights=None if weights == "auto" else _bytes(weights),
        reserve_bytes=_bytes(reserve),
        ranks=asked.tp,
    )
    return budget(kv_model(model), room, tokens=tokens, setup=asked)


def verify(model: CacheModel, *, tokens: int, batch: int = 1, dtype: str | None = None) -> tuple[CheckRow, ...]:
    """What is predicted beside what the classes of the installed transformers hold, run without weights.

    It takes seconds and little memory, whatever the model's size; it imports torch. Models whose code
    looks at values are run with zeros for weights, and fewer tokens where that would take long.

        >>> [row.agrees for row in verify("qwen3-0.6b", tokens=100)]
        [True, True, True]

    Args:
        model: as in `kv_footprint`, with a config.
        tokens: the length of the prefill; two steps follow it.
        batch: sequences.
        dtype: the cache's element type; the model's own when not given.

    Returns:
        One row for each moment: the bytes of every layer, and of the storage of all.

    Raises:
        As `kv_footprint`, and UsageError for a model without a config.
    """
    config = _source(model).config
    if config is None:
        raise UsageError("--verify needs a config and one rank", hint="name a folder, a config.json or a Hub id")
    from llminfer.engine.checkpoints.checkpoint import check_docstrings

    check_docstrings()
    from llminfer.engine.kv_cache.dry_run import dry_run

    known = kv_model(model)
    held = footprint(known, tokens=tokens, batch=batch, dtype=dtype).dtype
    run = partial(dry_run, dict(config), tokens=tokens, steps=2, batch=batch, dtype=held)
    try:
        moments = run()
    except UnsupportedArchitecture:
        moments = run(real=True)
    return compare(known, moments, setup=CacheSetup(batch=batch, dtype=held))


def kv_model(model: CacheModel) -> ModelKV:
    """What a model caches, layer by layer; reading it once serves any number of `kv_footprint` and `kv_budget`.

    A type that the tables do not know is run without weights where transformers is installed (`method`
    says so).

        >>> [layer.kind for layer in kv_model("gemma-3-4b").layers[:7]]
        ['sliding', 'sliding', 'sliding', 'sliding', 'sliding', 'full', 'sliding']

    Raises:
        ModelNotAvailable: when there is no such model.
        UnsupportedArchitecture: for a model that no rule covers.
    """
    if isinstance(model, ModelKV):
        return model
    source = _source(model)
    if source.gguf is not None:
        return read_gguf_model(source.gguf)
    config = source.config or {}
    try:
        return read_model(config, source=source.name, name=source.name)
    except UnknownConfigField:
        raise
    except UnsupportedArchitecture:
        if not config.get("model_type") or why_no_rule(config):
            raise
        found = _dry_model(config, source.name)
        if found is None:
            raise
        return found


def _dry_model(config: Mapping[str, Any], name: str) -> ModelKV | None:
    """What the real classes cache, None when transformers is not there or does not know the type either."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    try:
        from llminfer.engine.kv_cache.dry_run import dry_run_model

        return dry_run_model(config, source=name, name=name)
    except (ImportError, UnsupportedArchitecture):
        return None


def _source(model: CacheModel) -> Source:
    if isinstance(model, Source):
        return model
    if isinstance(model, ModelKV):
        return Source(name=model.name)
    return Source(name="config", config=model) if isinstance(model, Mapping) else find_source(str(model))


def _bytes(size: int | str) -> int:
    return parse_bytes(size) if isinstance(size, str) else size


def _folder_of(
    model: str | Path | None,
    revision: str | None,
    allow_pickle: bool,
    trust_remote_code: bool,
    progress: Progress | None,
) -> tuple[str, Path]:
    """A model's name and the folder of its checkpoint, converted or fetched where that is needed."""
    from llminfer.engine.checkpoints import builtin
    from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf
    from llminfer.engine.checkpoints.locate import find_reference
    from llminfer.hub import fetch_checkpoint

    if model is None:
        path = builtin.require_default_model()
        defaults = builtin.DEFAULT_GENERATION
        return builtin.DEFAULT_MODEL_NAME, checkpoint_for_gguf(path, generation_defaults=defaults, progress=progress)
    reference = find_reference(str(model), revision=revision)
    if reference.path is None:
        folder = fetch_checkpoint(str(model), revision=revision, allow_pickle=allow_pickle, code=trust_remote_code)
        return str(model), folder
    if reference.kind == "gguf":
        return reference.path.stem, checkpoint_for_gguf(reference.path, progress=progress)
    return reference.path.resolve().name, reference.path
