"""From a checked checkpoint to a model and tokenizer that are ready to run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from llminfer.engine.checkpoint import Checkpoint
from llminfer.engine.checkpoint_cache import read_manifest
from llminfer.engine.device import choose_device, choose_dtype
from llminfer.engine.foreign_errors import foreign_errors
from llminfer.errors import ModelNotAvailable, OutOfMemory, UnsupportedArchitecture
from llminfer.kv.families import read_model
from llminfer.kv.layer import ModelKV

# a config states its own dtype under this name; older files under the second
_DTYPE_FIELDS = ("dtype", "torch_dtype")
# causal models whose config inherits `is_decoder: false` from a shared base
_DECODERS_THAT_DENY_IT = frozenset({"gpt_neox", "gpt_neox_japanese"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        kv: what the model caches; None when it cannot be predicted, and `kv_unpredicted` says why.
        generation_defaults: what the checkpoint's generation_config states, and nothing else.
        notes: what the user should know, such as a dtype that is not the checkpoint's.
        load_s: from the first look at the files until the weights were on the device.
    """

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    kv: ModelKV | None
    kv_unpredicted: str | None
    generation_defaults: Mapping[str, Any]
    eos_ids: frozenset[int]
    context_limit: int | None
    notes: tuple[str, ...]
    load_s: float


def load(
    checkpoint: Checkpoint,
    *,
    name: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer; nothing is fetched, asked or unpickled on the way.

    Args:
        checkpoint: from `inspect_checkpoint`.
        name: what to call the model; its folder when not given.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        trust_remote_code: run Python code from the checkpoint's folder.

    Raises:
        InvalidParams: for a device or dtype that is none, or that do not go together.
        ModelNotAvailable: when weights or tokenizer do not load.
        UnsupportedArchitecture: for a model that does not continue text by itself.
        OutOfMemory: when the weights do not fit the device.
    """
    start_s = time.perf_counter()
    _quiet_transformers()
    chosen_device = choose_device(device)
    check_architecture(checkpoint.config, str(checkpoint.folder), trust_remote_code=trust_remote_code)
    with _loading("config", checkpoint.folder):
        config = _load_config(checkpoint.folder, trust_remote_code)
    check_direction(config, str(checkpoint.folder))
    stated = next((getattr(config, field, None) for field in _DTYPE_FIELDS if getattr(config, field, None)), None)
    checkpoint_dtype = stated if isinstance(stated, torch.dtype) else torch.float32
    chosen_dtype, dtype_note = choose_dtype(dtype, chosen_device, checkpoint_dtype)
    kv, kv_unpredicted = _predict(config, str(checkpoint.folder))
    with _loading("tokenizer", checkpoint.tokenizer_folder):
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.tokenizer_folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    with _loading("weights", checkpoint.folder):
        model = _load_weights(checkpoint, config, chosen_dtype, chosen_device, trust_remote_code)
    eos_ids, eos_notes = collect_eos_ids(model, tokenizer)
    return LoadedModel(
        name=name or checkpoint.folder.name,
        model=model,
        tokenizer=tokenizer,
        device=chosen_device,
        dtype=chosen_dtype,
        kv=kv,
        kv_unpredicted=kv_unpredicted,
        generation_defaults=_stated_generation_defaults(model),
        eos_ids=eos_ids,
        context_limit=context_limit(model.config),
        notes=(*((f"dtype {dtype_note}",) if dtype_note else ()), *eos_notes, *_conversion_warnings(checkpoint.folder)),
        load_s=time.perf_counter() - start_s,
    )


def check_architecture(config: Mapping[str, Any], source: str, *, trust_remote_code: bool) -> None:
    """Refuse by name what cannot continue a text, before any weights are read.

    Raises:
        UnsupportedArchitecture: for types that are not causal language models, and unknown ones.
        ModelNotAvailable: for a type that only the checkpoint's own code knows.
    """
    model_type = config.get("model_type")
    if config.get("auto_map") and model_type not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        raise ModelNotAvailable(
            f"{source} needs Python code of its own to run",
            hint="--trust-remote-code runs that code: read it first",
        )
    if trust_remote_code and config.get("auto_map"):
        return
    if not model_type:
        raise UnsupportedArchitecture(f"{source}: the config names no model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise UnsupportedArchitecture(
            f"{source}: model type {model_type!r} is unknown to the installed transformers",
            hint="a newer transformers may know it",
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedArchitecture(f"{source}: {model_type} is not a causal language model")


def check_direction(config: Any, source: str) -> None:
    """Refuse models that do not read from left to right, by their config with its class defaults.

    Raises:
        UnsupportedArchitecture: for encoder-decoder and encoder-only models.
    """
    if config.is_encoder_decoder:
        raise UnsupportedArchitecture(f"{source}: {config.model_type} is an encoder-decoder model")
    if getattr(config, "is_decoder", True) is False and config.model_type not in _DECODERS_THAT_DENY_IT:
        raise UnsupportedArchitecture(
            f"{source}: {config.model_type} is an encoder, which does not continue a text",
            hint="its config says is_decoder: false",
        )


def collect_eos_ids(model: Any, tokenizer: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """The union of what generation_config, config and tokenizer call EOS, and notes about unusable ones."""
    text_config = model.config.get_text_config(decoder=True)
    sources = {
        "generation_config": getattr(model.generation_config, "eos_token_id", None),
        "config": getattr(text_config, "eos_token_id", None),
        "tokenizer": tokenizer.eos_token_id,
    }
    vocabulary = getattr(text_config, "vocab_size", None)
    found: set[int] = set()
    notes = []
    for source, value in sources.items():
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is None:
                continue
            if vocabulary is not None and not 0 <= token_id < vocabulary:
                notes.append(f"{source} names EOS id {token_id}, outside the vocabulary of {vocabulary}")
            else:
                found.add(int(token_id))
    if not found:
        notes.append("the model names no EOS token: it runs to the token limit")
    return frozenset(found), tuple(notes)


def context_limit(config: Any) -> int | None:
    """The longest sequence the model was made for, None when its config states none."""
    text_config = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _load_config(folder: Path, trust_remote_code: bool) -> Any:
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def _load_weights(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=not checkpoint.pickled,
        weights_only=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would fill them with random numbers
        raise ModelNotAvailable(
            f"{checkpoint.folder} lacks {len(missing)} of the model's weights, {missing[0]} among them",
            hint="is the download incomplete, or the checkpoint one of another class?",
        )
    return model.to(device).eval()


def _predict(config: Any, source: str) -> tuple[ModelKV | None, str | None]:
    try:
        return read_model(config.to_dict(), source=source), None
    except UnsupportedArchitecture as error:
        return None, error.message


def _conversion_warnings(folder: Path) -> tuple[str, ...]:
    manifest = read_manifest(folder)
    return manifest.warnings if manifest is not None else ()


def _stated_generation_defaults(model: Any) -> dict[str, Any]:
    stated = model.generation_config.to_diff_dict()
    return {name: value for name, value in stated.items() if value is not None and not name.startswith("_")}


@contextmanager
def _loading(what: str, folder: Path) -> Iterator[None]:
    """What the libraries raise becomes one line that names the folder; no room becomes our own error."""
    try:
        with foreign_errors(folder, f"cannot load the {what}"):
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise MemoryError from error
    except MemoryError as error:
        raise OutOfMemory(f"the {what} of {folder} do not fit in memory", hint="try --dtype bfloat16") from error


def _quiet_transformers() -> None:
    """Its progress bars and advice are not ours to print; errors come as exceptions."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
