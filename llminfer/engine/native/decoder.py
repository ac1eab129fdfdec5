"""A transformers model as the native engine's decoder, for the families that most people run.

What a layer has is read from the model's own modules; the table says where a family differs in ways
that its modules do not show. Weights are shared with the packed layers of the model, and keys and
values with its growing cache, so transformers' forward and the native step continue each other.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from llminfer.engine.native.library import (
    ACTIVATIONS,
    NORMS,
    STORED,
    LayerRecord,
    MatrixRecord,
    ModelRecord,
    library,
    pointer,
)
from llminfer.engine.native.packed import GROUP_ROWS, NativeLinear
from llminfer.engine.weights.packed_layer import LazyWeight

_PRE_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_FIRST_POSITIONS = 2048  # of the first table of rotations; later ones double
# rotations that change with the length of the sequence
_CHANGING_ROPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's layers differ where their modules do not say.

    Attributes:
        norms: the names of the norms before and after attention, and before and after the MLP.
        norm_offset: added to the weights of norms.
        norm: `rms` or `centred`.
        caps_attention: eager attention caps its logits.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = _PRE_NORMS
    norm_offset: float = 0.0
    norm: str = "rms"
    caps_attention: bool = False


FAMILIES: Mapping[str, Family] = {
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(norms=_FOUR_NORMS, norm_offset=1.0, caps_attention=True),
    "gemma3_text": Family(norms=_FOUR_NORMS, norm_offset=1.0),
    "granite": Family(),
    "llama": Family(),
    "mistral": Family(),
    "olmo": Family(norm="centred"),
    "olmo2": Family(norms=_POST_NORMS),
    "olmo3": Family(norms=_POST_NORMS),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
}


def why_not_native(config: Any) -> str | None:
    """Why a model of this config has no native decoder; None when it has one."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    ropes = {_rope_type(rope) for rope in _rope_parameters(config)}
    if ropes & _CHANGING_ROPES:
        return f"its {' and '.join(sorted(ropes & _CHANGING_ROPES))} rotations change with the length"
    heads, head_dim = config.num_attention_heads, _head_dim(config)
    if head_dim % GROUP_ROWS:
        return f"its heads of {head_dim} elements are no multiple of {GROUP_ROWS}"
    if heads % (getattr(config, "num_key_value_heads", None) or heads):
        return "its heads are not shared out evenly"
    if config.model_type == "phi3" and config.intermediate_size % GROUP_ROWS:
        return f"its fused projections are no multiple of {GROUP_ROWS} rows"
    if getattr(config, "use_bidirectional_attention", None):
        return "it attends in both directions"
    if _activation_name(config) not in _ACTIVATION_NAMES:
        return f"its activation {_activation_name(config)} has no kernel"
    return None


_ACTIVATION_NAMES: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def _activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope_parameters(config: Any) -> Iterator[Any]:
    """The rope parameters, one set or one a layer type."""
    stated = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in stated.values() if isinstance(value, Mapping)]
    yield from nested or [stated]


def _rope_type(rope: Any) -> str:
    return str(rope.get("rope_type") or "default")


class Rotations:
    """Cosines and sines of one kind of rotary position, from the model's own module, for as many positions as needed.

    The table has shape [positions, 2, rotated / 2].
    """

    __slots__ = ("_arguments", "_module", "table")

    def __init__(self, module: Any, arguments: tuple[Any, ...]) -> None:
        self._module, self._arguments = module, arguments
        self.table = self._make(_FIRST_POSITIONS)

    def reach(self, positions: int) -> bool:
        """Make the table long enough; True when it is a new one."""
        if positions <= self.table.shape[0]:
            return False
        self.table = self._make(max(positions, 2 * self.table.shape[0]))
        return True

    def _make(self, positions: int) -> Tensor:
        places = torch.arange(positions)[None]
        cosines, sines = self._module(torch.zeros(1, dtype=torch.float32), places, *self._arguments)
        half = cosines.shape[-1] // 2
        return torch.stack([cosines[0, :, :half], sines[0, :, :half]], dim=1).float().contiguous()


