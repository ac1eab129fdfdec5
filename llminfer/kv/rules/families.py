"""From a config to the layers that cache: one row for each model type.

A row says which rule gives the tensors of an attention layer and the states of a recurrent one;
which layer is of which kind comes from `layer_types` or from the patterns in `layer_types.py`. Model
types that are not in the table are refused: the plain formula would be wrong for many of them
without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.config import MOST_LAYERS, ConfigView, text_part
from llminfer.kv.context import computed_dtype, context_limit, stored_dtype
from llminfer.kv.defaults import defaults_origin, type_defaults
from llminfer.kv.layer import LayerKV, ModelKV, PerToken, State
from llminfer.kv.rules import attention, layer_types, quirks, recurrent
from llminfer.kv.rules.attention import LAYERS
from llminfer.kv.rules.direction import ENCODER_DECODERS, ENCODER_HINT, IS_ENCODER, IS_ENCODER_DECODER, is_encoder
from llminfer.kv.rules.layer_types import FULL, HYBRID_SLIDING, INDEXED, SLIDING, each
from llminfer.kv.rules.quirks import Layers

DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
Tensors = Callable[[ConfigView], tuple[PerToken, ...]]
States = Callable[[ConfigView], tuple[State, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the layers of a model type become records.

    `attention` and `states` are the rules of its attending and its recurrent layers; `of_kind` and
    `states_of_kind` are those of single kinds that differ. `latent` says that its attention caches
    latents. `prepare` rewrites old or derived fields to the usual ones before anything is read.
    `finish` turns the config's layers into the cache's, for types that cache a layer more than
    once, or not at all; `read` replaces all of it where a config has no list of layers. `notes` are
    sentences that any answer about the type has to carry.
    """

    attention: Tensors = attention.grouped
    states: States | None = None
    of_kind: Mapping[str, Tensors] = field(default_factory=dict)
    states_of_kind: Mapping[str, States] = field(default_factory=dict)
    latent: bool = False
    layers: tuple[str, ...] = LAYERS
    prepare: Callable[[ConfigView], ConfigView] = lambda view: view
    finish: Callable[[ConfigView, list[str], Layers], Layers] = lambda view, kinds, layers: layers
    read: Callable[[ConfigView], Layers] | None = None
    notes: tuple[str, ...] = ()


_LATENT_NAMES = {FULL: "latent", INDEXED: "latent", SLIDING: "latent_sliding"}


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
    family = FAMILIES.get(model_type) if model_type else _untyped(view)
    if family is None:
        reason = why_no_rule(config)
        raise UnsupportedArchitecture(
            f"{source}: {reason or f'cannot predict the cache of model type {model_type!r}'}",
            hint=None if reason else "plain attention: give --layers, --kv-heads and --head-dim instead",
        )
    labelled = view.nested or family.layers is DECODER_LAYERS  # a part of a larger model decodes for it
    if not labelled and is_encoder(model_type, view.get("is_decoder")):
        raise UnknownConfigField(f"{source}: {model_type} {IS_ENCODER}", hint=ENCODER_HINT)
    dtype, notes = computed_dtype(view)
    try:
        layers = read_layers(view, family)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # fields of a file can contradict each other in any way, and each way raises another of these
        what = f"the config's fields contradict each other ({type(error).__name__}: {error})"
        raise UnknownConfigField(f"{source}: {what}") from error
    return ModelKV(
        name=name or source,
        model_type=model_type,
        layers=layers,
        dtype=dtype,
        dtype_assumed=view.get("dtype", "torch_dtype") is None,
        stored_dtype=stored_dtype(config),
        context_limit=context_limit(view),
        fields=tuple(view.used.values()),
        notes=family.notes + notes,
    )


def why_no_rule(config: Mapping[str, Any]) -> str | None:
    """Why a type outside the table cannot be sized in any other way either, None when it may be."""
    model_type = str(config.get("model_type") or "")
    return f"{model_type} {IS_ENCODER_DECODER}" if model_type in ENCODER_DECODERS else None


def _untyped(view: ConfigView) -> Family:
    """The family of a config that names no model type: attention of the sizes that it states, or none at all.

    Raises:
        UnsupportedArchitecture: when it has fields of an architecture that caches something else.
    """
    foreign = sorted(name for name in view.config if _FOREIGN.search(str(name)))
    if foreign:
        raise UnsupportedArchitecture(
            f"{view.source}: no model_type in the config, and {', '.join(foreign)} could belong to several",
            hint="add its model_type",
        )
    view.note("model_type", None, "not in the file: read as attention of the stated sizes")
    return _LATENT if view.get("kv_lora_rank") is not None else replace(_EVEN, prepare=quirks.listed_heads)


