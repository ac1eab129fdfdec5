"""From the name of a model to a loaded one: found, fetched or converted, checked, and then its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llminfer.errors import UsageError
from llminfer.hub import fetch_checkpoint, fetch_config
from llminfer.kv.config import load_config
from llminfer.params import CacheOptions, Speculation
from llminfer.request import LoadRequest

if TYPE_CHECKING:
    from llminfer.engine.checkpoints.checkpoint import Checkpoint
    from llminfer.engine.model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far loading a model or file is: `done` of `total`, which is 0 where unknown, in this step of a conversion."""

    stage: Literal["fetch", "import", "convert", "load"]
    name: str
    step: str = ""
    done: int = 0
    total: int = 0


Progress: TypeAlias = Callable[[LoadProgress], None]


def load_model(
    request: LoadRequest,
    *,
    cache: CacheOptions | None = None,
    speculation: Speculation | None = None,
    draft: LoadRequest | None = None,
    progress: Progress | None = None,
) -> tuple[LoadedModel, LoadedModel | None]:
    """The model, and the one that drafts for it where one is asked for.

    What cannot be is refused as early as it can be known: from the config before weights are fetched,
    from the files before any are read. A draft model is loaded first, since its vocabulary has to be the same.

    Args:
        cache, speculation: what a run will ask for, so that a model that cannot have it is not loaded.
        progress: hears of each stage when it begins, and of the steps of a conversion.

    Raises:
        UsageError: for a draft model with another vocabulary, or `revision` for a model that is not from the Hub.
        ModelNotAvailable: when there is no such model, or not all of it.
        UnsupportedArchitecture: for a model that does not continue text, or not so.
        OutOfMemory: when the weights do not fit the device.
    """
    stages = _Stages(progress)
    name, checkpoint = _inspect(request, stages)
    small = None
    if draft is not None:
        draft_name, draft_checkpoint = _inspect(draft, stages)
        small = _load(draft, draft_name, draft_checkpoint, stages, speculation=speculation)
    loaded = _load(request, name, checkpoint, stages, cache=cache, speculation=speculation, draft=small)
    return replace(loaded, startup_s=stages.startup_s), small


class _Stages:
    """Tells of each stage, and adds up how long each took."""

    def __init__(self, progress: Progress | None) -> None:
        self.tell: Progress = progress or (lambda event: None)
        self.startup_s: dict[str, float] = {}

    @contextmanager
    def stage(self, stage: Literal["fetch", "import", "convert", "load"], name: str) -> Iterator[None]:
        """One stage: told when it begins, added up when it has ended well."""
        self.tell(LoadProgress(stage=stage, name=name))
        start_s = time.perf_counter()
        yield
        self.startup_s[stage] = self.startup_s.get(stage, 0.0) + time.perf_counter() - start_s


def _inspect(request: LoadRequest, stages: _Stages) -> tuple[str, Checkpoint]:
    """The model's name and its checkpoint, of which all is there that a run needs."""
    from llminfer.engine.checkpoints.checkpoint import check_docstrings, inspect_checkpoint

    check_docstrings()
    name, folder = _find_folder(request, stages)
    return name, inspect_checkpoint(
        folder,
        tokenizer=request.tokenizer,
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
    )


def _load(request: LoadRequest, name: str, checkpoint: Checkpoint, stages: _Stages, **asked: Any) -> LoadedModel:
    """The model of a checkpoint; `asked` are what else `load` is to check."""
    with stages.stage("import", name):
        from llminfer.engine.load import load
        from llminfer.engine.machine.device import set_threads
    with stages.stage("load", name):
        if request.threads is not None:
            set_threads(request.threads)
        return load(
            checkpoint,
            name=name,
            device=request.device,
            dtype=request.dtype,
            trust_remote_code=request.trust_remote_code,
            execution=request.execution,
            **asked,
        )


def _find_folder(request: LoadRequest, stages: _Stages) -> tuple[str, Path]:
    """The model's name and the folder of its checkpoint."""
    from llminfer.engine.checkpoints import builtin
    from llminfer.engine.checkpoints.locate import find_reference

    model = request.model
    if model is None:
        if request.revision is not None:
            raise UsageError("--revision is for Hub models, and no model is named", hint="add --model")
        path = builtin.require_default_model()
        return builtin.DEFAULT_MODEL_NAME, _convert(path, stages, builtin.DEFAULT_GENERATION)
    reference = find_reference(model, revision=request.revision)
    if reference.path is None:
        with stages.stage("fetch", model):
            return model, _fetch(request, model)
    if request.revision is not None:
        raise UsageError(f"--revision is for Hub models, and {model} is a local path", hint="drop --revision")
    if reference.kind == "gguf":
        return reference.path.stem, _convert(reference.path, stages, None)
    return reference.path.resolve().name, reference.path


def _fetch(request: LoadRequest, model: str) -> Path:
    """The folder of a Hub model: its config first, so that what cannot run is refused before its weights come."""
    from llminfer.engine.models.support import check_model_type

    config = load_config(fetch_config(model, revision=request.revision))
    check_model_type(config, model, trust_remote_code=request.trust_remote_code)
    return fetch_checkpoint(
        model, revision=request.revision, allow_pickle=request.allow_pickle, code=request.trust_remote_code
    )


def _convert(path: Path, stages: _Stages, generation_defaults: Mapping[str, object] | None) -> Path:
    """The checkpoint of a GGUF file: found in the cache, else converted."""
    from llminfer.engine.checkpoints.conversions import cached_checkpoint

    folder = cached_checkpoint(path, generation_defaults=generation_defaults)
    if folder is not None:
        return folder

    def advance(step: str, done: int, total: int) -> None:
        stages.tell(LoadProgress(stage="convert", name=path.name, step=step, done=done, total=total))

    with stages.stage("import", path.name):
        from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf
    with stages.stage("convert", path.name):
        return checkpoint_for_gguf(path, generation_defaults=generation_defaults, progress=advance)
