"""Converting a GGUF file, once, to a plain float32 checkpoint folder in the user's cache.

transformers can load a GGUF file itself, at 25 to 35 s a start for the default model: its reader
parses the vocabulary several times in Python, and builds a name map for every module. Here the same
tables and the same tensor rules run once over a header read by our own reader, one tensor at a time,
and the result is bit for bit the same. The few architectures that transformers loads by a second,
faster road (`GGUF_CONFIG_ARCHS`) go through its `from_pretrained`.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from llminfer.engine.checkpoint_cache import (
    Progress,
    build_checkpoint,
    checkpoint_folder,
    file_digest,
    read_manifest,
    require_room,
)
from llminfer.engine.gguf_tokenizer import save_tokenizer, special_token_ids, vocabulary_size
from llminfer.errors import LlminferError, ModelNotAvailable, UnsupportedArchitecture
from llminfer.kv.gguf import GgufHeader, GgufTensor, SkippedValue, read_gguf_header

_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Derived from the config at run time, so not in any checkpoint.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


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
    config = _config(header, folder)
    model = _empty_model(header, config)
    warnings = list(_rope_warnings(header))
    if header.architecture in GGUF_CONFIG_ARCHS:
        loaded = _load(header, config)
        stored, tensors = _stored_shapes(model, set(loaded)), iter(loaded.items())
    else:
        names = _tensor_names(header, model)
        stored, tensors = _stored_shapes(model, set(names.values())), _mapped_tensors(header, config, names)
        warnings.extend(_unused_warnings(header, names))
    with (folder / "model.safetensors").open("wb") as file:
        weights = _Weights(file, stored)
        require_room(folder, weights.end_bytes)
        for name, tensor in tensors:
            weights.write(header, name, tensor)
            if progress is not None:
                progress("convert", weights.written_bytes, weights.end_bytes)
        weights.require_all(header)
    if progress is not None:
        progress("tokenizer", 0, 1)
    warnings.extend(save_tokenizer(header, folder))
    _save_configs(header, folder, config, type(model).__name__, generation_defaults)
    return tuple(warnings)


@contextmanager
def _transformers_errors(header: GgufHeader, what: str) -> Iterator[None]:
    """Any error of transformers on metadata that nobody vouches for, as one line of ours."""
    try:
        yield
    except (LlminferError, MemoryError):
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ModelNotAvailable(f"{header.path}: {what} ({type(error).__name__}: {reason})") from error


# The config


def _config(header: GgufHeader, folder: Path) -> Any:
    """The config that transformers derives, with the ids and the vocabulary that the file states."""
    with _transformers_errors(header, "its metadata does not describe a model"):
        fields = _config_fields(header, folder)
        model_type = fields.pop("model_type")
        if model_type not in transformers.CONFIG_MAPPING:
            raise _unsupported(header)
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
        return AutoConfig.for_model(model_type, **fields)


def _config_fields(header: GgufHeader, folder: Path) -> dict[str, Any]:
    if header.architecture in GGUF_CONFIG_ARCHS:
        counts = {key: _plain(value) for key, value in header.metadata.items()}
        return get_gguf_config(counts, tuple(tensor.name for tensor in header.tensors))
    stub = folder / "stub.gguf"
    try:
        _write_stub(header, stub)
        fields: dict[str, Any] = load_gguf_checkpoint(stub, return_tensors=False)["config"]
    except ValueError as error:
        if "is not supported" in str(error):
            raise _unsupported(header) from error
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


def _unsupported(header: GgufHeader) -> UnsupportedArchitecture:
    known = sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"})
    return UnsupportedArchitecture(
        f"{header.path}: GGUF files of the architecture {header.architecture!r} cannot be converted",
        hint=f"transformers {transformers.__version__} converts {', '.join(known)}",
    )


def _rope_warnings(header: GgufHeader) -> tuple[str, ...]:
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    tensors = [tensor.name for tensor in header.tensors if tensor.name in _ROPE_TENSORS]
    if header.architecture in (*GGUF_CONFIG_ARCHS, "gpt-oss") or (kind == "none" and not tensors):
        return ()
    what = f"the rope scaling {kind!r}" if kind != "none" else f"the rope scaling in {tensors[0]}"
    return (f"{header.path.name}: {what} is not carried over, so long contexts lose quality",)


# The model's tensors


def _empty_model(header: GgufHeader, config: Any) -> Any:
    """The model on the meta device: its names and shapes, no weights."""
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unsupported(header)
    with _transformers_errors(header, "its metadata does not describe a model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class _NamedView:
    """The part of a model that the name map reads, without the modules below.

    transformers maps every module of the model on its own and rebuilds the table of names for each;
    the model and its base model are the two that yield names.
    """

    def __init__(self, model: Any, children: Mapping[str, Any]) -> None:
        self.config = model.config
        self._model, self._children = model, children

    def state_dict(self) -> dict[str, Any]:
        """The model's names."""
        return dict(self._model.state_dict())

    def named_children(self) -> list[tuple[str, _NamedView]]:
        """The base model, once."""
        return [(name, _NamedView(child, {})) for name, child in self._children.items()]


