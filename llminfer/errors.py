"""Every error llminfer reports, with the exit code it carries.

    LlminferError                       1  failure
    ├── UsageError                      2  the request itself is wrong
    │   └── InvalidParams               2  a value out of its range
    ├── ModelNotAvailable               3  no such model here, or not all of it
    ├── UnsupportedArchitecture         4  a model that we do not (yet) know how to run or size
    │   └── UnknownConfigField          4  a config that lacks what the formula needs
    ├── PromptCacheMismatch             1  a saved cache that is not this run's, or damaged
    ├── DoesNotFit                      5  more bytes than the stated memory
    └── GenerationFailed                1  a run that broke after it began
        ├── NonFiniteLogits             1
        └── OutOfMemory                 1

An error is one line for people (what, where) and a hint (what to do next). `cli/` is the only
place that prints them.
"""

from __future__ import annotations

from typing import ClassVar

MOST_CHARACTERS = 1 << 14  # of a message, and of a hint


class LlminferError(Exception):
    """Base of all errors: a message, an optional hint, and the exit code of its kind."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = _clipped(message)
        self.hint = None if hint is None else _clipped(hint)
        super().__init__(self.message)


def _clipped(text: str) -> str:
    """What an error quotes from a file may be of any length."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


class UsageError(LlminferError):
    """The request contradicts itself or lacks something, whatever the model."""

    exit_code = 2


class InvalidParams(UsageError):
    """A parameter lies outside the range it may have."""


class ModelNotAvailable(LlminferError):
    """The named model is not here, is incomplete, or cannot be fetched."""

    exit_code = 3


class UnsupportedArchitecture(LlminferError):
    """The model's architecture is one that we cannot run, or cannot size."""

    exit_code = 4


class UnknownConfigField(UnsupportedArchitecture):
    """A config lacks a field that the cache's size depends on."""


class PromptCacheMismatch(LlminferError):
    """A saved cache is damaged, or belongs to another model, element type, version or prompt."""


class DoesNotFit(LlminferError):
    """The stated tokens and batch need more bytes than the stated memory."""

    exit_code = 5


class GenerationFailed(LlminferError):
    """A run broke after it began; what it had produced stays valid."""


class NonFiniteLogits(GenerationFailed):
    """The model returned NaN, +inf, or nothing but -inf as logits."""


class OutOfMemory(GenerationFailed):
    """The device ran out of memory during a forward."""


def reason_of(error: Exception) -> str:
    """The kind of a foreign error and its first line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
