"""Our folder on the disk, and the digests of files that are kept there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

from llminfer.atomic import replacing
from llminfer.foreign import parse_json

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, what is done and what there is in all (0 when unknown)."""

CACHE_VARIABLE = "LLMINFER_CACHE"
CACHE_HINT = f"set {CACHE_VARIABLE} to a folder with room that you can write to"
_HASH_CHUNK_BYTES = 1 << 22


def cache_folder() -> Path:
    """The root of our cache: `LLMINFER_CACHE`, or the platform's cache folder for the user."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("llminfer")


def file_digest(path: Path, *, progress: Progress | None = None) -> str:
    """The SHA-256 of a file's content, hashed only when the index does not know it."""
    if (known := indexed_digest(path)) is not None:
        return known
    before = _fingerprint(path)
    hasher, done_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            hasher.update(chunk)
            done_bytes += len(chunk)
            if progress is not None:
                progress("hash", done_bytes, max(done_bytes, before["size_bytes"]))
    digest = hasher.hexdigest()
    # without an index the next run hashes again, which is slower and not wrong
    with suppress(OSError):
        if _fingerprint(path) == before:
            entry = _index_entry(path)
            entry.parent.mkdir(parents=True, exist_ok=True)
            with replacing(entry) as beside:
                beside.write_text(json.dumps({**before, "digest": digest}), encoding="utf-8")
    return digest


def indexed_digest(path: Path) -> str | None:
    """The digest that the index holds for exactly this path, size and times, if any."""
    try:
        entry = parse_json(_index_entry(path).read_text(encoding="utf-8"))
        digest = entry.pop("digest")
        return digest if isinstance(digest, str) and entry == _fingerprint(path) else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _index_entry(path: Path) -> Path:
    # one file a path: no entry is lost when two processes write at once
    name = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_folder() / "digests" / f"{name}.json"


def _fingerprint(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "path": str(path.resolve()),
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        # installers reset the modification time; nothing resets this one
        "ctime_ns": status.st_ctime_ns,
    }
