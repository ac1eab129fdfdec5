"""Which layer is of which kind, where a config does not list it in `layer_types`.

Published configs state the pattern in many ways: a period, a list of indices, a string of letters,
or not at all. Each rule here is what the `__post_init__` of that model type's config class in
transformers 5.24 does. The kinds are transformers' names for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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

Pattern = Callable[[ConfigView, int], list[str]]
Row = TypeVar("Row")


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


def each(row: Row, names: str) -> dict[str, Row]:
    """The same row for each of the names, which spaces separate."""
    return dict.fromkeys(names.split(), row)


# older names for the same kinds (transformers' `remap_legacy_layer_types`, `get_layer_types_and_kwargs`)
_OLD_NAMES = {
    "mamba": LINEAR,
    "attention": FULL,
    **each(INDEXED, "deepseek_sparse_attention qwen_sparse_attention"),
    **each(NONE, "moe mlp dummy"),
}
# types whose classes take a longer list of kinds, of which the first count
_CUT_THEIR_LISTS = frozenset({"deepseek_v4"})


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
    unknown = sorted(set(kinds) - KINDS.keys())
    if unknown:
        known = ", ".join(sorted(KINDS.keys() | _OLD_NAMES.keys()))
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


def _where(full: Callable[[int, int], bool]) -> Pattern:
    """Full where `full` holds of a layer's index and the number of layers, else sliding."""
    return lambda view, layers: [FULL if full(index, layers) else SLIDING for index in range(layers)]


def _cycle(*order: str) -> Pattern:
    return lambda view, layers: [order[index % len(order)] for index in range(layers)]


def _every(
    period: int | None, field: str | None = None, *, kind: str = FULL, other: str = SLIDING, first: bool = False
) -> Pattern:
    """The last (or first) of every `period` layers is of `kind`; a config may state the period in `field`."""

    def pattern(view: ConfigView, layers: int) -> list[str]:
        step = view.integer(field, default=period) if field else period or 1
        return [other if (index + (not first)) % step else kind for index in range(layers)]

    return pattern


def _listed(field: str, unlisted: Pattern, *, kind: str = FULL, other: str) -> Pattern:
    """The layers whose indices `field` lists are of `kind`; a config without the list follows `unlisted`."""

    def pattern(view: ConfigView, layers: int) -> list[str]:
        indices = view.integers(field)
        if indices is None:
            return unlisted(view, layers)
        return [kind if index in indices else other for index in range(layers)]

    return pattern


def _last_full(pattern: Pattern) -> Pattern:
    return lambda view, layers: [*pattern(view, layers)[:-1], FULL]


def _with(field: str, pattern: Pattern) -> Pattern:
    """`pattern` where the config sets `field`, else full layers."""
    return lambda view, layers: [FULL] * layers if view.get(field) is None else pattern(view, layers)


def _upper_layers_slide(view: ConfigView, layers: int) -> list[str]:
    """Qwen: the layers from `max_window_layers` on slide, when there is a window and it is in use."""
    if view.get("sliding_window") is None or view.get("use_sliding_window") is False:
        return [FULL] * layers
    first = view.integer("max_window_layers", least=0)
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _qwen2_moe(view: ConfigView, layers: int) -> list[str]:
    if not view.get("use_sliding_window"):
        return [FULL] * layers
    last = view.integer("max_window_layers", least=0)
    return [SLIDING if index < last and (index + 1) % 2 else FULL for index in range(layers)]


def _cohere2_moe(view: ConfigView, layers: int) -> list[str]:
    """The dense layers at the start have a period of their own."""
    dense = view.integer("first_k_dense_replace", default=0, least=0)
    first = _every(None, "prefix_dense_sliding_window_pattern")(view, dense) if dense else []
    return first + _every(None, "sliding_window_pattern")(view, layers - dense)


def _dots3(view: ConfigView, layers: int) -> list[str]:
    full = FULL if view.get("use_dsa") is False else INDEXED
    slides = view.get("use_sliding_window", default=True)
    return [SLIDING if slides and index >= 2 and index % 4 != 1 else full for index in range(layers)]


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


