"""The model config of a GGUF file, as transformers derives it, corrected by what the file states."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from transformers import AutoConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, load_gguf_checkpoint

from llminfer.engine.checkpoints.gguf_tokenizer import special_token_ids, vocabulary_size
from llminfer.engine.machine.library_errors import foreign_errors
from llminfer.errors import ModelNotAvailable, UnsupportedArchitecture
from llminfer.kv.gguf import GgufHeader, SkippedValue

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_config(header: GgufHeader, folder: Path) -> tuple[Any, tuple[str, ...]]:
    """The config, and warnings about what it lacks; `folder` is used for a file that is then removed.

    Raises:
        ModelNotAvailable: when the metadata does not describe a model.
        UnsupportedArchitecture: when transformers does not know the architecture.
    """
    with foreign_errors(header.path, "its metadata does not describe a model"):
        fields = _config_fields(header, folder)
        model_type = fields.pop("model_type")
        if model_type not in transformers.CONFIG_MAPPING:
            raise unsupported(header)
        embedding = next((t for t in header.tensors if t.name == "token_embd.weight"), None)
        ids = special_token_ids(header)
        fields |= {
            # the rows of the embedding, which may be padded beyond the tokens
            "vocab_size": embedding.shape[-1] if embedding else vocabulary_size(header),
            # a class default here is another model's id
            "bos_token_id": ids.get("bos_token_id"),
            "eos_token_id": ids.get("eos_token_id"),
            "pad_token_id": ids.get("padding_token_id"),
        }
        if fields["vocab_size"] < vocabulary_size(header):
            raise ModelNotAvailable(
                f"{header.path} has {vocabulary_size(header)} tokens, but {fields['vocab_size']} embeddings"
            )
        scaling, warnings = _rope_scaling(header)
        return AutoConfig.for_model(model_type, **fields, **scaling), warnings


def _config_fields(header: GgufHeader, folder: Path) -> dict[str, Any]:
    if header.architecture in GGUF_CONFIG_ARCHS:
        counts = {key: _plain(value) for key, value in header.metadata.items()}
        return dict(get_gguf_config(counts, tuple(tensor.name for tensor in header.tensors)))
    stub = folder / "stub.gguf"
    try:
        _write_stub(header, stub)
        fields: dict[str, Any] = load_gguf_checkpoint(stub, return_tensors=False)["config"]
    except ValueError as error:
        if "is not supported" in str(error):
            raise unsupported(header) from error
        raise
    finally:
        stub.unlink(missing_ok=True)
    fields.pop("_model_name_or_path", None)
    if header.architecture == "gpt2" and "n_ctx" in fields:
        # transformers maps the length to a field that its GPT-2 no longer reads
        fields["n_positions"] = fields.pop("n_ctx")
    return fields


def _write_stub(header: GgufHeader, path: Path) -> None:
    """A file with the same metadata and tensor names and nothing that takes long to read."""
    writer = gguf.GGUFWriter(path, header.architecture)
    for key, value in header.metadata.items():
        if key in ("general.architecture", "general.alignment") or value == () or isinstance(value, SkippedValue):
            continue
        if isinstance(value, tuple):
            writer.add_array(key, list(value))
        else:
            writer.add_key_value(key, value, _STUB_TYPES[type(value)])
    if f"{header.architecture}.vocab_size" not in header.metadata:
        writer.add_vocab_size(vocabulary_size(header))
    # where the size comes from the list, any list will do: we know the size
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for tensor in header.tensors:
        writer.add_tensor(tensor.name, np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_STUB_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.INT64,
    float: gguf.GGUFValueType.FLOAT64,
    str: gguf.GGUFValueType.STRING,
}


def _plain(value: Any) -> Any:
    return value.count if isinstance(value, SkippedValue) else list(value) if isinstance(value, tuple) else value


def unsupported(header: GgufHeader) -> UnsupportedArchitecture:
    """The error that names the architecture and those that are known."""
    known = sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"})
    return UnsupportedArchitecture(
        f"{header.path}: GGUF files of the architecture {header.architecture!r} cannot be converted",
        hint=f"transformers {transformers.__version__} converts {', '.join(known)}",
    )


# The rope scaling, which transformers leaves behind


def _rope_scaling(header: GgufHeader) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config fields of the file's rope scaling, or the warning that we cannot tell them."""
    prefix = f"{header.architecture}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    factor = header.metadata.get(f"{prefix}.factor")
    original = header.metadata.get(f"{prefix}.original_context_length")
    tensors = [tensor.name for tensor in header.tensors if tensor.name in ROPE_TENSORS]
    if header.architecture in (*GGUF_CONFIG_ARCHS, "gpt-oss") or (kind == "none" and not tensors):
        return {}, ()
    if tensors == ["rope_freqs.weight"] and (llama3 := _llama3_scaling(header)) is not None:
        return {"rope_scaling": llama3}, ()
    if not tensors and isinstance(factor, float):
        if kind == "linear":
            return {"rope_scaling": {"rope_type": kind, "factor": factor}}, ()
        if kind == "yarn" and isinstance(original, int):
            scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
            return {"rope_scaling": scaling}, ()
    what = f"in the tensor {tensors[0]}" if tensors else f"of the type {kind!r}"
    return {}, (f"{header.path.name}: the rope scaling {what} is not carried over, so the model answers less well",)


# What all Llama 3 models share; only the factor differs, which is the largest of the stored ones.
_LLAMA3_ORIGINAL_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def _llama3_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """The `llama3` rope scaling whose divisors the file stores; None when they are of another kind."""
    tensor = next(tensor for tensor in header.tensors if tensor.name == "rope_freqs.weight")
    theta = header.metadata.get(f"{header.architecture}.rope.freq_base", 10000.0)
    if tensor.type_name != "F32" or not isinstance(theta, float) or theta <= 0 or not 0 < tensor.n_elements <= 4096:
        return None
    with header.path.open("rb") as file:
        file.seek(header.data_offset + tensor.offset)
        stored = struct.unpack(f"<{tensor.n_elements}f", file.read(tensor.nbytes))
    factor = round(max(stored), 3)
    for index, divisor in enumerate(stored):
        wavelength = 2 * math.pi * theta ** (index / len(stored))
        turns = _LLAMA3_ORIGINAL_CONTEXT / wavelength
        smooth = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }
