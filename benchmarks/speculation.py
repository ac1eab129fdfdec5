"""Decoding with drafts from the text itself against decoding without, interleaved in one process.

    python benchmarks/speculation.py [--rounds N] [--new-tokens N] [--json]

Three texts: `copy` has a passage twice and begins it a third time, so that the model copies it;
`answer` is a question, answered greedily; `story` is drawn at temperature 0.8, where hardly anything
repeats. Every round runs each text without drafts and with them, in turns; ratios are taken round by
round. That the tokens are the same is checked on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from llminfer import SamplingParams, StopCriteria, api
from llminfer.events import Trace

PASSAGE = (
    "The harbour master wrote down every ship that came in: the Gannet with coal from Leith, the Petrel with"
    " salt from Cadiz, the Dunlin with timber from Riga, the Curlew with oranges and two passengers, and the"
    " Heron with nothing at all but a crew that wanted to go home. He dried the page, closed the book and put"
    " the lamp out. In the morning the tide had taken the Heron, and nobody had paid.\n"
)
GREEDY = SamplingParams(temperature=0)
TEXTS: dict[str, dict[str, Any]] = {
    "copy": {"prompt": f"{PASSAGE}\n{PASSAGE}\nThe harbour master", "raw": True, "sampling": GREEDY},
    "answer": {"prompt": "Explain why the sea is salty, and why lakes mostly are not.", "sampling": GREEDY},
    "story": {
        "prompt": "Tell me a story about a lighthouse and a fox.",
        "sampling": SamplingParams(temperature=0.8, seed=1),
    },
}


def run(model: Any, text: str, stop: StopCriteria, speculate: str | None, draft_tokens: int | None) -> Trace:
    """One run to its end."""
    trace = Trace()
    for event in api.generate(model, **TEXTS[text], stop=stop, speculate=speculate, draft_tokens=draft_tokens):
        trace.add(event)
    return trace


def measure(model: Any, rounds: int, stop: StopCriteria, draft_tokens: int | None) -> list[dict[str, Any]]:
    """A row a text; a first round is not counted."""
    rates: dict[str, list[tuple[float, float]]] = {text: [] for text in TEXTS}
    last: dict[str, Trace] = {}
    for number in range(rounds + 1):
        for text in TEXTS:
            # whichever goes first in one round goes second in the next
            order = (None, "prompt-lookup") if number % 2 else ("prompt-lookup", None)
            traces = {speculate: run(model, text, stop, speculate, draft_tokens) for speculate in order}
            plain, drafted = traces[None], traces["prompt-lookup"]
            if plain.token_ids != drafted.token_ids:
                sys.exit(f"{text}: other tokens with drafts than without")
            if number:
                rates[text].append((plain.decode_tokens_per_s or 0.0, drafted.decode_tokens_per_s or 0.0))
            last[text] = drafted
    return [_row(text, rates[text], last[text]) for text in TEXTS]


def _row(text: str, rates: list[tuple[float, float]], trace: Trace) -> dict[str, Any]:
    ratios = [drafted / plain for plain, drafted in rates]
    return {
        "text": text,
        "tokens": len(trace.steps),
        "plain_tokens_per_s": statistics.median(plain for plain, _ in rates),
        "drafted_tokens_per_s": statistics.median(drafted for _, drafted in rates),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "drafted": trace.drafted,
        "accepted": trace.accepted,
        "acceptance_rate": trace.acceptance_rate,
        "tokens_per_forward": trace.tokens_per_forward,
    }


def report(rows: list[dict[str, Any]]) -> None:
    """A line a text."""
    print(f"{'text':<8} {'tokens':>6} {'plain':>9} {'drafted':>9}  {'ratio':<22} {'accepted':<16} tokens a forward")
    for row in rows:
        low, high = row["ratio_spread"]
        rate = f" ({row['acceptance_rate']:.0%})" if row["acceptance_rate"] is not None else ""
        accepted = f"{row['accepted']}/{row['drafted']}{rate}"
        ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        plain, drafted = row["plain_tokens_per_s"], row["drafted_tokens_per_s"]
        speeds = f"{plain:>7.2f}/s {drafted:>7.2f}/s"
        print(
            f"{row['text']:<8} {row['tokens']:>6} {speeds}  {ratio:<22} {accepted:<16} {row['tokens_per_forward']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder, a .gguf file or a Hub id; the built-in model without it")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of each text (default 96)")
    parser.add_argument("--draft-tokens", type=int, help="tokens to draft for a forward at most")
    parser.add_argument("--json", action="store_true", help="one JSON document in place of the table")
    arguments = parser.parse_args()
    model = api.load(arguments.model, dtype="float32")
    stop = StopCriteria(max_new_tokens=arguments.new_tokens, ignore_eos=True)
    rows = measure(model, arguments.rounds, stop, arguments.draft_tokens)
    if arguments.json:
        print(json.dumps({"model": model.name, "rounds": arguments.rounds, "texts": rows}))
    else:
        report(rows)


if __name__ == "__main__":
    main()