def _rotary_layers(view: ConfigView, layers: int) -> list[int]:
    """What is not 0 for the layers with rotary positions."""
    listed = view.integers("no_rope_layers")
    return listed or [(index + 1) % view.integer("no_rope_layer_interval") for index in range(layers)]


def _llama4(view: ConfigView, layers: int) -> list[str]:
    """Llama 4: layers with rotary positions are chunked, those without see everything."""
    return [CHUNKED if rotary else FULL for rotary in _rotary_layers(view, layers)]


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
    return [FULL if rotary else SLIDING for rotary in _rotary_layers(view, layers)]


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
    **each(_all(FULL), "cohere_compass_text laguna mellum"),
    **each(_all(INDEXED), "axk2 deepseek_v32 glm_moe_dsa hy_v4"),
    **each(_all(LINEAR), "falcon_mamba granitemoehybrid mamba mamba2 rwkv xlstm"),
    **each(_all(HYBRID), "falcon_h1 zaya"),
    **each(_every(2), "gemma2 gpt_oss vaultgemma"),
    **each(_every(4), "dory olmo3"),
    **each(_every(5), "gemma3n_text kolibri1"),
    **each(_every(4, first=True), "cwm granite_swa granitemoe_swa"),
    **each(_every(4, "full_attention_interval", other=LINEAR), "qwen3_5_moe_text qwen3_5_text qwen3_next"),
    **each(_every(6, kind=HYBRID, other=HYBRID_SLIDING), "inkling2_loop_text inkling2_text"),
    **each(_last_full(_every(6)), "beam gemma4_text gemma4_unified_text"),
    **each(_with("sliding_window", _every(None, "sliding_window_pattern")), "exaone4 exaone_moe"),
    **each(_upper_layers_slide, "dots1 qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text qwen3"),
    # the last layer is full, and every fourth before it
    **each(_where(lambda index, layers: (layers - 1 - index) % 4 == 0), "muse_glimmer_text muse_spark_text"),
    "afmoe": _every(None, "global_attn_every_n_layers"),
    "bailing_hybrid": _every(None, "layer_group_size", other=LINEAR),
    "bamba": _listed("attn_layer_indices", _all(LINEAR), other=LINEAR),
    "cohere2": _every(4, "sliding_window_pattern"),
    "cohere2_moe": _cohere2_moe,
    "deepseek_v4": _deepseek_v4,
    "dots3_note_text": _dots3,
    "flint": _where(lambda index, layers: index < 2 or index % 4 == 1 or index == layers - 1),
    "gemma3_text": _every(6, "sliding_window_pattern"),
    "inkling_text": _listed(
        "local_layer_ids", _every(6, kind=HYBRID, other=HYBRID_SLIDING), kind=HYBRID_SLIDING, other=HYBRID
    ),
    "jamba": _attention_period(FULL),
    "kimi_linear": _kimi_linear,
    "lara_mini": _cycle(LINEAR, SLIDING, LINEAR, FULL, SLIDING),
    "lfm2": _listed("full_attn_idxs", _all(FULL), other=CONV),
    "lfm3": lambda view, layers: [CONV, *_cycle(SLIDING, CONV, FULL, CONV)(view, layers)[1:]],
    "llama4_text": _with("attention_chunk_size", _llama4),
    "mimo_v2_flash": _where(lambda index, layers: index == 0 or index % 6 == 5),
    "minimax": _every(2, kind=LINEAR, other=FULL),
    "minimax_m3_vl_text": _minimax_m3,
    "ministral": _with("sliding_window", _all(SLIDING)),
    "modernbert-decoder": _every(3, "global_attn_every_n_layers", first=True),
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "qwen2_moe": _qwen2_moe,
    "qwen4_exp_text": _every(4, "full_attention_interval", kind=INDEXED, other=LINEAR),
    "recurrent_gemma": _recurrent_gemma,
    "smollm3": _smollm3,
    "zamba": _zamba,
    "zamba2": _zamba2,
}
