"""How a cache is set up: whose it is, for how many sequences, on how many ranks, of which element types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from llminfer.errors import InvalidParams


def require_count(name: str, value: object, *, least: int) -> None:
    """Refuse what is not a whole number of at least `least`.

    Raises:
        InvalidParams: with the number's name.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidParams(f"{name} is {value!r}, not a whole number of {least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """All that the bytes of a model's cache depend on, beside the tokens in it; checked when made.

    `runtime` is a name in `kv.runtimes.table.RUNTIMES`, `batch` the number of sequences. `dtype` is
    the cache's element type, the model's own when None; `k_dtype` is that of the keys (and of all
    that is not values) and `v_dtype` that of the values where they differ from it. `tp` is the
    number of tensor-parallel ranks: sizes are those of one of them. `waiting` is how many tokens a
    quantized cache holds in full precision (None: as many as it can), `quantizer` its library,
    `quanto` or `hqq`.

    Raises:
        InvalidParams: when a number is out of its range.
    """

    runtime: str = "transformers"
    batch: int = 1
    dtype: str | None = None
    k_dtype: str | None = None
    v_dtype: str | None = None
    tp: int = 1
    waiting: int | None = None
    quantizer: str = "quanto"

    def __post_init__(self) -> None:
        require_count("batch", self.batch, least=1)
        require_count("tp", self.tp, least=1)

    @property
    def states_dtype(self) -> bool:
        """Whether any element type is asked for."""
        return any((self.dtype, self.k_dtype, self.v_dtype))


class SetupOptions(TypedDict, total=False):
    """The fields of a `CacheSetup` as keywords."""

    runtime: str
    batch: int
    dtype: str | None
    k_dtype: str | None
    v_dtype: str | None
    tp: int
    waiting: int | None
    quantizer: str


DEFAULT_SETUP = CacheSetup()
