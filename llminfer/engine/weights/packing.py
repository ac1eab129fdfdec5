"""Swapping a model's linear layers for packed ones: which can be, what is freed, what stays.

A layer's weight may be more than the layer's: an embedding shares it, or the model's code reads it
past the layer. What is read is not guessed from names: a short run of the model shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from llminfer.engine.forward.forward import make_forward
from llminfer.engine.weights.packed_layer import LazyWeight, PackedLinear, widened
from llminfer.engine.weights.packed_linear import TORCH_KERNELS, Float32Linear, Kernels

_LINEAR = (nn.Linear, Conv1D)
_WATCHED = (*_LINEAR, nn.Embedding)
# those whose padding and scales cost more than they save in small layers
_SMALL_FORMATS = frozenset({"int8", "int4"})
_NARROW = frozenset({torch.bfloat16, torch.float16})
_TRIAL_IDS = (5, 6, 7)
# the largest element of a weight that a format takes; integers would hide one that is no number
_LARGEST = {
    "float16": torch.finfo(torch.float16).max,
    **dict.fromkeys(_SMALL_FORMATS, torch.finfo(torch.float32).max),
}

PARTS = ("linear_layers", "experts", "embedding", "rest")
READ_ELSEWHERE = "the model's own code reads their weights"
SHARED = "another kind of module shares their weights"
NO_GAIN = "they are too small to gain"
OUT_OF_RANGE = "their weights are beyond what the format can hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What became of a model's weights.

    Attributes:
        layers: linear layers that were swapped.
        before_bytes: what their weights and biases held before.
        after_bytes: what they hold now.
        kept_bytes: what all else of the model holds.
        left: linear layers that stay as they are, and why, by name.
        copied_bytes: what embeddings hold of weights that a packed layer holds as well.
    """

    layers: int
    before_bytes: int
    after_bytes: int
    kept_bytes: int
    left: Mapping[str, str] = field(default_factory=dict)
    copied_bytes: int = 0


def pack_model(model: Any, weights_format: str, kernels: Kernels = TORCH_KERNELS) -> Packing:
    """Swap a model's linear layers for packed ones, in place; the weights that they had are freed one by one."""
    before_bytes, owners, places = held_bytes(model), _owners(model), _places(model)
    read = read_past_their_layers(model)
    names = [name for name, module in model.named_modules() if type(module) in _LINEAR]
    left: dict[str, str] = {}
    for name in names:  # before anything is packed: what judging needs for a moment would lie between what stays
        linear = model.get_submodule(name)
        reason = _why_left(linear, weights_format, owners[id(linear.weight)], read, kernels.least_size)
        if reason is not None:
            left[name] = reason
    head = model.get_output_embeddings()
    layers = packed_bytes = copied_bytes = 0
    for name in names:
        linear = model.get_submodule(name)
        if name in left or isinstance(linear, PackedLinear):  # replaced together with one before it
            continue
        sharing = owners[id(linear.weight)]
        embeddings = [owner for owner in sharing if isinstance(owner, nn.Embedding)]
        own_format = kernels.head_formats.get(weights_format, weights_format) if linear is head else weights_format
        packed = _pack(linear, own_format, kernels, tied=bool(embeddings))
        if weights_format in _SMALL_FORMATS and packed.held_bytes > sum(held.nbytes for held in linear.parameters()):
            left[name] = NO_GAIN
            continue
        # several layers of one weight and bias become one
        same = [owner for owner in sharing if type(owner) in _LINEAR and owner.bias is linear.bias]
        for parent, child_name in (place for owner in same for place in places[id(owner)]):
            parent._modules[child_name] = packed
        layers += len(same)
        packed_bytes += packed.held_bytes
        for embedding in embeddings:
            copied_bytes += _share(embedding, packed)
        sharing.clear()  # which lets go of what was replaced
        head = None if linear is head else head
    after_bytes = held_bytes(model)
    kept_bytes = after_bytes - packed_bytes
    return Packing(
        layers=layers,
        before_bytes=before_bytes - (kept_bytes - copied_bytes),
        after_bytes=packed_bytes,
        kept_bytes=kept_bytes,
        left=left,
        copied_bytes=copied_bytes,
    )


def held_parts(model: Any) -> dict[str, int]:
    """Bytes of all that a model holds, by `PARTS`, each tensor counted once."""
    parts, seen = dict.fromkeys(PARTS, 0), set()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            parts["linear_layers"] += module.held_bytes
            continue
        lazy = [value.held for value in vars(module).values() if isinstance(value, LazyWeight)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *lazy):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                parts[_part_of(module, tensor)] += tensor.nbytes
    return parts


def _part_of(module: nn.Module, tensor: Tensor) -> str:
    if isinstance(module, _LINEAR):
        return "linear_layers"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "experts" if tensor.dim() > 2 and not isinstance(module, _ConvNd) else "rest"


def held_bytes(model: Any) -> int:
    """Bytes of all that a model holds: parameters, buffers and packed weights, each counted once."""
    return sum(held_parts(model).values())


