"""Which models and caches drafts are exact with."""

from __future__ import annotations

from llminfer.engine.kv_cache.layers import row_of_type
from llminfer.engine.models.capabilities import layer_types, model_class, text_config, why_one_at_a_time
from llminfer.engine.models.protocols import Config
from llminfer.engine.text.tokenizer import Tokenizer
from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.params import CacheOptions, Speculation


def check_speculation(speculation: Speculation, options: CacheOptions, config: Config, source: str) -> None:
    """Refuse what cannot be fed several tokens, or whose cache cannot go back, before any weights are read.

    Raises:
        UnsupportedArchitecture: naming what about the model stands against it.
    """
    reason = why_not_speculate(config, options.name)
    if reason is not None:
        raise UnsupportedArchitecture(f"{source} cannot speculate: {reason}", hint=f"drop {speculation.option}")


def why_not_speculate(config: Config, cache: str = "dynamic") -> str | None:
    """Why a model of this config cannot check a draft in one forward and take it back; None when it can."""
    text, known = text_config(config), model_class(config)
    if known is None:
        return "its code is its own, and may not take several tokens after others"
    if (one_at_a_time := why_one_at_a_time(config)) is not None:
        return one_at_a_time
    if cache == "none":
        return None
    if not known._supports_default_dynamic_cache():
        return f"{text.model_type} models make a cache of their own"
    static, types = cache == "static", layer_types(config)
    others = sorted(name for name in types if row_of_type(name, static=static).can_crop is None)
    return f"the cache of {', '.join(others)} layers cannot be cut back" if others else None


def check_vocabularies(draft: Tokenizer, tokenizer: Tokenizer, *, draft_name: str, source: str) -> None:
    """Refuse a draft model whose ids mean something else than those of the model that checks its drafts.

    Raises:
        UsageError: naming both, and how many tokens differ.
    """
    ours, theirs = tokenizer.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = sum(theirs.get(token) != token_id for token, token_id in ours.items()) or len(theirs) - len(ours)
    raise UsageError(
        f"--draft {draft_name} has another vocabulary than {source}: {differing} tokens differ",
        hint="take a draft model of the same family, or --speculate prompt-lookup",
    )
