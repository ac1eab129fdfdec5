"""What a recurrent or convolution layer keeps: states whose size does not depend on the tokens.

Each rule reads one layer's view of a config and returns the layer's states. The sources are the
mixers of transformers 5.24, where `update_conv_state` and `update_recurrent_state` say what is kept.
States that those modules compute in 32 bit stay so in a 16-bit model.
"""

from __future__ import annotations

from llminfer.errors import UnknownConfigField
from llminfer.kv.config import ConfigView
from llminfer.kv.layer import State
from llminfer.kv.rules.attention import HEADS, HIDDEN, head_dim

_CONV_WIDTH = ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "short_conv_kernel_size")


def conv(channels: int, width: int, *, name: str = "conv", dtype: str | None = None) -> State:
    """The last inputs of a causal convolution: transformers keeps `width` columns, the next step reads width − 1."""
    return State(name=name, shape=(channels, width), role="conv", needed_columns=width - 1, dtype=dtype)


def mamba1(view: ConfigView, inner: int | None = None) -> tuple[State, ...]:
    """Mamba (arXiv 2312.00752): conv I · k and state I · d_state, I the inner width."""
    inner = inner or _inner(view)
    state = view.integer("mamba_d_state", "state_size")
    return conv(inner, view.integer(*_CONV_WIDTH)), State(name="ssm", shape=(inner, state), dtype="float32")


def mamba(view: ConfigView) -> tuple[State, ...]:
    """Mamba alone: a stated inner width stands, and `expand` gives it where there is none."""
    return mamba1(view, None if view.get("intermediate_size") is None else view.integer("intermediate_size"))


