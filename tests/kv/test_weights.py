"""What a folder's weights weigh: what would be loaded, counted once and whole, or refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from llminfer.errors import LlminferError, ModelNotAvailable
from llminfer.kv.gguf_layers import read_gguf_model
from llminfer.kv.weights import weights_bytes


def write_safetensors(file: Path, size_bytes: int) -> None:
    header = json.dumps({file.stem: {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size_bytes))


def counted(folder: Path, **config: str) -> int:
    return weights_bytes(folder, name="m", config=config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one model of 10 bytes."""
    write_safetensors(tmp_path / "model.safetensors", 10)
    return tmp_path


@pytest.mark.parametrize("stem", ["consolidated", "model.fp16", "adapter_model", "model-00001-of-00002"])
def test_a_variant_beside_the_model_is_not_counted(folder: Path, stem: str) -> None:
    write_safetensors(folder / f"{stem}.safetensors", 1000)
    (folder / "pytorch_model.bin").write_bytes(bytes(500))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 77}}))
    assert counted(folder) == 10


def test_the_file_that_the_config_names_is_the_one_that_is_counted(folder: Path) -> None:
    write_safetensors(folder / "other.safetensors", 30)
    assert counted(folder, transformers_weights="other.safetensors") == 30


def test_shards_count_by_their_own_headers(folder: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, size_bytes in zip(names, (10, 20), strict=True):
        write_safetensors(folder / name, size_bytes)
    (folder / "model.safetensors").unlink()
    assert counted(folder) == 30  # all parts, without an index
    index = {"metadata": {"total_size": 5}, "weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert counted(folder) == 30
    (folder / names[1]).unlink()
    with pytest.raises(ModelNotAvailable, match="which is not in"):
        counted(folder)
    (folder / "model.safetensors.index.json").unlink()
    write_safetensors(folder / "model-00003-of-00003.safetensors", 1)
    with pytest.raises(ModelNotAvailable, match="several models"):
        counted(folder)
    (folder / names[0]).unlink()
    write_safetensors(folder / "model-00001-of-00003.safetensors", 1)
    with pytest.raises(ModelNotAvailable, match="2 of the 3 parts"):
        counted(folder)


def test_several_models_are_not_added_up(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert counted(folder) == 10
    write_safetensors(folder / "b.safetensors", 20)
    with pytest.raises(ModelNotAvailable, match=r"several models' weights \(a\.safetensors, b\.safetensors\)"):
        counted(folder)


def test_pickles_count_where_there_is_nothing_else(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(bytes(500))
    (folder / "optimizer.bin").write_bytes(bytes(999))
    assert counted(folder) == 500


# GGUF models in parts


def write_part(folder: Path, number: int, *, count: int = 3, total: int = 3, tensors: int = 1) -> Path:
    """Part `number` (from 1) as llama.cpp's gguf-split writes it: only the first says what the model is."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    rows = [
        text("split.no") + struct.pack("<IH", 2, number - 1),
        text("split.count") + struct.pack("<IH", 2, count),
        text("split.tensors.count") + struct.pack("<Ii", 5, total),
    ]
    if number == 1:
        rows.insert(0, text("general.architecture") + struct.pack("<I", 8) + text("llama"))
    table = b"".join(text(f"t{n}") + struct.pack("<IQIQ", 1, 8, 0, 32 * n) for n in range(tensors))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(rows)) + b"".join(rows) + table
    path = folder / f"big-0000{number}-of-0000{count}.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(32 * tensors))
    return path


def test_all_parts_of_a_gguf_model_are_counted(tmp_path: Path) -> None:
    parts = [write_part(tmp_path, number) for number in (1, 2, 3)]
    assert [weights_bytes(part, name="m") for part in parts] == [96, 96, 96]


def test_a_gguf_model_with_a_part_missing_or_of_another_model_is_refused(tmp_path: Path) -> None:
    first = write_part(tmp_path, 1)
    write_part(tmp_path, 2)
    with pytest.raises(ModelNotAvailable, match=r"big-00003-of-00003\.gguf is not a file"):
        weights_bytes(first, name="m")
    write_part(tmp_path, 3).write_bytes(write_part(tmp_path, 2).read_bytes())
    with pytest.raises(ModelNotAvailable, match=r"big-00003-of-00003\.gguf is not part 3 of 3"):
        weights_bytes(first, name="m")
    write_part(tmp_path, 3, tensors=2)
    with pytest.raises(ModelNotAvailable, match="hold 4 tensors, and should hold 3"):
        weights_bytes(first, name="m")
    with pytest.raises(ModelNotAvailable, match="its name does not say where the others are"):
        weights_bytes(first.rename(tmp_path / "renamed.gguf"), name="m")


def test_a_later_part_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(LlminferError, match="is a later part of a model"):
        read_gguf_model(write_part(tmp_path, 2))
