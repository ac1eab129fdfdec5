"""What a model's weights weigh, read from the tables in its files and never from the tensors."""

from __future__ import annotations

import json
from pathlib import Path

from llminfer.errors import ModelNotAvailable
from llminfer.kv.gguf import read_gguf_header

_HEADER_LIMIT_BYTES = 100 * 1024**2  # safetensors itself refuses a longer header


def weights_bytes(path: Path | None, *, name: str) -> int:
    """The bytes of all tensors of a GGUF file, or of a folder with safetensors or their index.

    Raises:
        ModelNotAvailable: when no such files are there, or one of them is cut.
    """
    if path is not None and path.is_file():
        return sum(tensor.nbytes for tensor in read_gguf_header(path).tensors)
    if path is not None:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            return _index_bytes(index)
        files = sorted(path.glob("*.safetensors"))
        if files:
            return sum(_safetensors_bytes(file) for file in files)
    raise ModelNotAvailable(
        f"--weights auto: no weight files of {name} here", hint="give their size, like --weights 15GiB"
    )


def _index_bytes(index: Path) -> int:
    try:
        size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotAvailable(f"{index} has no total_size") from error
    # some writers store it as a float
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < 2**63:
        raise ModelNotAvailable(f"{index}: total_size is {size!r}")
    return int(size)


def _safetensors_bytes(file: Path) -> int:
    """The end of the last tensor, by the header: 8 bytes of its length, then JSON."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_HEADER_LIMIT_BYTES, file.stat().st_size):
                raise ModelNotAvailable(f"{file}: its header is cut or no safetensors header")
            header = json.loads(stream.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        return int(max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelNotAvailable(f"{file}: no safetensors header can be read") from error
