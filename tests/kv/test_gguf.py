"""The GGUF header reader against honest, cut and hostile files."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llminfer.errors import LlminferError, ModelNotAvailable
from llminfer.kv.gguf import GGML_TYPES, SkippedValue, read_gguf_header

STRING, ARRAY, UINT32, UINT8 = 8, 9, 4, 0


def write_small(path: Path) -> Path:
    """An honest file with a value of every kind and tensors of three types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_block_count(2)
    writer.add_head_count_kv([2, 0])
    writer.add_rope_freq_base(10000.0)
    writer.add_add_bos_token(False)
    writer.add_token_list([f"tok{index}" for index in range(100)])
    writer.add_token_scores([float(index) for index in range(5000)])
    writer.add_languages(["en", "de"])
    writer.add_tensor("token_embd.weight", np.zeros((100, 32), dtype=np.float16))
    quantized = gguf.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))


def file_of(
    *pairs: bytes, tensors: bytes = b"", n_tensors: int = 0, version: int = 3, n_keys: int | None = None
) -> bytes:
    return (
        b"GGUF"
        + struct.pack("<IQQ", version, n_tensors, len(pairs) if n_keys is None else n_keys)
        + b"".join(pairs)
        + tensors
    )


def array_of(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    header = read_gguf_header(path)
    assert (header.version, header.architecture, header.path) == (3, "llama", path)
    assert header.metadata["llama.attention.head_count_kv"] == (2, 0)
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert header.metadata["general.languages"] == ("en", "de")
    assert header.metadata["tokenizer.ggml.tokens"] == SkippedValue(element_type="string", count=100)
    assert header.metadata["tokenizer.ggml.scores"] == SkippedValue(element_type="float32", count=5000)
    assert [(t.name, t.shape, t.type_name, t.n_elements, t.nbytes) for t in header.tensors] == [
        ("token_embd.weight", (32, 100), "F16", 3200, 6400),
        ("blk.0.attn_q.weight", (64, 4), "Q8_0", 256, 272),
        ("output_norm.weight", (32,), "F32", 32, 128),
    ]
    assert (header.parameter_count, sum(tensor.nbytes for tensor in header.tensors)) == (3488, 6800)
    assert header.file_bytes == path.stat().st_size


def test_reads_the_same_tensor_places_as_the_gguf_package(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    header = read_gguf_header(path)
    theirs = [(t.name, t.data_offset, t.n_bytes, t.n_elements) for t in gguf.GGUFReader(path).tensors]
    assert [(t.name, header.data_offset + t.offset, t.nbytes, t.n_elements) for t in header.tensors] == theirs


def test_keeps_the_arrays_asked_for(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    header = read_gguf_header(path, with_arrays=("tokenizer.ggml.tokens", "tokenizer.ggml.scores"))
    assert header.metadata["tokenizer.ggml.tokens"] == tuple(f"tok{index}" for index in range(100))
    assert header.metadata["tokenizer.ggml.scores"] == tuple(float(index) for index in range(5000))


def test_the_type_table_is_that_of_the_gguf_package() -> None:
    # a newer package may know more types; none may differ
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: theirs.get(kind, row) for kind, row in GGML_TYPES.items()} == dict(GGML_TYPES)


def test_version_two_and_nested_arrays_are_read(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    inner = array_of(UINT8, 2, b"\1\2")
    path.write_bytes(file_of(ARCHITECTURE, pair("nested", ARRAY, array_of(ARRAY, 2, inner * 2)), version=2))
    assert read_gguf_header(path).metadata["nested"] == SkippedValue(element_type="array", count=2)
    assert read_gguf_header(path, with_arrays={"nested"}).metadata["nested"] == ((1, 2), (1, 2))


def deep_array(depth: int) -> bytes:
    payload = array_of(UINT8, 1, b"\0")
    for _ in range(depth):
        payload = array_of(ARRAY, 1, payload)
    return payload


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "random bytes": (bytes(range(7, 207)), "not a GGUF file"),
    "magic only": (b"GGUF", "the version needs 4 bytes, 0 are left"),
    "version 99": (file_of(version=99), "GGUF version 99 is unknown"),
    "version 1": (file_of(version=1), "GGUF version 1 is unknown"),
    "big endian": (file_of(version=3 << 24), "big-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "the tensor count needs 8 bytes"),
    "a key of 2^48": (file_of(struct.pack("<Q", 1 << 48) + bytes(40)), "needs 281474976710656 bytes"),
    "a string of 2^48": (file_of(pair("k", STRING, struct.pack("<Q", 1 << 48))), "needs 281474976710656 bytes"),
    "2^48 keys": (file_of(ARCHITECTURE, n_keys=1 << 48), "claims 281474976710656 metadata keys"),
    "2^63 tensors": (file_of(ARCHITECTURE, n_tensors=1 << 63), "claims 9223372036854775808 tensors"),
    "2^60 numbers": (file_of(pair("k", ARRAY, array_of(UINT32, 1 << 60))), "needs 4611686018427387904 bytes"),
    "2^60 strings": (file_of(pair("k", ARRAY, array_of(STRING, 1 << 60))), "needs 9223372036854775808 bytes"),
    "a string array that overruns": (
        file_of(pair("k", ARRAY, array_of(STRING, 100, struct.pack("<Q", 1 << 62) + bytes(792)))),
        "is cut",
    ),
    "unknown value type": (file_of(pair("k", 77, b"")), "has the unknown type 77"),
    "unknown element type": (file_of(pair("k", ARRAY, array_of(55, 1, b"\0"))), "elements of the unknown type 55"),
    "arrays too deep": (file_of(pair("k", ARRAY, deep_array(9))), "more than 4 deep"),
    "a key twice": (file_of(ARCHITECTURE, ARCHITECTURE), "'general.architecture' occurs twice"),
    "no architecture": (file_of(pair("k", UINT32, bytes(4))), "names no general.architecture"),
    "an architecture that is a number": (
        file_of(pair("general.architecture", UINT32, bytes(4))),
        "names no general.architecture",
    ),
    "a key that is not UTF-8": (file_of(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20)), "is not UTF-8"),
    "a value that is not UTF-8": (file_of(pair("k", STRING, struct.pack("<Q", 1) + b"\xff")), "is not UTF-8"),
    "alignment 0": (file_of(ARCHITECTURE, pair("general.alignment", UINT32, bytes(4))), "not a power of two"),
    "five dimensions": (
        file_of(ARCHITECTURE, tensors=tensor("t", (1, 1, 1, 1, 1)), n_tensors=1),
        "has 5 dimensions",
    ),
    "2^31 dimensions": (
        file_of(ARCHITECTURE, tensors=text("t") + struct.pack("<I", 1 << 31) + bytes(24), n_tensors=1),
        "has 2147483648 dimensions",
    ),
    "unknown tensor type": (
        file_of(ARCHITECTURE, tensors=tensor("t", (1,), kind=200), n_tensors=1),
        "unknown ggml type 200",
    ),
    "half a block": (file_of(ARCHITECTURE, tensors=tensor("t", (33,), kind=8), n_tensors=1), "rows of 33"),
    "a tensor off the alignment": (
        file_of(ARCHITECTURE, tensors=tensor("t", (1,), offset=1), n_tensors=1),
        "off the alignment of 32",
    ),
    "a tensor past the end": (
        file_of(ARCHITECTURE, tensors=tensor("t", (1,), offset=1 << 40), n_tensors=1),
        "the tensor 't' ends at byte",
    ),
    "a tensor of 2^255 bytes": (
        file_of(ARCHITECTURE, tensors=tensor("t", ((1 << 64) - 1,) * 4), n_tensors=1),
        "the tensor 't' ends at byte",
    ),
    "a tensor twice": (
        file_of(ARCHITECTURE, tensors=tensor("t", (0,)) * 2, n_tensors=2),
        "the tensor 't' occurs twice",
    ),
    "escape codes in a key": (file_of(pair("\x1b[31m\n" * 50, 99, b"")), "has the unknown type 99"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_file_costs_one_line(name: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelNotAvailable) as caught:
        read_gguf_header(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert expected in caught.value.message
    assert str(path) in caught.value.message
    assert content == b"" or "(at byte " in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300 + len(str(path))
    assert peak_bytes < 10 << 20


@pytest.mark.timeout(60)
def test_a_big_hostile_file_is_refused_at_its_first_excess(tmp_path: Path) -> None:
    # 60 MB of empty strings, 5 million inner arrays, and a long text: all honest about their lengths
    strings = pair("strings", ARRAY, array_of(STRING, 7_500_000, bytes(60_000_000)))
    arrays = pair("arrays", ARRAY, array_of(ARRAY, 5_000_000, bytes(60_000_000)))
    texts = b"".join(pair(f"text{index}", STRING, text("x" * 1_000_000)) for index in range(20))
    for content in (strings, arrays, texts):
        path = tmp_path / "model.gguf"
        path.write_bytes(file_of(ARCHITECTURE, content, n_keys=21 if content is texts else 2))
        with pytest.raises(ModelNotAvailable, match="more"):
            read_gguf_header(path)


def test_a_cut_at_any_byte_of_the_header_is_reported(small_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(0, len(small_bytes), 97):
        path.write_bytes(small_bytes[:length])
        with pytest.raises(ModelNotAvailable):
            read_gguf_header(path)


@pytest.mark.parametrize("make", [lambda path: path, lambda path: path.mkdir()], ids=["missing", "folder"])
def test_what_is_no_file_is_named(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(ModelNotAvailable, match=r"model\.gguf is not a file"):
        read_gguf_header(path)


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.floats(0, 0.25), st.binary(min_size=1, max_size=9)), max_size=4),
    keep=st.floats(0, 1),
    wanted=st.booleans(),
)
def test_mutations_raise_nothing_but_our_errors(
    edits: list[tuple[float, bytes]], keep: float, wanted: bool, small_bytes: bytes, tmp_path: Path
) -> None:
    content = bytearray(small_bytes[: int(len(small_bytes) * max(keep, 0.02))])
    for place, patch in edits:
        start = int(place * len(content))
        content[start : start + len(patch)] = patch
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores") if wanted else ()
    with suppress(LlminferError):
        header = read_gguf_header(path, with_arrays=arrays)
        assert header.file_bytes == len(content)
