"""Which layer is of which kind, where a config does not list it in `layer_types`.

Published configs state the pattern in many ways: a period, a list of indices, a string of letters,
or not at all. Each rule here is what the `__post_init__` of that model type's config class in
transformers 5.24 does. The kinds are transformers' names for them.
"""

from __future__ import annotations

from collections.abc import Callable

from llminfer.errors import UnknownConfigField, UnsupportedArchitecture
from llminfer.kv.config import ConfigView

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
INDEXED = "indexed_attention"
LINEAR = "linear_attention"
CONV = "conv"
HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"
NONE = "none"
COMPRESSED_SPARSE = "compressed_sparse_attention"
COMPRESSED_HEAVILY = "heavily_compressed_attention"
SPARSE_BLOCKS = "minimax_m3_sparse"

# older names for the same kinds (transformers' `remap_legacy_layer_types`, `get_layer_types_and_kwargs`)
_OLD_NAMES = {
    "mamba": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
    "moe": NONE,
    "mlp": NONE,
    "dummy": NONE,
}
_KNOWN = frozenset(
    {FULL, SLIDING, CHUNKED, INDEXED, LINEAR, CONV, HYBRID, HYBRID_SLIDING, NONE}
    | {COMPRESSED_SPARSE, COMPRESSED_HEAVILY, SPARSE_BLOCKS}
)

# types whose classes take a longer list of kinds, of which the first count
_CUT_THEIR_LISTS = frozenset({"deepseek_v4"})

Pattern = Callable[[ConfigView, int], list[str]]


def layer_kinds(view: ConfigView, layers: int) -> list[str]:
    """The kind of every layer: as listed, else by the model type's pattern, else by the window fields.

    Raises:
        UnsupportedArchitecture: when a listed kind is not known, or their number is not that of the layers.
    """
    listed = view.get("layer_types", "layers_block_type")
    if listed is not None:
        kinds = listed_kinds(view, listed)
        if view.model_type in _CUT_THEIR_LISTS:
            kinds = kinds[:layers]
        if len(kinds) != layers:
            raise UnsupportedArchitecture(f"{view.source}: {len(kinds)} layer types for {layers} layers")
    else:
        kinds = PATTERNS.get(view.model_type, by_window)(view, layers)
    if view.get("use_sliding_window") is False:
        kinds = [FULL if kind == SLIDING else kind for kind in kinds]
    return kinds


def listed_kinds(view: ConfigView, listed: object) -> list[str]:
    """A config's own list of kinds, with old names replaced.

    Raises:
        UnsupportedArchitecture: when one of them is not known.
    """
    if not isinstance(listed, list):
        raise UnknownConfigField(f"{view.source}: layer_types is {listed!r}, not a list")
    kinds = [_OLD_NAMES.get(str(kind), str(kind)) for kind in listed]
    unknown = sorted(set(kinds) - _KNOWN)
    if unknown:
        known = ", ".join(sorted(_KNOWN | _OLD_NAMES.keys()))
        raise UnsupportedArchitecture(
            f"{view.source}: cannot predict layer types {', '.join(unknown)}", hint=f"known: {known}"
        )
    return kinds


def by_window(view: ConfigView, layers: int) -> list[str]:
    """Every layer sliding when there is a window, chunked when there is a chunk size, else full."""
    if view.get("sliding_window") is not None:
        return [SLIDING] * layers
    return [CHUNKED if view.get("attention_chunk_size") is not None else FULL] * layers


def _all(kind: str) -> Pattern:
    return lambda view, layers: [kind] * layers


def _every(period: int | None, field: str | None = None, *, kind: str = FULL, other: str = SLIDING) -> Pattern:
    """The last of every `period` layers is of `kind`; a config may state the period in `field`."""

    def pattern(view: ConfigView, layers: int) -> list[str]:
        step = view.integer(field, default=period) if field else period or 1
        return [other if (index + 1) % step else kind for index in range(layers)]

    return pattern


