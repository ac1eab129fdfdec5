"""What a model's cache really holds: its own classes, run without weights, and their tensors walked.

The model is built on the `meta` device, where tensors have shapes but no memory, and decodes a few
tokens the way `generate` does. A model whose code looks at values runs on the CPU instead, a few
tokens through weights that are one zero each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
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

from llminfer.engine.kv_cache.layers import named_tensors
from llminfer.engine.kv_cache.tensors import MODULE_STATES, returned_cache
from llminfer.engine.models.protocols import CausalLM
from llminfer.engine.models.quirks import quirks_of
from llminfer.errors import LlminferError, UnsupportedArchitecture
from llminfer.kv.config import ConfigView, text_config
from llminfer.kv.context import context_limit
from llminfer.kv.dtypes import element_type
from llminfer.kv.footprint import footprint
from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State

# a length that no window is as short as, and one that shows what has stopped growing
_PROBES = (3, 6000)
# in this type, a tensor of another type shows that it is pinned to that
_PROBE_DTYPE = "bfloat16"
# a run with values computes all that a model computes, so it gets no more tokens than this
MOST_REAL_TOKENS = 64
_NOTHING: Mapping[str, torch.Tensor] = {}


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
    views of something larger, and counted for the first layer where several are views of one.
    """

    tensors: tuple[TensorBytes, ...]
    storage_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the layer's tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A cache after `tokens` tokens of every sequence; `real` where the model does not run without values."""

    tokens: int
    layers: tuple[LayerBytes, ...]
    real: bool = False

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
    config: Mapping[str, Any],
    *,
    tokens: int,
    steps: int = 1,
    batch: int = 1,
    dtype: str | None = None,
    real: bool = False,
) -> tuple[Measurement, ...]:
    """The cache of this config's model after a prefill of `tokens` tokens, and after each of `steps` more.

    With `real` the tensors have values, for models whose code looks at them: at most
    `MOST_REAL_TOKENS` tokens go through weights of zero, on which no size depends.

    Raises:
        UnsupportedArchitecture: when transformers has no causal language model for the config, or it cannot run.
    """
    model_type = str(config.get("model_type") or "")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            with torch.device("meta"):
                model = _build(AutoConfig.for_model(**config), dtype)
            model = _with_zeros(model) if real else _without_looks(model)
            with torch.device("cpu" if real else "meta"):
                fed = min(tokens, MOST_REAL_TOKENS) if real else tokens
                ids = torch.ones((batch * _rows(model), fed), dtype=torch.long)
                return tuple(
                    Measurement(tokens=seen, layers=measure_model(model, cache), real=real)
                    for seen, cache in decode(model, ids, steps=steps)
                )
    except LlminferError:
        raise
    except Exception as error:  # whatever a model's own code raises on tensors without values
        raise UnsupportedArchitecture(
            f"a {'real' if real else 'dry'} run of model type {model_type!r} failed: {type(error).__name__}: {error}"
        ) from error


def dry_run_model(config: Mapping[str, Any], *, source: str, name: str | None = None) -> ModelKV:
    """The records of a model as a dry run shows them, for types that the tables do not know.

    Two prefills are compared: a tensor that is the same in both is a state, one that grew by a
    whole entry for every token grows, one that stopped growing has a window.

    Raises:
        UnsupportedArchitecture: when it cannot run, or a tensor grows in another way.
    """
    short, long = (dry_run(config, tokens=tokens, steps=0, dtype=_PROBE_DTYPE)[0] for tokens in _PROBES)
    text = text_config(config)
    model = ModelKV(
        name=name or source,
        model_type=str(config.get("model_type") or ""),
        layers=tuple(_as_record(source, *pair) for pair in zip(short.layers, long.layers, strict=True)),
        dtype=element_type(str(text.get("dtype") or text.get("torch_dtype") or "float32")).name,
        context_limit=context_limit(ConfigView(config=text, source=source)),
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
    return _measure(_layer_tensors(cache))


def measure_model(model: CausalLM, cache: Any) -> tuple[LayerBytes, ...]:
    """The cache of a model, with the states that RecurrentGemma keeps in its modules and not in the cache."""
    layers = _layer_tensors(cache)
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if key in MODULE_STATES and value is not None}
        if kept:
            index = next(int(part) for part in name.split(".") if part.isdigit())
            layers[index] |= _distinct(kept)
    return _measure(layers)


def decode(model: CausalLM, ids: torch.Tensor, *, steps: int) -> Iterator[tuple[int, Any]]:
    """Feed `ids`, then `steps` single tokens, as `generate` would; after each forward the tokens seen and the cache.

    The model prepares its own inputs, so types that take more than ids (or take them otherwise) work.
    """
    if quirks_of(model.config.model_type).prompt_without_cache:
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
        yield ids.shape[-1], returned_cache(outputs, kwargs.get("cache"))
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


