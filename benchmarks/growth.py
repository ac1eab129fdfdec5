"""What a decode step costs, and what memory, against the context: ours and model.generate()'s, interleaved.

    python benchmarks/growth.py [--model FOLDER] [--contexts 64,512,8192] [--rounds N] [--steps N] [--native] [--json]

At each context the caches are filled with the same random keys and values, since a prefill would
take long and cost nothing else. Then every round runs a few real steps of each contender from
there: our loop with the growing cache and with transformers' dynamic one, with `--native` the native
engine (float32, over a growing cache), and `model.generate()` itself, timed between the tokens that
it hands to its streamer. Figures are medians; a slope is a least-squares fit of them over the
contexts. A step at which the growing cache moves to larger buffers is shown apart, and its share
(one in 256) is added to the slope "with moves".
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
OURS = ("growing", "dynamic")
NATIVE = "native"
GENERATE = "generate()"
MIB = 2**20


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to decode from a filled cache, and what it cost there.

    `run` makes so many steps, takes them back, and returns their seconds, each with whether buffers
    were moved in it. `cache_bytes` is what the cache holds, `extra_bytes` what the process held
    beyond that at its peak.
    """

    run: Callable[[int], list[tuple[float, bool]]]
    cache: Any
    steps_s: list[float] = field(default_factory=list)
    moves_s: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    extra_bytes: int | None = None


def filled(cache: Any, like: Any, context: int) -> Any:
    """The cache with `context` random tokens in every layer, shaped as the layers of `like`."""
    import torch

    for layer, other in zip(cache.layers, like.layers, strict=True):
        generator = torch.Generator().manual_seed(context)
        states = [
            torch.randn((*part.shape[:-2], context, part.shape[-1]), generator=generator).to(part.dtype)
            for part in (other.keys, other.values)
        ]
        layer.update(*states)
    return cache


def our_contender(model: Any, kind: str, cache: Any, context: int, way: Any = None) -> Contender:
    """Our own loop, from this cache of this kind."""
    from llminfer.engine.forward.forward import make_forward
    from llminfer.engine.loop import decode
    from llminfer.engine.machine.clock import Clock
    from llminfer.engine.sampling.sampler import make_sampler
    from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
    from llminfer.params import CacheOptions, SamplingParams

    forward = make_forward(model, options=CacheOptions(kind=kind), cache=cache, cached_ids=[1] * context, factory=way)
    sample = make_sampler(SamplingParams(temperature=0), [1], model.device)

    def buffers() -> list[int]:
        return [layer.keys.data_ptr() for layer in cache.layers] if hasattr(cache.layers[0], "key_buffer") else []

    def run(steps: int) -> list[tuple[float, bool]]:
        output = Output(
            detokenizer=NoText(),
            matcher=StopMatcher(()),
            eos_ids=frozenset(),
            limit=TokenLimit(tokens=steps + 1),
            token_text=str,
        )
        taken, running = [], decode(forward, sample, output, Clock(), prompt_ids=[1], cached=context)
        next(running)  # the first one is not counted, as of generate()
        before, at_s = buffers(), time.perf_counter()
        for _ in running:
            duration_s, after = time.perf_counter() - at_s, buffers()
            taken.append((duration_s, before != after))
            before, at_s = after, time.perf_counter()
        forward.crop(context)
        return taken

    return Contender(run=run, cache=cache)


def generate_contender(model: Any, cache: Any, context: int) -> Contender:
    """`model.generate()` going on from this cache, greedily."""
    import torch
    from transformers import GenerationConfig

    ids = torch.ones((1, context + 1), dtype=torch.long)
    mask = torch.ones_like(ids)

    def run(steps: int) -> list[tuple[float, bool]]:
        streamer = Stopwatch()
        wanted = GenerationConfig(max_new_tokens=steps + 1, do_sample=False, eos_token_id=None, pad_token_id=0)
        saved, model.generation_config = model.generation_config, GenerationConfig()
        try:
            model.generate(ids, attention_mask=mask, cache=cache, generation_config=wanted, streamer=streamer)
        finally:
            model.generation_config = saved
        cache.crop(-(steps + 1))
        at_s = streamer.at_s[1:]  # the first is the prompt
        return [(after - before, False) for before, after in itertools.pairwise(at_s)]

    return Contender(run=run, cache=cache)


