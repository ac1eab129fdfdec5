"""What others wrote, read with nothing taken on trust: JSON in bounds, and files and folders of another kind.

A number, a length or a depth in such a file costs nothing until it was compared with a bound. What is
no model at all is called what it is, with what to do instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from llminfer.errors import ModelNotAvailable

# far above any real file, and low enough for a second and 512 MiB
MOST_JSON_BYTES = 32 * 1024**2
MOST_JSON_VALUES = 1 << 20
MOST_JSON_DEPTH = 64
MOST_DIGITS = 300  # such an integer is still a float; model_max_length of real tokenizers has 31
INCOMPLETE = "is the download incomplete?"

# how a file begins that is not what its name says: (pattern, what it is, what to do)
_BEGINNINGS = tuple(
    (re.compile(pattern, re.IGNORECASE), what, hint)
    for pattern, what, hint in (
        (rb"\Z", "is empty", "download it again"),
        (rb"version https://git-lfs", "is a Git LFS pointer, not the file itself", "git lfs pull fetches the file"),
        (
            rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|\?xml)",
            "is a web page, not the file itself",
            "download the file: on the Hub its address has /resolve/ where the page has /blob/",
        ),
        (rb"GGUF", "is a GGUF file", "give it as the model"),
        (rb"gg(ml|mf|jt|la)|lmgg|fmgg|tjgg|algg", "is in a format older than GGUF", "take a GGUF file of this model"),
        (rb"PK\x03\x04", "is a zip archive or a pickle of torch", "take safetensors, or a GGUF file"),
        (rb"\x80[\x02-\x05]", "is a pickle", "take safetensors, or a GGUF file"),
        (rb"\x1f\x8b|7z\xbc\xaf|\xfd7zXZ|\x28\xb5\x2f\xfd|BZh", "is an archive", "unpack it"),
        (rb"\x89HDF", "is an HDF5 file, of Keras or TensorFlow", "take safetensors, or a GGUF file"),
        (rb".{8}\{\s*\"", "is a safetensors file", "give the folder that it is in"),
    )
)
# what a folder without a model's config has, first match first: (glob, what it holds, what to do)
_FOLDERS = (
    ("model_index.json", "holds a diffusion pipeline", "take a model that writes text"),
    ("snapshots/*/config.json", "is a folder of the Hub's cache", "give {found.parent}, or the model's Hub id"),
    ("checkpoint-*/config.json", "holds checkpoints of a training", "give one of them, like {found.parent}"),
    ("*.gguf", "holds GGUF files", "give one of them, like {found}"),
    ("params.json", "holds a model in its maker's own format (params.json)", "take its Hugging Face version"),
    ("*.onnx", "holds an ONNX model", "take safetensors, or a GGUF file"),
    ("*.h5", "holds weights of TensorFlow", "take safetensors, or a GGUF file"),
    ("*.msgpack", "holds weights of Flax", "take safetensors, or a GGUF file"),
    ("*/config.json", "holds other models", "give one of them, like {found.parent}"),
    ("*.safetensors", "holds weights without a config.json", INCOMPLETE),
    ("*.bin", "holds pickled weights without a config.json", INCOMPLETE),
    ("tokenizer*", "holds a tokenizer alone", "give it as --tokenizer, and a model's folder as the model"),
)
# JSON files that are no config: (fields that only they have, what they are)
_OBJECTS = (
    ({"weight_map"}, "an index of weights"),
    ({"peft_type"}, "the config of an adapter"),
    ({"_diffusers_version"}, "a part of a diffusion pipeline"),
    ({"model", "added_tokens"}, "a tokenizer"),
    ({"tokenizer_class"}, "the config of a tokenizer"),
    ({"eos_token_id", "transformers_version"}, "a generation config"),
)


def parse_json(text: str | bytes) -> Any:
    """The JSON value in `text`. Of keys that occur twice the last one holds, as in every reader of these files.

    Raises:
        ValueError: when it is no JSON, or holds more, deeper or longer numbers than any real file.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    if len(text) > MOST_JSON_BYTES or sum(map(text.count, "[{,")) > MOST_JSON_VALUES:
        raise ValueError(f"more than {MOST_JSON_BYTES} characters or {MOST_JSON_VALUES} values")
    try:
        value = json.loads(text, parse_int=_integer)
        level = [value]
        for _ in range(MOST_JSON_DEPTH):
            level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
    except RecursionError:
        level = [text]
    if level:
        raise ValueError(f"nested more than {MOST_JSON_DEPTH} deep")
    return value


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of others.

    Raises:
        ModelNotAvailable: naming the file and what is wrong with it, or what it is instead.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_JSON_BYTES + 1)
    except FileNotFoundError:
        raise ModelNotAvailable(f"no such file: {file}") from None
    except OSError as error:
        raise ModelNotAvailable(f"cannot read {file}: {error.strerror}") from error
    return json_object(data, source=file)


def json_object(data: str | bytes, *, source: Path | str) -> dict[str, Any]:
    """The JSON object in `data`; `source` names it in errors, which are those of `read_json_object`."""
    try:
        value = parse_json(data.decode("utf-8") if isinstance(data, bytes) else data)
    except ValueError as error:
        name_other_kind(source, data.encode(errors="replace") if isinstance(data, str) else data)
        raise ModelNotAvailable(f"{source} is not JSON: {error}", hint=INCOMPLETE) from None
    if not isinstance(value, dict):
        raise ModelNotAvailable(f"{source} is not a JSON object")
    return value


def name_other_kind(source: Path | str, beginning: bytes) -> None:
    """Refuse a file by the name of what it is, where its beginning tells that.

    Raises:
        ModelNotAvailable: naming the kind and what to do.
    """
    for pattern, what, hint in _BEGINNINGS:
        if pattern.match(beginning):
            raise ModelNotAvailable(f"{source} {what}", hint=hint)


def beginning_of(file: Path) -> bytes:
    """The first bytes of a file, none where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(512)
    except OSError:
        return b""


def refuse_folder(folder: Path) -> NoReturn:
    """Refuse a folder without a config.json by the name of what it holds.

    Raises:
        ModelNotAvailable: always.
    """
    adapter, what, hint = folder / "adapter_config.json", "", "a model folder has a config.json"
    if adapter.is_file():
        base = read_json_object(adapter).get("base_model_name_or_path")
        what = f": the folder holds an adapter for {base or 'a model that it does not name'}"
        hint = "merge it into its base model first (peft: merge_and_unload), and give the merged model"
    for glob, held, advice in () if what else _FOLDERS:
        found = min(folder.glob(glob), default=None)
        if found is not None:
            what, hint = f": the folder {held}", advice.format(found=found)
            break
    raise ModelNotAvailable(f"no such file: {folder / 'config.json'}{what}", hint=hint)


def refuse_object(config: Mapping[str, Any], source: Path | str) -> None:
    """Refuse a JSON object that is not a model's config by the name of what it is.

    Raises:
        ModelNotAvailable: naming it.
    """
    if "model_type" in config:
        return
    for fields, what in _OBJECTS:
        if fields <= config.keys():
            raise ModelNotAvailable(f"{source} is {what}, not of a model", hint="give the model's config.json")
