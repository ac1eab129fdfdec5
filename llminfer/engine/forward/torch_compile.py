"""The decode step through torch.compile: what it needs, where its kernels are kept, how it is warmed up.

A prompt is fed by the model as it is, since its length varies; every token after it has the same
shapes, and goes through one compiled graph over a static cache. Kernels are kept on the disk, so
that the next process loads what this one has compiled.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import StaticCache

from llminfer.engine.forward.forward import static_arguments
from llminfer.engine.forward.protocol import Call
from llminfer.engine.kv_cache.kinds import check_cache
from llminfer.engine.machine.disk_cache import cache_folder
from llminfer.engine.models.capabilities import (
    forward_parameters,
    layer_types,
    model_class,
    prepares_by_default,
    text_config,
)
from llminfer.engine.models.protocols import CausalLM, Config, Outputs
from llminfer.engine.models.quirks import quirks_of
from llminfer.errors import UnsupportedArchitecture
from llminfer.params import CacheOptions
from llminfer.text import reason_of

# raise it whenever the graph that we hand to the compiler is made in another way
_GRAPH_FORMAT = 1
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# tokens that a static layer has room for at least, and a power of two of them beyond: each length is
# a graph of its own, and compiling one costs more than a longer mask
_LEAST_ROOM_TOKENS = 256
# graphs of one process: one a model and room, two where a window fills up
_MOST_GRAPHS = 64
# tokens fed before the step is compiled: with 0 or 1 the compiler would take their number for a constant
_SCRATCH_TOKENS = 2
# counters of the layers with windows, plain integers that grow with every token
_COUNTERS = r".*cumulative_length_int"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A compiled forward of one token, or `notes` that say why there is none and the model is called as it is."""

    call: Call | None
    compile_s: float
    notes: tuple[str, ...] = ()


def check_compiled(config: Config, source: str, *, known: type[CausalLM] | None = None) -> None:
    """Refuse a model that cannot be compiled over a static cache, before its weights are read.

    Args:
        source: names the model in errors.
        known: the model's class; the one that transformers has for the config when not given.

    Raises:
        UnsupportedArchitecture: with the reason.
    """
    reason = _why_not_compiled(config, known or model_class(config))
    if reason is not None:
        raise UnsupportedArchitecture(f"{source} cannot be compiled: {reason}", hint="drop --compile")


def _why_not_compiled(config: Config, known: type[CausalLM] | None) -> str | None:
    model_type = text_config(config).model_type
    if known is None:
        return "it brings its own code, of which nothing is known"
    try:
        check_cache(CacheOptions(kind="static"), config, str(model_type), known=known)
    except UnsupportedArchitecture as error:
        return f"compiling needs a static cache, and {error.message}"
    if not getattr(known, "_can_compile_fullgraph", False):
        return f"transformers does not make one graph of {model_type} models"
    if not StaticCache(config=text_config(config), max_cache_len=_LEAST_ROOM_TOKENS).is_compileable:
        return f"its {', '.join(sorted(layer_types(config)))} layers keep what no graph can write to"
    if not prepares_by_default(known):
        return f"{model_type} models prepare the inputs of every step in their own way"
    return quirks_of(model_type).not_compiled


def compiled_room(tokens: int) -> int:
    """The tokens that the static cache of a compiled run has room for, at least `tokens`."""
    return max(_LEAST_ROOM_TOKENS, 1 << max(tokens - 1, 0).bit_length())


@torch.inference_mode()
def compile_step(model: CausalLM, room: int) -> CompiledStep:
    """Compile the forward of one token over a static cache of `room` tokens, and run it once or twice.

    Whatever fails in the compiler is a note, and the model is then called as it is.
    """
    start_s = time.perf_counter()
    call: Call | None = None
    note = _missing_compiler(model.device)
    if note is None:
        try:
            with _compiler_settings():
                call = _warm(model, room)
        except Exception as error:  # whatever the compiler and the tools that it calls may raise
            cause = getattr(error, "inner_exception", error)
            note = f"not compiled, since torch.compile failed: {reason_of(cause)}"
    return CompiledStep(call=call, compile_s=time.perf_counter() - start_s, notes=(note,) if note else ())