def _first_of(period: int | None, field: str | None = None) -> Pattern:
    """The first of every `period` layers is full, the others slide."""

    def pattern(view: ConfigView, layers: int) -> list[str]:
        step = view.integer(field, default=period) if field else period or 1
        return [SLIDING if index % step else FULL for index in range(layers)]

    return pattern


def _last(kind: str, pattern: Pattern) -> Pattern:
    """`pattern`, but the last layer is of `kind`."""
    return lambda view, layers: [*pattern(view, layers)[:-1], kind]


def _period(view: ConfigView, layers: int) -> list[str]:
    """EXAONE 4: without a window every layer is full."""
    if view.get("sliding_window") is None:
        return [FULL] * layers
    return _every(None, "sliding_window_pattern")(view, layers)


def _upper_layers_slide(view: ConfigView, layers: int) -> list[str]:
    """Qwen: the layers from `max_window_layers` on slide, when there is a window and it is in use."""
    if view.get("sliding_window") is None or view.get("use_sliding_window") is False:
        return [FULL] * layers
    first = view.integer("max_window_layers", least=0)
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _full_from_the_end(view: ConfigView, layers: int) -> list[str]:
    """Muse: the last layer is full, and every fourth before it."""
    return [SLIDING if (layers - 1 - index) % 4 else FULL for index in range(layers)]


def _qwen2_moe(view: ConfigView, layers: int) -> list[str]:
    if not view.get("use_sliding_window"):
        return [FULL] * layers
    last = view.integer("max_window_layers", least=0)
    return [SLIDING if index < last and (index + 1) % 2 else FULL for index in range(layers)]


def _if_windowed(view: ConfigView, layers: int) -> list[str]:
    return [FULL if view.get("sliding_window") is None else SLIDING] * layers


def _cohere2_moe(view: ConfigView, layers: int) -> list[str]:
    """The dense layers at the start have a period of their own."""
    dense = view.integer("first_k_dense_replace", default=0, least=0)
    first = _every(None, "prefix_dense_sliding_window_pattern")(view, dense) if dense else []
    return first + _every(None, "sliding_window_pattern")(view, layers - dense)


def _dots3(view: ConfigView, layers: int) -> list[str]:
    full = FULL if view.get("use_dsa") is False else INDEXED
    slides = view.get("use_sliding_window", default=True)
    return [SLIDING if slides and index >= 2 and index % 4 != 1 else full for index in range(layers)]


def _flint(view: ConfigView, layers: int) -> list[str]:
    return [FULL if index < 2 or index % 4 == 1 or index == layers - 1 else SLIDING for index in range(layers)]


def _inkling(view: ConfigView, layers: int) -> list[str]:
    local = view.integers("local_layer_ids")
    if local is None:
        return _every(6, kind=HYBRID, other=HYBRID_SLIDING)(view, layers)
    return [HYBRID_SLIDING if index in local else HYBRID for index in range(layers)]


def _attention_at(view: ConfigView, layers: int) -> list[str]:
    """Bamba: the attention layers by index; there may be none."""
    full = view.integers("attn_layer_indices") or []
    return [FULL if index in full else LINEAR for index in range(layers)]


def _attention_period(kind: str) -> Pattern:
    """Jamba: attention where the index modulo the period is the offset."""

    def pattern(view: ConfigView, layers: int) -> list[str]:
        period, offset = view.integer("attn_layer_period"), view.integer("attn_layer_offset", least=0)
        return [kind if index % period == offset else LINEAR for index in range(layers)]

    return pattern


def _zamba(view: ConfigView, layers: int) -> list[str]:
    """Two Mamba layers, a hybrid one, then by period and offset counted from there."""
    rest = _attention_period(HYBRID)(view, max(layers - 3, 0))
    return [LINEAR, LINEAR, HYBRID, *rest][:layers]


