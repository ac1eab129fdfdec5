"""What an attention layer caches for every token: keys and values, latents, indexer keys.

Each rule reads one layer's view of a config and returns the layer's tensors. The sources are the
attention modules of transformers 5.24, where `cache.update` says what is kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llminfer.errors import UnknownConfigField
from llminfer.kv.config import ConfigView
from llminfer.kv.layer import PerToken

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "n_embed")
DECODER_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")


def keys_and_values(heads: int, dim: int, *, value_dim: int | None = None) -> tuple[PerToken, ...]:
    """K and V: 2 · h_kv · d_h elements a token when both have the same width."""
    return (PerToken(name="k", heads=heads, dim=dim), PerToken(name="v", heads=heads, dim=value_dim or dim))


def grouped(view: ConfigView, *, whole: bool = False) -> tuple[PerToken, ...]:
    """Multi-head and grouped-query attention: K and V of every KV head."""
    heads = view.size(*HEADS)
    return keys_and_values(kv_heads(view, heads), head_dim(view, heads, whole=whole))


# where the class refuses a hidden size that the heads do not divide
grouped_evenly = partial(grouped, whole=True)


def partly_rotated(view: ConfigView) -> tuple[PerToken, ...]:
    """As `grouped`, but keys of which one element is rotated get two: it meets a pair of cosines, and broadcasts."""
    heads = view.size(*HEADS)
    count, dim = kv_heads(view, heads), head_dim(view, heads, whole=view.model_type != "phi")
    factor = view.get("rope_parameters.partial_rotary_factor", "partial_rotary_factor")
    default = 0.25 if view.model_type == "stablelm" else 0.5
    rotated = int(dim * (factor if isinstance(factor, (int, float)) and 0 < factor <= 1 else default))
    return keys_and_values(count, dim + (rotated == 1), value_dim=dim)


def kv_heads(view: ConfigView, heads: int) -> int:
    """The KV heads; as many as there are query heads when the config names none.

    Raises:
        UnknownConfigField: when the config names none and the class default does not go with its heads.
    """
    count = view.integer(*KV_HEADS, default=heads)
    if heads % count:
        raise UnknownConfigField(f"{view.source}: {heads} attention heads cannot share {count} key-value heads")
    return count


def head_dim(view: ConfigView, heads: int, *, whole: bool = False) -> int:
    """The width of a head: as stated, else hidden size / attention heads, rounded down as most classes do.

    Raises:
        UnknownConfigField: when it is not stated, and the quotient is not `whole` as it has to be.
    """
    return _split_hidden(view, heads, whole=whole) if view.get("head_dim") is None else view.integer("head_dim")


def every_head(view: ConfigView, names: tuple[str, ...] = HEADS) -> tuple[PerToken, ...]:
    """Attention with as many KV heads as query heads, each hidden size / heads wide, whatever else is stated."""
    heads = view.size(*names)
    return keys_and_values(heads, _split_hidden(view, heads))


# the self-attention of an encoder-decoder model's decoder
decoder_half = partial(every_head, names=DECODER_HEADS)


def _split_hidden(view: ConfigView, heads: int, *, whole: bool = True) -> int:
    hidden = view.size(*HIDDEN)
    if hidden < heads:
        raise UnknownConfigField(f"{view.source}: hidden size {hidden} is less than {heads} heads")
    if whole and hidden % heads:
        raise UnknownConfigField(f"{view.source}: hidden size {hidden} is not a multiple of {heads} heads")
    view.note("head_dim", hidden // heads, "hidden size / attention heads")
    return hidden // heads


def multi_query(view: ConfigView) -> tuple[PerToken, ...]:
    """GPT-BigCode: one KV head for all query heads when `multi_query` is set."""
    heads = view.size(*HEADS)
    return keys_and_values(1 if view.get("multi_query") else heads, _split_hidden(view, heads))


def dbrx(view: ConfigView) -> tuple[PerToken, ...]:
    """DBRX: the KV heads of `attn_config` count, whatever is stated beside it."""
    heads = view.size(*HEADS)
    return keys_and_values(view.integer("attn_config.kv_n_heads"), _split_hidden(view, heads))


def falcon(view: ConfigView) -> tuple[PerToken, ...]:
    """Falcon: one KV head (7B), or `num_kv_heads` groups (40B), which transformers repeats before it caches them."""
    heads = view.size(*HEADS)
    dim = _split_hidden(view, heads)
    if view.get("new_decoder_architecture"):
        tensors = keys_and_values(view.integer("num_kv_heads", default=heads), dim)
        return tuple(replace(tensor, transformers_heads=heads) for tensor in tensors)
    return keys_and_values(1 if view.get("multi_query") else heads, dim)


def jetmoe(view: ConfigView) -> tuple[PerToken, ...]:
    """JetMoE: the experts share the KV heads; a head is `kv_channels` wide."""
    return keys_and_values(view.size("num_key_value_heads"), view.integer("kv_channels"))


def not_cached(view: ConfigView) -> tuple[PerToken, ...]:
    """GPT-1: keys and values that the architecture could keep and transformers does not."""
    return tuple(replace(tensor, transformers_heads=0) for tensor in every_head(view))


def cpmant(view: ConfigView) -> tuple[PerToken, ...]:
    """CPM-Ant: heads of `dim_head`, and a learned prompt in front of every sequence."""
    tensors = keys_and_values(view.size(*HEADS), view.integer("dim_head"))
    prompt = view.integer("prompt_length")
    return tuple(replace(tensor, extra_tokens=prompt) for tensor in tensors)


def xlm(view: ConfigView) -> tuple[PerToken, ...]:
    """XLM: each step ends with a mask token, which stays cached."""
    return tuple(replace(tensor, extra_tokens=1) for tensor in every_head(view))


def xlnet(view: ConfigView) -> tuple[PerToken, ...]:
    """XLNet: the hidden states of the tokens and of the dummy token at the end, kept as `mems`."""
    return (PerToken(name="mems", heads=1, dim=view.size("d_model", *HIDDEN), extra_tokens=1),)


def reformer(view: ConfigView) -> tuple[PerToken, ...]:
    """Reformer's local layers: the hidden states, from which keys and values are made anew."""
    return (PerToken(name="states", heads=1, dim=view.size(*HIDDEN), chunks=_reformer_chunks(view)),)