def _missing_compiler(device: torch.device) -> str | None:
    """The note that says which C++ compiler was looked for in vain; inductor writes C++ for a CPU."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.type != "cpu" or shutil.which(compiler) is not None:
        return None
    return f"not compiled: torch.compile needs a C++ compiler, and {compiler} was not found"


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Kernels are kept in our own cache folder; lengths that grow are no reason to compile anew."""
    folder = cache_folder() / "compiled" / f"{_GRAPH_FORMAT}-torch-{torch.__version__}"
    before = os.environ.get(_FOLDER_VARIABLE)
    os.environ[_FOLDER_VARIABLE] = str(folder)  # torch itself sets it, to a temporary folder
    try:
        with (
            cast(Any, torch.compiler.config).patch(dynamic_sources=_COUNTERS),
            torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS),
        ):
            yield
    finally:
        if before is None:
            del os.environ[_FOLDER_VARIABLE]
        else:
            os.environ[_FOLDER_VARIABLE] = before


def _warm(model: CausalLM, room: int) -> Call:
    """The compiled call, run on a scratch cache in every state that a run within the room may come to."""
    backend = _matvec_backend if model.device.type == "cpu" else "inductor"
    compiled = torch.compile(_run, backend=backend, fullgraph=True)
    cache = StaticCache(config=text_config(model.config), max_cache_len=room)
    _run(model, **_arguments(model, cache, start=0, tokens=_SCRATCH_TOKENS))
    compiled(model, **_arguments(model, cache, start=_SCRATCH_TOKENS, tokens=1))
    windows = [layer for layer in cache.layers if getattr(layer, "max_cache_len", room) < room]
    if windows:  # a full window is written to in another way, so it has a graph of its own
        for layer in windows:
            layer.cumulative_length_int = layer.max_cache_len
        compiled(model, **_arguments(model, cache, start=_SCRATCH_TOKENS + 1, tokens=1))
    # what was not foreseen runs as it is: nothing is compiled in the middle of a run
    call: Call = torch.compiler.set_stance("eager_on_recompile")(partial(compiled, model))
    return call


def _arguments(model: CausalLM, cache: Any, *, start: int, tokens: int) -> dict[str, Any]:
    """What a plain forward gives the model for so many tokens from position `start` on."""
    positions = torch.arange(start, start + tokens, device=model.device).unsqueeze(0)
    arguments = {"input_ids": torch.zeros_like(positions), **static_arguments(model, use_cache=True), "cache": cache}
    return arguments | ({"position_ids": positions} if "position_ids" in forward_parameters(model) else {})


def _run(model: CausalLM, **arguments: Any) -> Outputs:
    return model(**arguments)


def _matvec_backend(graph: Any, inputs: Sequence[Tensor]) -> Any:
    """Inductor, with linear layers of one row written as sums, which it makes loops over all threads of.

    The library that it would call for them runs a float32 product of one row on one thread. The graph
    is changed here, since a table of decompositions would keep it out of the cache on the disk.
    """
    from torch._inductor.compile_fx import compile_fx

    for node in list(graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)):
        _write_as_sum(graph.graph, node)
    graph.recompile()
    return compile_fx(graph, inputs)


def _write_as_sum(graph: Any, node: Any) -> None:
    """Replace a linear layer's product of one row, [..., inner] by [outer, inner]; leave others as they are."""
    row, matrix, bias = (*node.args, *node.kwargs.values(), None)[:3]
    *leading, _ = row.meta["example_value"].shape
    if any(size != 1 for size in leading):
        return
    with graph.inserting_before(node):
        product = graph.call_function(torch.sum, (graph.call_function(torch.mul, (matrix, row)), -1))
        if bias is not None:
            product = graph.call_function(torch.add, (product, bias))
        product = graph.call_function(torch.reshape, (product, (*leading, -1)))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
