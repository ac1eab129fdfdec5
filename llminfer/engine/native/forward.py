"""The native step as a forward: what comes in few tokens is its own, long prompts go through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from llminfer.engine.forward import PlainForward
from llminfer.engine.growing_cache import GrowingCache
from llminfer.engine.native.decoder import Decoder


class NativeForward(PlainForward):
    """Steps in C++ over the cache that transformers' forward fills and reads."""

    __slots__ = ("_decoder",)

    def __init__(self, model: Any, *, cache: Any = None, cached_ids: Sequence[int] = ()) -> None:
        super().__init__(model, cache=GrowingCache(model.config) if cache is None else cache, cached_ids=cached_ids)
        if not hasattr(model, "llminfer_decoder"):
            object.__setattr__(model, "llminfer_decoder", Decoder(model))
        self._decoder: Decoder = model.llminfer_decoder

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        """Logits after the last `count` new ids, shape [count, vocabulary]: natively where those are few."""
        if len(new_ids) > self._decoder.most_tokens:
            return super().last(new_ids, count)
        self._torn = True
        logits = self._decoder.step(new_ids, self._cache, len(self._ids), count)
        self._torn = False
        self._ids.extend(new_ids)
        return logits
