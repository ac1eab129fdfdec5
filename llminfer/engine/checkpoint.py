"""A checkpoint folder, looked over before anything heavy is imported: is all of it there, is it safe?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable
from llminfer.kv.config import load_config

_INDEX = "model.safetensors.index.json"
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


def inspect_checkpoint(folder: Path, *, tokenizer: Path | None = None, allow_pickle: bool = False) -> Checkpoint:
    """Look a checkpoint over: its config, its weights against their own headers, its tokenizer files.

    Raises:
        ModelNotAvailable: naming the file and what is missing or wrong about it.
    """
    config = load_config(folder)
    pickled, weights_bytes = _check_weights(folder, allow_pickle=allow_pickle)
    return Checkpoint(
        folder=folder,
        tokenizer_folder=_tokenizer_folder(folder, tokenizer),
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


def _check_weights(folder: Path, *, allow_pickle: bool) -> tuple[bool, int]:
    """Whether the weights are pickled, and the bytes of all weight files."""
    index, single = folder / _INDEX, folder / "model.safetensors"
    if index.is_file():
        return False, _check_shards(folder, index)
    if single.is_file():
        _tensor_names(single)
        return False, single.stat().st_size
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled and not allow_pickle:
        raise ModelNotAvailable(
            f"{folder} has pickled weights only ({pickled[0].name})",
            hint="convert them to safetensors, or --allow-pickle reads them with torch's restricted unpickler",
        )
    if pickled:
        return True, sum(file.stat().st_size for file in pickled)
    raise ModelNotAvailable(
        f"no weights in {folder}", hint="looked for model.safetensors and its index (and pickles, with --allow-pickle)"
    )


def _check_shards(folder: Path, index: Path) -> int:
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelNotAvailable(f"{index} has no weight_map", hint=_INCOMPLETE)
    weights_bytes = 0
    for shard in sorted(set(weight_map.values())):
        file = folder / str(shard)
        # an index is data from elsewhere: it must not lead out of its folder
        if file.parent != folder or not file.is_file():
            raise ModelNotAvailable(f"{index.name} names {shard}, which is not in {folder}", hint=_INCOMPLETE)
        present = _tensor_names(file)
        absent = sorted(name for name, home in weight_map.items() if home == shard and name not in present)
        if absent:
            raise ModelNotAvailable(f"{file} lacks the tensor {absent[0]}, which {index.name} places there")
        weights_bytes += file.stat().st_size
    return weights_bytes


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
            header = json.loads(stream.read(header_bytes))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise ModelNotAvailable(f"{file} has no readable safetensors header", hint=_INCOMPLETE) from None
    expected_bytes = 8 + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise ModelNotAvailable(f"{file} has {size_bytes} bytes, its header says {expected_bytes}", hint=_INCOMPLETE)
    return set(entries)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotAvailable(f"cannot read {file}: {error}", hint=_INCOMPLETE) from None
    if not isinstance(content, dict):
        raise ModelNotAvailable(f"{file} is not a JSON object", hint=_INCOMPLETE)
    return content
