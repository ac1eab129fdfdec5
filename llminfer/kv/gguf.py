"""The header of a GGUF file: its metadata and its tensor table, read without trusting a single length.

The layout (little endian): magic, version, tensor count, metadata count, the metadata, the tensor
table, padding to the alignment, the tensors. Every length is compared with what is left of the file
before anything is allocated for it, so that a cut or a hostile file costs one line and no memory.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from llminfer.errors import ModelNotAvailable
from llminfer.foreign import name_other_kind
from llminfer.kv.ggml_types import GGML_TYPES

SUPPORTED_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedValue:
    """A value too big to keep unless asked for: what it consists of, and of how many."""

    element_type: str
    count: int


MetadataValue: TypeAlias = "bool | int | float | str | tuple[MetadataValue, ...] | SkippedValue"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # in file order, the fastest-moving dimension first
    ggml_type: int
    offset: int  # from the start of the data section

    @property
    def type_name(self) -> str:
        """The name of its element type."""
        return GGML_TYPES[self.ggml_type][0]

    @property
    def n_elements(self) -> int:
        """The product of its shape."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as the file stores it; its rows are whole blocks."""
        _, block_elements, block_bytes = GGML_TYPES[self.ggml_type]
        return self.n_elements // block_elements * block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """All that a GGUF file says about itself."""

    tensors: tuple[GgufTensor, ...]
    metadata: Mapping[str, MetadataValue]
    path: Path
    version: int
    architecture: str
    data_offset: int
    file_bytes: int

    @property
    def parameter_count(self) -> int:
        """Elements of all tensors; tied weights are stored, and counted, once."""
        return sum(tensor.n_elements for tensor in self.tensors)


