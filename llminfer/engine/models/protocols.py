"""What we call of transformers' models, configs and outputs, which have no types of their own."""

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
    dtype: torch.dtype | None

    def get_text_config(self, decoder: bool | None = None) -> Config:
        """The language model's own part."""
        ...


class Outputs(Protocol):
    """What a forward gives back: the logits of the last positions, and what the next step needs under some name."""

    logits: Tensor

    def get(self, name: str) -> Any:
        """The value under a name, None where there is none."""
        ...


class CausalLM(Protocol):
    """A model that continues ids from left to right, or its class where no weights are there yet."""

    config: Config
    forward: Callable[..., Outputs]

    def __call__(self, **inputs: Any) -> Outputs:
        """One forward."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What its parameters are made of."""
        ...

    def modules(self) -> Iterator[torch.nn.Module]:
        """All of its modules."""
        ...

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All of its modules by their paths."""
        ...

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """What a step's forward is to be called with."""
        ...

    def _prepare_position_ids_for_generation(self, input_ids: Tensor, kwargs: dict[str, Any]) -> Tensor: ...

    def _update_model_kwargs_for_generation(
        self, outputs: Outputs, kwargs: dict[str, Any], is_encoder_decoder: bool = False
    ) -> dict[str, Any]: ...

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool: ...


class CacheLayer(Protocol):
    """What the layers of a cache share; `kv_cache/layers.py` knows what else each class has."""

    is_initialized: bool

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far."""
        ...

    def crop(self, tokens_to_remove: int) -> None:
        """Take so many of the newest tokens back, as a negative number."""
        ...


class LayeredCache(Protocol):
    """A cache of transformers or of ours; models may have others, of which nothing is known."""

    layers: Sequence[CacheLayer]