def _zamba2(view: ConfigView, layers: int) -> list[str]:
    """The released order of 54 layers."""
    head = [LINEAR] + ([LINEAR] * 5 + [HYBRID]) * 7
    return head + [LINEAR] * 4 + [HYBRID] + [LINEAR] * 3 + [HYBRID] + [LINEAR] * 2


def _kimi_linear(view: ConfigView, layers: int) -> list[str]:
    full = view.integers("linear_attn_config.full_attn_layers")
    if full is not None and view.get("linear_attn_config.kda_layers") is not None:
        # checkpoints count layers from 1
        return [FULL if index + 1 in full else LINEAR for index in range(layers)]
    return [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]


def _lara_mini(view: ConfigView, layers: int) -> list[str]:
    order = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
    return [order[index % len(order)] for index in range(layers)]


def _lfm2(view: ConfigView, layers: int) -> list[str]:
    full = view.integers("full_attn_idxs")
    return [FULL if full is None or index in full else CONV for index in range(layers)]


def _lfm3(view: ConfigView, layers: int) -> list[str]:
    order = (SLIDING, CONV, FULL, CONV)
    return [CONV if index == 0 else order[index % 4] for index in range(layers)]


def _llama4(view: ConfigView, layers: int) -> list[str]:
    """Llama 4: layers with rotary positions are chunked, those without see everything."""
    if view.get("attention_chunk_size") is None:
        return [FULL] * layers
    rotary = view.integers("no_rope_layers")
    if not rotary:
        step = view.integer("no_rope_layer_interval")
        rotary = [(index + 1) % step for index in range(layers)]
    return [CHUNKED if flag else FULL for flag in rotary]


def _mimo_v2_flash(view: ConfigView, layers: int) -> list[str]:
    return [FULL if index == 0 or not (index + 1) % 6 else SLIDING for index in range(layers)]


def _minimax_m3(view: ConfigView, layers: int) -> list[str]:
    sparse = view.integers("sparse_attention_config.sparse_attention_freq")
    return [SPARSE_BLOCKS if flag else FULL for flag in sparse] if sparse else [FULL] * layers


def _nemotron_h(view: ConfigView, layers: int) -> list[str]:
    """Nemotron-H: a string with a letter for each layer."""
    letters = {"M": LINEAR, "*": FULL, "E": NONE, "-": NONE}
    pattern = view.get("hybrid_override_pattern")
    if pattern is None:
        return [LINEAR, NONE, FULL, NONE]
    unknown = sorted(set(str(pattern)) - letters.keys())
    if unknown:
        raise UnsupportedArchitecture(
            f"{view.source}: hybrid_override_pattern has {', '.join(unknown)}", hint=f"known: {', '.join(letters)}"
        )
    return [letters[letter] for letter in str(pattern)]


def _olmo_hybrid(view: ConfigView, layers: int) -> list[str]:
    kinds = _every(4, other=LINEAR)(view, layers)
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _smollm3(view: ConfigView, layers: int) -> list[str]:
    if not view.get("use_sliding_window") or view.get("sliding_window") is None:
        return [FULL] * layers
    rotary = view.integers("no_rope_layers")
    if rotary is None:
        step = view.integer("no_rope_layer_interval")
        rotary = [(index + 1) % step for index in range(layers)]
    return [FULL if flag else SLIDING for flag in rotary]


def _recurrent_gemma(view: ConfigView, layers: int) -> list[str]:
    blocks = view.get("block_types")
    if not isinstance(blocks, list) or not blocks:
        raise view.missing("block_types")
    return [LINEAR if blocks[index % len(blocks)] == "recurrent" else SLIDING for index in range(layers)]


def _deepseek_v4(view: ConfigView, layers: int) -> list[str]:
    ratios = view.integers("compress_ratios")
    if ratios is not None:
        names = {0: SLIDING, 4: COMPRESSED_SPARSE, 128: COMPRESSED_HEAVILY}
        unknown = sorted(set(ratios) - names.keys())
        if unknown:
            raise UnsupportedArchitecture(f"{view.source}: compress_ratios has {unknown}", hint=f"known: {[*names]}")
        return [names[ratio] for ratio in ratios[:layers]]
    return [COMPRESSED_SPARSE if index > 2 and index % 2 else COMPRESSED_HEAVILY for index in range(layers)]


