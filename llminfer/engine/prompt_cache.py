"""A run's cache in a file: what a later prompt begins with as well need not be fed again.

The file is one safetensors file: a tensor per kept part of a layer, the token ids, and metadata that
names all that shapes keys and values: the model by a digest over all of its files, how its weights are
held and by what it is computed, the kind of cache. Only a run of the same may use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llminfer.atomic import replacing
from llminfer.engine.forward.cache_reuse import common_prefix
from llminfer.engine.forward.protocol import Forward
from llminfer.engine.kv_cache.kinds import TokenSchedule, make_cache, predict_cache
from llminfer.engine.kv_cache.layers import STATES, row_of
from llminfer.engine.kv_cache.tensors import WHOLE_CACHES
from llminfer.engine.machine.disk_cache import file_digest
from llminfer.engine.model import LoadedModel
from llminfer.errors import GenerationFailed, PromptCacheMismatch, UsageError
from llminfer.foreign import parse_json
from llminfer.params import CacheOptions
from llminfer.text import first_line

FORMAT = "llminfer prompt cache"
# raise it whenever another layout is written, or more has to be the same
FORMAT_VERSION = 2
_IDS = "token_ids"
_NEW_FILE = "delete the file to begin a new one"


def load_prompt_cache(
    file: Path, loaded: LoadedModel, options: CacheOptions, *, max_tokens: int | None, prompt_ids: Sequence[int]
) -> tuple[Any, Sequence[int]] | None:
    """A cache with the tokens that the prompt begins with, and those tokens; None when there are none.

    At least the prompt's last token is left to feed.

    Raises:
        PromptCacheMismatch: when the file is damaged, was made by a run of another kind, or would have to be
            cut back where its layers cannot.
    """
    if not file.exists():
        return None
    with _reading(file), safe_open(str(file), framework="pt") as saved:
        metadata = saved.metadata() or {}
        _check_metadata(file, metadata, _identity(loaded, options))
        ids = _saved_ids(file, saved.get_tensor(_IDS))
        reuse = common_prefix(ids, prompt_ids[:-1])
        if reuse == 0:
            return None
        cache = make_cache(options, loaded.model, max_tokens)
        tensors = _saved_layers(saved, len(cache.layers))
        if parse_json(metadata["layers"]) != [type(layer).__name__ for layer in cache.layers]:
            raise PromptCacheMismatch(f"{file} is damaged: its layers are not of this model's kinds", hint=_NEW_FILE)
        _check_sizes(file, tensors, len(ids), loaded, options)
        for layer, parts in zip(cache.layers, tensors, strict=True):
            _check_cut(file, layer, parts, len(ids), reuse)
            _fill(layer, {name: part.to(loaded.device) for name, part in parts.items()}, reuse)
    return cache, ids[:reuse]


def save_prompt_cache(file: Path, loaded: LoadedModel, forward: Forward, options: CacheOptions) -> None:
    """Write what the forward has cached to the file, whole or not at all.

    Raises:
        GenerationFailed: when it cannot be written, or the cache is of a kind that cannot be saved.
    """
    ids, cache = list(forward.ids), forward.cache
    if not ids or not forward.crop(len(ids)):
        raise GenerationFailed(f"{file} is not written: the run was broken off inside a step")
    if type(cache) not in WHOLE_CACHES or any(row_of(layer).restore is None for layer in cache.layers):
        raise GenerationFailed(f"{file} is not written: {loaded.name} keeps its cache in a way of its own")
    tensors = {_IDS: torch.tensor(ids, dtype=torch.int64)}
    for index, layer in enumerate(cache.layers):
        for name, part in _parts(layer, len(ids)).items():
            # a copy: tensors that are views of one another cannot be written
            tensors[f"layers.{index}.{name}"] = part.detach().to("cpu", copy=True).contiguous()
    layers = json.dumps([type(layer).__name__ for layer in cache.layers])
    metadata = {**_identity(loaded, options), "layers": layers}
    try:
        with replacing(file) as beside:  # readable by its owner alone, since it holds the prompt
            save_file(tensors, beside, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise GenerationFailed(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        if not file.is_file():
            raise PromptCacheMismatch(f"{file} is not a file")
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        reason = _printable(first_line(error))
        raise PromptCacheMismatch(f"cannot read the prompt cache {file}: {reason}", hint=_NEW_FILE) from error


# Who may use the file


def _identity(loaded: LoadedModel, options: CacheOptions) -> dict[str, str]:
    """What must be the same in the run that writes and the one that reads.

    How a prompt was fed is not in it: reading the file is another way of feeding.
    """
    if loaded.folder is None:
        raise UsageError("a prompt cache needs a model that was loaded from a folder")
    return {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "model": model_digest(loaded.folder),
        "model_name": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "weights": loaded.execution.weights_format or "",
        "engine": loaded.execution.engine,
        "compiled": "yes" if loaded.execution.compiled else "",
        "transformers": transformers.__version__,
        "cache": options.name,
        "window": str(options.window or ""),
    }


def _check_metadata(file: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    if saved.get("format") != FORMAT:
        raise PromptCacheMismatch(f"{file} is a safetensors file, but not a prompt cache", hint="give another file")
    names = {name: name.replace("_", " ") for name in here if name != "model_name"}
    differing = [name for name in names if saved.get(name) != here[name]]
    if "model" in differing:
        was = _printable(saved.get("model_name", "unknown"))
        other = "another model" if was != here["model_name"] else "other weights of that name"
        raise PromptCacheMismatch(f"{file} was made with {other} ({was}, this is {here['model_name']})", hint=_NEW_FILE)
    parts = [
        f"{names[name]} {_printable(saved.get(name) or 'none')}, here {here[name] or 'none'}" for name in differing
    ]
    if parts:
        raise PromptCacheMismatch(f"{file} does not fit this run: {'; '.join(parts)}", hint=_NEW_FILE)


def _printable(text: str) -> str:
    """What a file claims, fit for one line of a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:200])


