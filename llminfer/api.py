"""The library: load a model, generate from it event by event, size a cache. The command line uses the same parts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llminfer.errors import ModelNotAvailable
from llminfer.events import Event
from llminfer.kv.footprint import Footprint, footprint
from llminfer.kv.gguf_layers import read_gguf_model
from llminfer.kv.rules.families import read_model
from llminfer.params import (
    CacheOptions,
    Execution,
    SamplingParams,
    StopCriteria,
    make_speculation,
)
from llminfer.sources import find_source

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel

Progress = Callable[[str, int, int], None]


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


def kv_footprint(
    model: str | Path | Mapping[str, Any],
    *,
    tokens: int,
    batch: int = 1,
    dtype: str | None = None,
    runtime: str = "transformers",
) -> Footprint:
    """What the KV cache of so many tokens weighs, to the byte; no weights are needed.

    Args:
        model: a folder, a config.json, a GGUF file, a shipped config's name, a Hub id, or a config as a mapping.
        tokens: cached tokens per sequence.
        batch: sequences.
        dtype: the cache's element type; the model's own when not given.
        runtime: whose cache is sized: `transformers`, `vllm`, `llama.cpp`, `ideal`, ...

    Raises:
        ModelNotAvailable: when there is no such model.
        UnsupportedArchitecture: for a model that no rule covers.
    """
    if isinstance(model, Mapping):
        read = read_model(model, source="config")
    else:
        source = find_source(str(model))
        if source.gguf is not None:
            read = read_gguf_model(source.gguf)
        elif source.config is not None:
            read = read_model(source.config, source=source.name, name=source.name)
        else:
            raise ModelNotAvailable(f"{model} has neither a config nor a header")
    return footprint(read, tokens=tokens, batch=batch, dtype=dtype, runtime=runtime)


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
