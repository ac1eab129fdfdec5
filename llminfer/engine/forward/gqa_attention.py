"""Grouped-query attention of a single token that reads every key and value once.

transformers hands a decode step without a mask to torch's fused kernel, which goes over the keys of
a group once for each of its query heads. The query heads of a group are as well so many queries of
one head: then the kernel goes over the keys once. With a mask transformers does this itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_STOCK = "sdpa"
# the threads whose forwards attend through us; transformers has one table of functions for all threads
_ATTENDING: list[int] = []
_CHANGE = Lock()
# arguments that change the scores; a mask and dropout are named ones
_ALTER_SCORES = ("position_bias", "softcap", "s_aux")


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Within it, models that attend through transformers' `sdpa` function attend through ours, on this thread.

    The first thread to come replaces the function and the last to leave puts it back; another thread that
    meets ours meanwhile is sent on to transformers'.
    """
    with _CHANGE:
        if not _ATTENDING:
            ALL_ATTENTION_FUNCTIONS[_STOCK] = partial(_attend_here, ALL_ATTENTION_FUNCTIONS[_STOCK])
        _ATTENDING.append(get_ident())
    try:
        yield
    finally:
        with _CHANGE:
            _ATTENDING.remove(get_ident())
            if not _ATTENDING:
                before = ALL_ATTENTION_FUNCTIONS[_STOCK].args[0]
                del ALL_ATTENTION_FUNCTIONS[_STOCK]
                if ALL_ATTENTION_FUNCTIONS.get(_STOCK) is not before:  # somebody else's replacement
                    ALL_ATTENTION_FUNCTIONS[_STOCK] = before


def _attend_here(stock: Callable[..., Any], *arguments: Any, **keyword_arguments: Any) -> Any:
    ours = not torch.compiler.is_compiling() and get_ident() in _ATTENDING
    return (attend if ours else stock)(*arguments, **keyword_arguments)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' function of this signature gives; all but plain decode steps go on to it.

    Args:
        query: shape [batch, groups · heads, new tokens, dim].
        key: shape [batch, heads, tokens, dim].
        value: shape [batch, heads, tokens, value dim].

    Returns:
        Shape [batch, new tokens, groups · heads, value dim], and no weights.
    """
    batch, query_heads, new_tokens, dim = query.shape
    groups = query_heads // key.shape[1]
    plain = attention_mask is None and not dropout and all(kwargs.get(name) is None for name in _ALTER_SCORES)
    grouped = groups > 1 and query_heads == groups * key.shape[1] and batch == key.shape[0]
    if not (new_tokens == 1 and plain and grouped and query.device.type == "cpu"):
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return stock
    # a token sees all that is cached, so neither a mask nor causality is lost with the queries' order
    packed = query.reshape(batch, query_heads // groups, groups, dim)
    output = scaled_dot_product_attention(packed, key, value, scale=scaling)
    return output.reshape(batch, 1, query_heads, value.shape[-1]), None
