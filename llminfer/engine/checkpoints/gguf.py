"""Converting a GGUF file, once, to a plain float32 checkpoint folder in the user's cache.

transformers can load a GGUF file itself, at 25 to 35 s a start for the default model: its reader
parses the vocabulary several times in Python, and builds a name map for every module. Here the same
tables and the same tensor rules run once over a header read by our own reader, one tensor at a time,
and the result is bit for bit the same. The few architectures that transformers loads by a second,
faster road (`GGUF_CONFIG_ARCHS`) go through its `from_pretrained`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from llminfer.engine.checkpoints.conversions import build_checkpoint, checkpoint_folder, read_manifest, require_room
from llminfer.engine.checkpoints.gguf_config import ROPE_TENSORS, gguf_config, unsupported
from llminfer.engine.checkpoints.gguf_tokenizer import save_tokenizer, special_token_ids
from llminfer.engine.checkpoints.safetensors_writer import SafetensorsWriter
from llminfer.engine.machine.disk_cache import Progress, file_digest
from llminfer.engine.machine.library_errors import foreign_errors
from llminfer.errors import ModelNotAvailable, UnsupportedArchitecture
from llminfer.kv.gguf import GgufHeader, GgufTensor, read_gguf_header

_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DEQUANTIZE_CHUNK_ELEMENTS = 1 << 15  # torch's own grain: a thread's least share

Shapes = dict[str, tuple[int, ...]]
NamedTensors = Iterator[tuple[str, torch.Tensor]]


def checkpoint_for_gguf(
    path: Path, *, generation_defaults: Mapping[str, object] | None = None, progress: Progress | None = None
) -> Path:
    """The plain checkpoint folder of a GGUF file, converted now if it was not before.

    `generation_defaults` are merged into its generation_config.json. `progress` hears of the stages
    `hash`, `wait` (for another process that converts the same file), `convert` and `tokenizer`.

    Raises:
        ModelNotAvailable: when the file is missing, damaged or incomplete.
        UnsupportedArchitecture: when transformers cannot build the model or its tokenizer.
        LlminferError: when the cache has no room or cannot be written.
    """
    header = read_gguf_header(path)
    _require_convertible(header)
    digest = file_digest(header.path, progress=progress)
    folder = checkpoint_folder(digest, generation_defaults=generation_defaults)
    if read_manifest(folder) is not None:
        return folder

    def build(into: Path) -> tuple[str, ...]:
        return _convert(header, into, dict(generation_defaults or {}), progress)

    return build_checkpoint(folder, build, source=header.path.name, digest=digest, progress=progress)


def _require_convertible(header: GgufHeader) -> None:
    """Refuse what no conversion could serve, before the file is hashed."""
    n_parts = header.metadata.get("split.count")
    if isinstance(n_parts, int) and n_parts > 1:
        raise ModelNotAvailable(
            f"{header.path} is one of {n_parts} parts of a model", hint="join them with llama-gguf-split --merge"
        )
    n_layers = header.metadata.get(f"{header.architecture}.block_count")
    # a layer has a tensor at least; a claim of 2^31 layers would keep us building them for hours
    if isinstance(n_layers, int) and n_layers > len(header.tensors):
        raise ModelNotAvailable(f"{header.path} claims {n_layers} layers, but holds {len(header.tensors)} tensors")
    special_token_ids(header)


def _convert(
    header: GgufHeader, folder: Path, generation_defaults: dict[str, object], progress: Progress | None
) -> tuple[str, ...]:
    config, warnings = gguf_config(header, folder)
    model = _empty_model(header, config)
    unused: list[str] = []
    if header.architecture in GGUF_CONFIG_ARCHS:
        loaded = _load(header, config)
        stored, tensors = _stored_shapes(model, set(loaded)), iter(loaded.items())
    else:
        names = _tensor_names(header, model)
        unused = _unused_tensors(header, names)
        stored, tensors = _stored_shapes(model, set(names.values())), _mapped_tensors(header, config, names)
    missing = _write_weights(header, folder / "model.safetensors", stored, tensors, progress=progress)
    if missing and unused:
        what = f"{len(unused)} of its tensors have no known place in the model, such as {unused[0]!r}"
        raise UnsupportedArchitecture(f"{header.path}: {what}")
    _refuse_missing(header, missing)
    if unused:
        what = f"{len(unused)} tensors have no place in the model, such as {unused[0]!r}"
        warnings = (*warnings, f"{header.path.name}: {what}")
    if progress is not None:
        progress("tokenizer", 0, 1)
    warnings = (*warnings, *save_tokenizer(header, folder))
    if progress is not None:
        progress("tokenizer", 1, 1)
    _save_configs(header, folder, config, type(model).__name__, generation_defaults)
    return warnings


def _write_weights(
    header: GgufHeader, path: Path, stored: Shapes, tensors: NamedTensors, *, progress: Progress | None
) -> list[str]:
    """Write the tensors that the model stores, and return those that did not come."""
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, stored)
        # nearer misses are named by tensor below; this far off, the file system would fail first
        if writer.data_bytes > 64 * 4 * header.parameter_count:
            what = f"describes {writer.data_bytes // 4} parameters, its tensors hold {header.parameter_count}"
            raise ModelNotAvailable(f"{header.path}: its metadata {what}")
        # no more than the file can fill, when its metadata claims a bigger model
        require_room(path.parent, min(writer.data_bytes, 4 * header.parameter_count))
        for name, tensor in tensors:
            if name not in stored:  # tied to one that is
                continue
            if tuple(tensor.shape) != stored[name]:
                what = f"{name} has the shape {tuple(tensor.shape)}, the model needs {stored[name]}"
                raise ModelNotAvailable(f"{header.path}: {what}")
            writer.write(name, tensor)
            if progress is not None:
                progress("convert", writer.written_bytes, writer.data_bytes)
    return writer.missing


def _refuse_missing(header: GgufHeader, missing: list[str]) -> None:
    # transformers would make up their values
    if missing:
        raise ModelNotAvailable(f"{header.path} lacks {len(missing)} tensors of the model, such as {missing[0]}")


# The model's tensors


def _empty_model(header: GgufHeader, config: Any) -> Any:
    """The model on the meta device: its names and shapes, no weights."""
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unsupported(header)
    with foreign_errors(header.path, "its metadata does not describe a model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _tensor_names(header: GgufHeader, model: Any) -> dict[str, str]:
    """GGUF's tensor names to the model's.

    transformers maps every module of the model on its own and rebuilds the table of names for each; the
    model and its base model are the two that yield names, so it sees no others at first.
    """
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
    base = getattr(model, model.base_model_prefix, None)
    children = [] if base is None else [(model.base_model_prefix, _view(base, []))]
    view = _view(model, children)
    with foreign_errors(header.path, "its tensors have names that we cannot map"):
        names: dict[str, str] = get_gguf_hf_weights_map(view, processor)
        if any(tensor.name not in names for tensor in header.tensors):
            names = get_gguf_hf_weights_map(model, processor)
    return names


def _view(model: Any, children: list[tuple[str, Any]]) -> SimpleNamespace:
    """The part of a model that the name map reads."""
    return SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: children)


def _unused_tensors(header: GgufHeader, names: Mapping[str, str]) -> list[str]:
    known = {*names, *(f"{name}.weight" for name in names), *ROPE_TENSORS}
    return [tensor.name for tensor in header.tensors if tensor.name not in known]


def _mapped_tensors(header: GgufHeader, config: Any, names: Mapping[str, str]) -> NamedTensors:
    """Every tensor under the model's name and in its layout, by the rules of transformers.

    A rule may gather several tensors of the file in one of the model's (experts: gate and up), which
    it puts into `gathered`; such a one is yielded when the last of its parts is in.
    """
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    gathered: dict[str, Any] = {}
    targets = [names.get(t.name) or names.get(t.name.removesuffix(".weight")) for t in header.tensors]
    parts_left = Counter(targets)
    with header.path.open("rb") as file:
        for tensor, target in zip(header.tensors, targets, strict=True):
            weights = _dequantized(header, tensor, file).numpy()
            with foreign_errors(header.path, f"its tensor {tensor.name!r} does not fit the model"):
                result = processor.process(
                    weights, tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": gathered}
                )
            parts_left[target] -= 1
            if result.name in names:
                yield names[result.name], torch.from_numpy(np.ascontiguousarray(result.weights))
            for name in [name for name in gathered if parts_left[name] <= 0]:
                yield name, gathered.pop(name)


def _dequantized(header: GgufHeader, tensor: GgufTensor, file: IO[bytes]) -> torch.Tensor:
    raw = bytearray(tensor.nbytes)
    file.seek(header.data_offset + tensor.offset)
    if file.readinto(raw) != tensor.nbytes:  # type: ignore[attr-defined]
        raise ModelNotAvailable(f"{header.path} was cut while we read the tensor {tensor.name!r}")
    shape = tensor.shape[::-1]
    if tensor.nbytes == 0:
        return torch.zeros(shape)
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    if tensor.type_name in _FLOAT_TYPES:
        return flat.view(_FLOAT_TYPES[tensor.type_name]).float().reshape(shape)
    if tensor.ggml_type in GGML_BLOCK:
        return _dequantized_blocks(flat, tensor).reshape(shape)
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        rows = flat.numpy().reshape(*shape[:-1], -1)
        return torch.from_numpy(gguf.dequantize(rows, kind).astype(np.float32, copy=False)).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        what = f"its tensor {tensor.name!r} is of the type {tensor.type_name}, which cannot be dequantized"
        raise UnsupportedArchitecture(f"{header.path}: {what}") from error


def _dequantized_blocks(flat: torch.Tensor, tensor: GgufTensor) -> torch.Tensor:
    """The same bits as `gguf.dequantize`, which takes several times as long.

    By chunks that stay in the processor's cache, and that torch does not split over threads: for these
    small operations its threads wait for each other longer than they work.
    """
    block_elements, block_bytes = GGML_BLOCK[tensor.ggml_type]
    n_blocks = _DEQUANTIZE_CHUNK_ELEMENTS // block_elements
    values = torch.empty(tensor.n_elements)
    chunks = zip(torch.split(flat, n_blocks * block_bytes), torch.split(values, n_blocks * block_elements), strict=True)
    for packed, part in chunks:
        part.copy_(dequantize(packed, tensor.ggml_type))
    return values


def _load(header: GgufHeader, config: Any) -> dict[str, torch.Tensor]:
    """The tensors of an architecture that transformers loads fast itself."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with foreign_errors(header.path, "transformers cannot load it"):
            model, report = AutoModelForCausalLM.from_pretrained(
                header.path.parent,
                gguf_file=header.path.name,
                config=config,
                dtype=torch.float32,
                # the kernels for packed weights would come from the network
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
                output_loading_info=True,
            )
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    _refuse_missing(header, sorted(report["missing_keys"]))
    tensors: dict[str, torch.Tensor] = model.state_dict()
    return tensors


def _stored_shapes(model: Any, available: set[str]) -> Shapes:
    """What a checkpoint stores: each parameter once, and the buffers that the file has."""
    tied, parameters = set(model.all_tied_weights_keys), {name for name, _ in model.named_parameters()}
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in tied and (name in parameters or name in available)
    }


def _save_configs(
    header: GgufHeader, folder: Path, config: Any, architecture: str, generation_defaults: dict[str, object]
) -> None:
    config.architectures = [architecture]
    config.dtype = torch.float32
    # the weights are dense now
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.to_json_file(folder / "config.json", use_diff=False)
    ids = special_token_ids(header)
    # the end of a turn ends generation too, and is another token than the end of the text in some
    ends = list(dict.fromkeys(ids[name] for name in ("eos_token_id", "eot_token_id") if name in ids))
    stated = {
        "bos_token_id": ids.get("bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids.get("padding_token_id"),
        "transformers_version": transformers.__version__,
    }
    content = {key: value for key, value in {**stated, **generation_defaults}.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
