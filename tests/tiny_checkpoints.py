"""Tiny checkpoints on disk: real transformers models with random, or scripted, weights and real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from llminfer.engine.text.detokenizer import byte_level_alphabet

BOS, EOS, TURN_END = "<s>", "</s>", "<|turn_end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "<|turn_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer(
    pieces: Sequence[str] = (), *, add_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level vocabulary: BOS 0, EOS 1, turn end 2, then 256 bytes, then whole pieces."""
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    tokens = [BOS, EOS, TURN_END, *(alphabet[byte] for byte in range(256))]
    spelled = ["".join(alphabet[byte] for byte in piece.encode()) for piece in pieces]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *spelled]))}
    # without merges a text is encoded byte by byte; the pieces are only ever generated
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, TURN_END)])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


def sentencepiece_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A vocabulary as sentencepiece makes it: ▁ for spaces, byte fallback, a stripped first space."""
    tokens = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", BOS, EOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token="<unk>")


def save_tiny_checkpoint(
    folder: Path, config: Any = None, *, tokenizer: Any = None, generation: dict[str, Any] | None = None
) -> Path:
    """A random model of the config (a two-layer Llama when not given) with a byte-level tokenizer."""
    tokenizer = tokenizer or byte_level_tokenizer()
    torch.manual_seed(0)
    if config is None:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=1,
        )
    model = AutoModelForCausalLM.from_config(config)
    return _save(model, tokenizer, folder, generation or {"eos_token_id": 1})


def save_scripted_checkpoint(
    folder: Path,
    pieces: Sequence[str | int],
    *,
    positions: int = 64,
    eos_token_id: int | list[int] | None = 1,
    generation_eos: int | list[int] | None = 1,
    chat_template: str | None = None,
    nan_after: int | None = None,
) -> Path:
    """A GPT-2 that, after a raw one-letter prompt, emits the given pieces whatever it has seen.

    A piece is a text, one token of the vocabulary, or an id. What comes out depends on the position
    alone: token embeddings and blocks are zero, position p is the p-th unit vector, and the output
    layer maps that to the token scripted for p. The prompt takes two positions (BOS and the letter),
    so the piece i is scripted at position 1 + i. `nan_after=n` breaks the weights from the n-th on.
    """
    texts = [piece for piece in pieces if isinstance(piece, str)]
    tokenizer = byte_level_tokenizer(texts, chat_template=chat_template)
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    ids = [
        piece
        if isinstance(piece, int)
        else tokenizer.convert_tokens_to_ids("".join(alphabet[byte] for byte in piece.encode()))
        for piece in pieces
    ]
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=max(64, positions),
        n_layer=1,
        n_head=1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.wpe.weight.copy_(torch.eye(positions, config.n_embd))
        for index, token_id in enumerate(ids):
            position = 1 + index
            if position < positions:
                model.lm_head.weight[token_id, position] = 10.0
        if nan_after is not None:
            model.transformer.wpe.weight[1 + nan_after :] = float("nan")
    return _save(model, tokenizer, folder, {"eos_token_id": generation_eos})


def _save(model: Any, tokenizer: Any, folder: Path, generation: dict[str, Any]) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
