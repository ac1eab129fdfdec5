"""What a model's weights weigh, read from the tables in its files and never from the tensors.

Counted is what would be loaded: of several variants in a folder one, of a model in parts all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable
from llminfer.foreign import INCOMPLETE, MOST_JSON_BYTES, beginning_of, name_other_kind, parse_json, read_json_object
from llminfer.kv.gguf import GgufHeader, read_gguf_header

# where transformers looks for weights, in its order
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# beside a model, and none of it
_NOT_THE_MODEL = re.compile(r"adapter_|optimizer|scheduler|training_args|rng_state")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """The table of a safetensors file: its tensors, and the bytes of all of them."""

    names: frozenset[str]
    data_bytes: int


def weights_bytes(path: Path | None, *, name: str, config: Mapping[str, Any] | None = None) -> int:
    """The bytes of all tensors of a GGUF file with its other parts, or of the weights in a folder.

    Args:
        path: the file or folder.
        name: what to call the model in errors.
        config: the folder's config, which may name the weights.

    Raises:
        ModelNotAvailable: when there are none, when one of them is missing or cut, or when it is not
            clear which of them are the model.
    """
    if path is not None and path.is_file():
        return sum(tensor.nbytes for part in _gguf_parts(path) for tensor in part.tensors)
    if path is not None and path.is_dir():
        weights = first_file(path, (*safetensors_names(config or {}), *PICKLES))
        if weights is not None:
            return _index_bytes(weights) if weights.suffix == ".json" else _file_bytes(weights)
        files = [file for glob in ("*.safetensors", "*.bin") for file in sorted(path.glob(glob))]
        parts = _one_model([file for file in files if not _NOT_THE_MODEL.match(file.name)], path)
        if parts:
            return sum(map(_file_bytes, parts))
    raise ModelNotAvailable(
        f"--weights auto: no weight files of {name} here", hint="give their size, like --weights 15GiB"
    )


def safetensors_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Where transformers looks for safetensors, in its order: what we read must be what it loads."""
    stated = config.get("transformers_weights")
    return SAFETENSORS if stated is None else (str(stated),)


def first_file(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of the names that is a file of the folder."""
    # names come from files of others: they must not lead out of the folder, and may be no names at all
    files = (folder / name for name in names if "\0" not in name and len(name.encode(errors="replace")) < 256)
    return next((file for file in files if file.parent == folder and file.is_file()), None)


def read_safetensors_header(file: Path) -> SafetensorsHeader:
    """The header of a safetensors file, whose offsets must end where the file ends.

    Source: the safetensors format: 8 bytes of little-endian header length, a JSON header, the data.

    Raises:
        ModelNotAvailable: for a file that is cut, or another kind of file, by its name.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size_bytes < 8 or header_bytes > size_bytes - 8:
            name_other_kind(file, beginning_of(file))
            raise ModelNotAvailable(f"{file} ends inside its header ({size_bytes} bytes)", hint=INCOMPLETE)
        try:
            entries = parse_json(stream.read(min(header_bytes, MOST_JSON_BYTES + 1)).decode("utf-8"))
            entries.pop("__metadata__", None)
            data_bytes = max((_end_of(entry) for entry in entries.values()), default=0)
        except (ValueError, AttributeError, LookupError, TypeError):
            raise ModelNotAvailable(f"{file} has no readable safetensors header", hint=INCOMPLETE) from None
    if size_bytes != 8 + header_bytes + data_bytes:
        what = f"{file} has {size_bytes} bytes, its header says {8 + header_bytes + data_bytes}"
        raise ModelNotAvailable(what, hint=INCOMPLETE)
    return SafetensorsHeader(names=frozenset(entries), data_bytes=data_bytes)


def _end_of(entry: Mapping[str, Any]) -> int:
    start, end = entry["data_offsets"]
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError(entry)
    return end


def shards_of(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, each with its tensors, in the order of their names.

    Raises:
        ModelNotAvailable: when it names none, or one that is not there.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelNotAvailable(f"{index} has no weight_map", hint=INCOMPLETE)
    tensors: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        tensors.setdefault(str(name), set()).add(tensor)
    shards = {}
    for name in sorted(tensors):
        shard = first_file(index.parent, [name])
        if shard is None:
            raise ModelNotAvailable(f"{index.name} names {name}, which is not in {index.parent}", hint=INCOMPLETE)
        shards[shard] = tensors[name]
    return shards


def _index_bytes(index: Path) -> int:
    """The bytes of the shards; what the index itself says of them where none of them is here."""
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    if any(first_file(index.parent, [name]) for name in names):
        return sum(map(_file_bytes, shards_of(index)))
    metadata = content.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    # some writers store it as a float
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < 2**63:
        raise ModelNotAvailable(f"{index}: its total_size is {size!r}", hint="give --weights a size")
    return int(size)


def _file_bytes(file: Path) -> int:
    """The tensors of a safetensors file, and all of a pickle, which has no table that could be read safely."""
    return read_safetensors_header(file).data_bytes if file.suffix == ".safetensors" else file.stat().st_size


def _one_model(files: list[Path], folder: Path) -> list[Path]:
    """The files of the one model among those that no index lists: a single file, or all parts of one.

    Raises:
        ModelNotAvailable: when they are several models, or not all parts of one.
    """
    if len(files) <= 1:
        return files
    found = [_PART.fullmatch(file.name) for file in files]
    names = {(match[1], match[3], match[4]) if match else file.name for match, file in zip(found, files, strict=True)}
    if len(names) > 1:
        listed = ", ".join(file.name for file in files[:4])
        raise ModelNotAvailable(f"{folder} holds several models' weights ({listed})", hint="give --weights a size")
    count = int(found[0][3]) if found[0] else len(files)
    if len(files) != count:
        raise ModelNotAvailable(f"{folder} holds {len(files)} of the {count} parts of its weights", hint=INCOMPLETE)
    return files


def _gguf_parts(path: Path) -> list[GgufHeader]:
    """The headers of all parts of a GGUF model: of one file, or of those that are named after it.

    Raises:
        ModelNotAvailable: when one is missing, or of another model.
    """
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return [first]
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        what = f"{path} is one of {count} parts, and its name does not say where the others are"
        raise ModelNotAvailable(what, hint="name them as llama.cpp does, NAME-00001-of-00003.gguf")
    headers = []
    for number in range(1, int(match[3]) + 1):
        part = path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}")
        header = read_gguf_header(part)
        if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (number - 1, count):
            raise ModelNotAvailable(f"{part} is not part {number} of {count} of the model", hint=INCOMPLETE)
        headers.append(header)
    total, found = first.metadata.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if total is not None and total != found:
        raise ModelNotAvailable(f"the parts of {path} hold {found} tensors, and should hold {total}", hint=INCOMPLETE)
    return headers
