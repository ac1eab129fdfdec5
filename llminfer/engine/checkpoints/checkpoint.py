"""A checkpoint folder, looked over before anything heavy is imported: is all of it there, is it safe?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable
from llminfer.kv.config import load_config

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_TOKENIZER_SUFFIXES = (".tiktoken", ".model")
_INCOMPLETE = "is the download incomplete?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder that has all it needs: its config, its weights, a tokenizer."""

    folder: Path
    tokenizer_folder: Path
    config: Mapping[str, Any]
    pickled: bool
    weights_bytes: int


def inspect_checkpoint(
    folder: Path, *, tokenizer: Path | None = None, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Checkpoint:
    """Look a checkpoint over: its config, its weights against their own headers, its tokenizer files.

    Args:
        folder: where the checkpoint is.
        tokenizer: where the tokenizer is; with the model when not given.
        allow_pickle: accept pickled weights where there are no others.
        trust_remote_code: accept a model that only Python code in the folder knows.

    Raises:
        ModelNotAvailable: naming the file and what is missing or wrong about it.
        UnsupportedArchitecture: when files are missing of a model that could not run with them either.
    """
    config = load_config(folder)
    try:
        pickled, weights_bytes = _check_weights(folder, config, allow_pickle=allow_pickle)
        tokenizer_folder = _tokenizer_folder(folder, tokenizer)
        _check_generation_config(folder / "generation_config.json")
    except (ModelNotAvailable, OSError) as error:
        # the reason behind the reason, for the price of an import that takes seconds
        from llminfer.engine.models.support import read_architecture

        read_architecture(folder, config, trust_remote_code=trust_remote_code)
        if isinstance(error, OSError):
            raise ModelNotAvailable(f"cannot read {error.filename or folder}: {error.strerror}") from error
        raise
    return Checkpoint(
        folder=folder,
        tokenizer_folder=tokenizer_folder,
        config=config,
        pickled=pickled,
        weights_bytes=weights_bytes,
    )


def _tokenizer_folder(folder: Path, tokenizer: Path | None) -> Path:
    place = tokenizer or folder
    names = {file.name for file in place.iterdir()} if place.is_dir() else set()
    if not any(name in _TOKENIZER_FILES or name.endswith(_TOKENIZER_SUFFIXES) for name in names):
        raise ModelNotAvailable(
            f"no tokenizer in {place} (looked for {', '.join(_TOKENIZER_FILES)})", hint="give --tokenizer FOLDER"
        )
    return place


def _check_generation_config(file: Path) -> None:
    # transformers passes over one that it cannot read, and with it over the EOS ids
    if file.exists():
        _json_object(file)


def _check_weights(folder: Path, config: Mapping[str, Any], *, allow_pickle: bool) -> tuple[bool, int]:
    """Whether the weights are pickled, and the bytes of all weight files."""
    safetensors = _first_file(folder, _safetensors_names(config))
    if safetensors is not None:
        return False, _check_shards(safetensors) if safetensors.suffix == ".json" else _check_file(safetensors)
    pickle = _first_file(folder, _PICKLES)
    if pickle is None:
        raise ModelNotAvailable(
            f"no weights in {folder}",
            hint="looked for model.safetensors and its index (and pickles, with --allow-pickle)",
        )
    if not allow_pickle:
        raise ModelNotAvailable(
            f"{folder} has pickled weights only ({pickle.name})",
            hint="convert them to safetensors, or --allow-pickle reads them with torch's restricted unpickler",
        )
    shards = _shards(pickle) if pickle.suffix == ".json" else {pickle: set()}
    return True, sum(file.stat().st_size for file in shards)


def _safetensors_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Where transformers looks for the weights, in its order: what we check must be what it loads."""
    stated = config.get("transformers_weights")
    return _SAFETENSORS if stated is None else (str(stated),)


def _first_file(folder: Path, names: Iterable[str]) -> Path | None:
    # names come from files of others: they must not lead out of the folder
    files = (folder / name for name in names)
    return next((file for file in files if file.parent == folder and file.is_file()), None)


def _check_file(file: Path) -> int:
    _tensor_names(file)
    return file.stat().st_size


def _check_shards(index: Path) -> int:
    """Every shard against its header and the index; the bytes of all of them."""
    weights_bytes = 0
    for shard, names in _shards(index).items():
        absent = sorted(names - _tensor_names(shard))
        if absent:
            raise ModelNotAvailable(f"{shard} lacks the tensor {absent[0]}, which {index.name} places there")
        weights_bytes += shard.stat().st_size
    return weights_bytes


def _shards(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, each with its tensors, in the order of their names."""
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelNotAvailable(f"{index} has no weight_map", hint=_INCOMPLETE)
    tensors: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        tensors.setdefault(str(name), set()).add(tensor)
    shards = {}
    for name in sorted(tensors):
        shard = _first_file(index.parent, [name])
        if shard is None:
            raise ModelNotAvailable(f"{index.name} names {name}, which is not in {index.parent}", hint=_INCOMPLETE)
        shards[shard] = tensors[name]
    return shards


def _tensor_names(file: Path) -> set[str]:
    """Names in a safetensors header, whose offsets must end where the file ends.

    Source: the safetensors format: 8 bytes of little-endian header length, a JSON header, the data.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size_bytes < 8 or header_bytes > size_bytes - 8:
            raise ModelNotAvailable(f"{file} ends inside its header ({size_bytes} bytes)", hint=_INCOMPLETE)
        try:
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError("longer than any header")
            header = json.loads(stream.read(header_bytes))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            expected_bytes = 8 + header_bytes + data_bytes
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            raise ModelNotAvailable(f"{file} has no readable safetensors header", hint=_INCOMPLETE) from None
    if size_bytes != expected_bytes:
        raise ModelNotAvailable(f"{file} has {size_bytes} bytes, its header says {expected_bytes}", hint=_INCOMPLETE)
    return set(entries)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotAvailable(f"cannot read {file}: {error}", hint=_INCOMPLETE) from None
    if not isinstance(content, dict):
        raise ModelNotAvailable(f"{file} is not a JSON object", hint=_INCOMPLETE)
    return content
