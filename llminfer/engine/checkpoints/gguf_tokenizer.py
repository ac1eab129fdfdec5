"""The tokenizer of a GGUF file, saved as the two JSON files of a plain checkpoint.

transformers builds it; what we add is the splitting rules that it lacks, a warning where nobody
knows the rule, and the refusal of token ids that lie outside the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import TokenizersBackend
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_TYPES,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from llminfer.engine.machine.library_errors import foreign_errors
from llminfer.errors import ModelNotAvailable, UnsupportedArchitecture
from llminfer.kv.gguf import GgufHeader, SkippedValue

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id", "padding_token_id")


def special_token_ids(header: GgufHeader) -> dict[str, int]:
    """The special ids that the file names, by GGUF's names for them.

    Raises:
        ModelNotAvailable: when an id lies outside the vocabulary.
    """
    size, ids = vocabulary_size(header), {}
    for name in _TOKEN_IDS:
        value = header.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < size:
            raise ModelNotAvailable(f"{header.path}: its {name} {value!r} is outside its vocabulary of {size} tokens")
        ids[name] = value
    return ids


def vocabulary_size(header: GgufHeader) -> int:
    """How many tokens the file's vocabulary has.

    Raises:
        ModelNotAvailable: when the file has none.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    size = tokens.count if isinstance(tokens, SkippedValue) else len(tokens) if isinstance(tokens, tuple) else 0
    if size == 0:
        hint = "a file of weights alone cannot be run; take one with a tokenizer"
        raise ModelNotAvailable(f"{header.path} holds no vocabulary", hint=hint)
    return size


def save_tokenizer(header: GgufHeader, folder: Path) -> tuple[str, ...]:
    """Write tokenizer.json and tokenizer_config.json, and return what the user should know about them.

    Raises:
        ModelNotAvailable: when the file's vocabulary contradicts itself.
        UnsupportedArchitecture: when its kind of tokenizer is unknown.
    """
    special_token_ids(header)
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in GGUF_TOKENIZER_TYPES:
        known = ", ".join(sorted(GGUF_TOKENIZER_TYPES))
        raise UnsupportedArchitecture(f"{header.path}: the tokenizer {kind!r} is unknown; known are {known}")
    with foreign_errors(header.path, "its tokenizer cannot be built"):
        architecture, fields, settings = get_gguf_tokenizer(str(header.path))
        backend, _ = convert_gguf_tokenizer(architecture, fields)
    warnings = _set_pre_tokenizer(header, backend) if kind == "gpt2" else ()
    _wrap(header, backend, settings).save_pretrained(folder, save_jinja_files=False)
    # flags that are dropped there, since tokenizer.json acts on them; readers look for them here
    path = folder / "tokenizer_config.json"
    flags = {name: settings[name] for name in ("add_bos_token", "add_eos_token") if name in settings}
    content = {**json.loads(path.read_text(encoding="utf-8")), **flags}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    return warnings


def _wrap(header: GgufHeader, backend: Tokenizer, settings: dict[str, Any]) -> Any:
    """The generic tokenizer class around it: a class of a family would rebuild parts of it its own way."""
    context = header.metadata.get(f"{header.architecture}.context_length")
    return TokenizersBackend(
        tokenizer_object=backend,
        # a clean-up would make the text differ from what the ids say
        clean_up_tokenization_spaces=False,
        **({"model_max_length": context} if isinstance(context, int) else {}),
        **settings,
    )


# Pre-tokenizers. llama.cpp gives each splitting rule a name, which the file carries as
# `tokenizer.ggml.pre`; transformers knows some of them and takes GPT-2's rule for all others.


def _like(known: str) -> PreTokenizer:
    split = Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[known]), behavior="isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
_SINGLE_DIGITS = Sequence([Digits(individual_digits=True), _GPT2])
_PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "gigachat", "trillion"), _GPT2),
    **dict.fromkeys(("exaone4", "mellum", "modern-bert", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), _like("qwen2")),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _like("llama-bpe")),
}


def _set_pre_tokenizer(header: GgufHeader, backend: Tokenizer) -> tuple[str, ...]:
    """Set the rule that the file names; a warning when all we can do is guess GPT-2's."""
    name = header.metadata.get("tokenizer.ggml.pre")
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        return ()
    if isinstance(name, str) and name in _PRE_TOKENIZERS:
        backend.pre_tokenizer = _PRE_TOKENIZERS[name]
        return ()
    if header.architecture == "gpt2" and name is None:
        return ()
    stated = "does not say" if name is None else f"says {name!r}, which we do not know,"
    return (
        f"{header.path.name} {stated} how its tokenizer splits text; we split as GPT-2 does, "
        "so some token ids may differ from the model's own",
    )
