"""Class defaults and field names of transformers' config classes, from a data file made from them.

`defaults.json` is written by `scripts/generate_defaults.py` and holds, for each model type, only
the fields that the rules in `kv/` read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeDefaults:
    """What transformers knows about a model type's config beyond what a file says.

    `values` are the class defaults. `names` are the type's own names for common fields. `text_key`
    and `text_type` say where a composite config keeps its language model's part, and of which
    model type that is when the file does not say.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    text_key: str | None = None
    text_type: str | None = None


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((files("llminfer.kv") / "defaults.json").read_text(encoding="utf-8"))
    return data


def type_defaults(model_type: str) -> TypeDefaults:
    """The entry of a model type; an empty one when the file has none."""
    return TypeDefaults(**_data()["types"].get(model_type, {}))


def defaults_origin() -> str:
    """How to name a class default's origin: `class default of transformers 5.24.0`."""
    return f"class default of transformers {_data()['transformers']}"
