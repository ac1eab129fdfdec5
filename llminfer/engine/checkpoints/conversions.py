"""The folder of converted checkpoints: keys, look-up, and putting a new one in place whole.

Imports neither torch nor transformers, so that a run whose checkpoint exists starts without either.

    <cache>/checkpoints/<key>/            a whole checkpoint; its manifest is written last
    <cache>/checkpoints/.<key>.<x>.tmp/   one being written, by whoever holds the lock
    <cache>/checkpoints/.<key>.lock
    <cache>/digests/<path hash>.json      the digest of a file, while its size and times stay
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout
from packaging.version import Version

from llminfer.engine.machine.disk_cache import CACHE_HINT, Progress, cache_folder, indexed_digest
from llminfer.errors import LlminferError
from llminfer.foreign import parse_json

# Raise it whenever the conversion writes something else for the same file.
CONVERSION_FORMAT = 1
MANIFEST_NAME = "llminfer.json"
NOT_INSTALLED = "none"

_SHAPING_DISTRIBUTIONS = ("gguf", "tokenizers", "transformers")

Build = Callable[[Path], tuple[str, ...]]
"""Fills a folder and returns its warnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a converted checkpoint says about itself, in its `llminfer.json`."""

    format: int
    source: str
    digest: str
    versions: dict[str, str]
    warnings: tuple[str, ...]
    file_bytes: dict[str, int]


def shaping_versions() -> dict[str, str]:
    """The versions of the distributions whose code shapes a conversion."""
    found = {}
    for name in _SHAPING_DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = NOT_INSTALLED
    return found


def checkpoint_folder(digest: str, *, generation_defaults: Mapping[str, object] | None = None) -> Path:
    """Where the conversion of the file with this digest belongs, whether it is there or not."""
    shaping = {
        "digest": digest,
        "format": CONVERSION_FORMAT,
        "generation_defaults": dict(generation_defaults or {}),
        "versions": shaping_versions(),
    }
    key = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "checkpoints" / key


def cached_checkpoint(path: Path, *, generation_defaults: Mapping[str, object] | None = None) -> Path | None:
    """The whole checkpoint of a file that was converted before; None when we must convert, or hash, it."""
    digest = indexed_digest(path)
    if digest is None:
        return None
    folder = checkpoint_folder(digest, generation_defaults=generation_defaults)
    return folder if read_manifest(folder) is not None else None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a whole checkpoint; None for a folder that is missing, foreign or damaged."""
    try:
        fields = parse_json((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        manifest = Manifest(**{**fields, "warnings": tuple(fields["warnings"])})
        sizes = {name: (folder / name).stat().st_size for name in manifest.file_bytes}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if manifest.format == CONVERSION_FORMAT and sizes == manifest.file_bytes else None


def build_checkpoint(folder: Path, build: Build, *, source: str, digest: str, progress: Progress | None = None) -> Path:
    """Put a checkpoint at `folder`: `build` fills a temporary sibling, which is then renamed.

    When another process builds the same one, we wait and use theirs.

    Raises:
        LlminferError: when the cache folder has no room or cannot be written.
    """
    with _write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if read_manifest(folder) is not None:
                return folder
            _remove_leftovers(folder)
            temporary = _temporary_folder(folder)
            try:
                warnings = build(temporary)
                _write_manifest(temporary, source=source, digest=digest, warnings=warnings)
                _move_into_place(temporary, folder)
                _remove_older(folder, digest)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            return folder


def require_room(folder: Path, needed_bytes: int) -> None:
    """Fail as a full disk would, before anything is written."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {needed_bytes} bytes are needed")


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LlminferError(f"cannot write to the cache {folder.parent}: {reason}", hint=CACHE_HINT) from error


def _locked(folder: Path, progress: Progress | None) -> AbstractContextManager[object]:
    lock = FileLock(_lock_path(folder))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress("wait", 0, 0)
        return lock.acquire(poll_interval=0.2)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _temporary_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))


def _set_aside(folder: Path) -> Path:
    """Move a folder away in one step, so that no reader sees it shrink."""
    aside = _temporary_folder(folder)
    os.rename(folder, aside / "old")
    return aside


def _move_into_place(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        # where locks do not work (some network folders) another process may have won: theirs is as good
        if read_manifest(folder) is None:
            raise


def _remove_leftovers(folder: Path) -> None:
    """Remove what crashed runs left: whoever could still be writing it would hold its lock."""
    if folder.exists():  # damaged, or of a format that we do not read
        _set_aside(folder)
    for leftover in folder.parent.glob(".*.tmp"):
        owner = folder.with_name(leftover.name.split(".")[1])
        if owner == folder:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with suppress(Timeout, OSError), FileLock(_lock_path(owner), timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)


def _remove_older(folder: Path, digest: str) -> None:
    """Remove what older versions made of the same file; one that is locked is being made anew, and stays.

    An older installation that lives on converts once more. It removes nothing newer, so the two do not
    take turns.
    """
    for path in folder.parent.glob(f"*/{MANIFEST_NAME}"):
        other = path.parent
        if other == folder or other.name.startswith(".") or not _is_older(path, digest):
            continue
        with suppress(Timeout, OSError), FileLock(_lock_path(other), timeout=0):
            shutil.rmtree(_set_aside(other), ignore_errors=True)


def _is_older(path: Path, digest: str) -> bool:
    """Whether a manifest is of a conversion of the same file by versions none of which is newer than ours."""
    try:
        manifest = parse_json(path.read_text(encoding="utf-8"))
        stated, ours = manifest["versions"], shaping_versions()
        pairs = [(_version(stated[name]), _version(found)) for name, found in ours.items()]
        pairs.append((Version(str(manifest["format"])), Version(str(CONVERSION_FORMAT))))
        same_file = manifest["digest"] == digest
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return same_file and all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _version(stated: str) -> Version:
    """A version to compare with, the least one for what is not installed."""
    return Version("0.dev0" if stated == NOT_INSTALLED else stated)


def _write_manifest(folder: Path, *, source: str, digest: str, warnings: tuple[str, ...]) -> None:
    manifest = Manifest(
        format=CONVERSION_FORMAT,
        source=source,
        digest=digest,
        versions=shaping_versions(),
        warnings=warnings,
        file_bytes={path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    )
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