def reformer_hashed(view: ConfigView) -> tuple[PerToken, ...]:
    """Reformer's hashing layers: the same and, beyond a chunk's length, the bucket of every head and round.

    That is after a prompt. In a sequence that grows past a chunk by decoding, the buckets begin a
    token earlier and take 32 bit each, since transformers appends them to an empty 32-bit tensor.
    """
    return (
        *reformer(view),
        PerToken(
            name="buckets",
            heads=view.size(*HEADS),
            dim=view.integer("num_hashes"),
            dtype="int64",
            after=view.integer("lsh_attn_chunk_length"),
            chunks=_reformer_chunks(view),
        ),
    )


def _reformer_chunks(view: ConfigView) -> tuple[int, ...]:
    used = view.get("attn_layers", default=())
    lengths = {"local": "local_attn_chunk_length", "lsh": "lsh_attn_chunk_length"}
    return tuple(view.integer(name) for kind, name in lengths.items() if kind in used)


def zamba(view: ConfigView) -> tuple[PerToken, ...]:
    """Zamba: attention over the hidden state and the embedding side by side, so 2 · hidden / heads wide."""
    heads = view.size(*HEADS)
    width = 2 * view.size(*HIDDEN)
    return keys_and_values(kv_heads(view, heads), view.integer("attention_head_dim", default=width // heads))


def mimo_v2_flash(view: ConfigView, *, sliding: bool = False) -> tuple[PerToken, ...]:
    """MiMo-V2-Flash: values narrower than keys; the sliding layers have twice the KV heads, by code not by config."""
    heads = view.integer("num_key_value_heads") * (2 if sliding else 1)
    return keys_and_values(heads, view.integer("head_dim"), value_dim=view.integer("v_head_dim"))


def gemma4_full(view: ConfigView) -> tuple[PerToken, ...]:
    """Gemma 4's full layers: wider heads, and fewer of them when keys serve as values."""
    if view.get("per_layer_config") is not None:
        return grouped(view)
    heads = view.integer("num_key_value_heads")
    if view.get("attention_k_eq_v", default=True):
        heads = view.integer("num_global_key_value_heads", default=heads)
    return keys_and_values(heads, view.integer("global_head_dim", default=512))


def inkling(view: ConfigView, *, sliding: bool = False) -> tuple[PerToken, ...]:
    """Inkling: the sliding layers have their own heads."""
    prefix = "swa_" if sliding else ""
    return keys_and_values(view.integer(f"{prefix}num_key_value_heads"), view.integer(f"{prefix}head_dim"))


def latent(view: ConfigView) -> tuple[PerToken, ...]:
    """Multi-head latent attention: the compressed latent and the rotary key, one head for all.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1): kv_lora_rank + qk_rope_head_dim elements a token.
    transformers up to 5.14 cached the expanded heads instead.
    """
    return (
        PerToken(name="latent", heads=1, dim=view.integer("kv_lora_rank")),
        PerToken(name="rope_key", heads=1, dim=view.integer("qk_rope_head_dim")),
    )


def indexer(view: ConfigView, dtype: str | None = None) -> tuple[PerToken, ...]:
    """DeepSeek sparse attention: an index key a token, which all of a layer's index heads share."""
    return (PerToken(name="indexer", heads=1, dim=view.integer("index_head_dim"), dtype=dtype),)


def latent_indexed(view: ConfigView) -> tuple[PerToken, ...]:
    """Latent attention that picks its tokens by an indexer; a layer may use the indexer of an earlier one."""
    return latent(view) + (() if _indexer_type(view) == "shared" else indexer(view))


def _indexer_type(view: ConfigView) -> str:
    listed = view.get("indexer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) <= view.index:
            raise UnknownConfigField(f"{view.source}: indexer_types has no entry for layer {view.index}")
        return str(listed[view.index])
    rule = _INDEXER_TYPES.get(view.model_type)
    return rule(view) if rule else "full"


def _glm_moe_dsa_indexer(view: ConfigView) -> str:
    pattern = view.get("index_topk_pattern")
    if isinstance(pattern, (str, list)) and len(pattern) > view.index:
        return "shared" if pattern[view.index] in ("S", "shared") else "full"
    period = max(view.integer("index_topk_freq", default=1, least=0), 1)
    offset = view.integer("index_skip_topk_offset", default=2, least=0)
    return "shared" if max(view.index - offset + 1, 0) % period else "full"


def _hy_v4_indexer(view: ConfigView) -> str:
    return "full" if view.index == 0 or (view.index - 1) % 4 == 0 else "shared"


_INDEXER_TYPES = {"glm_moe_dsa": _glm_moe_dsa_indexer, "hy_v4": _hy_v4_indexer}


def dots3_indexed(view: ConfigView) -> tuple[PerToken, ...]:
    """dots3: latent attention with an indexer whose keys stay in 32 bit."""
    return latent(view) + indexer(view, "float32")


def dots3_sliding(view: ConfigView) -> tuple[PerToken, ...]:
    """dots3: the sliding layers are latent with ranks of their own."""
    whole, plain = view.get("swa_head_dim", default=256), view.get("swa_qk_nope_head_dim", default=192)
    if view.get("per_layer_config") is not None:
        return latent(view)
    rope = view.integer("swa_qk_rope_head_dim", default=whole - plain)
    return (
        PerToken(name="latent", heads=1, dim=view.integer("swa_kv_lora_rank", default=1024)),
        PerToken(name="rope_key", heads=1, dim=rope),
    )


def qwen4_indexed(view: ConfigView) -> tuple[PerToken, ...]:
    """Qwen4: K and V, raw indexer keys, and on the first such layer the three rotary positions of every token."""
    keys = PerToken(name="indexer", heads=view.integer("indexer_kv_heads"), dim=view.integer("indexer_head_dim"))
    return (*grouped(view), keys)


def sparse_blocks(view: ConfigView) -> tuple[PerToken, ...]:
    """MiniMax-M3: K and V, and one index key a token by which blocks are chosen."""
    dim = view.integer("sparse_attention_config.sparse_index_dim", "index_head_dim")
    return (*grouped(view), PerToken(name="idx_keys", heads=1, dim=dim))


def shared_key_value(view: ConfigView) -> tuple[PerToken, ...]:
    """DeepSeek-V4: one head whose keys are its values, held once."""
    return (PerToken(name="kv", heads=1, dim=view.integer("head_dim")),)


def heavily_compressed(view: ConfigView) -> tuple[PerToken, ...]:
    """DeepSeek-V4's heavily compressed layers: a window, an entry for each full block, and the block being filled."""
    dim = view.integer("head_dim")
    rate = _compress_rate(view, "heavily_compressed_attention", "compress_rate_hca", 128)
    return (*shared_key_value(view), *_blocks("compressor", rate, dim, width=dim))


def compressed_sparse(view: ConfigView) -> tuple[PerToken, ...]:
    """DeepSeek-V4's compressed sparse layers: blocks overlap, and an indexer has compressed keys of its own."""
    rate = _compress_rate(view, "compressed_sparse_attention", "compress_rate_csa", 4)
    tensors = list(shared_key_value(view))
    for name, dim in (("compressor", view.integer("head_dim")), ("indexer", view.integer("index_head_dim"))):
        tensors += _blocks(name, rate, dim, width=2 * dim)
        # of the last full block, what the next one overlaps with
        overlap = PerToken(name=f"overlap_kv.{name}", heads=rate, dim=dim, stride=rate, at_most=1, windowed=False)
        tensors += [overlap, replace(overlap, name=f"overlap_gate.{name}", dtype="float32")]
    return tuple(tensors)


def _blocks(name: str, rate: int, dim: int, *, width: int) -> tuple[PerToken, ...]:
    buffers = (
        PerToken(name=f"buffer_{part}.{name}", heads=1, dim=width, stride=rate, remainder=True, windowed=False)
        for part in ("kv", "gate")
    )
    return (*buffers, PerToken(name=f"compressed_kv.{name}", heads=1, dim=dim, stride=rate, windowed=False))


def _compress_rate(view: ConfigView, kind: str, old_name: str, default: int) -> int:
    # an old file's own name wins over the table that the class would fill in
    return view.integer(old_name, f"compress_rates.{kind}", default=default)
