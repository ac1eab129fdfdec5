"""From a config to the layers that cache: one row for each model type.

A row says which rule gives the tensors of an attention layer and the states of a recurrent one;
which layer is of which kind comes from `layer_types` or from the patterns in `kinds.py`. Model
types that are not in the table are refused: the plain formula would be wrong for many of them
without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv import attention, recurrent
from llminfer.kv.config import ConfigView, text_part
from llminfer.kv.defaults import defaults_origin, type_defaults
from llminfer.kv.dtypes import element_type
from llminfer.kv.kinds import (
    CHUNKED,
    COMPRESSED_HEAVILY,
    COMPRESSED_SPARSE,
    CONV,
    FULL,
    HYBRID,
    HYBRID_SLIDING,
    INDEXED,
    LINEAR,
    NONE,
    SLIDING,
    SPARSE_BLOCKS,
    layer_kinds,
)
from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
# a config may come from anywhere, and every layer becomes a record
_MOST_LAYERS = 10_000

Tensors = Callable[[ConfigView], tuple[PerToken, ...]]
States = Callable[[ConfigView], tuple[State, ...]]
Layers = tuple[LayerKV, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the layers of a model type become records.

    `attention` and `states` are the rules of its attending and its recurrent layers; `of_kind` and
    `states_of_kind` are those of single kinds that differ. `kind` names its full layers in the
    records. `prepare` rewrites old or derived fields to the usual ones before anything is read.
    `finish` turns the config's layers into the cache's, for types that cache a layer more than
    once, or not at all; `read` replaces all of it where a config has no layers of its own. `notes` are sentences that any answer about the type has to carry.
    """

    attention: Tensors = attention.grouped
    states: States | None = None
    of_kind: Mapping[str, Tensors] = field(default_factory=dict)
    states_of_kind: Mapping[str, States] = field(default_factory=dict)
    kind: str | None = None
    layers: tuple[str, ...] = LAYERS
    prepare: Callable[[ConfigView], ConfigView] = lambda view: view
    finish: Callable[[ConfigView, list[str], Layers], Layers] = lambda view, kinds, layers: layers
    read: Callable[[ConfigView], Layers] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kind of layer holds, and which field says how far back it sees."""

    name: str
    attends: bool = True
    recurs: bool = False
    window: str | None = None


KINDS: dict[str, Kind] = {
    FULL: Kind(name="full"),
    SLIDING: Kind(name="sliding", window="sliding_window"),
    CHUNKED: Kind(name="chunked", window="attention_chunk_size"),
    INDEXED: Kind(name="indexed"),
    LINEAR: Kind(name="linear", attends=False, recurs=True),
    CONV: Kind(name="conv", attends=False, recurs=True),
    HYBRID: Kind(name="hybrid", recurs=True),
    HYBRID_SLIDING: Kind(name="hybrid_sliding", recurs=True, window="sliding_window"),
    COMPRESSED_SPARSE: Kind(name="compressed", window="sliding_window"),
    COMPRESSED_HEAVILY: Kind(name="compressed", window="sliding_window"),
    SPARSE_BLOCKS: Kind(name="sparse_blocks"),
    NONE: Kind(name="none", attends=False),
}


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
    view = _text_view(config, source)
    model_type = view.model_type
    family = FAMILIES.get(model_type) if model_type else _UNTYPED
    if family is None:
        raise UnsupportedArchitecture(
            f"{source}: cannot predict the cache of model type {model_type!r}",
            hint=f"known: {', '.join(sorted(FAMILIES))}",
        )
    if not model_type:
        view.note("model_type", None, "not in the file: read as attention of the stated sizes")
    return ModelKV(
        name=name or source,
        model_type=model_type,
        layers=read_layers(view, family),
        dtype=_dtype(view),
        context_limit=_context_limit(view),
        fields=tuple(view.used.values()),
        notes=family.notes,
    )


def read_layers(view: ConfigView, family: Family) -> Layers:
    """The records of all layers of a cache, in its order."""
    if family.read:
        return family.read(view)
    view = family.prepare(view)
    count = view.size(*family.layers)
    if count > _MOST_LAYERS:
        raise UnknownConfigField(f"{view.source}: {count} layers are more than any model has")
    kinds = layer_kinds(view, count)
    views = [view.at(index, _layer_overrides(view, index)) for index in range(len(kinds))]
    layers = tuple(_layer(layer_view, family, kind) for layer_view, kind in zip(views, kinds, strict=True))
    return family.finish(view, kinds, layers)


def _layer(view: ConfigView, family: Family, kind_name: str) -> LayerKV:
    kind = KINDS[kind_name]
    tensors = family.of_kind.get(kind_name, family.attention)(view) if kind.attends else ()
    states: tuple[State, ...] = ()
    if kind.recurs:
        rule = family.states_of_kind.get(kind_name, family.states)
        if rule is None:
            raise UnsupportedArchitecture(f"{view.source}: no rule for {kind_name} layers of {view.model_type!r}")
        states = rule(view)
    name = family.kind if family.kind and kind_name in (FULL, INDEXED) else kind.name
    window = view.integer(kind.window) if kind.window else None
    return LayerKV(kind=name, tensors=tensors, states=states, window=window)


def _layer_overrides(view: ConfigView, index: int) -> Mapping[str, Any] | None:
    """What `per_layer_config` says of one layer."""
    overrides = view.get("per_layer_config")
    if not isinstance(overrides, Mapping):
        return None
    own = overrides.get(str(index), overrides.get(index))
    return own if isinstance(own, Mapping) else None


def _text_view(config: Mapping[str, Any], source: str) -> ConfigView:
    """The view of a config's language model, with the class defaults of its model type."""
    outer_type = str(config.get("model_type") or "")
    outer = type_defaults(outer_type)
    if outer_type in FAMILIES and outer.text_key is None:
        part, nested = config, False
    else:
        part, nested = text_part(config, outer.text_key)
    if outer.text_type and not (nested and part.get("model_type")):
        # old files keep everything at the top, and a part may leave out its type
        part = {**part, "model_type": outer.text_type}
    part = _PARTS.get(outer_type, lambda part: part)(part)
    own = type_defaults(str(part.get("model_type") or ""))
    return ConfigView(
        config=part,
        source=source,
        defaults=own.values,
        defaults_origin=defaults_origin(),
        names=own.names,
        # an empty part states nothing at all, so it stays an error
        nested=nested and bool(part.keys() - {"model_type", "dtype"}),
    )


