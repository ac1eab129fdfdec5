"""The answers of one `kv-size` call, as they pass from the calculator to the renderers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llminfer.kv.budget import Budget
from llminfer.kv.footprint import Footprint
from llminfer.kv.layer import ModelKV
from llminfer.kv.setup import CacheSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """Prediction and measurement of one moment: the bytes of each layer in the real cache's tensors.

    The storage is what these tensors keep allocated, views of something larger counted in full.
    `real` says that the run had values, of fewer tokens than were asked about perhaps.
    """

    tokens: int
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    predicted_storage_bytes: int
    measured_storage_bytes: int
    real: bool = False

    @property
    def agrees(self) -> bool:
        """Whether every layer's bytes, and the storage of all, are as predicted."""
        return (
            self.predicted_bytes == self.measured_bytes and self.predicted_storage_bytes == self.measured_storage_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One model in one setup at one length: its footprint, or why there is none.

    `check` holds what `--verify` measured, `budget` what fits when a memory was stated.
    """

    model: ModelKV
    setup: CacheSetup
    tokens: int
    footprint: Footprint | None = None
    refusal: str | None = None
    budget: Budget | None = None
    check: tuple[CheckRow, ...] = ()

    @property
    def beyond_limit(self) -> bool:
        """Whether the tokens are more than the model was made for."""
        return self.model.context_limit is not None and self.tokens > self.model.context_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes against context for one model in one runtime, as a function and the range to draw it over.

    `corners` are the lengths at which the curve bends.
    """

    label: str
    bytes_of: Callable[[int], int]
    last_tokens: int
    corners: tuple[int, ...] = ()
