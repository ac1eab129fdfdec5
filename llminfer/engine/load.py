"""From a checked checkpoint to a model and tokenizer that are ready to run."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.utils import is_peft_available, logging

from llminfer.engine.backend import check_execution, load_dtype, prepare_execution
from llminfer.engine.checkpoints.checkpoint import Checkpoint
from llminfer.engine.checkpoints.conversions import read_manifest
from llminfer.engine.kv_cache.kinds import check_cache
from llminfer.engine.machine.device import choose_device, choose_dtype, is_out_of_memory
from llminfer.engine.machine.library_errors import foreign_errors
from llminfer.engine.model import LoadedModel
from llminfer.engine.models.protocols import Config
from llminfer.engine.models.support import NEEDS_CODE, TRUST_HINT, auto_class, read_architecture
from llminfer.engine.speculation.checks import check_speculation, check_vocabularies
from llminfer.engine.text.tokenizer import Tokenizer
from llminfer.engine.weights.packing import held_parts
from llminfer.engine.weights.upcast import widen_slow_products
from llminfer.errors import LlminferError, ModelNotAvailable, OutOfMemory, UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.context import scaled_context
from llminfer.kv.layer import ModelKV
from llminfer.kv.rules.families import read_model
from llminfer.params import CacheOptions, Execution, Speculation

# a config states its own dtype under this name; older files under the second
_DTYPE_FIELDS = ("dtype", "torch_dtype")
# what says in a config that weights are packed, and by what
_QUANTIZERS = ("quant_method", "load_in_4bit", "load_in_8bit")
_OTHER_CLASS = "is the download incomplete, or the checkpoint one of another class?"


def load(
    checkpoint: Checkpoint,
    *,
    name: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    cache: CacheOptions | None = None,
    execution: Execution | None = None,
    speculation: Speculation | None = None,
    draft: LoadedModel | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; nothing is fetched, asked or unpickled on the way.

    Args:
        checkpoint: from `inspect_checkpoint`.
        name: what to call the model; its folder when not given.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        trust_remote_code: run Python code from the checkpoint's folder.
        cache: the cache that will be asked for, so that a model that cannot have it is not loaded.
        execution: what carries out the arithmetic; the model's own forward and weights when not given.
        speculation: what will be asked for, so that a model that cannot do it is not loaded.
        draft: the model that will draft, so that one with another vocabulary is refused in time.

    Raises:
        UsageError: for a draft model with another vocabulary.
        InvalidParams: for a device or dtype that is none, or that cannot be combined.
        ModelNotAvailable: when weights or tokenizer do not load.
        UnsupportedArchitecture: for a model that does not continue text by itself.
        OutOfMemory: when the weights do not fit the device.
    """
    start_s, execution = time.perf_counter(), execution or Execution()
    folder, name = checkpoint.folder, name or checkpoint.folder.name
    execution.check_placed(device=device, dtype=dtype)
    chosen_device = choose_device(device)
    config = read_architecture(folder, checkpoint.config, trust_remote_code=trust_remote_code)
    stated, chosen_dtype, dtype_notes = _element_types(config, execution, dtype, chosen_device)
    kv, unpredicted = _predict(config, str(folder))
    _check_quantization(config, str(folder))
    check_execution(execution, chosen_device, config, name)
    _check_asked(cache, speculation, config, name)
    with _loading("tokenizer", checkpoint.tokenizer_folder):
        tokenizer = _load_tokenizer(checkpoint, config, trust_remote_code)
    if draft is not None:
        check_vocabularies(draft.tokenizer, tokenizer, draft_name=draft.name, source=name)
    with _loading("weights", folder, stated=checkpoint.config, doubt=unpredicted):
        read_dtype = load_dtype(execution, stated=stated, chosen=chosen_dtype)
        model, weight_notes = _load_weights(checkpoint, config, read_dtype, chosen_device, trust_remote_code)
        prepared = prepare_execution(model, execution, name)
        product_notes = widen_slow_products(model)
    eos_ids, eos_notes = collect_eos_ids(model, tokenizer)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        device=chosen_device,
        dtype=chosen_dtype,
        kv=kv,
        kv_unpredicted=unpredicted.message if unpredicted else None,
        generation_defaults=_stated_generation_defaults(model),
        eos_ids=eos_ids,
        context_limit=context_limit(model.config),
        notes=(*dtype_notes, *weight_notes, *prepared.notes, *product_notes, *eos_notes, *_notes_on_files(folder)),
        load_s=time.perf_counter() - start_s,
        folder=folder,
        execution=execution,
        weights_parts=held_parts(model),
        forward_factory=prepared.factory,
    )


def _check_asked(cache: CacheOptions | None, speculation: Speculation | None, config: Config, name: str) -> None:
    if cache is not None:
        check_cache(cache, config, name)
    if speculation is not None:
        check_speculation(speculation, cache or CacheOptions(), config, name)


def _element_types(
    config: Config, execution: Execution, dtype: str, device: torch.device
) -> tuple[torch.dtype, torch.dtype, tuple[str, ...]]:
    """The type that the checkpoint states, the one to compute in, and what has to be said about it."""
    found = next((getattr(config, field, None) for field in _DTYPE_FIELDS if getattr(config, field, None)), None)
    stated = found if isinstance(found, torch.dtype) else torch.float32
    wanted = dtype if execution.weights_format is None else "float32"  # in which packed weights compute
    chosen, note = choose_dtype(wanted, device, stated)
    return stated, chosen, (f"dtype {note}",) if note else ()