def _dtype(view: ConfigView) -> str:
    stated = view.get("dtype", "torch_dtype")
    if stated is None:
        view.note("dtype", "float32", "not in the file: what torch uses when nothing is stated")
    return element_type(str(stated or "float32")).name


def _context_limit(view: ConfigView) -> int | None:
    limit = view.get("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None


def _without_shared(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Gemma 3n and 4: the last `num_kv_shared_layers` layers read the cache of earlier ones."""
    shared = view.integer("num_kv_shared_layers", default=0, least=0)
    return tuple(_EMPTY if index >= len(layers) - shared else layer for index, layer in enumerate(layers))


def _twice(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """LongCat-Flash: two attention blocks in every layer."""
    return tuple(layer for layer in layers for _ in range(2))


def _dory_loops(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Dory: the middle layers run several times, and each pass has a cache of its own, after all others."""
    first = view.integer("n_input_layers", least=0)
    middle = view.get("n_recurrent_layers")
    last = len(layers) - view.integer("n_output_layers", least=0) if middle is None else first + int(middle)
    if view.get("recurrent_kv_cache_mode") == "last_loop":
        return layers
    return layers + layers[first:last] * (view.integer("n_recurrent_loops") - 1)


def _inkling_loops(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Inkling 2 with loops: as Dory's, by first and last index."""
    first = view.integer("loop_config.core_start", "loop_layer_index_start", least=0)
    last = view.integer("loop_config.core_end", "loop_layer_index_end", least=0)
    return layers + layers[first:last] * (view.integer("loop_config.num_passes", "loop_num_passes") - 1)


def _qwen4_positions(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Qwen4: the first indexed layer keeps every token's three rotary positions, for all of them."""
    if INDEXED not in kinds:
        return layers
    index = kinds.index(INDEXED)
    positions = PerToken(name="position_ids", heads=1, dim=3, dtype="int64")
    holder = replace(layers[index], tensors=(*layers[index].tensors, positions))
    return (*layers[:index], holder, *layers[index + 1 :])


def _without_cross(view: ConfigView, kinds: list[str], layers: Layers) -> Layers:
    """Llama 3.2 Vision: the cross-attention layers hold an image's keys and values, so nothing without one."""
    cross = view.integers("cross_attention_layers")
    cross = [3, 8, 13, 18, 23, 28, 33, 38] if cross is None else cross
    return tuple(_EMPTY if index in cross else layer for index, layer in enumerate(layers))


def _blt(view: ConfigView) -> Layers:
    """BLT: the local encoder's layers and the local decoder's, which see bytes; the global ones see patches anew."""
    layers: list[LayerKV] = []
    for part in ("encoder_config", "decoder_config"):
        nested = view.get(part)
        if not isinstance(nested, Mapping):
            raise view.missing(part)
        own = replace(view, config=nested, defaults=view.defaults.get(part, {}), nested=True)
        layer = LayerKV(kind="full", tensors=attention.grouped(own))
        layers += [layer] * own.size(*LAYERS)
    return tuple(layers)


def _reformer(view: ConfigView) -> Layers:
    """Reformer: a list of `local` and `lsh` layers."""
    rules = {"local": attention.reformer, "lsh": attention.reformer_hashed}
    listed = view.get("attn_layers")
    if not isinstance(listed, list) or not listed or len(listed) > _MOST_LAYERS:
        raise view.missing("attn_layers")
    unknown = sorted({str(kind) for kind in listed} - rules.keys())
    if unknown:
        raise UnsupportedArchitecture(f"{view.source}: attn_layers has {unknown}", hint=f"known: {', '.join(rules)}")
    return tuple(LayerKV(kind=str(kind), tensors=rules[str(kind)](view)) for kind in listed)


def _dory(view: ConfigView) -> ConfigView:
    """Released files list attention and MLP as layers of their own, which doubles every count."""
    listed = view.get("layer_types")
    if not isinstance(listed, list) or "mlp" not in listed:
        return view
    names = ("num_hidden_layers", "n_input_layers", "n_output_layers", "n_recurrent_layers")
    halved = {name: value // 2 for name in names if isinstance(value := view.get(name), int)}
    return view.at(0, {**halved, "layer_types": listed[::2]})


def _hrm(view: ConfigView) -> ConfigView:
    """HRM: a pass of the low stack in every low cycle and of the high one in every high cycle, each cached."""
    if view.get("num_layers_per_stack") is not None:
        return view
    cycles = view.integer("H_cycles") * (view.integer("L_cycles") + 1)
    return view.at(0, {"num_hidden_layers": view.size(*LAYERS) * cycles})


def _nemotron_h(view: ConfigView) -> ConfigView:
    """Nemotron-H: the pattern counts, whatever the stated number of layers."""
    listed = view.get("layer_types", "layers_block_type", "hybrid_override_pattern")
    if listed is None:
        raise view.missing("layer_types", "hybrid_override_pattern")
    return view.at(0, {"num_hidden_layers": len(listed)}) if isinstance(listed, (list, str)) else view


def _mimo_v2_flash(view: ConfigView) -> ConfigView:
    """MiMo-V2-Flash: `sliding_window_size` does not count the newest token."""
    size = view.get("sliding_window_size")
    return view if size is None else view.at(0, {"sliding_window": view.integer("sliding_window_size") + 1})


def _recurrent_gemma(view: ConfigView) -> ConfigView:
    return view.at(0, {"sliding_window": view.integer("sliding_window", "attention_window_size")})


def _inkling(view: ConfigView) -> ConfigView:
    return view.at(0, {"sliding_window": view.integer("sliding_window", "sliding_window_size")})


def _modernbert_decoder(view: ConfigView) -> ConfigView:
    """ModernBERT: `local_attention` counts both directions."""
    return view.at(0, {"sliding_window": view.integer("local_attention") // 2})


def _gemma4(view: ConfigView) -> ConfigView:
    """Gemma 4: the last layer is full, whatever the list says."""
    listed = view.get("layer_types")
    return view.at(0, {"layer_types": [*listed[:-1], FULL]}) if isinstance(listed, list) and listed else view


def _jamba(view: ConfigView) -> ConfigView:
    """Jamba derives its layers from period and offset, so a saved list says nothing new."""
    return view.at(0, {"layer_types": None, "layers_block_type": None})


def _dots3(view: ConfigView) -> ConfigView:
    window = view.get("sliding_window", "sliding_window_size", default=512)
    listed = view.get("layer_types")
    use_dsa = view.get("use_dsa", default=view.get("per_layer_config") is None or None)
    if isinstance(listed, list) and use_dsa is not None:
        old, new = (FULL, INDEXED) if use_dsa else (INDEXED, FULL)
        listed = [new if kind == old else kind for kind in listed]
    return view.at(0, {"sliding_window": window, "layer_types": listed})


def _qwen4(view: ConfigView) -> ConfigView:
    listed = view.get("layer_types")
    if not isinstance(listed, list):
        return view
    return view.at(0, {"layer_types": [INDEXED if kind == FULL else kind for kind in listed]})


def _assistant(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gemma 4's drafters read the cache of the model they draft for: every layer is shared."""
    return {**part, "num_kv_shared_layers": part.get("num_kv_shared_layers") or part.get("num_hidden_layers")}


# composites that change their language model's config
_PARTS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "gemma4_assistant": _assistant,
    "gemma4_unified_assistant": _assistant,
}
_EMPTY = LayerKV(kind="none")
_PLAIN = Family()
_UNTYPED = Family()
_MHA = Family(attention=attention.every_head)
_MAMBA1 = Family(states=recurrent.mamba1)
_MAMBA2 = Family(states=recurrent.mamba2)
_DELTA_NET = Family(states=recurrent.gated_delta_net)
_LATENT = Family(attention=attention.latent, kind="latent")
_LATENT_INDEXED = Family(attention=attention.latent_indexed, kind="latent")
_SHORT_CONV = Family(states=recurrent.short_conv)
_DECODER_HALF = Family(
    attention=attention.decoder_half,
    layers=DECODER_LAYERS,
    notes=("the decoder alone: with an encoder, every layer also caches keys and values of the source",),
)
_INKLING = Family(
    prepare=_inkling,
    attention=attention.inkling,
    states=recurrent.inkling,
    of_kind={HYBRID_SLIDING: partial(attention.inkling, sliding=True)},
    states_of_kind={HYBRID_SLIDING: partial(recurrent.inkling, sliding=True)},
)
_GEMMA4 = Family(of_kind={FULL: attention.gemma4_full}, prepare=_gemma4, finish=_without_shared)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys((
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "beam", "bitnet", "bloom", "cohere",
        "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dbrx", "diffllama", "doge", "dots1",
        "emu3_text_model", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "flex_olmo", "flint",
        "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granite_swa",
        "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
        "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama",
        "llama4_text", "mellum", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "moshi",
        "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3",
        "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sarvam_moe", "seed_oss",
        "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    ), _PLAIN),  # fmt: skip
    **dict.fromkeys((
        "bert", "bert-generation", "big_bird", "biogpt", "camembert", "codegen", "ctrl", "data2vec-text",
        "electra", "ernie", "git", "gpt-sw3", "gpt2", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj",
        "megatron-bert", "mpt", "musicgen_decoder", "musicgen_melody_decoder", "opt", "rembert", "roberta",
        "roberta-prelayernorm", "roc_bert", "roformer", "xglm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ), _MHA),  # fmt: skip
    **dict.fromkeys((
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus",
        "plbart", "prophetnet", "trocr", "whisper",
    ), _DECODER_HALF),  # fmt: skip
    **dict.fromkeys((
        "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu",
    ), _LATENT),  # fmt: skip
    **dict.fromkeys((
        "axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4",
    ), _LATENT_INDEXED),  # fmt: skip
    "bailing_hybrid": replace(_LATENT, states=recurrent.bailing_hybrid),
    "bamba": _MAMBA2,
    "blt": Family(read=_blt),
    "cpmant": Family(attention=attention.cpmant),
    "deepseek_v4": Family(
        attention=attention.shared_key_value,
        of_kind={
            COMPRESSED_SPARSE: attention.compressed_sparse,
            COMPRESSED_HEAVILY: attention.heavily_compressed,
        },
    ),
    "dory": Family(prepare=_dory, finish=_dory_loops),
    "dots3_note_text": Family(
        attention=attention.latent,
        kind="latent",
        of_kind={INDEXED: attention.dots3_indexed, SLIDING: attention.dots3_sliding},
        prepare=_dots3,
    ),
    "falcon": Family(attention=attention.falcon),
    "falcon_h1": _MAMBA2,
    "falcon_mamba": _MAMBA1,
    "gemma3n_text": Family(finish=_without_shared),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_bigcode": Family(attention=attention.multi_query),
    "granitemoehybrid": _MAMBA2,
    "hrm_text": Family(prepare=_hrm),
    "inkling2_loop_text": replace(_INKLING, finish=_inkling_loops),
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "jamba": Family(states=recurrent.mamba1, prepare=_jamba),
    "jetmoe": Family(attention=attention.jetmoe),
    "kimi_linear": replace(_LATENT, states=recurrent.delta_attention),
    "lara_mini": _DELTA_NET,
    "lfm2": _SHORT_CONV,
    "lfm2_moe": _SHORT_CONV,
    "lfm3": _SHORT_CONV,
    "longcat_flash": replace(_LATENT, finish=_twice),
    "mamba": _MAMBA1,
    "mamba2": _MAMBA2,
    "mimo_v2_flash": Family(
        attention=attention.mimo_v2_flash,
        of_kind={SLIDING: partial(attention.mimo_v2_flash, sliding=True)},
        prepare=_mimo_v2_flash,
    ),
    "minimax": Family(states=recurrent.lightning),
    "minimax_m3_vl_text": Family(of_kind={SPARSE_BLOCKS: attention.sparse_blocks}),
    "mllama_text_model": Family(finish=_without_cross, notes=("without an image: each cross-attention layer caches an image's keys and values",)),
    "modernbert-decoder": Family(prepare=_modernbert_decoder),
    "nemotron_h": Family(states=recurrent.mamba2, prepare=_nemotron_h),
    "olmo_hybrid": Family(states=recurrent.olmo_hybrid),
    "openai-gpt": Family(
        attention=attention.not_cached,
        notes=("transformers keeps no cache for this type: every step reads the whole sequence again",),
    ),
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
    "qwen4_exp_text": Family(
        states=recurrent.qwen4,
        of_kind={INDEXED: attention.qwen4_indexed},
        prepare=_qwen4,
        finish=_qwen4_positions,
    ),
    "recurrent_gemma": Family(
        states=recurrent.recurrent_gemma,
        prepare=_recurrent_gemma,
        notes=("transformers keeps the recurrent states in the modules, not in the cache object",),
    ),
    "reformer": Family(read=_reformer),
    "rwkv": Family(states=recurrent.rwkv),
    "xlm": Family(attention=attention.xlm),
    "xlnet": Family(attention=attention.xlnet),
    "xlstm": Family(states=recurrent.xlstm, layers=("num_hidden_layers", "num_blocks")),
    "zamba": Family(attention=attention.zamba, states=recurrent.zamba),
    "zamba2": Family(attention=attention.zamba2, states=recurrent.mamba2),
    "zaya": Family(states=recurrent.zaya),
}
