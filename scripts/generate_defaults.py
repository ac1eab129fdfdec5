"""Write `llminfer/kv/defaults.json`: class defaults and field names of transformers' config classes.

Only fields that the rules in `llminfer/kv/` name are kept: every string in their source that is a
field of a config class. Run it after a change of the rules or of the installed transformers.

    python scripts/generate_defaults.py [--check]
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

KV = Path(__file__).resolve().parent.parent / "llminfer" / "kv"
TEXT_KEYS = ("decoder", "generator", "text_config")  # as `PreTrainedConfig.get_text_config(decoder=True)` has them


def main() -> int:
    """Write the file, or with --check say whether it is as it would be written."""
    text = render()
    target = KV / "defaults.json"
    if "--check" in sys.argv[1:]:
        return 0 if target.read_text(encoding="utf-8") == text else 1
    target.write_text(text, encoding="utf-8")
    return 0


def render() -> str:
    """The content of the data file, a line for each model type."""
    types = entries(fields_read())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in types.items())
    return f'{{"transformers": {json.dumps(transformers.__version__)}, "types": {{\n{lines}\n}}}}\n'


def fields_read() -> set[str]:
    """Every string in the rules' source, so a superset of the fields they read."""
    found: set[str] = set()
    for file in sorted(KV.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value, *node.value.split(".")}
    # fields whose name the rules build with the prefix of the sliding layers
    return found | {f"swa_{name}" for name in found} - {"model_type"}


def entries(read: set[str]) -> dict[str, dict[str, Any]]:
    """The entry of every model type that has one, in order of their names."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    while waiting:
        model_type = waiting.pop()
        if model_type in found or model_type not in CONFIG_MAPPING:
            continue
        found[model_type], text_type = entry(CONFIG_MAPPING[model_type], read)
        if text_type:
            waiting.append(text_type)
    return {name: found[name] for name in sorted(found) if found[name]}


def entry(config_class: type[PreTrainedConfig], read: set[str]) -> tuple[dict[str, Any], str | None]:
    """A config class as its entry, and the model type of the language model inside it."""
    # a field may be read by its common name or by the type's own
    read = read | {own for name, own in config_class.attribute_map.items() if name in read}
    values: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(config_class)
        if field.name in read and (value := plain_default(field)) is not None
    }
    names = {name: own for name, own in config_class.attribute_map.items() if {name, own} & read}
    for key, nested in config_class.sub_configs.items():
        if key in read - {*TEXT_KEYS} and dataclasses.is_dataclass(nested):
            values[key] = entry(nested, read)[0].get("values", {})
    result: dict[str, Any] = {}
    if values:
        result["values"] = values
    if names:
        result["names"] = names
    key, text_type = text_part(config_class)
    if key:
        result |= {"text_key": key} | ({"text_type": text_type} if text_type else {})
    return result, text_type


def plain_default(field: dataclasses.Field[Any]) -> Any:
    """A field's default when it is one that JSON can hold, else None."""
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, tuple):
        value = list(value)
    return value if isinstance(value, (bool, int, float, str, list)) else None


def text_part(config_class: type[PreTrainedConfig]) -> tuple[str | None, str | None]:
    """Where a composite config keeps its language model, and of which type that is by default."""
    for key in TEXT_KEYS:
        nested = config_class.sub_configs.get(key)
        if nested is None:
            continue
        if model_type := getattr(nested, "model_type", ""):
            return key, model_type
        # a composite that takes any text config has its own idea of which it is when none is given
        try:
            return key, getattr(config_class(), key).model_type
        except StrictDataclassError:  # one that is not valid without more fields
            return key, None
    return None, None


if __name__ == "__main__":
    sys.exit(main())
