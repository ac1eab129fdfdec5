"""A transformers model as the native engine's decoder, for the families that most people run.

What a layer has is read from the model's own modules; the table says where a family differs in ways
that its modules do not show. Weights are shared with the packed layers of the model, and keys and
values with its growing cache, so transformers' forward and the native step continue each other.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_AROUND_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", *_AROUND_MLP)
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_FIRST_POSITIONS = 2048  # of the first tables of rotations; later ones double
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
        norms_whole_projection: queries and keys are normed across all heads.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = _PRE_NORMS
    norm_offset: float = 0.0
    norm: str = "rms"
    caps_attention: bool = False
    norms_whole_projection: bool = False


FAMILIES: Mapping[str, Family] = {
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(norms=_FOUR_NORMS, norm_offset=1.0, caps_attention=True),
    "gemma3_text": Family(norms=_FOUR_NORMS, norm_offset=1.0),
    "olmo": Family(norm="centred"),
    **dict.fromkeys(("olmo2", "olmo3"), Family(norms=_POST_NORMS, norms_whole_projection=True)),
    **dict.fromkeys(("granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"), Family()),
}


def why_not_native(config: Any) -> str | None:
    """Why a model of this config has no native decoder; None when it has one."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(sorted(FAMILIES))}"
    stated = getattr(config, "rope_parameters", None) or {}
    ropes = stated.values() if _has_several_ropes(config) else [stated]
    changing = _CHANGING_ROPES & {rope.get("rope_type") for rope in ropes if isinstance(rope, Mapping)}
    if changing:
        return f"its {' and '.join(sorted(changing))} rotations change with the length"
    heads, head_dim = config.num_attention_heads, _head_dim(config)
    if head_dim % GROUP_ROWS:
        return f"its heads of {head_dim} elements are not a multiple of {GROUP_ROWS}"
    if heads % _kv_heads(config):
        return "its heads are not shared evenly"
    if config.model_type == "phi3" and config.intermediate_size % GROUP_ROWS:
        return f"its fused projections are not a multiple of {GROUP_ROWS} rows"
    if getattr(config, "use_bidirectional_attention", None):
        return "it attends in both directions"
    if _activation_name(config) not in ACTIVATIONS:
        return f"its activation {_activation_name(config)} has no kernel"
    return None


def _activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _has_several_ropes(config: Any) -> bool:
    """Whether each type of layers has rotations of its own."""
    return any(isinstance(value, Mapping) for value in (getattr(config, "rope_parameters", None) or {}).values())


