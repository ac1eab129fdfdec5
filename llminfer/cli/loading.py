"""From a model's name on the command line to a loaded model, with what people see on the way."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llminfer.errors import UsageError
from llminfer.params import DEVICE, DTYPES, CacheOptions, Execution, Speculation

if TYPE_CHECKING:
    from llminfer.engine.checkpoints.checkpoint import Checkpoint
    from llminfer.engine.model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model to load and how; `verbose` when progress goes to standard error."""

    model: str | None
    revision: str | None
    tokenizer: Path | None
    device: str
    dtype: str
    allow_pickle: bool
    trust_remote_code: bool
    verbose: bool
    execution: Execution = field(default_factory=Execution)


def check_choice(choice: ModelChoice) -> None:
    """Refuse an unknown device or dtype before anything is loaded.

    Raises:
        UsageError: naming the flag and what it may be.
    """
    if not DEVICE.fullmatch(choice.device):
        raise UsageError(f"--device {choice.device}: unknown", hint="one of auto, cpu, cuda, cuda:N, mps")
    check_known("--dtype", choice.dtype, DTYPES)


def check_known(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is none of those known.

    Raises:
        UsageError: naming the flag and what it may be.
    """
    if value not in known:
        raise UsageError(f"{flag} {value}: unknown", hint=f"one of {', '.join(known)}")


def load_model(
    choice: ModelChoice,
    startup_s: dict[str, float],
    *,
    cache: CacheOptions | None = None,
    speculation: Speculation | None = None,
) -> LoadedModel:
    """Find the model, convert it when it is a GGUF file, and load it; note how long each took.

    A model that cannot have the `cache`, or not with `speculation`, is refused before its weights are read.
    """
    with quick_start(), no_data():
        name, checkpoint = _inspect(choice, startup_s)
        return _load(choice, name, checkpoint, startup_s, cache=cache, speculation=speculation)


def load_with_draft(
    choice: ModelChoice,
    draft_model: str,
    startup_s: dict[str, float],
    *,
    cache: CacheOptions,
    speculation: Speculation,
) -> tuple[LoadedModel, LoadedModel]:
    """The model, and the smaller one that drafts for it, which is loaded first: its vocabulary has to be the same."""
    with quick_start(), no_data():
        name, checkpoint = _inspect(choice, startup_s)
    small = replace(
        choice, model=draft_model, revision=None, tokenizer=None, execution=replace(choice.execution, compiled=False)
    )
    draft = load_model(small, startup_s, speculation=speculation)
    with no_data():
        return _load(choice, name, checkpoint, startup_s, cache=cache, speculation=speculation, draft=draft), draft


def _inspect(choice: ModelChoice, startup_s: dict[str, float]) -> tuple[str, Checkpoint]:
    choice.execution.check_placed(device=choice.device, dtype=choice.dtype)
    from llminfer.engine.checkpoints.checkpoint import check_docstrings, inspect_checkpoint

    check_docstrings()
    name, folder = _find_folder(choice, startup_s)
    return name, inspect_checkpoint(
        folder,
        tokenizer=choice.tokenizer,
        allow_pickle=choice.allow_pickle,
        trust_remote_code=choice.trust_remote_code,
    )


def _load(
    choice: ModelChoice,
    name: str,
    checkpoint: Checkpoint,
    startup_s: dict[str, float],
    *,
    cache: CacheOptions | None,
    speculation: Speculation | None,
    draft: LoadedModel | None = None,
) -> LoadedModel:
    with status(f"loading {name}", choice.verbose):
        with timed("import", startup_s):
            from llminfer.engine.load import load
        with timed("load", startup_s):
            return load(
                checkpoint,
                name=name,
                device=choice.device,
                dtype=choice.dtype,
                trust_remote_code=choice.trust_remote_code,
                cache=cache or CacheOptions(),
                execution=choice.execution,
                speculation=speculation,
                draft=draft,
            )


def _find_folder(choice: ModelChoice, startup_s: dict[str, float]) -> tuple[str, Path]:
    """The model's name and its checkpoint folder."""
    model, revision = choice.model, choice.revision
    from llminfer.engine.checkpoints.locate import find_reference

    if model is None:
        from llminfer.engine.checkpoints import builtin

        path = builtin.require_default_model()
        defaults = builtin.DEFAULT_GENERATION
        return builtin.DEFAULT_MODEL_NAME, _convert(path, choice.verbose, startup_s, defaults)
    reference = find_reference(model, revision=revision)
    if reference.kind == "hub" or reference.path is None:
        with timed("fetch", startup_s):
            return model, _fetch(choice, model, revision)
    if revision is not None:
        raise UsageError(f"--revision is for Hub models, and {model} is a local path", hint="drop --revision")
    if reference.kind == "gguf":
        return reference.path.stem, _convert(reference.path, choice.verbose, startup_s, None)
    return reference.path.resolve().name, reference.path


def _fetch(choice: ModelChoice, model: str, revision: str | None) -> Path:
    """The folder of a Hub model: its config first, so that what cannot run is refused before its weights come."""
    from llminfer.engine.models.support import check_model_type
    from llminfer.hub import fetch_checkpoint, fetch_config
    from llminfer.kv.config import load_config

    config = load_config(fetch_config(model, revision=revision))
    check_model_type(config, model, trust_remote_code=choice.trust_remote_code)
    return fetch_checkpoint(
        model,
        revision=revision,
        allow_pickle=choice.allow_pickle,
        code=choice.trust_remote_code,
        progress=choice.verbose and sys.stderr.isatty(),
    )


def _convert(
    path: Path, verbose: bool, startup_s: dict[str, float], generation_defaults: Mapping[str, object] | None
) -> Path:
    """The checkpoint of a GGUF file: found in the cache, else converted, with a bar on standard error."""
    from llminfer.engine.checkpoints.conversions import cached_checkpoint

    folder = cached_checkpoint(path, generation_defaults=generation_defaults)
    if folder is not None:
        return folder
    from llminfer.render.progress import progress_bar

    with progress_bar(f"converting {path.name}, once", shown=verbose) as advance:
        with timed("import", startup_s):
            from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf
        with timed("convert", startup_s):
            return checkpoint_for_gguf(path, generation_defaults=generation_defaults, progress=advance)


@contextmanager
def no_data() -> Iterator[None]:
    """What libraries print while they load is no data, so it goes to standard error, from Rust and C++ as well."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def timed(name: str, startup_s: dict[str, float]) -> Iterator[None]:
    """Add how long something took to what came before the run."""
    start_s = time.perf_counter()
    yield
    startup_s[name] = startup_s.get(name, 0.0) + time.perf_counter() - start_s


@contextmanager
def quick_start() -> Iterator[None]:
    """Import, convert and load without looking for garbage: what comes in stays for as long as the process does.

    Looking through it again and again takes a tenth of the time. Only for the first import of torch: a
    process that has it already may hold garbage that this would keep.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def status(text: str, verbose: bool) -> Iterator[None]:
    """A line on the terminal while something is under way, gone afterwards."""
    if not verbose or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from llminfer.render.console import make_console

    with make_console(sys.stderr).status(text):
        yield
