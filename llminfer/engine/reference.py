"""From what the user named to a folder or file on this machine, before anything heavy is imported."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llminfer.errors import ModelNotAvailable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """What `--model` named: a folder with a checkpoint, a GGUF file, or a Hub id."""

    kind: Literal["folder", "gguf", "hub"]
    name: str
    path: Path | None = None
    revision: str | None = None


def find_reference(name: str, *, revision: str | None = None) -> ModelReference:
    """Decide what `name` is. What looks like a path is never taken for a Hub id.

    Raises:
        ModelNotAvailable: for a path that does not exist or is no model.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return ModelReference(kind="folder", name=name, path=path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelReference(kind="gguf", name=name, path=path)
        raise ModelNotAvailable(f"{name} is not a model", hint="give a folder with a config.json, or a .gguf file")
    if _looks_like_path(name, path):
        raise ModelNotAvailable(f"no such file or folder: {name}")
    return ModelReference(kind="hub", name=name, revision=revision)


def _looks_like_path(name: str, path: Path) -> bool:
    return (
        not _HUB_ID.fullmatch(name)
        or name.endswith(".gguf")
        or name.startswith((".", "/", "~"))
        or (len(path.parts) > 1 and path.parent.exists())
    )


def fetch_from_hub(reference: ModelReference, *, allow_pickle: bool = False) -> Path:
    """The local folder of a Hub model, downloaded unless it is in the Hub's cache already.

    Offline (`HF_HUB_OFFLINE=1`) only the cache is looked at. Weights come as safetensors; pickled
    ones are fetched only when allowed.

    Raises:
        ModelNotAvailable: one sentence each for offline, not found, gated, not logged in, no network.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [*_HUB_FILES, *(["*.bin"] if allow_pickle else [])]
    try:
        folder = snapshot_download(
            reference.name,
            revision=reference.revision,
            allow_patterns=patterns,
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except Exception as error:
        raise _hub_error(error, reference.name, reference.revision) from error
    return Path(folder)


def _hub_error(error: Exception, name: str, revision: str | None) -> ModelNotAvailable:
    """What went wrong with the Hub, as one sentence without tokens or addresses."""
    from huggingface_hub import constants, errors

    not_a_folder = f"{name} is not a folder here"
    rows: tuple[tuple[type[Exception], str, str | None], ...] = (
        (
            errors.GatedRepoError,
            f"{name} is gated on the Hub",
            f"accept its licence at {constants.ENDPOINT}/{name} and log in with `hf auth login`",
        ),
        (errors.RevisionNotFoundError, f"{name} has no revision {revision}", None),
        (
            errors.RepositoryNotFoundError,
            f"{not_a_folder}, and not found on the Hub",
            "check the spelling; a private model needs `hf auth login`",
        ),
        (errors.HFValidationError, f"{name} is neither a folder here nor a Hub id", None),
    )
    for kind, message, hint in rows:
        if isinstance(error, kind):
            return ModelNotAvailable(message, hint=hint)
    if getattr(getattr(error, "response", None), "status_code", None) == 401:
        return ModelNotAvailable(f"the Hub asks for a login to read {name}", hint="log in with `hf auth login`")
    where = f"the Hub's cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        return ModelNotAvailable(
            f"{not_a_folder}, not in {where}, and offline mode is on", hint="unset HF_HUB_OFFLINE to download it"
        )
    return ModelNotAvailable(f"{not_a_folder}, not in {where}, and the Hub cannot be reached")
