"""The native step as a way to feed a model: a few tokens are its own, long prompts go through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from llminfer.engine.forward.forward import PlainForward
from llminfer.engine.models.protocols import CausalLM
from llminfer.engine.native.decoder import Decoder


class NativeForward(PlainForward):
    """Steps in C++ over the growing cache that transformers' forward fills and reads."""

    def __init__(self, model: CausalLM, *, decoder: Decoder, cache: Any = None, cached_ids: Sequence[int] = ()) -> None:
        super().__init__(model, cache=cache, cached_ids=cached_ids)
        self._decoder = decoder

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        """Logits after the last `count` new ids, shape [count, vocabulary]: natively where those are few."""
        if len(new_ids) > self._decoder.most_tokens:
            return super().last(new_ids, count)
        self._torn = True
        logits = self._decoder.step(new_ids, self._cache, len(self._ids), count)
        self._torn = False
        self._ids.extend(new_ids)
        return logits
