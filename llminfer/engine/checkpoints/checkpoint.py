"""A checkpoint folder, looked over before anything heavy is imported: is all of it there, is it safe?"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable
from llminfer.foreign import INCOMPLETE, beginning_of, name_other_kind, read_json_object
from llminfer.kv.config import MOST_LAYERS, load_config, text_config
from llminfer.kv.rules.attention import HEADS, HIDDEN, LAYERS
from llminfer.kv.weights import PICKLES, first_file, read_safetensors_header, safetensors_names, shards_of

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "tekken.json"),
)
_TOKENIZER_SUFFIXES = (".tiktoken", ".model")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_LAYER_COUNT = re.compile(r"(\w+_)?(layers?|blocks?|depth)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder that has all it needs: its config, its weights, a tokenizer."""

    folder: Path
    tokenizer_folder: Path
    config: Mapping[str, Any]
    pickled: bool
    weights_bytes: int


def inspect_checkpoint(
    folder: Path, *, tokenizer: Path | None = None, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Checkpoint:
    """Look a checkpoint over: its config, its weights against their own headers, its tokenizer files.

    Args:
        tokenizer: its folder, the model's own when not given.
        allow_pickle: accept pickled weights where there are no others.
        trust_remote_code: accept a model that only Python code in the folder knows.

    Raises:
        ModelNotAvailable: naming the file and what is missing or wrong about it.
        UnsupportedArchitecture: when files are missing of a model that could not run with them either.
    """
    check_docstrings()
    config = load_config(folder)
    try:
        pickled, weights_bytes, tensors = _check_weights(folder, config, allow_pickle=allow_pickle)
        _check_counts(config, folder, tensors)
        _check_sizes(text_config(config), folder, weights_bytes)
        tokenizer_folder = _tokenizer_folder(folder, tokenizer)
        if (generation_config := folder / "generation_config.json").exists():
            # transformers passes over one that it cannot read, and with it over the EOS ids
            read_json_object(generation_config)
    except (ModelNotAvailable, OSError) as error:
        # the reason behind the reason, for the price of an import that takes seconds
        from llminfer.engine.models.support import read_architecture

        read_architecture(folder, config, trust_remote_code=trust_remote_code)
        if isinstance(error, OSError):
            raise ModelNotAvailable(f"cannot read {error.filename or folder}: {error.strerror}") from error
        raise
    return Checkpoint(
        folder=folder, tokenizer_folder=tokenizer_folder, config=config, pickled=pickled, weights_bytes=weights_bytes
    )


def check_docstrings() -> None:
    """Refuse a Python without docstrings, from which transformers builds parts of its classes.

    Raises:
        ModelNotAvailable: for Python with -OO.
    """
    if sys.flags.optimize > 1:
        reason = "transformers needs the docstrings that Python drops with PYTHONOPTIMIZE=2 or -OO"
        raise ModelNotAvailable(f"no model can be loaded: {reason}", hint="unset it, or set it to 1")


def _tokenizer_folder(folder: Path, tokenizer: Path | None) -> Path:
    place = tokenizer or folder
    files = sorted(place.iterdir()) if place.is_dir() else []
    found = [file for file in files if file.name in _TOKENIZER_FILES or file.name.endswith(_TOKENIZER_SUFFIXES)]
    if not found:
        raise ModelNotAvailable(
            f"no tokenizer in {place} (looked for {', '.join(_TOKENIZER_FILES)})", hint="give --tokenizer FOLDER"
        )
    whole = [file for file in found if file.name == "tokenizer.json"]  # where there is one, no other is read
    for file in (*(whole or found), *(file for file in files if file.name in _TOKENIZER_CONFIGS)):
        name_other_kind(file, beginning_of(file))
    return place


def _check_weights(folder: Path, config: Mapping[str, Any], *, allow_pickle: bool) -> tuple[bool, int, int | None]:
    """Whether the weights are pickled, the bytes of all weight files, and how many tensors they hold."""
    safetensors = first_file(folder, safetensors_names(config))
    found = safetensors or first_file(folder, PICKLES)
    if found is None:
        raise ModelNotAvailable(
            f"no weights in {folder}",
            hint="looked for model.safetensors and its index (and pickles, with --allow-pickle)",
        )
    if not safetensors and not allow_pickle:
        raise ModelNotAvailable(
            f"{folder} has pickled weights only ({found.name})",
            hint="convert them to safetensors, or --allow-pickle reads them with torch's restricted unpickler",
        )
    shards = shards_of(found) if found.suffix == ".json" else {found: set[str]()}
    tensors = sum(_check_shard(shard, names, found) for shard, names in shards.items()) if safetensors else None
    return not safetensors, sum(shard.stat().st_size for shard in shards), tensors


def _check_shard(shard: Path, names: set[str], index: Path) -> int:
    """How many tensors a file holds, after a look at its header and at those that the index places there."""
    held = read_safetensors_header(shard).names
    if absent := sorted(names - held):
        raise ModelNotAvailable(f"{shard} lacks the tensor {absent[0]}, which {index.name} places there")
    return len(held)


def _check_counts(config: Mapping[str, Any], source: Path, tensors: int | None) -> None:
    """Refuse a config that claims more layers than there can be: the classes would build them one by one."""
    most = MOST_LAYERS if tensors is None else max(tensors, 1)
    for name in LAYERS:
        value = text_config(config).get(name)
        if type(value) is int and value > most:
            what = f"{name} is {value}, and the weights are {tensors} tensors" if tensors else f"{name} is {value}"
            raise ModelNotAvailable(f"{source / 'config.json'}: {what}", hint=INCOMPLETE)
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, source, None)
        elif type(value) is int and value > MOST_LAYERS and _LAYER_COUNT.fullmatch(name):
            raise ModelNotAvailable(f"{source / 'config.json'}: {name} is {value}, more than any model has")


def _check_sizes(config: Mapping[str, Any], source: Path, weights_bytes: int) -> None:
    """Refuse a config whose matrices are far larger than all weights: memory would be taken for them first."""
    width = next((value for name in HIDDEN if type(value := config.get(name)) is int), 0)
    for name in ("vocab_size", "intermediate_size", *HEADS):
        value = config.get(name)
        # an element takes a bit at least, and small models cost nothing
        if type(value) is int and value * width > max(64 * weights_bytes, 1 << 24):
            what = f"{name} is {value} at a width of {width}, and the weights are {weights_bytes} bytes"
            raise ModelNotAvailable(f"{source / 'config.json'}: {what}", hint=INCOMPLETE)