def _with_zeros(model: Any) -> Any:
    """The model with values that take no memory: one zero under the shape of every weight."""
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            module._parameters[name] = torch.nn.Parameter(_zero(tensor), requires_grad=False)
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = _zero(tensor).clone()
    return model


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def _rows(model: CausalLM) -> int:
    """Rows of ids per sequence: one for each codebook where a model reads several at once."""
    return int(getattr(model, "num_codebooks", 1)) if quirks_of(model.config.model_type).prompt_without_cache else 1


def _as_record(source: str, short: LayerBytes, long: LayerBytes) -> LayerKV:
    """One layer's record from its tensors at two lengths."""
    few, many = _PROBES
    before = {tensor.name: tensor.shape for tensor in short.tensors}
    tensors: list[PerToken] = []
    states: list[State] = []
    windows: set[int] = set()
    for tensor in long.tensors:
        dtype = None if tensor.dtype == _PROBE_DTYPE else tensor.dtype
        shape = before.get(tensor.name, ())
        if tensor.name in before and shape == tensor.shape:
            role = "conv" if "conv" in tensor.name else "recurrent"
            states.append(State(name=tensor.name, shape=tensor.shape[1:], dtype=dtype, role=role))
            continue
        changed = [axis for axis, size in enumerate(shape) if size != tensor.shape[axis]]
        if len(changed) != 1 or shape[changed[0]] != few:
            raise UnsupportedArchitecture(f"{source}: cannot tell how the tensor {tensor.name} of a dry run grows")
        kept = tensor.shape[changed[0]]
        if kept != many:
            windows.add(kept + 1)  # the newest token is seen and not kept
        # heads are the second of four dimensions: batch, heads, tokens, width
        heads = tensor.shape[1] if len(tensor.shape) == 4 and changed[0] == 2 else 1
        width = math.prod(tensor.shape) // kept // heads
        tensors.append(PerToken(name=tensor.name, heads=heads, dim=width, dtype=dtype, windowed=kept != many))
    if len(windows) > 1:
        raise UnsupportedArchitecture(f"{source}: a layer of a dry run has windows of {sorted(windows)}")
    kind = "none" if not long.tensors else "sliding" if windows else "full" if tensors else "linear"
    return LayerKV(kind=kind, tensors=tuple(tensors), states=tuple(states), window=windows.pop() if windows else None)


def decode_plainly(model: CausalLM, ids: torch.Tensor, *, steps: int) -> Iterator[tuple[int, Any]]:
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
        layers = [_distinct(layer) for layer in cache.layers]
        # MiniMax keeps the states of its linear layers beside the list of layers
        states = [_distinct({"linear_cache": state}) for state in getattr(cache, "linear_cache", ())]
        return [{**layer, **state} for layer, state in zip_longest(layers, states, fillvalue=_NOTHING)]
    if hasattr(cache, "states_cache"):  # Reformer
        return [
            _distinct({"states": states, "buckets": buckets})
            # an empty entry is added for every step of a local layer, behind those of the layers
            for states, buckets in zip(cache.states_cache, cache.buckets_cache, strict=False)
        ]
    if hasattr(cache, "rnn_state"):  # xLSTM
        return [_distinct({"state": state}) for state in cache.rnn_state.values()]
    if isinstance(cache, list) and all(isinstance(part, torch.Tensor) for part in cache):  # RWKV
        return [_distinct({"state": [part[..., index] for part in cache]}) for index in range(cache[0].shape[-1])]
    if isinstance(cache, tuple):  # XLNet
        return [_distinct({"mems": layer}) for layer in cache]
    raise UnsupportedArchitecture(f"cannot read a cache of type {type(cache).__name__}")


def _distinct(holder: object) -> dict[str, torch.Tensor]:
    """All tensors in a part of a cache by name: one under two names (shared keys and values) is held once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(holder):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _measure(layers: Iterable[Mapping[str, torch.Tensor]]) -> tuple[LayerBytes, ...]:
    counted: set[int] = set()  # what several layers are views of (RWKV's states) is allocated once
    measured = []
    for tensors in layers:
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors.values()}
        stored = sum(size for storage, size in storages.items() if storage not in counted)
        counted |= storages.keys()
        rows = tuple(_tensor_bytes(name, tensor) for name, tensor in tensors.items())
        measured.append(LayerBytes(tensors=rows, storage_bytes=stored))
    return tuple(measured)


def _tensor_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorBytes(name=name, shape=tuple(tensor.shape), dtype=dtype, size_bytes=tensor.nbytes)
