"""What it means that our loop equals `generate()`: one model, every check, and a verdict for each.

The sweep over all architectures and the script that writes `docs/parity.md` share these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from llminfer.engine.batch import BatchLoad, Row, decode_batch
from llminfer.engine.clock import Clock
from llminfer.engine.forward import make_forward
from llminfer.engine.loop import decode
from llminfer.engine.sampler import make_sampler
from llminfer.engine.stop import Output, StopMatcher
from llminfer.events import Finished, Step
from llminfer.kv.footprint import footprint
from llminfer.kv.layer import ModelKV
from llminfer.params import SamplingParams
from tests.tiny_models import VOCABULARY

SHORT, LONG = 5, 13  # tokens of a prompt inside the tiny models' window, and of one beyond it
NEW_TOKENS = 6  # enough for the short prompt to leave the window while decoding
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=7)
ROUNDING = 1e-4
# prompts of a batch and how much each may generate: two start together, the third takes the place of the first
BATCH_LENGTHS, BATCH_LIMITS, BATCH_SIZE = (SHORT, LONG, 3), (3, NEW_TOKENS, 5), 2


class NoText:
    """A detokenizer for models without a vocabulary."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def output_of(limit: int) -> Output:
    """An output that only counts."""
    return Output(
        detokenizer=NoText(),
        matcher=StopMatcher(()),
        eos_ids=frozenset(),
        max_new_tokens=limit,
        limit_reason="length",
        token_text=str,
    )


def prompt_of(length: int) -> list[int]:
    """Ids that no special token has."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY - 8, (length,), generator=generator).tolist()


def expected_tokens(model: Any, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
    """What `model.generate()` appends to the prompt: ids, and their log-probabilities before any filter."""
    options: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        options = {"do_sample": True, **filters}
    wanted = GenerationConfig(
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    # its own defaults would otherwise fill what is left unset
    saved, model.generation_config = model.generation_config, GenerationConfig()
    ids = torch.tensor([prompt], device=model.device)
    torch.manual_seed(params.seed)
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
    finally:
        model.generation_config = saved
    new = output.sequences[0, len(prompt) :].tolist()
    logprobs = [logits[0].float().log_softmax(dim=-1) for logits in output.logits]
    return [(token_id, float(row[token_id])) for token_id, row in zip(new, logprobs, strict=True)]


def our_steps(model: Any, prompt: Sequence[int], count: int, params: SamplingParams) -> list[Step]:
    """The steps of our own loop, its errors raised."""
    forward, sample = make_forward(model, cached=True), make_sampler(params, prompt, model.device)
    torch.manual_seed(params.seed)
    running = decode(forward, sample, output_of(count), Clock(), prompt_ids=prompt)
    steps = []
    while True:
        try:
            steps.append(next(running))
        except StopIteration as end:
            finished: Finished = end.value
            if finished.error is not None:
                raise finished.error from None
            return steps


def assert_same(steps: Sequence[Step], expected: Sequence[tuple[int, float]], what: str) -> None:
    """The same ids, and log-probabilities that differ by rounding only.

    Ids alone would not do: a tiny random model often draws the same ones at wrong positions, too.
    """
    assert [step.token_id for step in steps] == [token_id for token_id, _ in expected], f"{what}: other tokens"
    for step, (_, logprob) in zip(steps, expected, strict=True):
        assert abs(step.logprob - logprob) < ROUNDING, f"{what}: step {step.index} is off by {step.logprob - logprob}"


def check_tokens(model: Any, params: SamplingParams, counts: Sequence[int]) -> None:
    """Our tokens are those of `generate()`, for a prompt within the window and one beyond it."""
    for length, count in zip((SHORT, LONG), counts, strict=True):
        prompt = prompt_of(length)
        theirs = expected_tokens(model, prompt, count, params)
        assert_same(our_steps(model, prompt, count, params), theirs, f"prompt of {length}")


def check_footprint(model: Any, kv: ModelKV, counts: Sequence[int]) -> None:
    """The bytes predicted are those that each step reports."""
    for length, count in zip((SHORT, LONG), counts, strict=True):
        for step in our_steps(model, prompt_of(length), count, GREEDY):
            predicted = footprint(kv, tokens=step.cached_tokens, dtype="float32").total_bytes
            assert step.kv_bytes == predicted or (step.kv_bytes is None and predicted == 0), step.cached_tokens


def check_batch(model: Any, params: SamplingParams) -> bool:
    """Rows that come and go beside each other get the tokens that each gets alone.

    Returns whether any step had several rows; models whose caches cannot be joined run one after another.
    """
    prompts = [prompt_of(length) for length in BATCH_LENGTHS]
    rows = [
        Row(key=key, prompt_ids=prompt, sample=make_sampler(params, prompt, model.device), output=output_of(limit))
        for key, (prompt, limit) in enumerate(zip(prompts, BATCH_LIMITS, strict=True))
    ]
    steps: dict[int, list[Step]] = {row.key: [] for row in rows}
    together = False
    for event in decode_batch(model, rows, Clock(), batch_size=BATCH_SIZE):
        if isinstance(event, BatchLoad):
            together = together or event.rows > 1
        elif isinstance(event[1], Step):
            steps[event[0]].append(event[1])
        elif event[1].error is not None:
            raise event[1].error
    for key, (prompt, limit) in enumerate(zip(prompts, BATCH_LIMITS, strict=True)):
        alone = [(step.token_id, step.logprob) for step in our_steps(model, prompt, limit, params)]
        assert_same(steps[key], alone, f"row {key}")
    return together