def zamba(view: ConfigView) -> tuple[State, ...]:
    """Zamba's Mamba layers: the inner width split over Mamba heads."""
    inner, heads, state = _inner(view), view.integer("n_mamba_heads"), view.integer("mamba_d_state")
    ssm = State(name="ssm", shape=(heads, inner // heads, state), dtype="float32")
    return conv(inner, view.integer(*_CONV_WIDTH)), ssm


def mamba2(view: ConfigView) -> tuple[State, ...]:
    """Mamba-2 (arXiv 2405.21060): conv (I + 2 · groups · d_state) · k and state heads · head_dim · d_state."""
    heads = view.integer("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    stated = view.get("mamba_d_ssm")
    if view.get("mamba_head_dim") is not None:  # Nemotron-H: the inner width follows from the heads
        inner = heads * view.integer("mamba_head_dim")
    else:
        inner = _inner(view) if stated is None else view.integer("mamba_d_ssm")
    state = view.integer("mamba_d_state", "ssm_state_size", "state_size")
    channels = inner + 2 * view.integer("mamba_n_groups", "mamba_ngroups", "n_groups") * state
    ssm = State(name="ssm", shape=(heads, inner // heads, state), dtype="float32")
    return conv(channels, view.integer(*_CONV_WIDTH)), ssm


def _inner(view: ConfigView) -> int:
    expand = view.get("mamba_expand", "expand")
    if isinstance(expand, bool) or not isinstance(expand, (int, float)) or not 0 < expand < 1e6:
        raise UnknownConfigField(f"{view.source}: mamba_expand is {expand!r}, not a positive number")
    return int(expand * view.size(*HIDDEN))


def gated_delta_net(view: ConfigView) -> tuple[State, ...]:
    """Gated DeltaNet (arXiv 2412.06464): conv (2 · n_k · d_k + n_v · d_v) · k and state n_v · d_k · d_v."""
    key_heads, value_heads = view.integer("linear_num_key_heads"), view.integer("linear_num_value_heads")
    key_dim, value_dim = view.integer("linear_key_head_dim"), view.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    state = State(name="delta", shape=(value_heads, key_dim, value_dim), dtype="float32")
    return conv(channels, view.integer("linear_conv_kernel_dim")), state


def olmo_hybrid(view: ConfigView) -> tuple[State, ...]:
    """OLMo Hybrid: a gated DeltaNet whose sizes follow from the attention's when they are not stated."""
    heads = view.size(*HEADS)
    key_heads = view.integer("linear_num_key_heads", default=heads)
    key_dim = view.integer("linear_key_head_dim", default=int(0.75 * view.size(*HIDDEN) / key_heads))
    derived = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": view.integer("linear_num_value_heads", default=heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": view.integer("linear_value_head_dim", default=2 * key_dim),
    }
    return gated_delta_net(view.at(view.index, derived))


def qwen4(view: ConfigView) -> tuple[State, ...]:
    """Qwen4: a gated DeltaNet; some layers also keep the last inputs and ids of their n-gram embedding."""
    states = gated_delta_net(view)
    embedding_layers = view.integers("ple_layer_ids") or []
    if view.index + 1 not in embedding_layers:  # counted from 1
        return states
    span = view.integer("ngram_size")
    columns = (view.integer("ple_conv_kernel_size") - 1) * span
    channels = view.integer("hc_count") * view.size(*HIDDEN)
    ids = State(name="ngram_ids", shape=(span - 1,), dtype="int64")
    return (*states, State(name="ngram_conv", shape=(channels, columns), role="conv", needed_columns=columns), ids)


def delta_attention(view: ConfigView) -> tuple[State, ...]:
    """Kimi Delta Attention (arXiv 2510.26692): conv 3 · h · d · k and state h · d · d."""
    nested = "linear_attn_config."
    heads = view.integer(f"{nested}num_heads", "linear_num_heads")
    dim = view.integer(f"{nested}head_dim", "linear_head_dim")
    width = view.integer(f"{nested}short_conv_kernel_size", "linear_conv_kernel_dim")
    return _delta_attention(heads, dim, width)


def bailing_hybrid(view: ConfigView) -> tuple[State, ...]:
    """Ling's linear layers: Kimi Delta Attention, with the attention's heads unless it has its own."""
    heads = view.integer("linear_num_heads", default=view.size(*HEADS))
    return _delta_attention(heads, view.integer("linear_head_dim", "head_dim"), view.integer(*_CONV_WIDTH))


def _delta_attention(heads: int, dim: int, width: int) -> tuple[State, ...]:
    state = State(name="delta", shape=(heads, dim, dim), dtype="float32")
    return conv(3 * heads * dim, width), state


def short_conv(view: ConfigView) -> tuple[State, ...]:
    """LFM2's gated short convolution: hidden · L_cache, no recurrent state."""
    return (conv(view.size(*HIDDEN), view.integer("conv_L_cache")),)


def lightning(view: ConfigView) -> tuple[State, ...]:
    """MiniMax's lightning attention: d_h · d_h a head, in the model's own type."""
    heads = view.size(*HEADS)
    dim = head_dim(view, heads)
    return (State(name="kv", shape=(heads, dim, dim)),)


def inkling(view: ConfigView, *, sliding: bool = False) -> tuple[State, ...]:
    """Inkling: short convolutions over keys, values, and the inputs of attention and MLP, all in 32 bit."""
    prefix = "swa_" if sliding else ""
    width = view.integer("sconv_kernel_size", "conv_kernel_size")
    kv = view.integer(f"{prefix}num_key_value_heads") * view.integer(f"{prefix}head_dim")
    hidden = view.size(*HIDDEN)
    channels = (("k", kv), ("v", kv), ("attention", hidden), ("mlp", hidden))
    return tuple(conv(count, width, name=f"conv_{name}", dtype="float32") for name, count in channels)


def zaya(view: ConfigView) -> tuple[State, ...]:
    """ZAYA's compressed convolutional attention: the last queries and keys, and the last token's delayed value."""
    heads, groups, dim = view.size(*HEADS), view.integer("num_key_value_heads"), view.integer("head_dim")
    columns = view.integer("cca_time0") - 1 + view.integer("cca_time1") - 1
    qk = State(name="conv", shape=((heads + groups) * dim, columns), role="conv", needed_columns=columns)
    return qk, State(name="delayed_v", shape=(groups * dim // 2,))


def rwkv(view: ConfigView) -> tuple[State, ...]:
    """RWKV-4: the last input of both mixers, and numerator, denominator and maximum, these in 32 bit."""
    hidden = view.size(*HIDDEN)
    inner = view.integer("attention_hidden_size", default=hidden)
    last = tuple(State(name=name, shape=(hidden,)) for name in ("feed_forward", "attention"))
    return last + tuple(
        State(name=name, shape=(inner,), dtype="float32") for name in ("numerator", "denominator", "maximum")
    )


def xlstm(view: ConfigView) -> tuple[State, ...]:
    """xLSTM's matrix memory, its normalizer and its maximum (arXiv 2405.04517)."""
    hidden, heads = view.size("hidden_size", "embedding_dim"), view.size("num_heads")
    multiple = 64
    dims = []
    for factor in ("qk_dim_factor", "v_dim_factor"):
        width = view.get(factor, default=1.0) * hidden
        dims.append(int((width + multiple - 1) // multiple * multiple) // heads)
    qk, v = dims
    shapes = {"matrix": (heads, qk, v), "normalizer": (heads, qk), "maximum": (heads, 1)}
    return tuple(State(name=name, shape=shape) for name, shape in shapes.items())


def recurrent_gemma(view: ConfigView) -> tuple[State, ...]:
    """Griffin's recurrent block (arXiv 2402.19427): the last inputs of its convolution, and one state a channel."""
    width = view.integer("lru_width", default=view.size(*HIDDEN))
    columns = view.integer("conv1d_width") - 1
    conv_state = State(name="conv", shape=(width, columns), role="conv", needed_columns=columns, sliced_off=width)
    return conv_state, State(name="rg_lru", shape=(width,), dtype="float32")