def make_float32(model: Any) -> None:
    """Let a model compute in float32 and hold no more than it did.

    Vectors become float32. What else is in 16 bits stays so, and what of it is used becomes float32 for
    that long: some rows of an embedding, one expert.
    """
    lazy: dict[Tensor, LazyWeight] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is None or weight.dim() < 2 or weight.dtype not in _NARROW:
                continue
            if getattr(module, "max_norm", None) is None:  # such an embedding writes to its weight
                del module._parameters[name]
                setattr(module, name, lazy.setdefault(weight, widened(weight)))
    model.float()
    model.config.dtype = torch.float32
    if any(weight.dim() > 2 for weight in lazy) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # one expert after the other; the default takes all at once


def read_past_their_layers(model: Any) -> frozenset[int]:
    """The ids of those layers whose weights the model's code reads itself, as a short run of the model shows.

    A prompt of two tokens is fed and then one token, so that both ways through the code are seen.
    """
    vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or max(_TRIAL_IDS) + 1
    ids = [token_id % vocabulary for token_id in _TRIAL_IDS]
    with _watched(model) as read, torch.no_grad():
        forward = make_forward(model)
        forward(ids[:2])
        forward(ids[2:])
    return frozenset(read)


@contextmanager
def _watched(model: Any) -> Iterator[set[int]]:
    """While this is open, layers note that their weight was read by anything but their own forward."""
    modules = [module for module in model.modules() if type(module) in _WATCHED]
    read: set[int] = set()
    for module in modules:
        module.__dict__["_read"], module.__dict__["_inside"] = read, False
        kind: Any = type(module)
        module.__class__ = _watching(kind)
    try:
        yield read
    finally:
        for module in modules:
            module.__class__ = type(module).__bases__[0]
            del module.__dict__["_read"], module.__dict__["_inside"]


class _WatchedTensor(Tensor):
    """A weight that notes when more of it is read than its type, device or shape."""

    note: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        def unwrap(value: Any) -> Any:
            if not isinstance(value, _WatchedTensor):
                return value
            if func not in _HARMLESS:
                value.note()
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(Tensor)

        args, kwargs = tree_map(unwrap, (args, kwargs))
        return func(*args, **(kwargs or {}))


# what code asks of a weight without reading it
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "is_cuda", "requires_grad")
)


@cache
def _watching(kind: type[nn.Module]) -> type[nn.Module]:
    """A kind of layer that notes who reads its weight."""

    class Watching(kind):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if name != "weight" or self.__dict__["_inside"]:
                return value
            watched = value.as_subclass(_WatchedTensor)
            watched.note = lambda: self.__dict__["_read"].add(id(self))
            return watched

        def forward(self, *arguments: Any, **keyword_arguments: Any) -> Any:
            self.__dict__["_inside"] = True
            try:
                return super().forward(*arguments, **keyword_arguments)
            finally:
                self.__dict__["_inside"] = False

    return Watching


def _owners(model: Any) -> dict[int, list[Any]]:
    """The modules that hold each parameter, by its id."""
    owners = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)].append(module)
    return owners


def _places(model: Any) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each module is a child, by its id."""
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[id(child)].append((parent, name))
    return places


def _why_left(linear: Any, name: str, sharing: list[Any], read: frozenset[int], least_size: int) -> str | None:
    """Why a layer cannot be swapped for one of the format `name`."""
    if any(id(owner) in read for owner in sharing):
        return READ_ELSEWHERE
    # Conv1D has its weight the other way round, so an embedding that shares it has other rows
    turned = any(isinstance(owner, nn.Embedding) for owner in sharing) and Conv1D in map(type, sharing)
    if turned or not all(isinstance(owner, _WATCHED) for owner in sharing):
        return SHARED
    if name in _SMALL_FORMATS and min(linear.weight.shape) < least_size:
        return NO_GAIN
    # written so that NaN, for which every comparison is false, is out of range too
    if name in _LARGEST and not bool(linear.weight.abs().amax() <= _LARGEST[name]):
        return OUT_OF_RANGE
    return None


def _pack(linear: Any, weights_format: str, kernels: Kernels, *, tied: bool) -> PackedLinear:
    weight = linear.weight.detach()
    weight = weight.T.contiguous() if type(linear) is Conv1D else weight
    make = kernels.make_tied.get(weights_format) if tied else None
    return (make or kernels.make[weights_format])(weight, linear.bias)


def _share(embedding: Any, head: PackedLinear) -> int:
    """Let an embedding look its rows up in what the head holds; returns the bytes that it holds besides the head."""
    if isinstance(head, Float32Linear):
        return 0  # which holds the very same tensor
    if embedding.max_norm is not None:  # such an embedding writes to its weight
        return int(embedding.weight.nbytes)
    shape = embedding.weight.shape
    del embedding.weight
    if head.finds_rows:
        embedding.weight = LazyWeight(shape, head.dequantized, head.embedded)
        return 0
    half = head.dequantized().half()
    embedding.weight = widened(half)
    return half.nbytes