class Stopwatch:
    """A streamer that keeps the time of every call."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, value: object) -> None:
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class NoText:
    """A detokenizer that writes nothing."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def measure(model: Any, context: int, *, rounds: int, steps: int, native: Any = None) -> dict[str, Contender]:
    """All contenders at one context: a round that is not counted, then `rounds` of `steps` each."""
    import torch

    from llminfer.engine.kv_cache.kinds import make_cache
    from llminfer.engine.kv_cache.tensors import cache_bytes
    from llminfer.params import CacheOptions

    # the counted steps lie around the context, so that of a whole block of tokens includes the move
    start = max(context - 1 - steps // 2, 1)
    like = make_cache(CacheOptions(), model, None)
    with torch.inference_mode():
        model(torch.ones((1, 1), dtype=torch.long), cache=like, use_cache=True)

    def new(kind: str) -> Any:
        return filled(make_cache(CacheOptions(kind=kind), model, None), like, start)

    contenders = {kind: our_contender(model, kind, new(kind), start) for kind in OURS}
    if native is not None:
        contenders[NATIVE] = our_contender(native.model, "growing", new("growing"), start, native.forward_factory)
    contenders[GENERATE] = generate_contender(model, new("dynamic"), start)
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contender = contenders[name]
            resident = reset_peak()
            taken = contender.run(steps)
            if number:
                contender.steps_s += [duration_s for duration_s, moved in taken if not moved]
                contender.moves_s += [duration_s for duration_s, moved in taken if moved]
                extra = None if resident is None else max(peak_bytes() - resident, contender.extra_bytes or 0)
                contender.extra_bytes = extra
    for contender in contenders.values():
        contender.cache_bytes = cache_bytes(contender.cache)
    return contenders


def reset_peak() -> int | None:
    """Let the process's peak begin anew; its resident bytes, None where that cannot be known."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return status_bytes("VmRSS")
    except (OSError, AttributeError):
        return None


def peak_bytes() -> int:
    """The most that the process has held since `reset_peak`."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A figure of this process, which Linux states in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Least squares: (seconds a step costs without context, seconds a context token adds); None of one point."""
    if len(points) < 2:
        return None
    slope, intercept = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return intercept, slope


def document(model_name: str, rows: dict[int, dict[str, Contender]]) -> dict[str, Any]:
    """Everything as plain values: times in seconds, sizes in bytes."""
    import torch

    from llminfer.kv.runtimes.growing import BLOCK_TOKENS

    contexts = []
    points: dict[str, list[tuple[int, float]]] = {}
    for context, contenders in rows.items():
        row: dict[str, Any] = {"context": context}
        for name, contender in contenders.items():
            median_s = statistics.median(contender.steps_s)
            move_s = statistics.median(contender.moves_s) if contender.moves_s else None
            row[name] = {
                "step_s": median_s,
                "fastest_s": min(contender.steps_s),
                "slowest_s": max(contender.steps_s),
                "move_s": move_s,
                "cache_bytes": contender.cache_bytes,
                "extra_peak_bytes": contender.extra_bytes,
            }
            points.setdefault(name, []).append((context, median_s))
            if name == "growing":
                with_moves = median_s + (max(move_s - median_s, 0) / BLOCK_TOKENS if move_s else 0)
                points.setdefault("growing, with moves", []).append((context, with_moves))
        contexts.append(row)
    fits = {name: fit(found) for name, found in points.items()}
    base = fits[GENERATE]
    slopes = {
        name: {
            "fixed_s": found[0],
            "per_context_token_s": found[1],
            "of_generate": found[1] / base[1] if base and base[1] else None,
        }
        for name, found in fits.items()
        if found is not None
    }
    return {
        "schema_version": 1,
        "model": model_name,
        "threads": torch.get_num_threads(),
        "contexts": contexts,
        "slopes": slopes,
    }


def print_table(found: dict[str, Any]) -> None:
    """The document for people."""
    names = [name for name in (*OURS, NATIVE, GENERATE) if name in found["contexts"][0]]
    print(f"{found['model']}, {found['threads']} threads; medians")
    heads = "".join(f"{name:>12}" for name in names)
    print(f"{'':>8}{'step, ms':>{len(heads)}}{'':>9}{'cache, MiB':>{len(heads)}}{'peak beyond, MiB':>{len(heads)}}")
    print(f"{'context':>8}{heads}{'move':>9}{heads}{heads}")
    for row in found["contexts"]:
        times = "".join(f"{row[name]['step_s'] * 1e3:>12.1f}" for name in names)
        move = f"{row['growing']['move_s'] * 1e3:.1f}" if row["growing"]["move_s"] else "-"
        caches = "".join(f"{row[name]['cache_bytes'] / MIB:>12.1f}" for name in names)
        extra = "".join(f"{in_mib(row[name]['extra_peak_bytes']):>12}" for name in names)
        print(f"{row['context']:>8}{times}{move:>9}{caches}{extra}")
    for name, slope in found["slopes"].items():
        share = "" if slope["of_generate"] is None else f"  {slope['of_generate']:5.2f} × {GENERATE}"
        print(
            f"{name:<20} {slope['fixed_s'] * 1e3:7.1f} ms + "
            f"{slope['per_context_token_s'] * 1e6:6.2f} µs a context token{share}"
        )


def in_mib(size_bytes: int | None) -> str:
    """A size as a number of MiB."""
    return "-" if size_bytes is None else f"{size_bytes / MIB:.1f}"


def load_model(folder: str | None) -> tuple[str, Any]:
    """The model of a folder, or the built-in one, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, DEFAULT_MODEL_NAME, find_default_model
    from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf

    if folder is None:
        path = find_default_model()
        if path is None:
            sys.exit("the built-in model is not installed: give --model")
        folder = str(checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION))
        name = DEFAULT_MODEL_NAME
    else:
        name = Path(folder).name
    return name, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_native(folder: str | None) -> Any:
    """The same on the native engine."""
    from llminfer import load

    return load(folder, engine="native")


def counts(text: str) -> tuple[int, ...]:
    """Contexts from `64,128`."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError("contexts are 1 or more")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a checkpoint folder; the built-in model when not given")
    parser.add_argument("--contexts", type=counts, default=CONTEXTS, help="tokens, with commas (default 64 to 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds at each context (default 5)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender a round (default 4)")
    parser.add_argument("--native", action="store_true", help="the native engine too")
    parser.add_argument("--json", action="store_true", help="one JSON document in place of the table")
    arguments = parser.parse_args()
    name, model = load_model(arguments.model)
    native = load_native(arguments.model) if arguments.native else None
    rows = {
        context: measure(model, context, rounds=arguments.rounds, steps=arguments.steps, native=native)
        for context in arguments.contexts
    }
    for contenders in rows.values():
        for contender in contenders.values():
            assert all(math.isfinite(duration_s) for duration_s in contender.steps_s)
    found = document(name, rows)
    if arguments.json:
        print(json.dumps(found, allow_nan=False))
    else:
        print_table(found)


if __name__ == "__main__":
    main()
