"""The inverse of the footprint: the longest context and the largest batch for so many bytes.

Bytes never fall when a token or a sequence is added, whatever windows, states and blocks the
layers have: the sizes are steps that only rise. So the largest number that fits is found exactly
by halving an interval whose lower end fits and whose upper end does not. (Compressed entries are
the one exception: their buffer empties at every multiple of the stride. What is found then fits,
and one more does not, but a length further up may.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llminfer.errors import InvalidParams
from llminfer.kv.footprint import total_bytes
from llminfer.kv.layer import ModelKV
from llminfer.kv.setup import DEFAULT_SETUP, CacheSetup
from llminfer.units import format_bytes

# a cache that still fits with so many tokens (or sequences) does not grow with them
UNBOUNDED = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a rank has, and what of it is taken before the cache comes."""

    total_bytes: int
    weights_bytes: int = 0
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_bytes <= 0 or self.weights_bytes < 0 or self.reserve_bytes < 0:
            raise InvalidParams("memory must be more than 0 bytes, weights and reserve not less than 0")

    @property
    def cache_bytes(self) -> int:
        """Bytes left for the cache; negative when weights and reserve alone are too much."""
        return self.total_bytes - self.weights_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What fits into `memory`. None means without end: the cache does not grow with it.

    `max_tokens` is the longest context for `batch` sequences, `max_batch` the largest batch of
    `tokens` tokens each (None too when no number of tokens was asked for).
    """

    memory: Memory
    batch: int
    tokens: int | None
    needed_bytes: int | None
    max_tokens: int | None
    max_batch: int | None
    fits: bool | None

    @property
    def exceeded(self) -> bool:
        """Whether the tokens asked for do not fit, or not a single one where none were."""
        return self.max_tokens == 0 if self.fits is None else not self.fits

    @property
    def text(self) -> str:
        """One line for people."""
        left = f"{format_bytes(max(self.memory.cache_bytes, 0))} for the cache"
        context = "any context" if self.max_tokens is None else f"{self.max_tokens} tokens at most"
        line = f"{left}: {context} with batch {self.batch}"
        if self.tokens is None:
            return line
        return f"{line}, batch {'without end' if self.max_batch is None else self.max_batch} with {self.tokens} tokens"


def budget(model: ModelKV, memory: Memory, *, tokens: int | None, setup: CacheSetup = DEFAULT_SETUP) -> Budget:
    """The largest context and batch whose steady size fits; arguments as in `footprint`.

    Raises:
        As `footprint`.
    """
    needed, room, batch = total_bytes(model, setup), memory.cache_bytes, setup.batch
    needed_bytes = None if tokens is None else needed(tokens, batch)
    return Budget(
        memory=memory,
        batch=batch,
        tokens=tokens,
        needed_bytes=needed_bytes,
        max_tokens=_largest(lambda count: needed(count, batch) <= room),
        max_batch=None if tokens is None else _largest(lambda count: needed(tokens, count) <= room),
        fits=None if needed_bytes is None else needed_bytes <= room,
    )


def _largest(fits: Callable[[int], bool]) -> int | None:
    """The largest count of 1 or more that fits, 0 when none does, None when all do."""
    if not fits(1):
        return 0
    fitting, failing = 1, 2
    while fits(failing):
        if failing >= UNBOUNDED:
            return None
        fitting, failing = failing, failing * 2
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        fitting, failing = (middle, failing) if fits(middle) else (fitting, middle)
    return fitting
