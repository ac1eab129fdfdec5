"""llminfer: run a Hugging Face language model token by token and see what every step costs.

    >>> from llminfer import kv_footprint
    >>> kv_footprint("llama-3.1-8b", tokens=8192).total_bytes
    1073741824

Names are imported when they are used, so `import llminfer` is light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "load": "api",
    "generate": "api",
    "generate_batch": "api",
    "generate_samples": "api",
    "Conversation": "engine.conversation",
    "GenerationRequest": "request",
    "kv_footprint": "api",
    "kv_budget": "api",
    "verify": "api",
    "CacheOptions": "params",
    "SamplingParams": "params",
    "StopCriteria": "params",
    "Started": "events",
    "Step": "events",
    "Finished": "events",
    "Trace": "events",
    "LlminferError": "errors",
}

if TYPE_CHECKING:
    from llminfer.api import generate, generate_batch, generate_samples, kv_budget, kv_footprint, load, verify
    from llminfer.engine.conversation import Conversation
    from llminfer.errors import LlminferError
    from llminfer.events import Finished, Started, Step, Trace
    from llminfer.params import CacheOptions, SamplingParams, StopCriteria
    from llminfer.request import GenerationRequest

__all__ = [
    "CacheOptions",
    "Conversation",
    "Finished",
    "GenerationRequest",
    "LlminferError",
    "SamplingParams",
    "Started",
    "Step",
    "StopCriteria",
    "Trace",
    "__version__",
    "generate",
    "generate_batch",
    "generate_samples",
    "kv_budget",
    "kv_footprint",
    "load",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llminfer' has no attribute {name!r}")
    return getattr(import_module(f"llminfer.{_HOMES[name]}"), name)
