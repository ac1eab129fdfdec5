"""What a model's cache really holds: its own classes, run without weights, and their tensors walked.

`dry_run` builds the model of a config on the `meta` device, where tensors have shapes but no
memory, decodes a few tokens the way `generate` does and reads every tensor of the cache. It takes
seconds and no memory to speak of, whatever the model's size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    MusicgenForCausalLM,
    MusicgenMelodyForCausalLM,
)

from llminfer.engine.kv_cache.tensors import BOOKKEEPING, MODULE_STATES
from llminfer.errors import LlminferError, UnsupportedArchitecture
from llminfer.kv.config import text_config
from llminfer.kv.dtypes import element_type
from llminfer.kv.footprint import footprint
from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State

# a length that no window is as short as, and one that shows what has stopped growing
_PROBES = (3, 6000)
# in this type, a tensor of another type shows that it is pinned to that
_PROBE_DTYPE = "bfloat16"
# MusicGen's decoder drops all but the last token of a prompt when it is given a cache
_PLAIN_INPUTS = frozenset({"musicgen_decoder", "musicgen_melody_decoder"})
# the names under which a model's output carries what the next step needs
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
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer's tensors."""
        return tuple(layer.size_bytes for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.layer_bytes)

    @property
    def storage_bytes(self) -> int:
        """Bytes that stay allocated for all tensors."""
        return sum(layer.storage_bytes for layer in self.layers)


def dry_run(
    config: Mapping[str, Any], *, tokens: int, steps: int = 1, batch: int = 1, dtype: str | None = None
) -> tuple[Measurement, ...]:
    """The cache of this config's model after a prefill of `tokens` tokens, and after each of `steps` more.

    Raises:
        UnsupportedArchitecture: when transformers has no causal language model for the config, or
            it cannot run without weights.
    """
    model_type = str(config.get("model_type") or "")
    try:
        with warnings.catch_warnings(), torch.device("meta"), torch.no_grad():
            warnings.simplefilter("ignore")
            model = _without_looks(_build(AutoConfig.for_model(**config), dtype))
            ids = torch.ones((batch * _rows(model), tokens), dtype=torch.long)
            return tuple(
                Measurement(tokens=seen, layers=measure_model(model, cache))
                for seen, cache in decode(model, ids, steps=steps)
            )
    except LlminferError:
        raise
    except Exception as error:  # whatever a model's own code raises on tensors without values
        raise UnsupportedArchitecture(
            f"a dry run of model type {model_type!r} failed: {type(error).__name__}: {error}"
        ) from error


def dry_run_model(config: Mapping[str, Any], *, source: str, name: str | None = None) -> ModelKV:
    """The records of a model as a dry run shows them, for types that the tables do not know.

    Two prefills are compared: a tensor that is the same in both is a state, one that grew by a
    whole entry for every token grows, one that stopped growing has a window.

    Raises:
        UnsupportedArchitecture: when it cannot run, or a tensor grows in another way.
    """
    short, long = (dry_run(config, tokens=tokens, steps=0, dtype=_PROBE_DTYPE)[0] for tokens in _PROBES)
    model = ModelKV(
        name=name or source,
        model_type=str(config.get("model_type") or ""),
        layers=tuple(_as_record(source, *pair) for pair in zip(short.layers, long.layers, strict=True)),
        dtype=_dtype_name(config),
        context_limit=_context_limit(config),
        method="dry run",
    )
    # a prefill does not show what a step keeps: windows that begin with the answer, tokens set apart
    for measured in dry_run(config, tokens=_PROBES[1], steps=2, dtype=_PROBE_DTYPE):
        predicted = footprint(model, tokens=measured.tokens, dtype=_PROBE_DTYPE).total_bytes
        if predicted != measured.size_bytes:
            raise UnsupportedArchitecture(f"{source}: what its cache keeps of a step does not follow from a prefill")
    return model


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
        kept = {key: value for key, value in vars(module).items() if key in MODULE_STATES and value is not None}
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
    if model.config.model_type in _PLAIN_INPUTS:
        yield from decode_plainly(model, ids, steps=steps)
        return
    kwargs: dict[str, Any] = {"use_cache": True}
    if ids.device.type != "meta":
        kwargs["attention_mask"] = torch.ones_like(ids)
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


def _build(config: Any, dtype: str | None) -> Any:
    classes = {"musicgen": MusicgenForCausalLM, "musicgen_melody": MusicgenMelodyForCausalLM}
    name = dtype or str(config.get_text_config(decoder=True).dtype or config.dtype or "float32")
    # the faster attentions look at the mask's values to choose a path
    options = {"dtype": getattr(torch, name.removeprefix("torch.")), "attn_implementation": "eager"}
    if config.model_type in classes:  # their own class wants the decoder's config
        return classes[config.model_type]._from_config(config.decoder, **options).eval()
    for known in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in known._model_mapping:
            return known.from_config(config, **options).eval()
    raise UnsupportedArchitecture(f"transformers has no language model for type {config.model_type!r}")


