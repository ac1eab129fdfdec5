"""What a model's cache really holds: its own classes, run without weights, and their tensors walked.

`dry_run` builds the model of a config on the `meta` device, where tensors have shapes but no
memory, decodes a few tokens the way `generate` does and reads every tensor of the cache. It takes
seconds and no memory to speak of, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache

from llminfer.errors import UnsupportedArchitecture

# counters and constants that cache layers hold as tensors; they say where the cache is, not what it holds
_BOOKKEEPING = frozenset({"_sliding_window_tensor", "cumulative_length", "indexer_cumulative_length", "seqlen_offset"})
# the names under which a model's output carries what the next step needs
_MODULE_STATES = frozenset({"conv1d_state", "recurrent_states"})
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """One tensor of a cache: its shape, its element type, and its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One layer of a cache as measured.

    `storage_bytes` is what its tensors keep allocated: more than their own bytes where they are
    views of something larger.
    """

    tensors: tuple[TensorBytes, ...] = ()
    storage_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the layer's tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A cache after `tokens` tokens of every sequence went through the model."""

    tokens: int
    layers: tuple[LayerBytes, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(layer.size_bytes for layer in self.layers)

    @property
    def storage_bytes(self) -> int:
        """Bytes that stay allocated for all tensors."""
        return sum(layer.storage_bytes for layer in self.layers)


def measure_cache(cache: Any) -> tuple[LayerBytes, ...]:
    """Every tensor of a cache, layer by layer.

    Works on transformers' cache classes, on tuples and lists with an entry per layer (XLNet's
    `mems`) and on RWKV's tensors with the layers in the last dimension.
    """
    return tuple(_measure_layer(tensors) for tensors in _layer_tensors(cache))


def measure_model(model: Any, cache: Any) -> tuple[LayerBytes, ...]:
    """The cache of a model, with the states that RecurrentGemma keeps in its modules and not in the cache."""
    layers = _layer_tensors(cache)
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if key in _MODULE_STATES and value is not None}
        if kept:
            index = next(int(part) for part in name.split(".") if part.isdigit())
            layers[index] |= _named_tensors(kept)
    return tuple(_measure_layer(tensors) for tensors in layers)


def decode(model: Any, ids: torch.Tensor, *, steps: int) -> Iterator[tuple[int, Any]]:
    """Feed `ids`, then `steps` single tokens, as `generate` would.

    The model prepares its own inputs, so types that take more than ids (or take them otherwise) work.

    Yields:
        The tokens seen so far and the cache, after each forward.
    """
    kwargs: dict[str, Any] = {"use_cache": True, "attention_mask": torch.ones_like(ids)}
    if model._supports_default_dynamic_cache():
        kwargs["cache"] = DynamicCache(config=model.config.get_text_config(decoder=True))
    for step in range(steps + 1):
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if step else None, is_first_iteration=not step, **kwargs
        )
        outputs = model(**inputs, return_dict=True)
        kept = next((outputs[name] for name in CACHE_NAMES if outputs.get(name) is not None), kwargs.get("cache"))
        yield ids.shape[-1], kept
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        # which token it is never matters to the size of a cache
        ids = torch.cat([ids, ids[:, -1:]], dim=-1)


def _layer_tensors(cache: Any) -> list[dict[str, torch.Tensor]]:
    if cache is None:
        return []
    if isinstance(cache, EncoderDecoderCache):
        return _layer_tensors(cache.self_attention_cache)
    if isinstance(cache, Cache):
        layers = [_named_tensors(vars(layer)) for layer in cache.layers]
        # MiniMax keeps the states of its linear layers beside the list of layers
        for index, state in enumerate(getattr(cache, "linear_cache", ())):
            layers.extend({} for _ in range(index + 1 - len(layers)))
            layers[index] |= _named_tensors({"linear_cache": state})
        return layers
    if hasattr(cache, "states_cache"):  # Reformer
        return [
            _named_tensors({"states": states, "buckets": buckets})
            for states, buckets in zip(cache.states_cache, cache.buckets_cache, strict=True)
        ]
    if hasattr(cache, "rnn_state"):  # xLSTM
        return [_named_tensors({"state": state}) for state in cache.rnn_state.values()]
    if isinstance(cache, list) and all(isinstance(part, torch.Tensor) for part in cache):  # RWKV
        return [
            _named_tensors({"state": [part[..., index] for part in cache]}) for index in range(cache[0].shape[-1])
        ]
    if isinstance(cache, tuple):  # XLNet
        return [_named_tensors({"mems": layer}) for layer in cache]
    raise UnsupportedArchitecture(f"cannot read a cache of type {type(cache).__name__}")


def _named_tensors(attributes: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors in attributes and in the dicts, lists and tuples among them, each tensor once."""
    found: dict[str, torch.Tensor] = {}
    for key, value in attributes.items():
        name = f"{prefix}{key}"
        if name in _BOOKKEEPING:
            continue
        if isinstance(value, torch.Tensor):
            # one tensor under two names (shared keys and values) is held once
            if not any(value is other for other in found.values()):
                found[name] = value
        elif isinstance(value, Mapping):
            found |= _named_tensors(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            found |= _named_tensors(dict(enumerate(value)), f"{name}.")
    return found


def _measure_layer(tensors: Mapping[str, torch.Tensor]) -> LayerBytes:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    return LayerBytes(
        tensors=tuple(
            TensorBytes(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                size_bytes=tensor.numel() * tensor.element_size(),
            )
            for name, tensor in tensors.items()
        ),
        storage_bytes=sum(storages.values()),
    )