@dataclass(kw_only=True)
class _Known:
    """The buffers of a layer's cache that the library was told of; they are not kept alive for it."""

    keys: Callable[[], Tensor | None] = field(default=lambda: None)
    values: Callable[[], Tensor | None] = field(default=lambda: None)


class Decoder:
    """The native decoder of a model whose linear layers are packed.

    Attributes:
        most_tokens: tokens that one step takes.
        vocabulary: width of the logits.
    """

    def __init__(self, model: Any) -> None:
        self._turn = Lock()
        self._kept: list[Tensor] = []  # what the records point to
        config, family = model.config, FAMILIES[model.config.model_type]
        body = model.model
        first = body.layers[0].self_attn
        heads = config.num_attention_heads
        self._kv_heads, self._head_dim = int(getattr(config, "num_key_value_heads", None) or heads), _head_dim(config)
        self._rotations = self._make_rotations(body, config)
        self._layers = (LayerRecord * len(body.layers))()
        self._kinds = [_rope_kind(layer, config, number) for number, layer in enumerate(body.layers)]
        for record, layer, kind in zip(self._layers, body.layers, self._kinds, strict=True):
            self._fill(record, layer, family, kind)
        self.vocabulary = int(model.lm_head.out_features)
        rotated = next((2 * rotation.table.shape[-1] for rotation in self._rotations.values()), 0)
        self._model = ModelRecord(
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            intermediate=config.intermediate_size,
            vocabulary=self.vocabulary,
            layers=len(body.layers),
            rotated=rotated,
            layer=self._layers,
            head=model.lm_head.record,
            final_norm=self._norm(body.norm, config.hidden_size),
            embedding_scale=float(
                getattr(body.embed_tokens, "embed_scale", getattr(config, "embedding_multiplier", 1.0))
            ),
            norm_epsilon=_epsilon(body.norm),
            norm_offset=family.norm_offset,
            attention_scale=float(first.scaling),
            attention_cap=_attention_cap(first, config, family),
            logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            logit_scale=1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
            residual_scale=float(getattr(config, "residual_multiplier", None) or 1.0),
            clip=float(getattr(config, "clip_qkv", None) or 0.0),
            norm=NORMS[family.norm],
            activation=ACTIVATIONS[_ACTIVATION_NAMES[_activation_name(config)]],
            norms_whole_projection=config.model_type in ("olmo2", "olmo3"),
        )
        self._embed(body.embed_tokens, model.lm_head)
        self._handle = library().decoder(ctypes.byref(self._model))
        self.most_tokens = int(library().most_tokens())
        self._known = [_Known() for _ in self._layers]
        example = torch.empty(1, self._kv_heads, 0, self._head_dim)
        self._like = {"like_keys": example, "like_values": example}

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library().decoder_free(self._handle)

    def step(self, ids: Sequence[int], cache: Any, position: int, wanted: int = 1) -> Tensor:
        """Feed ids after `position` others that the cache holds; logits of the last `wanted`, [wanted, vocabulary].

        The cache is a growing one with a batch of 1; its layers count the new tokens.
        """
        with self._turn:  # the library drops Python's lock, and reads records that each step fills
            return self._step(ids, cache, position, wanted)

    def _step(self, ids: Sequence[int], cache: Any, position: int, wanted: int) -> Tensor:
        count = len(ids)
        self._reach(position + count)
        for record, layer, known in zip(self._layers, cache.layers, self._known, strict=True):
            layer.reserve(count, **self._like)
            if layer.key_buffer is not known.keys() or layer.value_buffer is not known.values():
                self._place(record, layer, known)
            record.begin, record.end = layer.begin, layer.end
        logits = torch.empty(wanted, self.vocabulary)
        numbers = (ctypes.c_int64 * count)(*ids)
        if not library().step(self._handle, numbers, count, position, logits.data_ptr(), wanted):
            raise IndexError(f"the ids {list(ids)} are not all of {self.vocabulary}, or more than a step takes")
        for layer in cache.layers:
            layer.advance(count)
        return logits

    def _place(self, record: Any, layer: Any, known: _Known) -> None:
        """Tell the library where a layer's keys and values are now."""
        known.keys, known.values = weakref.ref(layer.key_buffer), weakref.ref(layer.value_buffer)
        record.keys, record.values = pointer(layer.key_buffer), pointer(layer.value_buffer)
        record.capacity = layer.key_buffer.shape[-2]
        record.window = getattr(layer, "sliding_window", 0)

    def _reach(self, positions: int) -> None:
        grown = {kind for kind, rotation in self._rotations.items() if rotation.reach(positions)}
        for record, kind in zip(self._layers, self._kinds, strict=True) if grown else ():
            if kind in grown:
                record.rotation = pointer(self._rotations[kind].table)

    def _make_rotations(self, body: Any, config: Any) -> dict[str, Rotations]:
        module = body.rotary_emb
        if not any(isinstance(value, Mapping) for value in (config.rope_parameters or {}).values()):
            return {"all": Rotations(module, ())}
        return {kind: Rotations(module, (kind,)) for kind in sorted(set(config.layer_types))}

    def _fill(self, record: Any, layer: Any, family: Family, kind: str | None) -> None:
        attention, mlp, hidden = layer.self_attn, layer.mlp, layer.self_attn.config.hidden_size
        for name, matrix in (*_projections(attention, self._kv_heads, self._head_dim), *_mlp(mlp)):
            setattr(record, name, matrix)
        places = ("attention_in", "attention_out", "mlp_in", "mlp_out")
        for place, norm_name in zip(places, family.norms, strict=True):
            norm = None if norm_name is None else getattr(layer, norm_name)
            setattr(record, place, None if norm is None else self._norm(norm, hidden))
        for place, norm_name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            norm = getattr(attention, norm_name, None)
            setattr(record, place, None if norm is None else self._norm(norm, self._head_dim))
        record.rotation = None if kind is None else pointer(self._rotations[kind].table)

    def _norm(self, norm: nn.Module, size: int) -> int | None:
        weight = getattr(norm, "weight", None)
        if weight is None:
            self._kept.append(torch.ones(size))
        else:
            self._kept.append(weight.detach().float().contiguous())  # of a loaded model the very tensor
        return pointer(self._kept[-1])

    def _embed(self, embedding: Any, head: NativeLinear) -> None:
        weight = embedding.weight
        held: Tensor | None = weight.held if isinstance(weight, LazyWeight) else weight.detach()
        self._model.known = weight.shape[0]
        if held is None:
            # a tied embedding, whose rows are the output layer's
            self._model.embedding_rows = ctypes.pointer(head.record)
            return
        self._kept.append(held)
        self._model.embedding, self._model.embedding_type = pointer(held), STORED[held.dtype]