PATTERNS: dict[str, Pattern] = {
    "afmoe": _every(None, "global_attn_every_n_layers"),
    "axk2": _all(INDEXED),
    "bailing_hybrid": _every(None, "layer_group_size", other=LINEAR),
    "bamba": _attention_at,
    "beam": _last(FULL, _every(6)),
    "cohere2": _every(4, "sliding_window_pattern"),
    "cohere2_moe": _cohere2_moe,
    "cohere_compass_text": _all(FULL),
    "cwm": _first_of(4),
    "deepseek_v32": _all(INDEXED),
    "deepseek_v4": _deepseek_v4,
    "dory": _every(4),
    "dots1": _upper_layers_slide,
    "dots3_note_text": _dots3,
    "exaone4": _period,
    "exaone_moe": _period,
    "falcon_h1": _all(HYBRID),
    "falcon_mamba": _all(LINEAR),
    "flint": _flint,
    "gemma2": _every(2),
    "gemma3_text": _every(6, "sliding_window_pattern"),
    "gemma3n_text": _every(5),
    "gemma4_text": _last(FULL, _every(6)),
    "gemma4_unified_text": _last(FULL, _every(6)),
    "glm_moe_dsa": _all(INDEXED),
    "gpt_oss": _every(2),
    "granite_swa": _first_of(4),
    "granitemoe_swa": _first_of(4),
    "granitemoehybrid": _all(LINEAR),
    "hy_v4": _all(INDEXED),
    "inkling2_loop_text": _every(6, kind=HYBRID, other=HYBRID_SLIDING),
    "inkling2_text": _every(6, kind=HYBRID, other=HYBRID_SLIDING),
    "inkling_text": _inkling,
    "jamba": _attention_period(FULL),
    "kimi_linear": _kimi_linear,
    "kolibri1": _every(5),
    "laguna": _all(FULL),
    "lara_mini": _lara_mini,
    "lfm2": _lfm2,
    "lfm3": _lfm3,
    "llama4_text": _llama4,
    "mamba": _all(LINEAR),
    "mamba2": _all(LINEAR),
    "mellum": _all(FULL),
    "mimo_v2_flash": _mimo_v2_flash,
    "minimax": _every(2, kind=LINEAR, other=FULL),
    "minimax_m3_vl_text": _minimax_m3,
    "ministral": _if_windowed,
    "modernbert-decoder": _first_of(3, "global_attn_every_n_layers"),
    "muse_glimmer_text": _full_from_the_end,
    "muse_spark_text": _full_from_the_end,
    "nemotron_h": _nemotron_h,
    "olmo3": _every(4),
    "olmo_hybrid": _olmo_hybrid,
    "qwen2": _upper_layers_slide,
    "qwen2_5_omni_text": _upper_layers_slide,
    "qwen2_5_vl_text": _upper_layers_slide,
    "qwen2_moe": _qwen2_moe,
    "qwen2_vl_text": _upper_layers_slide,
    "qwen3": _upper_layers_slide,
    "qwen3_5_moe_text": _every(4, "full_attention_interval", other=LINEAR),
    "qwen3_5_text": _every(4, "full_attention_interval", other=LINEAR),
    "qwen3_next": _every(4, "full_attention_interval", other=LINEAR),
    "qwen4_exp_text": _every(4, "full_attention_interval", kind=INDEXED, other=LINEAR),
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": _all(LINEAR),
    "smollm3": _smollm3,
    "vaultgemma": _every(2),
    "xlstm": _all(LINEAR),
    "zamba": _zamba,
    "zamba2": _zamba2,
    "zaya": _all(HYBRID),
}
