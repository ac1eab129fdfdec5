"""Tiny GGUF files, written by the `gguf` package: Llamas of 70,000 parameters with a byte-level vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from llminfer.engine.text.detokenizer import byte_level_alphabet

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 96, 4, 2, 2, 128
CHAT_TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
CONTROL, NORMAL = 3, 1


MERGES = ["1 2", "12 3", "h e", "l l", "he ll", "hell o", "Ġ w", "Ġ 1", "Ġ1 2"]
TOKENS = ["<|end|>", "<|user|>", "<s>", *byte_level_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
END, USER, BOS = 0, 1, 2


def write_tiny_llama(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str | None = "smollm",
    add_bos: bool | None = None,
    ids: bool = True,
    tied: bool = True,
    attention: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: str | None = None,
    seed: int = 0,
) -> Path:
    """Write the file; `edit` may add metadata and tensors, `leave_out` names a tensor to drop."""
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, pre=pre, add_bos=add_bos, ids=ids)
    if edit is not None:
        edit(writer)
    return write_tensors(writer, shapes_of(tied), attention=attention, leave_out=leave_out, seed=seed)


def write_tensors(
    writer: gguf.GGUFWriter,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    attention: gguf.GGMLQuantizationType,
    leave_out: str | None,
    seed: int,
) -> Path:
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if name == leave_out:
            continue
        kind = attention if "attn" in name else gguf.GGMLQuantizationType.F16
        kind = gguf.GGMLQuantizationType.F32 if "norm" in name or "conv." in name else kind
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert isinstance(writer.path, Path)
    return writer.path


def add_metadata(writer: gguf.GGUFWriter, *, pre: str | None, add_bos: bool | None, ids: bool) -> None:
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL if index in (END, USER, BOS) else NORMAL for index in range(len(TOKENS))])
    writer.add_token_merges(MERGES)
    if ids:
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(END)
        writer.add_pad_token_id(END)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def shapes_of(tied: bool) -> dict[str, tuple[int, ...]]:
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * head_dim),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    return shapes
