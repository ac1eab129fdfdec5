"""What the loop costs beside the model's own forward, part by part.

    python benchmarks/loop.py [--steps N] [--scripted] [--json]

With the built-in model, one step of each contender in turn, in rotating order: the model called by
hand with a cache and `argmax` (bare), then our loop greedy and with the usual filters. Their
difference is small beside what other programs on the machine do to a forward, so `--scripted` puts
a stub in the model's place that returns logits from a fixed pool at once and a cache of 30 layers:
what is left of a step is ours alone, counted in CPU time of the thread, in which nobody else's
programs show. Medians over the steps, and the limit of the fastest tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache

from llminfer.cli.standard_streams import write_text
from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, find_default_model
from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf
from llminfer.engine.forward.forward import PlainForward
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.text.output import TokenLimit, make_output
from llminfer.events import Finished, Step
from llminfer.params import SamplingParams, StopCriteria

PROMPT = "Explain in a few paragraphs why the sea is salty, and where the salt comes from. " * 6
SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8, seed=0),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=0),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9, seed=0),
}
PARTS = ("forward", "sampling", "text", "output", "unaccounted")
# the two vocabularies that small models mostly have
VOCABULARIES = (49152, 152064)

Times = dict[str, float]


def our_steps(
    loaded: Any,
    forward: Any,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    now: Callable[[], float] = time.perf_counter,
) -> Iterator[Times]:
    """Seconds of each step of our loop by part, its text written as the command writes it."""
    clock = Clock(now=now)
    output = make_output(loaded.tokenizer, StopCriteria(ignore_eos=True), TokenLimit(tokens=10**9), clock)
    sample = make_sampler(params, prompt_ids, torch.device("cpu"))
    events: Generator[Step, None, Finished] = decode(forward, sample, output, clock, prompt_ids=prompt_ids)
    write_text(next(events).text)
    while True:
        start_s = now()
        step = next(events)
        made_s = now()
        write_text(step.text)
        end_s = now()
        # the record's own `output_s` holds the other contenders' steps too
        parts = {"forward": step.forward_s, "sampling": step.sampling_s, "text": step.text_s, "output": end_s - made_s}
        yield {"step": end_s - start_s, **parts, "unaccounted": end_s - start_s - sum(parts.values())}


def bare_steps(model: Any, prompt_ids: Sequence[int]) -> Iterator[Times]:
    """Seconds of each step of the barest loop: the model, its cache, `argmax`."""
    cache, ids = DynamicCache(config=model.config), torch.tensor([prompt_ids])
    places = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        while True:
            start_s = time.perf_counter()
            logits = model(input_ids=ids, position_ids=places, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids, places = logits[:, -1].argmax(dim=-1, keepdim=True), places[:, -1:] + 1
            yield {"step": time.perf_counter() - start_s}


def in_turn(contenders: Mapping[str, Iterator[Times]], steps: int) -> dict[str, list[Times]]:
    """A step of each contender in rotating order, so often; a first tenth is not counted."""
    times: dict[str, list[Times]] = {name: [] for name in contenders}
    names, warm_up = list(contenders), max(steps // 10, 2)
    for number in range(steps + warm_up):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            step = next(contenders[name])
            if number >= warm_up:
                times[name].append(step)
    return times


class StubModel:
    """Stands in a model's place: logits from a pool at once, a cache that is there and does not grow."""

    device = torch.device("cpu")
    config = SimpleNamespace(model_type="stub", is_encoder_decoder=False)

    def __init__(self, vocabulary: int, layers: int = 30, rows: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        # ranks and scatter like those of a language model's logits, from flat to peaked
        ranks = torch.arange(1, vocabulary + 1).log()
        self.pool = [
            (
                torch.randn(vocabulary, generator=generator)
                - (0.8 + row / rows) * 2 * ranks[torch.randperm(vocabulary, generator=generator)]
            ).reshape(1, 1, vocabulary)
            for row in range(rows)
        ]
        self.cache = DynamicCache()
        for layer in range(layers):
            self.cache.update(torch.zeros(1, 3, 128, 64), torch.zeros(1, 3, 128, 64), layer)
        self.calls = 0

    def modules(self) -> Iterator[Any]:
        return iter(())

    def forward(self, input_ids: Any, position_ids: Any, cache: Any, use_cache: bool, logits_to_keep: int) -> Any: ...

    def __call__(self, **arguments: Any) -> Any:
        self.calls += 1
        return Outputs(logits=self.pool[self.calls % len(self.pool)], cache=arguments["cache"])


class Outputs(dict[str, Any]):
    """The two ways in which a forward reads a model's outputs."""

    __getattr__ = dict.__getitem__


def scripted(loaded: Any, steps: int) -> dict[str, dict[str, list[Times]]]:
    """Times by vocabulary and contender, with the stub in the model's place."""
    found = {}
    for vocabulary in VOCABULARIES:
        contenders = {}
        for name, params in SAMPLINGS.items():
            model = StubModel(vocabulary)
            forward = PlainForward(model, cache=model.cache, cached_ids=range(128))
            contenders[name] = our_steps(loaded, forward, [1], params, now=time.thread_time)
        found[f"vocabulary {vocabulary}"] = in_turn(contenders, steps)
    return found


def real(loaded: Any, steps: int) -> dict[str, dict[str, list[Times]]]:
    """Times by contender with the built-in model."""
    prompt_ids = loaded.tokenizer(PROMPT)["input_ids"]
    contenders = {"bare": bare_steps(loaded.model, prompt_ids)}
    next(contenders["bare"])
    for name, params in SAMPLINGS.items():
        contenders[name] = our_steps(loaded, PlainForward(loaded.model), prompt_ids, params)
    return {"the built-in model": in_turn(contenders, steps)}


def summarize(times: Sequence[Times]) -> dict[str, float]:
    """Medians in microseconds by part, and the fastest tenth of whole steps."""
    wholes = sorted(step["step"] for step in times)
    summary = {part: statistics.median(step[part] for step in times) * 1e6 for part in times[0]}
    if "forward" in summary:
        summary["around"] = statistics.median(step["step"] - step["forward"] for step in times) * 1e6
    return {**summary, "fastest tenth": wholes[len(wholes) // 10] * 1e6}


def report(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """A line per contender, in µs; with a bare one, what is around our forward as a share of its step."""
    columns = ("step", "fastest tenth", *PARTS, "around")
    print(f"{title}: µs a step, medians")
    print(f"{'':<20}" + "".join(f"{column:>14}" for column in columns) + (f"{'of bare':>9}" if "bare" in rows else ""))
    for name, row in rows.items():
        cells = "".join(f"{row[column]:>14.1f}" if column in row else f"{'-':>14}" for column in columns)
        share = f"{100 * row['around'] / rows['bare']['step']:>8.2f}%" if "bare" in rows and "around" in row else ""
        print(f"{name:<20}{cells}{share}")


@contextmanager
def standard_output_to_nowhere() -> Iterator[None]:
    """What the contenders write goes through the same calls as ever, to a file that keeps nothing."""
    shown = sys.stdout
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        try:
            yield
        finally:
            sys.stdout = shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, help="counted steps of each (default 60, scripted 2000)")
    parser.add_argument("--scripted", action="store_true", help="a stub in the model's place")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    path = find_default_model()
    if path is None:
        sys.exit("the built-in model is not installed")
    from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
    from llminfer.engine.load import load

    folder = checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION)
    loaded = load(inspect_checkpoint(folder), dtype="float32", device="cpu")
    measure: Callable[[Any, int], dict[str, dict[str, list[Times]]]] = scripted if arguments.scripted else real
    with standard_output_to_nowhere():
        found = measure(loaded, arguments.steps or (2000 if arguments.scripted else 60))
    summaries = {
        title: {name: summarize(times) for name, times in contenders.items()} for title, contenders in found.items()
    }
    if arguments.json:
        print(json.dumps({"unit": "us", "threads": torch.get_num_threads(), "results": summaries}, indent=2))
        return
    for title, rows in summaries.items():
        report(title, rows)


if __name__ == "__main__":
    main()
