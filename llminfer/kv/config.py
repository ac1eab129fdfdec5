"""Reading a model's config.json: nested text configs, old names, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llminfer.errors import UnknownConfigField
from llminfer.foreign import read_json_object, refuse_folder, refuse_object
from llminfer.kv.layer import Field

# a multimodal config keeps the language model's sizes under one of these; sizes beside them belong to something else
TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
_MISSING = object()
# far above any real model: every layer becomes a record, and a size is one of some file or memory
MOST_LAYERS = 2_000
MOST = 2**63 - 1


def load_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, which is a config.json or a folder that has one.

    Raises:
        ModelNotAvailable: when there is no such file, or it holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if file != path and not file.exists():
        refuse_folder(path)
    config = read_json_object(file)
    refuse_object(config, file)
    return config


@dataclass(slots=True, kw_only=True)
class ConfigView:
    """A config's text part, read field by field; what was read is kept with its origin.

    `names` are the model type's own names for common fields (`n_layer` for `num_hidden_layers`).
    `nested` says that the config is a part of a larger one: transformers writes such parts as
    differences from their class, so there and only there a missing size is the class default.
    `index` is the layer that a rule is asked about.
    """

    config: Mapping[str, Any]
    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults_origin: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    nested: bool = False
    index: int = 0
    used: dict[str, Field] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """The config's model type, empty when it names none."""
        return str(self.config.get("model_type") or "")

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set (dotted names go inside), else the class default, else `default`.

        A field that the file sets to null is unset on purpose: its class default does not apply.
        """
        spellings = [spelling for name in names for spelling in self._spellings(name)]
        stated = {name: value for name in spellings if (value := _dig(self.config, name)) is not _MISSING}
        for name, value in stated.items():
            if value is not None:
                self.used[name] = Field(name=name, value=value, origin="file")
                return value
        for name in spellings if not stated else ():
            value = _dig(self.defaults, name)
            if value is not _MISSING and value is not None:
                self.used[name] = Field(name=name, value=value, origin=self.defaults_origin)
                return value
        return default

    def _spellings(self, name: str) -> list[str]:
        """A field under its common name and under the type's own, whichever of them was asked for."""
        own = self.names.get(name)
        return [name, *([own] if own else []), *(common for common, other in self.names.items() if other == name)]

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """An integer field of at least `least`.

        Raises:
            UnknownConfigField: when none of `names` is set, or the value is no such integer.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise self.missing(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise UnknownConfigField(f"{self.source}: {self._as_stated(names)} is {value!r}, not {what}")
        if value > MOST:
            raise UnknownConfigField(f"{self.source}: {self._as_stated(names)} is {value}, more than any model has")
        return value

    def size(self, *names: str) -> int:
        """A size that makes the model what it is: never a class default, unless the config is a nested part.

        Raises:
            UnknownConfigField: when the config does not state it.
        """
        return (self if self.nested else replace(self, defaults={})).integer(*names)

    def _as_stated(self, names: tuple[str, ...]) -> str:
        """The name under which the file has the first of `names` that it has."""
        spellings = (spelling for name in names for spelling in self._spellings(name))
        return next((name for name in spellings if _dig(self.config, name) not in (_MISSING, None)), names[0])

    def integers(self, *names: str) -> list[int] | None:
        """A list of integers, or None when it is not set."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, int) and abs(item) <= MOST for item in value):
            raise UnknownConfigField(f"{self.source}: {self._as_stated(names)} is {value!r}, not a list of integers")
        return value

    def missing(self, *names: str) -> UnknownConfigField:
        """The error that none of `names` is there."""
        return UnknownConfigField(
            f"{self.source}: no {' or '.join(names)} in the config",
            hint=f"it has: {', '.join(sorted(map(str, self.config))) or 'nothing'}",
        )

    def note(self, name: str, value: object, origin: str) -> None:
        """Keep a derived value with the rule that gave it."""
        self.used[name] = Field(name=name, value=value, origin=origin)

    def at(self, index: int, overrides: Mapping[str, Any] | None = None) -> ConfigView:
        """The view of one layer: the config with that layer's own values over it."""
        return replace(self, index=index, config={**self.config, **(overrides or {})})


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own part of a config: `text_config` and its other names, however deep."""
    return text_part(config)[0]


def text_part(config: Mapping[str, Any], key: str | None = None) -> tuple[Mapping[str, Any], bool]:
    """The language model's part of a config, and whether it was nested in it.

    Args:
        config: a whole config.
        key: where this config's model type keeps it; the usual places when not given.
    """
    for name in (key,) if key else TEXT_CONFIG_KEYS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            inner, _ = text_part(nested)
            # the element type is often stated outside only
            if all(inner.get(name) is None for name in ("dtype", "torch_dtype")):
                inner = {**inner, "dtype": config.get("dtype") or config.get("torch_dtype")}
            return inner, True
    return config, False


def _dig(mapping: Mapping[str, Any], dotted: str) -> Any:
    value: Any = mapping
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value
