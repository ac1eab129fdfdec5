"""Write docs/parity.md: what of our loop equals `generate()`, for every causal language model type.

Run from the root of the repository, `python -m scripts.write_parity`; it takes a few minutes.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from llminfer.kv.rules.families import read_model
from tests.parity import (
    CANNOT_RUN,
    GREEDY,
    IMAGE_TEXT_TYPES,
    ONE_AFTER_ANOTHER,
    SAMPLED,
    check_batch,
    check_footprint,
    check_tokens,
    new_tokens,
    prepare_for_comparison,
)
from tests.tiny_models import tiny_config, tiny_image_text_model, tiny_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
VERSIONS = ("transformers", "torch")
HEADINGS = ("model type", "ran", "greedy equal", "sampled equal", "batch equal", "footprint equal")
INTRODUCTION = """\
# Parity with `generate()`

Every model type of transformers' causal-LM mapping, run as a tiny random float32 model with its real
classes on a CPU, with a prompt within its window and one beyond it. Made by
`python -m scripts.write_parity` with {versions}; the same checks are the tests in
`tests/engine/test_every_architecture.py`, which also say what counts as equal.

- **greedy equal**: our tokens at temperature 0 are those of `generate(do_sample=False)`, and their
  log-probabilities differ by rounding only.
- **sampled equal**: the same with temperature, top-k and top-p, under the same seed.
- **batch equal**: rows that start and end beside each other get the tokens that each gets alone.
  Types whose rows are not decoded together run *one after another*, which is equal by itself.
- **footprint equal**: the bytes predicted from the config are those of the cache after every step.

{summary}
"""

IMAGE_TEXT = """\
These are in transformers' image-text mapping and not in the causal one, and continue a text without an
image, compared with their own `generate()`. Listed are those whose tiny models build without more packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the table."""

    model_type: str
    ran: str = "no"
    greedy: str = "–"
    sampled: str = "–"
    batch: str = "–"
    footprint: str = "–"


def judge(model_type: str) -> Verdict:
    """Run all checks of a type that can run."""
    config = tiny_config(model_type)
    kv = read_model(json.loads(json.dumps(config.to_dict(), default=str)), source=model_type)
    build = tiny_image_text_model if model_type in IMAGE_TEXT_TYPES else tiny_model
    model = build(config, torch.float32)
    prepare_for_comparison(model)
    counts = new_tokens(model_type)
    return Verdict(
        model_type=model_type,
        ran="yes",
        greedy=_word(lambda: check_tokens(model, GREEDY, counts)),
        sampled=_word(lambda: check_tokens(model, SAMPLED, counts)),
        batch=_word(lambda: check_batch(model, SAMPLED)),
        footprint=_word(lambda: check_footprint(model, kv, counts)),
    )


def _word(check: Callable[[], bool | None]) -> str:
    try:
        together = check()
    except Exception as error:  # a failure is a row of the table too
        print(f"  {type(error).__name__}: {error}", file=sys.stderr)
        return "**no**"
    return "one after another" if together is False else "yes"


def page(causal: Sequence[Verdict], image_text: Sequence[Verdict]) -> str:
    """The whole page."""
    made_with = " and ".join(f"{name} {version(name).partition('+')[0]}" for name in VERSIONS)
    lines = [INTRODUCTION.format(versions=made_with, summary=_summary(causal)), *_table(causal)]
    lines += ["", "## What does not run", "", *_reasons(CANNOT_RUN)]
    lines += ["", "## What runs one after another", "", *_reasons(ONE_AFTER_ANOTHER)]
    lines += ["", "## Image-text models", "", IMAGE_TEXT, "", _summary(image_text), "", *_table(image_text)]
    return "\n".join(lines) + "\n"


def _table(verdicts: Sequence[Verdict]) -> list[str]:
    head = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return head + ["| " + " | ".join(astuple(verdict)) + " |" for verdict in verdicts]


def _summary(verdicts: Sequence[Verdict]) -> str:
    total = len(verdicts)
    counted = [
        f"{heading}: {sum(getattr(verdict, field.name).startswith(('yes', 'one')) for verdict in verdicts)}"
        for heading, field in zip(HEADINGS[1:], fields(Verdict)[1:], strict=True)
    ]
    alone = sum(verdict.batch == "one after another" for verdict in verdicts)
    return f"Of {total} types: {', '.join(counted)} ({alone} one after another)."


def _reasons(table: Any) -> Iterable[str]:
    """One line for each reason, with the types that share it."""
    by_reason: dict[str, list[str]] = {}
    for model_type, reason in table.items():
        by_reason.setdefault(reason, []).append(model_type)
    return [f"- {', '.join(f'`{name}`' for name in names)}: {reason}." for reason, names in by_reason.items()]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    PAGE.write_text(page(_all(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), _all(IMAGE_TEXT_TYPES)), encoding="utf-8")


def _all(model_types: Iterable[str]) -> list[Verdict]:
    verdicts = []
    for model_type in model_types:
        print(model_type, file=sys.stderr)
        verdicts.append(Verdict(model_type=model_type) if model_type in CANNOT_RUN else judge(model_type))
    return verdicts


if __name__ == "__main__":
    main()
