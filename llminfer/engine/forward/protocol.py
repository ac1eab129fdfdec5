"""What a forward is to the loops: new ids in, logits out, and a cache between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from llminfer.engine.models.protocols import Outputs

# the model, or what runs it: its arguments to its outputs
Call = Callable[..., Outputs]


class Forward(Protocol):
    """Feeds new ids to the model and keeps what the next call needs; any number of ids, at any call."""

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        """Logits after the newest id, shape [1, vocabulary]."""
        ...

    def last(self, new_ids: Sequence[int], count: int) -> Tensor:
        """Logits after each of the newest `count` ids, shape [count, vocabulary]; `new_ids` are so many at least."""
        ...

    @property
    def ids(self) -> Sequence[int]:
        """The ids fed so far, which need not be fed again."""
        ...

    def crop(self, tokens: int) -> bool:
        """Forget all but the first `tokens` ids; False, and nothing changed, when the cache cannot be cut so.

        This also mends a cache that a broken call has left half filled.
        """
        ...

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of the cache's tensors, None when there is no cache."""
        ...

    @property
    def cache(self) -> Any:
        """The cache itself, None when there is none."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about how the model was run."""
        ...


# (model, cache=..., cached_ids=...) to the forward
ForwardFactory = Callable[..., Forward]
