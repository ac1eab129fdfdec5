"""From what the user named to a folder or file on this machine, before anything heavy is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llminfer.errors import ModelNotAvailable, UsageError
from llminfer.foreign import beginning_of, name_other_kind
from llminfer.hub import looks_like_path


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
        UsageError: for an empty name.
        ModelNotAvailable: for a path that does not exist or is no model.
    """
    if not name:
        raise UsageError("the model's name is empty", hint="leave --model out for the built-in model")
    place = os.path.expanduser(name)
    # unlike Path's methods these answer for names that are too long, or in a folder that we may not read
    if os.path.isdir(place):
        return ModelReference(kind="folder", name=name, path=Path(place))
    if os.path.isfile(place):
        beginning = beginning_of(Path(place))
        if place.lower().endswith(".gguf") or beginning.startswith(b"GGUF"):
            return ModelReference(kind="gguf", name=name, path=Path(place))
        if os.path.isfile(os.path.join(os.path.dirname(place), "config.json")):
            folder = os.path.dirname(name) or "."
            raise ModelNotAvailable(f"{name} is a file of a model, not the model", hint=f"give its folder, {folder}")
        name_other_kind(name, beginning)
    if os.path.lexists(place):
        raise ModelNotAvailable(f"{name} is not a model", hint="give a folder with a config.json, or a .gguf file")
    if looks_like_path(name):
        raise ModelNotAvailable(f"no such file or folder: {name}")
    if name.isdecimal():
        raise ModelNotAvailable(f"no model is called {name}", hint="-m is the model; tokens to generate are -n")
    return ModelReference(kind="hub", name=name, revision=revision)