# metadata value type id: (name, struct format, bytes); the two without a fixed size stand apart
_SCALARS: Mapping[int, tuple[str, str, int]] = {
    0: ("uint8", "B", 1),
    1: ("int8", "b", 1),
    2: ("uint16", "H", 2),
    3: ("int16", "h", 2),
    4: ("uint32", "I", 4),
    5: ("int32", "i", 4),
    6: ("float32", "f", 4),
    7: ("bool", "?", 1),
    10: ("uint64", "Q", 8),
    11: ("int64", "q", 8),
    12: ("float64", "d", 8),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = 4, 10

# Far above any real model and low enough to keep a hostile header under a second and 100 MB.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_VARIABLE_ELEMENTS = 1 << 22  # strings and inner arrays of the whole header, walked one by one
_MAX_KEPT_ELEMENTS = 1 << 20  # elements of the whole header that become Python objects
_MAX_TEXT_BYTES = 1 << 24  # text of the whole header that becomes Python strings
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_SMALL_ARRAY = 4096  # numeric arrays up to here are kept unasked: a number a layer, rope sections
_SMALL_STRING_ARRAY = 64  # languages and tags, not a vocabulary
_INNER_ARRAY_COST = 16  # strings that could be walked in the time that one inner array takes
_LONG_STRING_BYTES = 1 << 20  # a chat template is far shorter; a whole tokenizer.json is longer
_DEFAULT_ALIGNMENT = 32

_WALKED = struct.Struct("<Q")


def read_gguf_header(path: str | os.PathLike[str], *, with_arrays: Container[str] = ()) -> GgufHeader:
    """The metadata and tensor table of a GGUF file of version 2 or 3.

    Long arrays (the vocabulary, the merges, the scores) are kept as a `SkippedValue`, but for the
    keys in `with_arrays`.

    Raises:
        ModelNotAvailable: when the file is missing, is not GGUF, is cut, or contradicts itself.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ModelNotAvailable(f"{_printable(path)} is not a file")
        file_bytes = path.stat().st_size
        if file_bytes == 0:
            name_other_kind(_printable(path), b"")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # the file may have shrunk since the stat; what is mapped is what counts
            return _read(_Cursor(path, data, len(data)), with_arrays)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelNotAvailable(f"cannot read {_printable(path)}: {reason}") from error


class _Cursor:
    """A position in the file that refuses to pass the file's end, and the budgets of one header."""

    __slots__ = ("_elements_left", "_kept_left", "_text_left", "data", "path", "position", "size")

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.position = path, data, size, 0
        self._elements_left, self._kept_left = _MAX_VARIABLE_ELEMENTS, _MAX_KEPT_ELEMENTS
        self._text_left = _MAX_TEXT_BYTES

    def fail(self, what: str, *, at: int | None = None, hint: str | None = None) -> NoReturn:
        """Raise the one line that names the file and the byte."""
        offset = self.position if at is None else at
        raise ModelNotAvailable(f"{_printable(self.path)}: {what} (at byte {offset})", hint=hint)

    def need(self, n_bytes: int, what: str) -> None:
        """Fail unless the file holds `n_bytes` more."""
        left = self.size - self.position
        if n_bytes > left:
            self.fail(f"{what} needs {n_bytes} bytes, {left} are left", hint="the file is cut or damaged")

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        return int(self.numbers(_U32, 1, what)[0])

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit number."""
        return int(self.numbers(_U64, 1, what)[0])

    def text(self, what: str) -> str:
        """The next string, decoded."""
        n_bytes = self.u64(f"the length of {what}")
        self.need(n_bytes, what)
        if n_bytes > self._text_left:
            self.fail(f"the header holds more than {_MAX_TEXT_BYTES} bytes of text")
        self._text_left -= n_bytes
        raw = self.data[self.position : self.position + n_bytes]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8", at=self.position + error.start)
        self.position += n_bytes
        return text

    def numbers(self, kind: int, count: int, what: str) -> tuple[Any, ...]:
        """The next `count` scalars of one type."""
        _, code, width = _SCALARS[kind]
        self.need(count * width, what)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += count * width
        return values

    def spend_elements(self, count: int, what: str) -> None:
        """Take `count` steps of walking out of the header's budget."""
        if count > self._elements_left:
            self.fail(f"{what} has more elements than any real header")
        self._elements_left -= count

    def spend_kept(self, count: int, what: str) -> None:
        """Take `count` Python objects out of the header's budget."""
        if count > self._kept_left:
            self.fail(f"{what} has {count} elements, too many to keep")
        self._kept_left -= count

    def skip_strings(self, count: int, what: str) -> None:
        """Walk over `count` strings. A local loop: this is what reading a header costs."""
        position, size, data, unpack = self.position, self.size, self.data, _WALKED.unpack_from
        for _ in range(count):
            if position + 8 > size:
                self.fail(f"{what} is cut", at=min(position, size), hint="the file is cut or damaged")
            position += 8 + unpack(data, position)[0]
        if position > size:
            self.fail(f"{what} reaches past the end of the file", hint="the file is cut or damaged")
        self.position = position


def _read(cursor: _Cursor, with_arrays: Container[str]) -> GgufHeader:
    version = _read_magic(cursor)
    n_tensors, n_keys = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    # the smallest entries possible: an empty key with a byte, a nameless tensor without dimensions
    _check_count(cursor, n_keys, "metadata keys", smallest=13, limit=_MAX_KEYS, at=16)
    _check_count(cursor, n_tensors, "tensors", smallest=24, limit=_MAX_TENSORS, at=8)

    metadata: dict[str, MetadataValue] = {}
    for index in range(n_keys):
        start = cursor.position
        key = cursor.text(f"metadata key {index}")
        if key in metadata:
            cursor.fail(f"the key {_short(key)} occurs twice", at=start)
        metadata[key] = _read_value(cursor, key, key in with_arrays)

    # only the first part of a split model says what it is
    architecture = metadata.get("general.architecture", "" if metadata.get("split.no") else None)
    if not isinstance(architecture, str) or not (architecture or "split.no" in metadata):
        cursor.fail("the metadata names no general.architecture")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {_short(alignment)}, not a power of two")

    tensors = _read_tensor_table(cursor, n_tensors, alignment)
    data_offset = -(-cursor.position // alignment) * alignment
    for tensor in tensors:
        end = data_offset + tensor.offset + tensor.nbytes
        if end > cursor.size:
            what = f"the tensor {_short(tensor.name)} ends at byte {end}, the file at byte {cursor.size}"
            cursor.fail(what, at=data_offset + tensor.offset, hint="the file is cut; download it again")
    return GgufHeader(
        path=cursor.path,
        version=version,
        architecture=architecture,
        metadata=MappingProxyType(metadata),
        tensors=tensors,
        data_offset=data_offset,
        file_bytes=cursor.size,
    )


def _read_magic(cursor: _Cursor) -> int:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        name_other_kind(_printable(cursor.path), cursor.data[:512])
        cursor.fail(f"not a GGUF file: it starts with {magic!r}", at=0)
    cursor.position = 4
    version = cursor.u32("the version")
    if version in SUPPORTED_VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS:
        cursor.fail("this is a big-endian GGUF file", at=4, hint="use the little-endian file of this model")
    cursor.fail(f"GGUF version {version} is unknown; known are 2 and 3", at=4)


def _check_count(cursor: _Cursor, count: int, what: str, *, smallest: int, limit: int, at: int) -> None:
    if count > limit or count * smallest > cursor.size - cursor.position:
        cursor.fail(f"it claims {count} {what}, more than it can hold", at=at, hint="the file is cut or damaged")


def _read_value(cursor: _Cursor, key: str, wanted: bool) -> MetadataValue:
    what = f"the value of {_short(key)}"
    kind = cursor.u32(f"the type of {_short(key)}")
    if kind in _SCALARS:
        value: MetadataValue = cursor.numbers(kind, 1, what)[0]
        return value
    if kind == _STRING:
        return _read_string(cursor, what, wanted)
    if kind == _ARRAY:
        return _read_array(cursor, what, wanted, depth=1)
    cursor.fail(f"{what} has the unknown type {kind}", at=cursor.position - 4)


def _read_string(cursor: _Cursor, what: str, wanted: bool) -> MetadataValue:
    start = cursor.position
    n_bytes = cursor.u64(f"the length of {what}")
    cursor.need(n_bytes, what)
    if n_bytes > _LONG_STRING_BYTES and not wanted:
        cursor.position += n_bytes
        return SkippedValue(element_type="byte", count=n_bytes)
    cursor.position = start
    return cursor.text(what)


def _read_array(cursor: _Cursor, what: str, wanted: bool, *, depth: int) -> MetadataValue:
    start = cursor.position
    kind, count = cursor.u32(f"the element type of {what}"), cursor.u64(f"the length of {what}")
    if kind in _SCALARS:
        name, _, width = _SCALARS[kind]
        cursor.need(count * width, what)
        if wanted or (depth == 1 and count <= _SMALL_ARRAY):
            cursor.spend_kept(count, what)
            return cursor.numbers(kind, count, what)
        cursor.position += count * width
        return SkippedValue(element_type=name, count=count)
    if kind not in (_STRING, _ARRAY):
        cursor.fail(f"{what} has elements of the unknown type {kind}", at=start)
    cursor.need(count * (8 if kind == _STRING else 12), what)
    cursor.spend_elements(count * (1 if kind == _STRING else _INNER_ARRAY_COST), what)
    if kind == _STRING:
        if wanted or (depth == 1 and count <= _SMALL_STRING_ARRAY):
            cursor.spend_kept(count, what)
            return tuple(cursor.text(what) for _ in range(count))
        cursor.skip_strings(count, what)
        return SkippedValue(element_type="string", count=count)
    if depth == _MAX_NESTING:
        cursor.fail(f"{what} nests arrays more than {_MAX_NESTING} deep", at=start)
    if wanted:
        cursor.spend_kept(count, what)
        return tuple(_read_array(cursor, what, wanted, depth=depth + 1) for _ in range(count))
    for _ in range(count):
        _read_array(cursor, what, wanted, depth=depth + 1)
    return SkippedValue(element_type="array", count=count)


def _read_tensor_table(cursor: _Cursor, n_tensors: int, alignment: int) -> tuple[GgufTensor, ...]:
    tensors: dict[str, GgufTensor] = {}
    for index in range(n_tensors):
        start = cursor.position
        tensor = _read_tensor(cursor, index, alignment)
        if tensor.name in tensors:
            cursor.fail(f"the tensor {_short(tensor.name)} occurs twice", at=start)
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> GgufTensor:
    start = cursor.position
    name = cursor.text(f"the name of tensor {index}")
    what = f"the tensor {_short(name)}"
    n_dimensions = cursor.u32(f"the rank of {what}")
    if n_dimensions > _MAX_DIMENSIONS:
        cursor.fail(f"{what} has {n_dimensions} dimensions, GGUF allows {_MAX_DIMENSIONS}", at=start)
    shape = cursor.numbers(_U64, n_dimensions, f"the shape of {what}")
    ggml_type, offset = cursor.u32(f"the type of {what}"), cursor.u64(f"the offset of {what}")
    if ggml_type not in GGML_TYPES:
        cursor.fail(f"{what} has the unknown ggml type {ggml_type}", at=start)
    type_name, block_elements, _ = GGML_TYPES[ggml_type]
    if (shape[0] if shape else 1) % block_elements:
        cursor.fail(f"{what} has rows of {shape[0] if shape else 1}, {type_name} needs {block_elements}s", at=start)
    if offset % alignment:
        cursor.fail(f"{what} starts at {offset}, off the alignment of {alignment}", at=start)
    return GgufTensor(name=name, shape=shape, ggml_type=ggml_type, offset=offset)


def _short(value: object) -> str:
    """A value from the file, safe to print: quoted, escaped, and not longer than a line."""
    if isinstance(value, SkippedValue):
        return f"{value.count} {value.element_type} values"
    text = ascii(value[:80] if isinstance(value, str | tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _printable(path: Path) -> str:
    """A path on one line, whatever characters are in its name."""
    text = str(path)
    return text if text.isprintable() else ascii(text)
