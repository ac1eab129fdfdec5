"""One forward at a time for each model, and what a model keeps in itself for one run alone.

Runs on several threads may share a model: what differs between them is in their caches. But some
models write to their own modules while they compute (rotary positions that change with the length),
and some keep the states of the sequence there; of those the newest run has the model to itself.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakKeyDictionary

from llminfer.engine.models.protocols import CausalLM
from llminfer.errors import GenerationFailed

_TURNS: WeakKeyDictionary[CausalLM, Lock] = WeakKeyDictionary()
_OWNERS: WeakKeyDictionary[CausalLM, object] = WeakKeyDictionary()
_TABLE = Lock()


def turn_of(model: CausalLM) -> Lock:
    """The lock that a forward of this model holds from its first layer to its last."""
    with _TABLE:
        return _TURNS.setdefault(model, Lock())


def claim(model: CausalLM) -> object:
    """Take over what the model keeps in itself; returned is what `check_claim` knows the run by."""
    with _TABLE:
        owner = _OWNERS[model] = object()
        return owner


def check_claim(model: CausalLM, owner: object) -> None:
    """Refuse to go on with states that are another run's by now.

    Raises:
        GenerationFailed: when another run has claimed the model.
    """
    if _OWNERS.get(model) is not owner:
        raise GenerationFailed(
            "another run of this model has begun, and its layers keep the sequence's states in themselves",
            hint="end one run before the next, or load the model for each",
        )
