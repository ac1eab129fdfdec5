"""Reading a model's config.json: nested text configs, old names, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llminfer.errors import ModelNotAvailable, UnknownConfigField
from llminfer.kv.layer import Field

# a multimodal config keeps the language model's sizes under one of these; sizes beside them belong to something else
TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
_MISSING = object()


def load_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, which is a config.json or a folder that has one.

    Raises:
        ModelNotAvailable: when there is no such file, or it holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "a model folder has a config.json" if path.is_dir() else None
        raise ModelNotAvailable(f"no such file: {file}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotAvailable(f"cannot read {file}: {error}") from error
    return parse_config(text, source=str(file))


def parse_config(text: str, *, source: str) -> dict[str, Any]:
    """The JSON object in `text`; `source` names it in errors."""
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelNotAvailable(f"{source} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelNotAvailable(f"{source} is not a JSON object")
    return config


@dataclass(slots=True, kw_only=True)
class ConfigView:
    """A config's text part, read field by field; what was read is kept with its origin."""

    config: Mapping[str, Any]
    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults_origin: str = ""
    used: dict[str, Field] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """The config's model type, empty when it names none."""
        return str(self.config.get("model_type") or "")

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set (dotted names go inside), else the class default, else `default`."""
        for origin, mapping in (("file", self.config), (self.defaults_origin, self.defaults)):
            for name in names:
                value = _dig(mapping, name)
                if value is not _MISSING and value is not None:
                    self.used[name] = Field(name=name, value=value, origin=origin)
                    return value
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive integer field.

        Raises:
            UnknownConfigField: when none of `names` is set, or the value is not a positive integer.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise UnknownConfigField(
                f"{self.source}: no {' or '.join(names)} in the config",
                hint=f"it has: {', '.join(sorted(self.config)) or 'nothing'}",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnknownConfigField(f"{self.source}: {names[0]} is {value!r}, not a positive integer")
        return value

    def note(self, name: str, value: object, origin: str) -> None:
        """Keep a derived value with the rule that gave it."""
        self.used[name] = Field(name=name, value=value, origin=origin)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own part of a config: `text_config` and its other names, however deep."""
    for key in TEXT_CONFIG_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            inner = text_config(nested)
            # the element type is often stated outside only
            outer_dtype = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None}
            return {**outer_dtype, **inner}
    return config


def _dig(mapping: Mapping[str, Any], dotted: str) -> Any:
    value: Any = mapping
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value
