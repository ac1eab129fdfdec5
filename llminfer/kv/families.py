"""From a config to the layers that cache: one row per family of model types.

A row is a function from a `ConfigView` to the layers. Model types that are not in the table are
refused: the plain formula would be wrong for many of them without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.config import ConfigView, text_config
from llminfer.kv.dtypes import element_type
from llminfer.kv.layer import LayerKV, ModelKV, PerToken

Family = Callable[[ConfigView], tuple[LayerKV, ...]]


def read_model(config: Mapping[str, Any], *, source: str, name: str | None = None) -> ModelKV:
    """What the model of this config caches.

    Args:
        config: the content of a config.json, or a transformers config's `to_dict()`.
        source: names the config in errors.
        name: what to call the model; the source when not given.

    Raises:
        UnsupportedArchitecture: when the model type is not in the family table.
        UnknownConfigField: when a field that the sizes need is missing or unusable.
    """
    view = ConfigView(config=text_config(config), source=source)
    model_type = view.model_type
    family = FAMILIES.get(model_type)
    if family is None:
        what = f"model type {model_type!r}" if model_type else "a config without model_type"
        raise UnsupportedArchitecture(
            f"{source}: cannot predict the cache of {what}", hint=f"known: {', '.join(sorted(FAMILIES))}"
        )
    layers = family(view)
    return ModelKV(
        name=name or source,
        model_type=model_type,
        layers=layers,
        dtype=element_type(str(view.get("dtype", "torch_dtype", default="float32"))).name,
        context_limit=view.get("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
        fields=tuple(view.used.values()),
    )


def attention_layers(view: ConfigView) -> tuple[LayerKV, ...]:
    """Plain, grouped-query and sliding-window attention.

    K and V of `h_kv · d_h` elements per token and layer. The window follows transformers'
    `get_layer_types_and_kwargs`: by `layer_types`, else every layer when `sliding_window` is set.
    """
    layers = view.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = view.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = view.integer("num_key_value_heads", default=heads)
    head_dim = _head_dim(view, heads)
    kinds = _layer_kinds(view, layers)
    tensors = (PerToken(name="k", heads=kv_heads, dim=head_dim), PerToken(name="v", heads=kv_heads, dim=head_dim))
    windows: dict[str, int | None] = {"full": None}
    if "sliding" in kinds:
        windows["sliding"] = view.integer("sliding_window")
    return tuple(LayerKV(kind=kind, tensors=tensors, window=windows[kind]) for kind in kinds)


def _head_dim(view: ConfigView, heads: int) -> int:
    stated = view.get("head_dim")
    if stated is not None:
        return view.integer("head_dim")
    hidden = view.integer("hidden_size", "n_embd", "d_model", "dim")
    if hidden % heads:
        raise UnknownConfigField(f"{view.source}: hidden size {hidden} is not a multiple of {heads} heads")
    view.note("head_dim", hidden // heads, "hidden size / attention heads")
    return hidden // heads


def _layer_kinds(view: ConfigView, layers: int) -> list[str]:
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    layer_types = view.get("layer_types")
    if layer_types is None:
        sliding = view.get("sliding_window") is not None and view.get("use_sliding_window", default=True)
        return ["sliding" if sliding else "full"] * layers
    unknown = sorted({str(kind) for kind in layer_types} - names.keys())
    if unknown or len(layer_types) != layers:
        reason = (
            f"layer types {', '.join(unknown)}" if unknown else f"{len(layer_types)} layer types for {layers} layers"
        )
        raise UnsupportedArchitecture(f"{view.source}: cannot predict {reason}", hint=f"known: {', '.join(names)}")
    return [names[kind] for kind in layer_types]


FAMILIES: dict[str, Family] = dict.fromkeys(
    (
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "granite",
        "llama",
        "ministral",
        "mistral",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    ),
    attention_layers,
)
