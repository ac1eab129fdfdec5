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
from llminfer.kv.runtimes.records import Allocate, Runtime

_TRANSFORMERS = "transformers 5.24"
# the runtimes whose modelling code is that of transformers, and so the heads that it caches
_BY_TRANSFORMERS: dict[str, tuple[str, Allocate]] = {
    "transformers": (f"{_TRANSFORMERS}, DynamicCache", transformers_dynamic.allocate),
    "transformers-static": (f"{_TRANSFORMERS}, StaticCache", transformers_static.allocate),
    "transformers-quantized": (f"{_TRANSFORMERS}, QuantizedCache (quanto or HQQ)", transformers_quantized.allocate),
    "llminfer": (f"llminfer's --cache growing, on {_TRANSFORMERS}", growing.allocate),
}
_BY_OTHERS: dict[str, tuple[str, Allocate]] = {
    "vllm": ("vLLM V1 (0.11 and later)", vllm.allocate),
    "llama.cpp": ("llama.cpp 0c1e57098 (llama-cpp-python 0.3.36)", llama_cpp.allocate),
    "ideal": ("the architecture itself", ideal.allocate),
}
RUNTIMES: dict[str, Runtime] = {
    name: Runtime(
        name=name,
        release=release,
        allocate=allocate,
        transformers_heads=rows is _BY_TRANSFORMERS,
        follows_checkpoint=name == "vllm",
    )
    for rows in (_BY_TRANSFORMERS, _BY_OTHERS)
    for name, (release, allocate) in rows.items()
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
