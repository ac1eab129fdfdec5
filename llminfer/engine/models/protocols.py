"""What we call of transformers' models, configs, outputs and caches, which have no types of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Config(Protocol):
    """A model's config, or that of its language model."""

    model_type: str
    is_encoder_decoder: bool
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    _attn_implementation: str

    def get_text_config(self, decoder: bool | None = None) -> Config: ...
    def to_dict(self) -> dict[str, Any]: ...


class Outputs(Protocol):
    """What a forward gives back: logits, and what the next step needs under some name."""

    logits: Tensor

    def get(self, name: str) -> Any: ...


class CausalLM(Protocol):
    """A model that continues ids from left to right; its class says much before any weights are there."""

    config: Config
    forward: Callable[..., Outputs]

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __call__(self, **inputs: Any) -> Outputs: ...
    def modules(self) -> Iterator[torch.nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...
    def get_input_embeddings(self) -> Any: ...
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]: ...
    def _prepare_position_ids_for_generation(self, input_ids: Tensor, kwargs: dict[str, Any]) -> Tensor: ...
    def _update_model_kwargs_for_generation(
        self, outputs: Outputs, kwargs: dict[str, Any], is_encoder_decoder: bool = False
    ) -> dict[str, Any]: ...
    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool: ...


class CacheLayer(Protocol):
    """What the layers of a cache share; `kv_cache/layers.py` knows what else each class has."""

    is_initialized: bool

    def get_seq_length(self) -> int: ...
    def crop(self, tokens_to_remove: int) -> None: ...


class LayeredCache(Protocol):
    """A cache of transformers or of ours; models may have others, of which nothing is known."""

    layers: Sequence[CacheLayer]