def _projections(attention: Any, kv_heads: int, head_dim: int) -> Iterator[tuple[str, MatrixRecord]]:
    fused: NativeLinear | None = getattr(attention, "qkv_proj", None)
    if fused is None:
        yield from (("query", attention.q_proj.record), ("key", attention.k_proj.record))
        yield "value", attention.v_proj.record
    else:
        keys = kv_heads * head_dim
        queries = fused.out_features - 2 * keys
        yield from (("query", fused.part(0, queries)), ("key", fused.part(queries, keys)))
        yield "value", fused.part(queries + keys, keys)
    yield "output", attention.o_proj.record


def _mlp(mlp: Any) -> Iterator[tuple[str, MatrixRecord]]:
    fused: NativeLinear | None = getattr(mlp, "gate_up_proj", None)
    if fused is None:
        yield from (("gate", mlp.gate_proj.record), ("up", mlp.up_proj.record))
    else:
        half = fused.out_features // 2
        yield from (("gate", fused.part(0, half)), ("up", fused.part(half, half)))
    yield "down", mlp.down_proj.record


def _rope_kind(layer: Any, config: Any, number: int) -> str | None:
    """Which rotations a layer uses, None for one that does not rotate."""
    if not getattr(layer.self_attn, "use_rope", True):
        return None
    nested = any(isinstance(value, Mapping) for value in (config.rope_parameters or {}).values())
    return str(config.layer_types[number]) if nested else "all"


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5)))


def _attention_cap(attention: Any, config: Any, family: Family) -> float:
    # a fused attention would leave the cap out, and transformers' tokens are the reference
    eager = config._attn_implementation == "eager"
    return float(attention.attn_logit_softcapping or 0.0) if family.caps_attention and eager else 0.0