def collect_eos_ids(model: Any, tokenizer: Tokenizer) -> tuple[frozenset[int], tuple[str, ...]]:
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
            if not isinstance(token_id, int):
                raise ModelNotAvailable(f"the {source} names {token_id!r} as EOS, which is not a token id")
            if vocabulary is not None and not 0 <= token_id < vocabulary:
                notes.append(f"{source} names EOS id {token_id}, outside the vocabulary of {vocabulary}")
            else:
                found.add(int(token_id))
    if not found:
        notes.append("the model names no EOS token: it runs to the token limit")
    return frozenset(found), tuple(notes)


def context_limit(config: Config) -> int | None:
    """The longest sequence the model was made for, None when its config states none."""
    text_config = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            rope = getattr(text_config, "rope_parameters", None)
            return scaled_context(value, rope, model_type=text_config.model_type)
    return None


def _check_quantization(config: Config, source: str) -> None:
    """Refuse a quantization that transformers would pass over, reading packed weights as plain ones."""
    stated = getattr(config, "quantization_config", None)
    if not isinstance(stated, Mapping) or not any(stated.get(name) for name in _QUANTIZERS):
        return
    with foreign_errors(Path(source), "its quantization_config cannot be read"):
        known = AutoHfQuantizer.supports_quant_method(stated)
    if not known:
        raise UnsupportedArchitecture(
            f"{source}: quantized by {stated['quant_method']!r}, which the installed transformers does not know",
            hint=f"known: {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}",
        )


def _load_tokenizer(checkpoint: Checkpoint, config: Any, trust_remote_code: bool) -> Any:
    return AutoTokenizer.from_pretrained(
        checkpoint.tokenizer_folder, config=config, trust_remote_code=trust_remote_code, local_files_only=True
    )


def _load_weights(
    checkpoint: Checkpoint, config: Config, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[Any, tuple[str, ...]]:
    """The model with all its weights on the device, and notes about tensors that it has no use for."""
    model, info = auto_class(config).from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype,
        # unasked, quantizers place their layers on the current GPU or on the CPU
        device_map={"": device} if getattr(config, "quantization_config", None) is not None else None,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=not checkpoint.pickled,
        weights_only=True,
        ignore_mismatched_sizes=True,  # we refuse them ourselves, by name
        output_loading_info=True,
    )
    # transformers would fill both kinds with random numbers
    for name, found, wanted in sorted(info["mismatched_keys"]):
        what = f"{name} has the shape {tuple(found)}, the model needs {tuple(wanted)}"
        raise ModelNotAvailable(f"{checkpoint.folder}: {what}", hint=_OTHER_CLASS)
    missing = sorted(info["missing_keys"])
    if missing:
        what = f"{len(missing)} of the model's weights, {missing[0]} among them"
        raise ModelNotAvailable(f"{checkpoint.folder} lacks {what}", hint=_OTHER_CLASS)
    unused = sorted(info["unexpected_keys"])
    notes = (f"{len(unused)} tensors have no place in the model, {unused[0]} among them",) if unused else ()
    return model.to(device).eval(), notes


def _predict(config: Config, source: str) -> tuple[ModelKV | None, UnsupportedArchitecture | None]:
    try:
        return read_model(config.to_dict(), source=source), None
    except UnsupportedArchitecture as error:
        return None, error


def _conversion_warnings(folder: Path) -> tuple[str, ...]:
    manifest = read_manifest(folder)
    return manifest.warnings if manifest is not None else ()


def _notes_on_files(folder: Path) -> tuple[str, ...]:
    return (*_conversion_warnings(folder), *_adapter_notes(folder))


def _adapter_notes(folder: Path) -> tuple[str, ...]:
    """An adapter beside the model, which transformers applies only where peft is installed."""
    found = next(iter(sorted(folder.glob("adapter_model.*"))), None)
    if found is None or not (folder / "adapter_config.json").is_file() or is_peft_available():
        return ()
    return (f"the adapter {found.name} beside the model is not applied: merge it with peft",)


def _stated_generation_defaults(model: Any) -> dict[str, Any]:
    stated = model.generation_config.to_diff_dict()
    return {name: value for name, value in stated.items() if value is not None and not name.startswith("_")}


def quiet_transformers() -> None:
    """For a program whose own the screen is: no bars and no advice; errors come as exceptions all the same."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def _loading(
    what: str, folder: Path, *, stated: Mapping[str, Any] | None = None, doubt: LlminferError | None = None
) -> Iterator[None]:
    """What the libraries raise becomes one line that names the folder; no room becomes our own error.

    `doubt` is what our own reading of the config stumbled over; where that is a field, it may be the reason.
    """
    reason = f": {doubt.message.removeprefix(f'{folder}: ')}" if isinstance(doubt, UnknownConfigField) else ""
    with foreign_errors(folder, f"cannot load the {what}{reason}", stated=stated):
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                message = f"out of memory while loading the {what} of {folder}"
                raise OutOfMemory(message, hint="try --dtype bfloat16, or a smaller model") from error
            if "trust_remote_code" in str(error):
                raise ModelNotAvailable(f"{folder}: the {what} {NEEDS_CODE}", hint=TRUST_HINT) from error
            if isinstance(error, pickle.UnpicklingError):
                # torch's own message advises to switch the protection off
                message = f"{folder}: the pickled {what} hold more than tensors, or are damaged, so they are not read"
                raise ModelNotAvailable(message, hint="ask for safetensors: a pickle can run any program") from error
            if isinstance(error, OSError) and error.errno is not None:
                raise ModelNotAvailable(f"cannot read {error.filename or folder}: {error.strerror}") from error
            raise
