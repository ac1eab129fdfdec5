"""Prefill: our forward against `model.generate(max_new_tokens=1)` on the same weights, interleaved.

    python benchmarks/prefill.py [--lengths 128 1024 4096] [--dtypes float32 bfloat16] [--rounds N] [--json]

Both get the same ids, made by chance, and stop at the first token. Each figure is a median over the
rounds with its spread; the ratio is taken round by round, and above 1 ours is faster. `generate()`
runs on the model as transformers loads it, ours on the model as llminfer loads it. The last column
compares our time with that of our float32 model at the same length in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, find_default_model
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.load import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One length in one element type; seconds are medians."""

    dtype: str
    tokens: int
    ours_s: float
    ours_low_s: float
    ours_high_s: float
    generate_s: float
    ratio: float
    to_float32: float | None


def timed_s(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def contenders(folder: Path, dtype: str) -> dict[str, Callable[[Sequence[int]], object]]:
    """What prefills: by name, from ids to the first token."""
    loaded = load(inspect_checkpoint(folder), device="cpu", dtype=dtype)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    reference.generation_config = transformers.GenerationConfig(do_sample=False, max_new_tokens=1)

    @torch.inference_mode()
    def ours(ids: Sequence[int]) -> object:
        return int(make_forward(loaded.model)(ids).argmax())

    def generate(ids: Sequence[int]) -> object:
        batch = torch.tensor([ids])
        return reference.generate(batch, attention_mask=torch.ones_like(batch), pad_token_id=0)

    return {"ours": ours, "generate": generate}


def measure(folder: Path, dtypes: Sequence[str], lengths: Sequence[int], rounds: int) -> list[Row]:
    """The rows of all lengths and element types, everything interleaved round by round."""
    models = {dtype: contenders(folder, dtype) for dtype in dtypes}
    generator = torch.Generator().manual_seed(0)
    prompts = {tokens: torch.randint(1000, 40000, (tokens,), generator=generator).tolist() for tokens in lengths}
    for functions in models.values():
        for function in functions.values():
            function(prompts[min(lengths)])
    times: dict[tuple[str, int, str], list[float]] = {}
    for number in range(rounds):
        for tokens, ids in prompts.items():
            for dtype, functions in models.items():
                # who comes first in a round alternates
                for name in sorted(functions, reverse=bool(number % 2)):
                    seconds = timed_s(lambda function=functions[name], ids=ids: function(ids))
                    times.setdefault((dtype, tokens, name), []).append(seconds)
    return [_row(times, dtype, tokens) for tokens in lengths for dtype in dtypes]


def _row(times: dict[tuple[str, int, str], list[float]], dtype: str, tokens: int) -> Row:
    ours, generate = times[dtype, tokens, "ours"], times[dtype, tokens, "generate"]
    float32 = times.get(("float32", tokens, "ours"))
    return Row(
        dtype=dtype,
        tokens=tokens,
        ours_s=statistics.median(ours),
        ours_low_s=min(ours),
        ours_high_s=max(ours),
        generate_s=statistics.median(generate),
        ratio=_median_ratio(generate, ours),
        to_float32=_median_ratio(ours, float32) if float32 else None,
    )


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def report(rows: Sequence[Row]) -> None:
    """The table as text."""
    print("dtype     tokens  ours ms/token (spread)       generate ms/token  generate ÷ ours  ours ÷ ours float32")
    for row in rows:
        milli = [1e3 * value / row.tokens for value in (row.ours_s, row.ours_low_s, row.ours_high_s, row.generate_s)]
        spread = f"{milli[0]:8.3f} ({milli[1]:.3f} to {milli[2]:.3f})"
        wide = "" if row.to_float32 is None else f"{row.to_float32:10.2f}"
        print(f"{row.dtype:<9} {row.tokens:>6}  {spread:<28} {milli[3]:>16.3f} {row.ratio:>16.2f} {wide}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096], help="prompt tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="element types")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    arguments = parser.parse_args()
    path = find_default_model()
    if path is None:
        sys.exit("the built-in model is not installed")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION)
    rows = measure(folder, arguments.dtypes, arguments.lengths, arguments.rounds)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        report(rows)


if __name__ == "__main__":
    main()