def _rotations(module: Any, positions: int, *kind: str) -> Tensor:
    """Cosines and sines of a kind of rotary position, by the model's module: [positions, 2, rotated / 2]."""
    cosines, sines = module(torch.zeros(1), torch.arange(positions)[None], *kind)
    half = cosines.shape[-1] // 2
    return torch.stack([cosines[0, :, :half], sines[0, :, :half]], dim=1).float().contiguous()


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
        self._kv_heads, self._head_dim = _kv_heads(config), _head_dim(config)
        self._layers = (LayerRecord * len(body.layers))()
        for record, layer in zip(self._layers, body.layers, strict=True):
            self._fill(record, layer, family)
        self._rotary, self._positions = body.rotary_emb, 0
        self._kinds = [_rope_kind(layer, config, number) for number, layer in enumerate(body.layers)]
        rotated = self._reach(_FIRST_POSITIONS)
        self.vocabulary = int(model.lm_head.out_features)
        self._model = ModelRecord(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
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
            activation=ACTIVATIONS[_activation_name(config)],
            norms_whole_projection=family.norms_whole_projection,
        )
        self._embed(body.embed_tokens, model.lm_head)
        self._handle = library().decoder(ctypes.byref(self._model))
        self.most_tokens = int(library().most_tokens())
        # the buffers that the library was told of, which are not kept alive for it
        self._known: list[tuple[Callable[[], Any], ...]] = [(lambda: None, lambda: None)] * len(self._layers)
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
        if position + count > self._positions:
            self._reach(position + count)
        for number, (record, layer) in enumerate(zip(self._layers, cache.layers, strict=True)):
            layer.reserve(count, **self._like)
            known_keys, known_values = self._known[number]
            if layer.key_buffer is not known_keys() or layer.value_buffer is not known_values():
                self._place(number, layer)
            record.begin, record.end = layer.begin, layer.end
        logits = torch.empty(wanted, self.vocabulary)
        numbers = (ctypes.c_int64 * count)(*ids)
        if not library().step(self._handle, numbers, count, position, logits.data_ptr(), wanted):
            raise IndexError(f"the ids {list(ids)} are not all of {self.vocabulary}, or more than a step takes")
        for layer in cache.layers:
            layer.advance(count)
        return logits

    def _place(self, number: int, layer: Any) -> None:
        """Tell the library where a layer's keys and values are now."""
        record, keys, values = self._layers[number], layer.key_buffer, layer.value_buffer
        self._known[number] = weakref.ref(keys), weakref.ref(values)
        record.keys, record.values, record.capacity = pointer(keys), pointer(values), keys.shape[-2]
        record.window = getattr(layer, "sliding_window", 0)

    def _reach(self, positions: int) -> int:
        """Have rotations for so many positions; the elements that are rotated of each head."""
        self._positions = max(positions, 2 * self._positions)
        kinds = {kind for kind in self._kinds if kind is not None}
        self._tables = tables = {kind: _rotations(self._rotary, self._positions, *kind) for kind in kinds}
        for record, kind in zip(self._layers, self._kinds, strict=True):
            record.rotation = None if kind is None else pointer(tables[kind])
        return next((2 * table.shape[-1] for table in tables.values()), 0)

    def _fill(self, record: Any, layer: Any, family: Family) -> None:
        attention, hidden = layer.self_attn, layer.self_attn.config.hidden_size
        for name, matrix in (*_projections(attention, self._kv_heads * self._head_dim), *_mlp(layer.mlp)):
            setattr(record, name, matrix)
        places = ("attention_in", "attention_out", "mlp_in", "mlp_out")
        for place, norm_name in zip(places, family.norms, strict=True):
            setattr(record, place, None if norm_name is None else self._norm(getattr(layer, norm_name), hidden))
        for place, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            setattr(record, place, self._norm(getattr(attention, name, None), self._head_dim))

    def _norm(self, norm: nn.Module | None, size: int) -> int | None:
        if norm is None:
            return None
        weight = getattr(norm, "weight", None)
        # of a loaded model the very tensor
        self._kept.append(torch.ones(size) if weight is None else weight.detach().float().contiguous())
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


_Matrices = Iterator[tuple[str, MatrixRecord]]


def _projections(attention: Any, keys: int) -> _Matrices:
    fused: NativeLinear | None = getattr(attention, "qkv_proj", None)
    if fused is None:
        yield from ((name, getattr(attention, f"{name[0]}_proj").record) for name in ("query", "key", "value"))
    else:
        queries = fused.out_features - 2 * keys
        yield from (("query", fused.part(0, queries)), ("key", fused.part(queries, keys)))
        yield "value", fused.part(queries + keys, keys)
    yield "output", attention.o_proj.record


def _mlp(mlp: Any) -> _Matrices:
    fused: NativeLinear | None = getattr(mlp, "gate_up_proj", None)
    if fused is None:
        yield from (("gate", mlp.gate_proj.record), ("up", mlp.up_proj.record))
    else:
        half = fused.out_features // 2
        yield from (("gate", fused.part(0, half)), ("up", fused.part(half, half)))
    yield "down", mlp.down_proj.record


def _rope_kind(layer: Any, config: Any, number: int) -> tuple[str, ...] | None:
    """What tells the model's rotary module which rotations a layer has, None for one that does not rotate."""
    if not getattr(layer.self_attn, "use_rope", True):
        return None
    return (str(config.layer_types[number]),) if _has_several_ropes(config) else ()


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5)))


def _attention_cap(attention: Any, config: Any, family: Family) -> float:
    # a fused attention would leave the cap out, and transformers' tokens are the reference
    eager = config._attn_implementation == "eager"
    return float(attention.attn_logit_softcapping or 0.0) if family.caps_attention and eager else 0.0
