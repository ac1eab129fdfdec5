"""A model ready to run, and what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llminfer.engine.forward.protocol import ForwardFactory
from llminfer.engine.forward.torch_compile import CompiledStep
from llminfer.kv.layer import ModelKV
from llminfer.params import CacheOptions, Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        kv: what the model caches; None when it cannot be predicted, and `kv_unpredicted` says why.
        generation_defaults: what the checkpoint's generation_config states, and nothing else.
        notes: what the user should know, such as a dtype that is not the checkpoint's.
        load_s: from the first look at the files until the weights were on the device.
        startup_s: what came before it by name (`fetch`, `import`, `convert`, `load`), in seconds; a draft
            model's is part of it.
        folder: where the weights are.
        execution: what carries out the arithmetic.
        weights_parts: bytes of all that the model holds, by part: parameters, buffers and packed weights.
        forward_factory: how to feed the model over a growing cache, where it is not the model's own way.
        compiled_steps: the compiled steps made so far, by the tokens that their caches have room for.
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
    startup_s: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None
    execution: Execution = field(default_factory=Execution)
    weights_parts: Mapping[str, int] | None = None
    forward_factory: ForwardFactory | None = None
    compiled_steps: dict[int, CompiledStep] = field(default_factory=dict)

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of all that the model holds."""
        return None if self.weights_parts is None else sum(self.weights_parts.values())

    def forward_factory_for(self, options: CacheOptions) -> ForwardFactory | None:
        """How to feed the model over such a cache, None for its own way."""
        return self.forward_factory if options.name == "growing" else None
