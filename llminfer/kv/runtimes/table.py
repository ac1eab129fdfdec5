"""The runtimes by name, in the order in which `--runtime all` shows them."""

from __future__ import annotations

from llminfer.errors import UsageError
from llminfer.kv.runtimes import (
    growing,
    ideal,
    llama_cpp,
    transformers_dynamic,
    transformers_quantized,
    transformers_static,
    vllm,
)
from llminfer.kv.runtimes.records import Runtime

RUNTIMES: dict[str, Runtime] = {
    row.name: row
    for row in (
        transformers_dynamic.RUNTIME,
        transformers_static.RUNTIME,
        transformers_quantized.RUNTIME,
        growing.RUNTIME,
        vllm.RUNTIME,
        llama_cpp.RUNTIME,
        ideal.RUNTIME,
    )
}


def runtime(name: str) -> Runtime:
    """The runtime called `name`.

    Raises:
        UsageError: for a name that is not in the table; the hint lists those that are.
    """
    row = RUNTIMES.get(name)
    if row is None:
        raise UsageError(f"unknown runtime {name!r}", hint=f"known: {', '.join(RUNTIMES)}")
    return row