def _without_looks(model: Any) -> Any:
    """The model without the parts that look at values and hold no cache: experts, and the warning about padding."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *inputs: None
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden_states, *rest, **options: torch.zeros_like(hidden_states)
    return model


def _rows(model: Any) -> int:
    """Rows of ids per sequence: one for each codebook where a model reads several at once."""
    return int(getattr(model, "num_codebooks", 1)) if model.config.model_type in _PLAIN_INPUTS else 1


def _as_record(source: str, short: LayerBytes, long: LayerBytes) -> LayerKV:
    """One layer's record from its tensors at two lengths."""
    few, many = _PROBES
    before = {tensor.name: tensor for tensor in short.tensors}
    tensors: list[PerToken] = []
    states: list[State] = []
    windows: set[int] = set()
    for tensor in long.tensors:
        old = before.get(tensor.name)
        shape = () if old is None else old.shape
        changed = [axis for axis, size in enumerate(shape) if size != tensor.shape[axis]]
        if old is not None and not changed:
            role = "conv" if "conv" in tensor.name else "recurrent"
            states.append(State(name=tensor.name, shape=tensor.shape[1:], dtype=_pinned(tensor), role=role))
            continue
        if old is None or len(changed) != 1 or old.shape[changed[0]] != few:
            raise UnsupportedArchitecture(f"{source}: cannot tell how the tensor {tensor.name} of a dry run grows")
        kept = tensor.shape[changed[0]]
        if kept != many:
            windows.add(kept + 1)  # the newest token is seen and not kept
        elements = math.prod(tensor.shape) // kept
        # heads are the second of four dimensions: batch, heads, tokens, width
        heads = tensor.shape[1] if len(tensor.shape) == 4 and changed[0] == 2 else 1
        tensors.append(
            PerToken(
                name=tensor.name,
                heads=heads,
                dim=elements // heads,
                dtype=_pinned(tensor),
                windowed=kept != many,
            )
        )
    if len(windows) > 1:
        raise UnsupportedArchitecture(f"{source}: a layer of a dry run has windows of {sorted(windows)}")
    kind = "none" if not long.tensors else "sliding" if windows else "full" if tensors else "linear"
    return LayerKV(kind=kind, tensors=tuple(tensors), states=tuple(states), window=windows.pop() if windows else None)


def _pinned(tensor: TensorBytes) -> str | None:
    return None if tensor.dtype == _PROBE_DTYPE else tensor.dtype


def _dtype_name(config: Mapping[str, Any]) -> str:
    part = text_config(config)
    return element_type(str(part.get("dtype") or part.get("torch_dtype") or "float32")).name


def _context_limit(config: Mapping[str, Any]) -> int | None:
    limit = text_config(config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def decode_plainly(model: Any, ids: torch.Tensor, *, steps: int) -> Iterator[tuple[int, Any]]:
    """As `decode`, but with ids and cache alone, so for models without a head, too."""
    cache = DynamicCache(config=model.config)
    for step in range(steps + 1):
        model(input_ids=ids[:, -1:] if step else ids, cache=cache, use_cache=True)
        yield ids.shape[-1] + step, cache


def _layer_tensors(cache: Any) -> list[dict[str, torch.Tensor]]:
    if cache is None:
        return []
    if isinstance(cache, EncoderDecoderCache):
        # BLT's decoder layers are in the second cache; a decoder alone leaves it empty
        cross = _layer_tensors(cache.cross_attention_cache)
        return _layer_tensors(cache.self_attention_cache) + (cross if any(cross) else [])
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
            # an empty entry is added for every step of a local layer, behind those of the layers
            for states, buckets in zip(cache.states_cache, cache.buckets_cache, strict=False)
        ]
    if hasattr(cache, "rnn_state"):  # xLSTM
        return [_named_tensors({"state": state}) for state in cache.rnn_state.values()]
    if isinstance(cache, list) and all(isinstance(part, torch.Tensor) for part in cache):  # RWKV
        return [_named_tensors({"state": [part[..., index] for part in cache]}) for index in range(cache[0].shape[-1])]
    if isinstance(cache, tuple):  # XLNet
        return [_named_tensors({"mems": layer}) for layer in cache]
    raise UnsupportedArchitecture(f"cannot read a cache of type {type(cache).__name__}")


def _named_tensors(attributes: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors in attributes and in the dicts, lists and tuples among them, each tensor once."""
    found: dict[str, torch.Tensor] = {}
    for key, value in attributes.items():
        name = f"{prefix}{key}"
        if name in BOOKKEEPING:
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