def model_digest(folder: Path) -> str:
    """Of all files that decide what a token's keys are: config, weights, the checkpoint's own code.

    All bytes of the weights: a fine-tuned model differs from its base in nothing else.
    """
    suffixes = {".safetensors", ".bin", ".py"}
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes or path.name == "config.json")
    return _files_digest(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@lru_cache(maxsize=4)
def _files_digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Once a process for the same sizes and times: a run asks when it reads and again when it writes.

    Each file is hashed once as long as it stays as it is: the cache folder keeps an index of digests.
    """
    paths, whole = [path for path, _, _ in files], hashlib.sha256()
    with ThreadPoolExecutor(max_workers=4) as pool:
        for path, digest in zip(paths, pool.map(file_digest, paths), strict=True):
            whole.update(f"{path.name}\0{digest}\n".encode())
    return whole.hexdigest()


# What is in it


def _saved_ids(file: Path, tensor: Tensor) -> list[int]:
    if tensor.dtype is not torch.int64 or tensor.dim() != 1 or not len(tensor):
        raise PromptCacheMismatch(f"{file} is damaged: its token ids are {tensor.dtype} {tuple(tensor.shape)}")
    return [int(token_id) for token_id in tensor.tolist()]


def _saved_layers(saved: Any, layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer by their names within it."""
    tensors: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name in saved.keys():  # noqa: SIM118 - a handle of the file, not a dict
        if name != _IDS:
            prefix, index, part = name.split(".", maxsplit=2)
            if prefix != "layers" or not 0 <= int(index) < layers:
                raise ValueError(f"it has a tensor {name[:40]!r}")
            tensors[int(index)][part] = saved.get_tensor(name)
    return tensors


def _check_sizes(
    file: Path, tensors: Sequence[Mapping[str, Tensor]], tokens: int, loaded: LoadedModel, options: CacheOptions
) -> None:
    """Compare the file's tensors with what so many tokens of this model take."""
    if loaded.kv is None:
        return
    kv = replace(loaded.kv, dtype=str(loaded.dtype).removeprefix("torch."))
    if options.kind == "growing":  # without the places that hold nothing, its tensors are a dynamic cache's
        options = replace(options, kind="dynamic")
    predicted = predict_cache(options, kv, TokenSchedule(prompt=(tokens,), steps=0, room=tokens))
    if predicted is None or len(predicted.layer_bytes) != len(tensors):
        return
    for index, (parts, expected) in enumerate(zip(tensors, predicted.layer_bytes, strict=True)):
        found = sum(part.numel() * part.element_size() for part in parts.values())
        if found != expected:
            raise PromptCacheMismatch(
                f"{file} is damaged: layer {index} has {found} B, {tokens} tokens take {expected}"
            )


def _check_cut(file: Path, layer: Any, tensors: Mapping[str, Tensor], tokens: int, reuse: int) -> None:
    if "keys" in tensors:
        keys, values = tensors["keys"], tensors["values"]
        whole = keys.dim() == values.dim() == 4 and keys.shape[0] == 1 and keys.shape[:3] == values.shape[:3]
        if not (whole and keys.is_floating_point() and values.is_floating_point()):
            raise PromptCacheMismatch(f"{file} is damaged: keys {tuple(keys.shape)}, values {tuple(values.shape)}")
    if reuse == tokens:
        return
    if row_of(layer).has_states:
        why = "the state of a recurrent layer cannot go back"
    elif "keys" in tensors and tensors["keys"].shape[-2] != tokens:
        why = "what has left a window cannot come back"
    else:
        return
    raise PromptCacheMismatch(
        f"{file} holds {tokens} tokens, of which this prompt begins with {reuse} only: {why}",
        hint="go on from the whole text of the run before, or delete the file to begin a new one",
    )


def _parts(layer: Any, tokens: int) -> dict[str, Tensor]:
    """The tensors of a layer by name, without places that hold no token yet."""
    parts = {}
    if row_of(layer).has_tokens and layer.is_initialized:
        if int(layer.get_seq_length()) != tokens:
            raise GenerationFailed(f"a layer holds {int(layer.get_seq_length())} tokens and not {tokens}")
        parts = {"keys": layer.keys[..., :tokens, :], "values": layer.values[..., :tokens, :]}
    if row_of(layer).has_states:
        for name in STATES:
            states = getattr(layer, name)
            parts.update({f"{name}.{state}": part for state, part in states.items() if part is not None})
    return parts


def _fill(layer: Any, tensors: Mapping[str, Tensor], tokens: int) -> None:
    """Put the first `tokens` tokens into an empty layer."""
    if "keys" in tensors:
        keys, values = (tensors[name][..., :tokens, :] for name in ("keys", "values"))
        restore = row_of(layer).restore
        if restore is None:
            raise ValueError(f"it has keys and values for a {type(layer).__name__}")
        restore(layer, keys, values, tokens)
    for name, update in STATES.items():
        for key, state in tensors.items():
            if key.startswith(f"{name}."):
                getattr(layer, update)(state, state_idx=int(key.removeprefix(f"{name}.")))