def read_layers(view: ConfigView, family: Family) -> Layers:
    """The records of all layers of a cache, in its order."""
    if family.read:
        return family.read(view)
    view = family.prepare(view)
    count = view.size(*family.layers)
    if count > MOST_LAYERS:
        raise UnknownConfigField(f"{view.source}: {count} layers are more than any model has")
    kinds = layer_types.layer_kinds(view, count)
    overrides = _layer_overrides(view)
    views = [view.at(index, overrides.get(index)) for index in range(len(kinds))]
    layers = tuple(_layer(layer_view, family, kind) for layer_view, kind in zip(views, kinds, strict=True))
    return family.finish(view, kinds, layers)


def _layer(view: ConfigView, family: Family, kind_name: str) -> LayerKV:
    kind = layer_types.KINDS[kind_name]
    tensors = family.of_kind.get(kind_name, family.attention)(view) if kind.attends else ()
    states: tuple[State, ...] = ()
    if kind.recurs:
        rule = family.states_of_kind.get(kind_name, family.states)
        if rule is None:
            raise UnsupportedArchitecture(f"{view.source}: no rule for {kind_name} layers of {view.model_type!r}")
        states = rule(view)
    latent = family.latent and kind_name in _LATENT_NAMES
    name = _LATENT_NAMES[kind_name] if latent else kind.name
    window = view.integer(kind.window) if kind.window else None
    return LayerKV(kind=name, latent=latent, tensors=tensors, states=states, window=window)


def _layer_overrides(view: ConfigView) -> dict[int, Mapping[str, Any]]:
    """What `per_layer_config` says of single layers; its keys are padded with zeros in files."""
    stated = view.get("per_layer_config")
    if not isinstance(stated, Mapping):
        return {}
    return {int(key): own for key, own in stated.items() if str(key).isdecimal() and isinstance(own, Mapping)}


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
    if outer_type in _PARTS:
        part = _PARTS[outer_type](part)
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


# composites that change their language model's config
_PARTS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "gemma4_assistant": quirks.assistant,
    "gemma4_unified_assistant": quirks.assistant,
}
# fields of types that cache more, less or something else than attention of the usual sizes does
_FOREIGN = re.compile(
    r"mamba|ssm|state_size|linear_|conv|multi_query|new_decoder|shared_layers|block_types?$|hybrid|index|swa_|loop"
    r"|cycles|lora_rank_|decoder_layers|cross_attention|compress|sparse|full_attn|attn_layer|no_rope|cca_|lru_|prompt"
)
_PLAIN = Family()
_EVEN = Family(attention=attention.grouped_evenly)
_MHA = Family(attention=attention.every_head)
_MAMBA = Family(states=recurrent.mamba)
_MAMBA2 = Family(states=recurrent.mamba2)
_DELTA_NET = Family(states=recurrent.gated_delta_net)
_LATENT = Family(attention=attention.latent, latent=True)
_LATENT_INDEXED = Family(attention=attention.latent_indexed, latent=True)
_SHORT_CONV = Family(states=recurrent.short_conv)
_SOUND = "the self-attention of the decoder alone; generation with guidance caches twice as many sequences"
_DECODER_HALF = Family(
    attention=attention.decoder_half,
    layers=DECODER_LAYERS,
    notes=("the decoder alone: with an encoder, every layer also caches keys and values of the source",),
)
_INKLING = Family(
    prepare=quirks.window_of("sliding_window_size"),
    attention=attention.inkling,
    states=recurrent.inkling,
    of_kind={HYBRID_SLIDING: partial(attention.inkling, sliding=True)},
    states_of_kind={HYBRID_SLIDING: partial(recurrent.inkling, sliding=True)},
)
_GEMMA4 = Family(of_kind={FULL: attention.gemma4_full}, prepare=quirks.gemma4, finish=quirks.without_shared)


