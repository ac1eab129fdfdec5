"""The library: load a model, generate from it event by event, size a cache. The command line uses the same parts."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from llminfer.errors import LlminferError, UnknownConfigField, UnsupportedArchitecture, UsageError
from llminfer.events import Event
from llminfer.kv.budget import Budget, budget
from llminfer.kv.footprint import Footprint, footprint
from llminfer.kv.gguf_layers import read_gguf_model
from llminfer.kv.layer import ModelKV
from llminfer.kv.query import compare, memory_of
from llminfer.kv.results import CheckRow
from llminfer.kv.rules.families import read_model, why_no_rule
from llminfer.kv.setup import CacheSetup, SetupOptions
from llminfer.loader import Progress, load_model
from llminfer.params import Execution, check_range
from llminfer.request import GenerationRequest, LoadRequest, RequestOptions, make_request
from llminfer.sources import Source, find_source
from llminfer.units import parse_bytes

if TYPE_CHECKING:
    from llminfer.engine.batch_generate import BatchResult, Samples
    from llminfer.engine.model import LoadedModel

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
    threads: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer; what transformers prints on the way is its caller's to silence.

        >>> model = load()  # the built-in one
        >>> model.name, model.context_limit
        ('SmolLM2-135M-Instruct', 8192)

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
        threads: of the processor, for the whole process; as many as torch chooses when not given. The native
            engine keeps those that it found when it was first used.
        progress: hears of each stage as `LoadProgress`.

    Raises:
        ModelNotAvailable: when there is no such model, or not all of it.
        UnsupportedArchitecture: for a model that does not continue text.
        UsageError: for a revision of what is not a Hub model, or options that cannot be combined.
        InvalidParams: for an unknown device or dtype.
        OutOfMemory: when the weights do not fit the device.
    """
    request = LoadRequest(
        model=None if model is None else str(model),
        revision=revision,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        device=device,
        dtype=dtype,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        threads=threads,
        execution=Execution(weights=weights, engine=engine, compiled=compiled),
    )
    return load_model(request, progress=progress)[0]


def generate(
    model: LoadedModel,
    prompt: str | GenerationRequest,
    *,
    draft: LoadedModel | None = None,
    **options: Unpack[RequestOptions],
) -> Generator[Event, None, None]:
    """Continue a prompt, event by event: one `Started`, a `Step` per token, one `Finished`.

        >>> events = generate(model, "What is the capital of France?", sampling={"temperature": 0})
        >>> started, *steps, finished = events
        >>> "".join(step.text for step in steps), finished.reason
        ('The capital of France is Paris.', 'eos')
        >>> steps[-1].kv_bytes == finished.kv.total_bytes  # measured, predicted
        True

    Args:
        prompt: the user's text, which chat models get through their template; or a whole request.
        draft: a smaller model with the same vocabulary that drafts.
        options: `sampling` (`SamplingParams`, or some of its values by name, and the model's own for the
            rest), `bad_words` (texts that are never completed), `stop` (256 tokens when not given),
            `system` (a system message), `raw` (skip the chat template), `cache` (`dynamic`, `growing`,
            `static`, `quantized`, `none` for the textbook loop, or `CacheOptions`; when not given, as
            suits the model), `speculate` (`prompt-lookup`; the tokens stay the same), and `draft_tokens`
            (to draft for a forward at most).

    Raises (all before the first event):
        UsageError: for a prompt that is empty or longer than the context, options that cannot be combined,
            or a draft model with another vocabulary.
        ModelNotAvailable: for a prompt with ids that the model does not embed.
        InvalidParams: for a value out of its range.
        UnsupportedArchitecture: for a cache that the model cannot have.
        PromptCacheMismatch: for a file that is damaged or of another model.
    """
    from llminfer.engine.generate import generate as run

    return run(model, make_request(prompt, drafts=draft is not None, **options), draft=draft)


def generate_batch(
    model: LoadedModel,
    prompts: Iterable[str | GenerationRequest | LlminferError],
    *,
    batch_size: int = 8,
    **options: Unpack[RequestOptions],
) -> Generator[BatchResult, None, None]:
    """Run many prompts, several at a time, and yield a `BatchResult` for each when it has ended.

    They end in any order. The tokens of each are in float32 those that it gets alone, and without a seed
    each draws its own. A prompt that cannot start has an error in its result and stops nothing.

        >>> asked = ["What is the capital of France?", "What is the capital of Japan?"]
        >>> results = generate_batch(model, asked, sampling={"temperature": 0})
        >>> [result.trace.text for result in sorted(results, key=lambda result: result.index)]
        ['The capital of France is Paris.', 'The capital of Japan is Tokyo.']

    Args:
        prompts: texts, or whole requests; read one at a time, when there is room. An error among them comes
            back as the result in its place.
        batch_size: prompts that decode together at most.
        options: as in `generate`, for prompts that are texts.

    Raises:
        UsageError: for a compiled model, or options that cannot be combined.
        InvalidParams: for a value out of its range.
    """
    from llminfer.engine.batch_generate import generate_batch as run

    check_range("batch_size", batch_size, 1, math.inf)
    common = make_request(**options)
    requests = (replace(common, text=prompt) if isinstance(prompt, str) else prompt for prompt in prompts)
    return run(model, requests, batch_size=batch_size)


def generate_samples(
    model: LoadedModel, prompt: str | GenerationRequest, count: int, **options: Unpack[RequestOptions]
) -> Samples:
    """Samples of one prompt, prefilled once and decoded together; sample i is the run of its own with the seed + i.

        >>> samples = generate_samples(model, "Hi", 2, sampling={"seed": 1}, stop=StopCriteria(max_new_tokens=4))
        >>> [trace.started.sampling.seed for trace in samples.traces]
        [1, 2]

    Raises:
        As `generate`, and UsageError for a compiled model.
    """
    from llminfer.engine.batch_generate import generate_samples as run

    return run(model, make_request(prompt, **options), count)


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
        InvalidParams, UsageError: for an invalid number, runtime or element type.
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

    It imports torch, and takes seconds and little memory, whatever the model's size. Models whose code
    looks at values are run with zeros for weights, and fewer tokens where that would take long.

        >>> [row.agrees for row in verify("qwen3-0.6b", tokens=100)]
        [True, True, True]

    Args:
        model: as in `kv_footprint`, with a config.
        tokens: the length of the prefill; two steps follow it.
        batch, dtype: as in `kv_footprint`.

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