def _tensor_names(header: GgufHeader, model: Any) -> dict[str, str]:
    """GGUF's tensor names to the model's."""
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
    prefix = model.base_model_prefix
    view = _NamedView(model, {prefix: getattr(model, prefix)} if hasattr(model, prefix) else {})
    with _transformers_errors(header, "its tensors have names that we cannot map"):
        names: dict[str, str] = get_gguf_hf_weights_map(view, processor)
        if any(tensor.name not in names for tensor in header.tensors):
            names = get_gguf_hf_weights_map(model, processor)
    return names


def _unused_warnings(header: GgufHeader, names: Mapping[str, str]) -> tuple[str, ...]:
    known = {*names, *(f"{name}.weight" for name in names), *_ROPE_TENSORS}
    unused = [tensor.name for tensor in header.tensors if tensor.name not in known]
    if not unused:
        return ()
    return (f"{header.path.name}: {len(unused)} tensors have no place in the model, such as {unused[0]!r}",)


def _mapped_tensors(header: GgufHeader, config: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Every tensor under the model's name and in its layout, by the rules of transformers.

    A rule may gather several tensors of the file in one of the model's (experts: gate and up), which
    it puts into `gathered`; such a one is yielded when the last of its parts is in.
    """
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    gathered: dict[str, Any] = {}
    parts_left = Counter(names.get(t.name) or names.get(t.name.removesuffix(".weight")) for t in header.tensors)
    with header.path.open("rb") as file:
        for tensor in header.tensors:
            weights = _dequantized(header, tensor, file).numpy()
            with _transformers_errors(header, f"its tensor {tensor.name!r} does not fit the model"):
                result = processor.process(
                    weights=weights,
                    name=tensor.name,
                    tensor_key_mapping=names,
                    parsed_parameters={"tensors": gathered},
                )
            target = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
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
        # the same bits as gguf.dequantize, which is several times slower
        return dequantize(flat, tensor.ggml_type).reshape(shape)
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        rows = flat.numpy().reshape(*shape[:-1], -1)
        return torch.from_numpy(gguf.dequantize(rows, kind).astype(np.float32, copy=False)).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        what = f"its tensor {tensor.name!r} is of the type {tensor.type_name}, which cannot be dequantized"
        raise UnsupportedArchitecture(f"{header.path}: {what}") from error


def _load(header: GgufHeader, config: Any) -> dict[str, torch.Tensor]:
    """The tensors of an architecture that transformers loads fast itself."""
    with _transformers_errors(header, "transformers cannot load it"):
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
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelNotAvailable(f"{header.path} lacks {len(missing)} tensors of the model, such as {missing[0]}")
    tensors: dict[str, torch.Tensor] = model.state_dict()
    return tensors


def _stored_shapes(model: Any, available: set[str]) -> dict[str, tuple[int, ...]]:
    """What a checkpoint stores: each parameter once, and the buffers that the file has."""
    tied, parameters = set(model.all_tied_weights_keys), {name for name, _ in model.named_parameters()}
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in tied and (name in parameters or name in available)
    }


# Writing


class _Weights:
    """A safetensors file of float32 whose header is known before its tensors are.

    The format: the header's length, the header as JSON, the tensors. Writing them one by one, in any
    order, takes the memory of one tensor, where `safetensors.save_file` wants the whole model.
    """

    def __init__(self, file: IO[bytes], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._file, self._shapes = file, shapes
        self.written_bytes = 0
        self._missing = dict.fromkeys(shapes)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts, position = {}, 0
        for name, shape in shapes.items():
            end = position + 4 * int(np.prod(shape, dtype=np.int64))
            entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
            self._starts[name], position = position, end
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # tensors start aligned, as the library writes them
        file.write(struct.pack("<Q", len(text)) + text)
        self._data_start, self.end_bytes = 8 + len(text), position

    def write(self, header: GgufHeader, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; one that the checkpoint does not store, being tied, is passed over."""
        if name not in self._shapes:
            return
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelNotAvailable(
                f"{header.path}: {name} has the shape {tuple(tensor.shape)}, the model needs {self._shapes[name]}"
            )
        data = tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4", copy=False)
        self._file.seek(self._data_start + self._starts[name])
        self._file.write(data.reshape(-1).view(np.uint8))
        self.written_bytes += data.nbytes
        self._missing.pop(name, None)

    def require_all(self, header: GgufHeader) -> None:
        """Fail when a parameter was not written: transformers would make one up."""
        if self._missing:
            first, count = next(iter(self._missing)), len(self._missing)
            raise ModelNotAvailable(f"{header.path} lacks {count} tensors of the model, such as {first}")


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
