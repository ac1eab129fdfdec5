"""What a format of weights costs in quality: its predictions against those of float32, on a text.

    python benchmarks/quality.py [--formats float16,int8,int4] [--engine native] [--tokens N] [--prefill] [--json]

The text is `benchmarks/quality.txt`. Every token of it is fed in turn, whatever the model would have
said (teacher forcing), by the kernels that decode; with `--prefill` all at once, by those that prefill.

KL divergence is that of the format's next-token distribution from the float32 one, in nats. Top-1 is
the share of places where the most likely token stays the same. Perplexity is the exponential of the
mean surprise at the text's own next token. Bytes are all that the model holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from llminfer import load
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.model import LoadedModel
from llminfer.params import ENGINES, WEIGHTS, CacheOptions
from llminfer.units import format_bytes

TEXT = Path(__file__).with_name("quality.txt")
REFERENCE = "plain float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The figures of one format."""

    format: str
    weights_bytes: int
    perplexity: float
    kl_mean: float
    kl_max: float
    top1: float


def predictions(loaded: LoadedModel, ids: list[int], *, prefill: bool) -> Tensor:
    """Log-probabilities after each id, float32, shape [ids, vocabulary]."""
    with torch.inference_mode():
        if prefill:
            logits: Tensor = loaded.model(input_ids=torch.tensor([ids])).logits[0]
        else:
            options = CacheOptions(kind=loaded.execution.default_cache)
            forward = make_forward(loaded.model, options=options, factory=loaded.forward_factory_for(options))
            logits = torch.cat([forward([token_id]) for token_id in ids])
        return logits.float().log_softmax(dim=-1)


def compare(name: str, weights_bytes: int, got: Tensor, expected: Tensor, ids: list[int]) -> Quality:
    """The figures of log-probabilities [ids, vocabulary] against those of float32."""
    divergence = (expected.exp() * (expected - got)).sum(dim=-1).clamp(min=0)
    surprise = -got[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return Quality(
        format=name,
        weights_bytes=weights_bytes,
        perplexity=math.exp(float(surprise.mean())),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        top1=float((got.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean()),
    )


def measure(model: str | None, formats: list[str], tokens: int, *, engine: str, prefill: bool) -> list[Quality]:
    """The figures of float32 as it is, then of each format."""
    rows: list[Quality] = []
    expected: Tensor | None = None
    ids: list[int] = []
    for name in (REFERENCE, *formats):
        packed = {} if name == REFERENCE else {"weights": name, "engine": engine}
        loaded = load(model, dtype="float32", **packed)
        ids = ids or loaded.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"][:tokens]
        got = predictions(loaded, ids, prefill=prefill)
        expected = got if expected is None else expected
        rows.append(compare(name, loaded.weights_bytes or 0, got, expected, ids))
        del loaded  # so that two models are never held at once
        gc.collect()
    return rows


def report(rows: list[Quality], tokens: int, how: str) -> None:
    """A line for each format."""
    print(f"{tokens} tokens of {TEXT.name}, {how}")
    print(f"{'weights':<14} {'held':>11} {'perplexity':>10} {'KL mean':>9} {'KL max':>9} {'top-1':>7}")
    for row in rows:
        print(
            f"{row.format:<14} {format_bytes(row.weights_bytes):>11} {row.perplexity:10.4f}"
            f" {row.kl_mean:9.2e} {row.kl_max:9.2e} {row.top1:7.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder, a .gguf file or a Hub id; the built-in model when not given")
    parser.add_argument("--formats", default=",".join(WEIGHTS), help="which to compare, by comma")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the text (default 256)")
    parser.add_argument(
        "--engine", choices=ENGINES, default="transformers", help="whose kernels (default transformers)"
    )
    parser.add_argument("--prefill", action="store_true", help="feed all at once, as a prompt is")
    parser.add_argument("--json", action="store_true", help="one JSON document in place of the table")
    chosen = parser.parse_args()
    formats = chosen.formats.split(",")
    if unknown := sorted({*formats} - {*WEIGHTS}):
        parser.error(f"--formats {unknown[0]}: unknown, one of {', '.join(WEIGHTS)}")
    if chosen.tokens < 2:
        parser.error("--tokens must be at least 2")
    rows = measure(chosen.model, formats, chosen.tokens, engine=chosen.engine, prefill=chosen.prefill)
    if chosen.json:
        stated = {"tokens": chosen.tokens, "engine": chosen.engine, "prefill": chosen.prefill}
        print(json.dumps({**stated, "rows": [asdict(row) for row in rows]}))
    else:
        how = "all at once" if chosen.prefill else "one at a time"
        report(rows, chosen.tokens, f"{how}, on {chosen.engine} kernels")


if __name__ == "__main__":
    main()
