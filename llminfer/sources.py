"""From a MODEL argument to a config: a folder, a file, standard input, a shipped config, or a Hub id."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable
from llminfer.foreign import MOST_JSON_BYTES, json_object, refuse_object
from llminfer.hub import fetch_config, looks_like_path
from llminfer.kv.config import load_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model's numbers are: a config, or a GGUF file; and the path that its weights may be at."""

    name: str
    config: Mapping[str, Any] | None = None
    gguf: Path | None = None
    path: Path | None = None


def find_source(argument: str) -> Source:
    """The source that a MODEL argument names.

    What exists here comes first, then the shipped configs, then the Hub; whatever looks like a path
    is never asked of the Hub.

    Raises:
        ModelNotAvailable: when nothing of the name is found; the message says where it was looked for.
    """
    if argument == "-":
        if sys.stdin is None:
            raise ModelNotAvailable("cannot read standard input: it is closed")
        name = "standard input"
        try:
            config = json_object(sys.stdin.read(MOST_JSON_BYTES + 1), source=name)
        except UnicodeDecodeError as error:
            raise ModelNotAvailable(f"{name} is not {error.encoding}") from None
        refuse_object(config, name)
        return Source(name=name, config=config)
    path = Path(argument).expanduser()
    if _exists(path):
        if _is_gguf(path):
            return Source(name=argument, gguf=path, path=path)
        return Source(name=argument, config=load_config(path), path=path if path.is_dir() else path.parent)
    if looks_like_path(argument):
        raise ModelNotAvailable(f"no such file or folder: {argument}")
    shipped = shipped_configs()
    if argument in shipped:
        return Source(name=argument, config=load_config(shipped[argument]))
    if _HUB_ID.fullmatch(argument):
        return Source(name=argument, config=load_config(fetch_config(argument)))
    close = difflib.get_close_matches(argument, shipped, n=3)
    raise ModelNotAvailable(
        f"no file, folder or shipped config is called {argument!r}, and a Hub id is written owner/name",
        hint=f"did you mean {', '.join(close)}?" if close else "llminfer kv-size --list names the shipped configs",
    )


def shipped_configs() -> dict[str, Path]:
    """The configs that come with llminfer, by name: in the wheel inside the package, in a checkout beside it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        found = {file.stem: file for file in sorted(folder.glob("*.json"))}
        if found:
            return found
    return {}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _is_gguf(path: Path) -> bool:
    if path.is_dir():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False  # the reader that comes next says why
