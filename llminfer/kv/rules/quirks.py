"""What single model types do that no other does: fields rewritten, layers repeated, shared or left out.

A `prepare` step takes the view of a config and returns one with the usual fields; a `finish` step
takes the layers that the config describes and returns those that the cache has. The sources are
the config classes' `__post_init__` and the models' forwards in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.config import MOST_LAYERS, ConfigView
from llminfer.kv.layer import LayerKV, PerToken
from llminfer.kv.rules import attention
from llminfer.kv.rules.attention import LAYERS
from llminfer.kv.rules.layer_types import FULL, INDEXED

Layers = tuple[LayerKV, ...]

_EMPTY = LayerKV(kind="none")


def _repeated(view: ConfigView, layers: Layers, times: int) -> Layers:
    if len(layers) * times > MOST_LAYERS:
        raise UnknownConfigField(f"{view.source}: {len(layers) * times} layers are more than any model has")
    return layers * times


def without_shared(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Gemma 3n and 4: the last `num_kv_shared_layers` layers read the cache of earlier ones."""
    shared = view.integer("num_kv_shared_layers", default=0, least=0)
    return tuple(_EMPTY if index >= len(layers) - shared else layer for index, layer in enumerate(layers))


def twice(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """LongCat-Flash: two attention blocks in every layer."""
    return tuple(layer for layer in layers for _ in range(2))


def dory_loops(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Dory: the middle layers run several times, and each pass has a cache of its own, after all others."""
    first = view.integer("n_input_layers", least=0)
    middle = view.get("n_recurrent_layers")
    last = len(layers) - view.integer("n_output_layers", least=0) if middle is None else first + int(middle)
    if view.get("recurrent_kv_cache_mode") == "last_loop":
        return layers
    return layers + _repeated(view, layers[first:last], view.integer("n_recurrent_loops") - 1)


def inkling_loops(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Inkling 2 with loops: as Dory's, by first and last index."""
    first = view.integer("loop_config.core_start", "loop_layer_index_start", least=0)
    last = view.integer("loop_config.core_end", "loop_layer_index_end", least=0)
    return layers + _repeated(view, layers[first:last], view.integer("loop_config.num_passes", "loop_num_passes") - 1)


def qwen4_positions(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Qwen4: the first indexed layer keeps every token's three rotary positions, for all of them."""
    if INDEXED not in kinds:
        return layers
    index = kinds.index(INDEXED)
    positions = PerToken(name="position_ids", heads=1, dim=3, dtype="int64")
    holder = replace(layers[index], tensors=(*layers[index].tensors, positions))
    return (*layers[:index], holder, *layers[index + 1 :])


def without_cross(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Llama 3.2 Vision: the cross-attention layers hold an image's keys and values, so nothing without one."""
    cross = view.integers("cross_attention_layers")
    cross = [3, 8, 13, 18, 23, 28, 33, 38] if cross is None else cross
    return tuple(_EMPTY if index in cross else layer for index, layer in enumerate(layers))


def blt(view: ConfigView) -> Layers:
    """BLT: the local encoder's layers and the local decoder's, which see bytes; the global ones see patches anew."""
    layers: list[LayerKV] = []
    for part in ("encoder_config", "decoder_config"):
        nested = view.get(part)
        if not isinstance(nested, Mapping):
            raise view.missing(part)
        own = replace(view, config=nested, defaults=view.defaults.get(part, {}), nested=True)
        layer = LayerKV(kind="full", tensors=attention.grouped(own))
        layers += _repeated(view, (layer,), own.size(*LAYERS))
    return tuple(layers)


def reformer(view: ConfigView) -> Layers:
    """Reformer: a list of `local` and `lsh` layers."""
    rules = {"local": attention.reformer, "lsh": attention.reformer_hashed}
    listed = view.get("attn_layers")
    if not isinstance(listed, list) or not listed or len(listed) > MOST_LAYERS:
        raise view.missing("attn_layers")
    unknown = sorted({str(kind) for kind in listed} - rules.keys())
    if unknown:
        raise UnsupportedArchitecture(f"{view.source}: attn_layers has {unknown}", hint=f"known: {', '.join(rules)}")
    return tuple(LayerKV(kind=str(kind), tensors=rules[str(kind)](view)) for kind in listed)


def listed_heads(view: ConfigView) -> ConfigView:
    """Heads listed layer by layer, in files whose model type nobody names: a shape for each layer."""
    names = (*attention.HEADS, *attention.KV_HEADS)
    listed = {name: value for name in names if isinstance(value := view.config.get(name), list)}
    count = view.size(*LAYERS) if listed else 0
    for name, value in listed.items():
        if len(value) != count:
            raise UnsupportedArchitecture(f"{view.source}: {name} lists {len(value)} of {count} layers")
    if not listed:
        return view
    own = {str(index): {name: value[index] for name, value in listed.items()} for index in range(count)}
    return view.at(0, {"per_layer_config": own})


def dory(view: ConfigView) -> ConfigView:
    """Released files list attention and MLP as layers of their own, which doubles every count."""
    listed = view.get("layer_types")
    if not isinstance(listed, list) or "mlp" not in listed:
        return view
    names = ("num_hidden_layers", "n_input_layers", "n_output_layers", "n_recurrent_layers")
    halved = {name: value // 2 for name in names if isinstance(value := view.get(name), int)}
    return view.at(0, {**halved, "layer_types": listed[::2]})


def hrm(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """HRM: a pass of the low stack in every low cycle and of the high one in every high cycle, each cached.

    The cache's other layers stay empty: a file written by transformers states the product as its layers.
    """
    stack = view.get("num_layers_per_stack")
    used = len(layers) if stack is None else view.integer("num_layers_per_stack") * _hrm_cycles(view)
    return tuple(layer if index < used else _EMPTY for index, layer in enumerate(layers))


def hrm_layers(view: ConfigView) -> ConfigView:
    """A file that states no stack states its layers, and the class makes both of them."""
    if view.get("num_layers_per_stack") is not None:
        return view
    return view.at(0, {"num_hidden_layers": view.size(*LAYERS) * _hrm_cycles(view)})


def _hrm_cycles(view: ConfigView) -> int:
    return view.integer("H_cycles") * (view.integer("L_cycles") + 1)


def nemotron_h(view: ConfigView) -> ConfigView:
    """Nemotron-H: the pattern counts, whatever the stated number of layers."""
    listed = view.get("layer_types", "layers_block_type", "hybrid_override_pattern")
    if listed is None:
        raise view.missing("layer_types", "hybrid_override_pattern")
    return view.at(0, {"num_hidden_layers": len(listed)}) if isinstance(listed, (list, str)) else view


def mimo_v2_flash(view: ConfigView) -> ConfigView:
    """MiMo-V2-Flash: `sliding_window_size` does not count the newest token."""
    size = view.get("sliding_window_size")
    return view if size is None else view.at(0, {"sliding_window": view.integer("sliding_window_size") + 1})


def window_of(name: str) -> Callable[[ConfigView], ConfigView]:
    """The window by its usual name, else by the type's older one."""
    return lambda view: view.at(0, {"sliding_window": view.integer("sliding_window", name)})


def modernbert_decoder(view: ConfigView) -> ConfigView:
    """ModernBERT: `local_attention` counts both directions; a window of the cache's own stands."""
    if view.get("sliding_window") is not None:
        return view
    return view.at(0, {"sliding_window": view.integer("local_attention") // 2})


def gemma3(view: ConfigView) -> ConfigView:
    """Gemma 3: half the window looks back when the other half looks ahead."""
    if not view.get("use_bidirectional_attention"):
        return view
    return view.at(0, {"sliding_window": view.integer("sliding_window") // 2 + 1})


def gemma4(view: ConfigView) -> ConfigView:
    """Gemma 4: the last layer is full, whatever the list says."""
    listed = view.get("layer_types")
    return view.at(0, {"layer_types": [*listed[:-1], FULL]}) if isinstance(listed, list) and listed else view


def jamba(view: ConfigView) -> ConfigView:
    """Jamba derives its layers from period and offset, so a saved list says nothing new."""
    return view.at(0, {"layer_types": None, "layers_block_type": None})


def dots3(view: ConfigView) -> ConfigView:
    window = view.get("sliding_window", "sliding_window_size", default=512)
    listed = view.get("layer_types")
    use_dsa = view.get("use_dsa", default=view.get("per_layer_config") is None or None)
    if isinstance(listed, list) and use_dsa is not None:
        old, new = (FULL, INDEXED) if use_dsa else (INDEXED, FULL)
        listed = [new if kind == old else kind for kind in listed]
    return view.at(0, {"sliding_window": window, "layer_types": listed})


def qwen4(view: ConfigView) -> ConfigView:
    listed = view.get("layer_types")
    if not isinstance(listed, list):
        return view
    return view.at(0, {"layer_types": [INDEXED if kind == FULL else kind for kind in listed]})


def assistant(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gemma 4's drafters read the cache of the model they draft for: every layer is shared."""
    return {**part, "num_kv_shared_layers": part.get("num_kv_shared_layers") or part.get("num_hidden_layers")}
