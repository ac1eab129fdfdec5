"""A safetensors file written tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch


class SafetensorsWriter:
    """A safetensors file of float32 whose header is known before its tensors are.

    The format: the header's length, the header as JSON, the tensors. Writing them one by one, in any
    order, takes the memory of one tensor, where `safetensors.save_file` wants the whole model.
    """

    def __init__(self, file: IO[bytes], shapes: Mapping[str, tuple[int, ...]]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._file, self._starts, position = file, dict[str, int](), 0
        for name, shape in shapes.items():
            end = position + 4 * math.prod(shape)
            entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
            self._starts[name], position = position, end
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # tensors start aligned, as the library writes them
        file.write(struct.pack("<Q", len(text)) + text)
        self._data_start = 8 + len(text)
        self._missing = dict.fromkeys(shapes)
        self.data_bytes, self.written_bytes = position, 0

    @property
    def missing(self) -> list[str]:
        """The tensors that were announced and not written yet."""
        return list(self._missing)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of the shape that was announced for this name."""
        data = tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4", copy=False)
        self._file.seek(self._data_start + self._starts[name])
        self._file.write(data.reshape(-1).view(np.uint8).data)
        self.written_bytes += data.nbytes
        self._missing.pop(name, None)