FAMILIES: dict[str, Family] = {
    **each(
        _PLAIN,
        """
        afmoe apertus apertus1p5_text beam cohere cohere2 cohere2_moe cohere_compass_text diffllama doge dots1
        emu3_text_model ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma glm glm4 glm4_moe gpt_oss
        granite granite_swa granitemoe granitemoe_swa granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3
        kolibri1 laguna llama4_text mellum minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron
        olmo olmo2 olmo3 phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss
        smollm3 solar_open starcoder2
        """,
    ),
    **each(
        _EVEN,
        """
        arcee aria_text bitnet bloom chameleon cwm exaone gemma2 helium hyperclovax internlm3 iquestcoder jais2
        llama moshi muse_glimmer_text muse_spark_text olmoe qwen2_5_vl_text qwen2_vl_text vaultgemma
        """,
    ),
    # language models that come inside image-text models only
    **each(
        _PLAIN,
        """
        ernie4_5_vl_moe_text glm4v_moe_text glm4v_text glm_ocr_text granite4_vision_text hunyuan_vl_text
        molmo2_text paddleocr_vl_text qwen2_5_omni_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text
        """,
    ),
    **each(
        _MHA,
        """
        bert bert-generation big_bird biogpt camembert codegen ctrl data2vec-text electra ernie git gpt-sw3 gpt2
        gpt_neo gpt_neox gpt_neox_japanese gptj megatron-bert mpt opt
        rembert roberta roberta-prelayernorm roc_bert roformer xglm xlm-roberta xlm-roberta-xl xmod
        """,
    ),
    **each(
        _DECODER_HALF,
        """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
        whisper
        """,
    ),
    **each(_LATENT, "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 mistral4 sarvam_mla youtu"),
    **each(_LATENT_INDEXED, "axk2 deepseek_v32 glm_moe_dsa hy_v4"),
    "bailing_hybrid": replace(_LATENT, states=recurrent.bailing_hybrid),
    "bamba": _MAMBA2,
    "blt": Family(read=quirks.blt),
    "cpmant": Family(attention=attention.cpmant),
    "dbrx": Family(attention=attention.dbrx),
    "deepseek_v4": Family(
        attention=attention.shared_key_value,
        of_kind={
            layer_types.COMPRESSED_SPARSE: attention.compressed_sparse,
            layer_types.COMPRESSED_HEAVILY: attention.heavily_compressed,
        },
    ),
    "dory": Family(prepare=quirks.dory, finish=quirks.dory_loops),
    "dots3_note_text": Family(
        attention=attention.latent,
        latent=True,
        of_kind={INDEXED: attention.dots3_indexed, SLIDING: attention.dots3_sliding},
        prepare=quirks.dots3,
    ),
    "falcon": Family(attention=attention.falcon),
    "falcon_h1": _MAMBA2,
    "falcon_mamba": _MAMBA,
    "gemma3_text": replace(_EVEN, prepare=quirks.gemma3),
    "gemma3n_text": replace(_EVEN, finish=quirks.without_shared),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_bigcode": Family(attention=attention.multi_query),
    "granitemoehybrid": _MAMBA2,
    "hrm_text": replace(_EVEN, prepare=quirks.hrm_layers, finish=quirks.hrm),
    "inkling2_loop_text": replace(_INKLING, finish=quirks.inkling_loops),
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "jamba": Family(states=recurrent.mamba1, prepare=quirks.jamba),
    "jetmoe": Family(attention=attention.jetmoe),
    "kimi_linear": replace(_LATENT, states=recurrent.delta_attention),
    "lara_mini": _DELTA_NET,
    **each(_SHORT_CONV, "lfm2 lfm2_moe lfm3"),
    "longcat_flash": replace(_LATENT, finish=quirks.twice),
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "mimo_v2_flash": Family(
        attention=attention.mimo_v2_flash,
        of_kind={SLIDING: partial(attention.mimo_v2_flash, sliding=True)},
        prepare=quirks.mimo_v2_flash,
    ),
    "minimax": Family(states=recurrent.lightning),
    "minimax_m3_vl_text": Family(of_kind={layer_types.SPARSE_BLOCKS: attention.sparse_blocks}),
    "mllama_text_model": Family(
        finish=quirks.without_cross,
        notes=("without an image: each cross-attention layer caches an image's keys and values",),
    ),
    "modernbert-decoder": replace(_EVEN, prepare=quirks.modernbert_decoder),
    "musicgen_decoder": replace(_MHA, notes=(_SOUND, "with a text, every layer also caches its keys and values")),
    "musicgen_melody_decoder": replace(
        _MHA, notes=(_SOUND, "text and melody come before the tokens and count as such")
    ),
    "nemotron_h": Family(states=recurrent.mamba2, prepare=quirks.nemotron_h),
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
        prepare=quirks.qwen4,
        finish=quirks.qwen4_positions,
    ),
    "recurrent_gemma": Family(
        attention=attention.grouped_evenly,
        states=recurrent.recurrent_gemma,
        prepare=quirks.window_of("attention_window_size"),
        notes=("transformers keeps the recurrent states in the modules, not in the cache object",),
    ),
    "reformer": Family(
        read=quirks.reformer,
        notes=("buckets as after a prompt longer than a chunk; those of a short prompt that grows take half",),
    ),
    "rwkv": Family(states=recurrent.rwkv),
    "xlm": Family(attention=attention.xlm),
    "xlnet": Family(attention=attention.xlnet),
    "xlstm": Family(states=recurrent.xlstm, layers=("num_hidden_layers", "num_blocks")),
    **each(Family(attention=attention.partly_rotated), "persimmon phi stablelm"),
    "zamba": Family(attention=attention.zamba, states=recurrent.zamba),
    "zamba2": Family(attention=attention.zamba, states=recurrent.mamba2),
    "zaya": Family(states=recurrent.zaya),
}
