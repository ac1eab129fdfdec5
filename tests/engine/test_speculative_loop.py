"""Drafts change how many forwards a text takes, and nothing else: not its tokens, not its end, not its accounts."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer import api
from llminfer.engine import load as load_module
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.conversation import Conversation
from llminfer.engine.forward.cache_reuse import exact_length
from llminfer.engine.forward.forward import PlainForward, PreparedForward, UncachedForward, make_forward
from llminfer.engine.kv_cache.tensors import keep_past
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import Draw, make_sampler
from llminfer.engine.speculation.checks import check_speculation, why_not_speculate
from llminfer.engine.speculative_loop import decode_drafts
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from llminfer.errors import InvalidParams, UnsupportedArchitecture, UsageError
from llminfer.events import Finished, Started, Step, Trace
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from llminfer.params import CacheOptions, SamplingParams, Speculation, StopCriteria
from llminfer.request import GenerationRequest
from tests.parity import (
    CANNOT_RUN,
    GREEDY,
    LONG,
    SAMPLED,
    SHORT,
    assert_same,
    our_steps,
    output_of,
    prepare_for_comparison,
    prompt_of,
)
from tests.test_events import FakeTime, NoText
from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint
from tests.tiny_models import tiny_config, tiny_model

CPU = torch.device("cpu")
PROMPT = (7, 7, 7, 7, 7)


# The loop, over a forward that follows a script


@dataclass(slots=True)
class ScriptedForward:
    """Points, after n ids, at the id that the script has for place n; a forward takes a tenth of a second."""

    time: FakeTime
    script: Sequence[int]
    fail_at: int | None = None
    fault: BaseException = field(default_factory=lambda: RuntimeError("boom"))
    ids: list[int] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    cache: None = None

    def __call__(self, new_ids: Sequence[int]) -> torch.Tensor:
        return self.last(new_ids, 1)

    def last(self, new_ids: Sequence[int], count: int) -> torch.Tensor:
        self.time.spend(0.1)
        if len(self.calls) == self.fail_at:
            raise self.fault
        self.calls.append(list(new_ids))
        self.ids.extend(new_ids)
        rows = torch.zeros(count, 10)
        for row in range(count):
            rows[row, self.script[len(self.ids) - count + row + 1 - len(PROMPT)]] = 1.0
        return rows

    def crop(self, tokens: int) -> bool:
        self.time.spend(0.001)
        del self.ids[tokens:]
        return True

    @property
    def kv_bytes(self) -> int:
        return 8 * len(self.ids)


@dataclass(slots=True)
class ScriptedDrafts:
    """Drafts the guesses that were given for each place, as many as fit."""

    time: FakeTime
    guesses: Sequence[Sequence[int]]
    forward: None = None
    notes: tuple[str, ...] = ()

    def __call__(self, ids: Sequence[int], most: int) -> Sequence[int]:
        self.time.spend(0.01)
        return list(self.guesses[len(ids) - len(PROMPT)])[:most]


def speculated(
    script: Sequence[int],
    guesses: Sequence[Sequence[int]],
    *,
    limit: int = 12,
    stops: tuple[str, ...] = (),
    interrupt_at: int | None = None,
    fail_at: int | None = None,
    fault: BaseException | None = None,
    bad_draw: int | None = None,
    draft_tokens: int = 8,
    exact: int | None = None,
) -> tuple[Trace, ScriptedForward]:
    """A run whose forward takes 0.1 s, a draft 0.01 s, a draw 0.005 s, a cut 0.001 s and its reader 0.02 s a token."""
    time = FakeTime()
    forward = ScriptedForward(time, script, fail_at, fault or RuntimeError("boom"))
    draws = itertools.count()

    def sample(logits: torch.Tensor) -> Draw:
        time.spend(0.005)
        if next(draws) == bad_draw:
            raise RuntimeError("bad row")
        assert logits.shape == (1, 10)
        return Draw(token_id=int(logits.argmax()), logprob=-0.5)

    output = Output(
        detokenizer=NoText(),
        matcher=StopMatcher(stops),
        eos_ids=frozenset({2}),
        limit=TokenLimit(tokens=limit),
        token_text=str,
    )
    trace = Trace()
    trace.add(
        Started(
            model="m", device="cpu", device_name="cpu", dtype="float32", threads=1, cache="dynamic",
            prompt_ids=PROMPT, prompt_text="", sampling=SamplingParams(), stop=StopCriteria(), eos_ids=(2,),
            context_limit=None, load_s=0.0, tokenize_s=0.0, kv_at_limit=None, speculation=Speculation(),
        )
    )  # fmt: skip
    clock = Clock(now=time)
    drafts = ScriptedDrafts(time, guesses)
    steps = decode_drafts(
        forward, drafts, sample, output, clock, prompt_ids=PROMPT, draft_tokens=draft_tokens, exact_length=exact
    )
    try:
        step = next(steps)
        while True:
            trace.add(step)
            time.spend(0.02)
            interrupted = interrupt_at is not None and step.index >= interrupt_at
            step = steps.throw(KeyboardInterrupt()) if interrupted else next(steps)
    except StopIteration as end:
        trace.add(end.value)
    return trace, forward


SCRIPT = [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5, 4, 3, 9, 8]
NOTHING: list[list[int]] = [[]] * 40


def right(script: Sequence[int], count: int) -> list[list[int]]:
    """For each place, the next `count` ids of the script."""
    return [list(script[place : place + count]) for place in range(len(script) + 1)]


def test_right_drafts_save_forwards_and_leave_the_cache_at_the_newest_token() -> None:
    trace, forward = speculated(SCRIPT, right(SCRIPT, 3))
    assert trace.token_ids == SCRIPT[:12]
    assert [len(call) for call in forward.calls] == [5, 4, 4, 3]
    assert [(step.drafted, step.accepted) for step in trace.steps if not step.shared_forward] == [
        (0, 0), (3, 3), (3, 3), (2, 2),
    ]  # fmt: skip
    assert [step.cached_tokens for step in trace.steps] == [5, *[9] * 4, *[13] * 4, *[16] * 3]
    assert [step.kv_bytes for step in trace.steps] == [8 * step.cached_tokens for step in trace.steps]
    assert forward.ids == [*PROMPT, *SCRIPT[:11]]
    assert (trace.acceptance_rate, trace.decode_forwards, trace.tokens_per_forward) == (1.0, 3, 11 / 3)
    assert (trace.finished.reason, trace.finished.cached_tokens) == ("length", 16)


def test_a_wrong_draft_costs_a_forward_nothing_and_is_cut_back() -> None:
    trace, forward = speculated(SCRIPT, [[8, 0, 0]] * 20, limit=3)
    assert trace.token_ids == SCRIPT[:3]
    assert forward.calls[1] == [9, 8]  # the last token needs no place
    trace, forward = speculated(SCRIPT, [[8, 0, 0]] * 20, limit=6)
    assert trace.token_ids == SCRIPT[:6]
    assert forward.ids == [*PROMPT, *SCRIPT[:5]]
    assert (trace.steps[1].drafted, trace.steps[1].accepted, trace.steps[1].cached_tokens) == (3, 1, 7)


guesses = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=40, max_size=40)
scripts = st.lists(st.sampled_from([9, 8, 7, 7, 7, 2]), min_size=30, max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    script=scripts,
    guesses=guesses,
    honest=st.sets(st.integers(0, 39)),
    limit=st.integers(1, 20),
    stops=st.sampled_from([(), ("7><8",), ("<7><7",)]),
)
def test_whatever_is_drafted_the_run_is_the_same(
    script: list[int], guesses: list[list[int]], honest: set[int], limit: int, stops: tuple[str, ...]
) -> None:
    mixed = [script[place : place + 4] if place in honest else guess for place, guess in enumerate(guesses)]
    trace, forward = speculated(script, mixed, limit=limit, stops=stops)
    plain, _ = speculated(script, NOTHING, limit=limit, stops=stops)
    assert (trace.token_ids, trace.text) == (plain.token_ids, plain.text)
    assert [step.text for step in trace.steps] == [step.text for step in plain.steps]
    for ours, theirs in ((trace.finished, plain.finished),):
        assert (ours.reason, ours.detail, ours.cached_tokens) == (theirs.reason, theirs.detail, theirs.cached_tokens)
    assert forward.ids == [*PROMPT, *trace.token_ids[:-1]]
    assert all(step.kv_bytes == 8 * step.cached_tokens for step in trace.steps)
    assert trace.steps[-1].cached_tokens == trace.finished.cached_tokens
    # what the forwards gave adds up to the tokens
    assert trace.accepted + trace.decode_forwards + 1 >= len(trace.steps)
    assert trace.accepted <= trace.drafted
    parts = trace.decode_parts_s()
    assert sum(parts.values()) == pytest.approx(trace.decode_s or 0.0)
    assert parts["unaccounted"] == pytest.approx(0.0, abs=1e-9)


def test_the_parts_of_a_run_with_drafts_add_up_and_each_is_what_it_says() -> None:
    trace, _ = speculated(SCRIPT, right(SCRIPT, 3))
    parts = trace.decode_parts_s()
    assert parts["forward"] == pytest.approx(0.3)
    assert parts["sampling"] == pytest.approx(0.005 * 11)
    assert parts["draft"] == pytest.approx(3 * (0.01 + 0.001))  # each with the cut behind the forward before
    assert parts["output"] == pytest.approx(0.02 * 9)  # what the reader does after the last forward is behind the end
    assert sum(parts.values()) == pytest.approx(trace.decode_s)
    # tokens of one forward are a draw apart
    assert trace.itl_s[1:4] == pytest.approx([0.005] * 3)


def test_eos_inside_a_draft_ends_the_run_there() -> None:
    script = [9, 8, 2, 7, 7, 7, 7]
    trace, forward = speculated(script, right(script, 5))
    assert (trace.token_ids, trace.finished.reason) == ([9, 8, 2], "eos")
    assert (trace.steps[1].drafted, trace.steps[1].accepted) == (5, 2)
    assert forward.ids == [*PROMPT, 9, 8]


def test_a_stop_text_inside_a_draft_ends_the_run_there() -> None:
    trace, _ = speculated(SCRIPT, right(SCRIPT, 6), stops=("<7>",))
    assert (trace.token_ids, trace.text, trace.finished.reason) == ([9, 8, 7], "<9><8>", "stop")


def test_an_interrupt_comes_after_what_was_drawn_already() -> None:
    trace, forward = speculated(SCRIPT, right(SCRIPT, 3), interrupt_at=2)
    assert (trace.token_ids, trace.finished.reason) == (SCRIPT[:5], "interrupted")
    assert trace.finished.cached_tokens == trace.steps[-1].cached_tokens == len(forward.ids) == 9
    assert trace.text == "".join(f"<{token}>" for token in SCRIPT[:5])


@pytest.mark.parametrize(("fault", "reason"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("boom"), "error")])
def test_a_forward_that_breaks_keeps_what_was_made(fault: BaseException, reason: str) -> None:
    trace, forward = speculated(SCRIPT, right(SCRIPT, 3), fail_at=2, fault=fault)
    assert (trace.token_ids, trace.finished.reason) == (SCRIPT[:5], reason)
    assert trace.finished.error is (fault if reason == "error" else None)
    assert trace.finished.cached_tokens == len(forward.ids) == 9


def test_a_draw_that_fails_keeps_those_before_it_of_the_same_forward() -> None:
    trace, forward = speculated(SCRIPT, right(SCRIPT, 3), bad_draw=3)
    assert (trace.token_ids, trace.finished.reason) == (SCRIPT[:3], "error")
    assert (trace.finished.cached_tokens, len(forward.ids)) == (7, 7)


def test_a_prefill_that_breaks_has_cached_nothing() -> None:
    trace, _ = speculated(SCRIPT, NOTHING, fail_at=0)
    assert (trace.steps, trace.finished.reason, trace.finished.cached_tokens) == ([], "error", 0)


def test_a_draft_is_no_longer_than_asked_and_stays_within_the_exact_length() -> None:
    _, forward = speculated(SCRIPT, right(SCRIPT, 6), draft_tokens=2)
    assert max(len(call) for call in forward.calls[1:]) == 3
    trace, forward = speculated(SCRIPT, right(SCRIPT, 6), exact=9)
    assert [len(call) for call in forward.calls] == [5, 4, *[1] * 7]
    assert "beyond 9 tokens" in trace.finished.notes[0]
    assert trace.token_ids == SCRIPT[:12]


def test_a_cache_that_does_not_go_back_is_an_error_and_no_wrong_text() -> None:
    class Stubborn(ScriptedForward):
        def crop(self, tokens: int) -> bool:
            return tokens == len(self.ids)

    time = FakeTime()
    forward = Stubborn(time, SCRIPT)
    running = decode_drafts(
        forward,
        ScriptedDrafts(time, [[0, 0]] * 20),
        lambda logits: Draw(token_id=int(logits.argmax()), logprob=0.0),
        output_of(8),
        Clock(now=time),
        prompt_ids=PROMPT,
        draft_tokens=4,
    )
    steps, finished = drain(running)
    assert ([step.token_id for step in steps], finished.reason) == (SCRIPT[:2], "error")
    assert "cannot be cut back" in str(finished.error)


def drain(running: Any) -> tuple[list[Step], Finished]:
    steps = []
    while True:
        try:
            steps.append(next(running))
        except StopIteration as end:
            return steps, end.value


# The distribution, where the exact one is known


class MarkovForward:
    """Logits that depend on the newest id alone, so that the probability of a text is a product."""

    notes: tuple[str, ...] = ()
    cache = None
    kv_bytes = None

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.ids = table, []

    def __call__(self, new_ids: Sequence[int]) -> torch.Tensor:
        return self.last(new_ids, 1)

    def last(self, new_ids: Sequence[int], count: int) -> torch.Tensor:
        self.ids.extend(new_ids)
        return self.table[list(new_ids[-count:])]

    def crop(self, tokens: int) -> bool:
        del self.ids[tokens:]
        return True


class Likeliest:
    """Drafts the most likely continuation of the table, which a draw at temperature 1 often leaves."""

    forward = None
    notes: tuple[str, ...] = ()

    def __init__(self, table: torch.Tensor) -> None:
        self.best = table.argmax(dim=-1).tolist()

    def __call__(self, ids: Sequence[int], most: int) -> list[int]:
        draft = [self.best[ids[-1]]]
        while len(draft) < most:
            draft.append(self.best[draft[-1]])
        return draft[:most]


def chi_square_limit(freedom: int, z: float = 4.0) -> float:
    """What a chi-square of so many degrees of freedom stays below but for one case in 30,000 (Wilson, Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def test_sampled_texts_come_with_their_exact_probabilities() -> None:
    vocabulary, runs = 4, 2500
    table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(3)) * 1.2
    probabilities = table.double().softmax(dim=-1)
    drawn: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for seed in range(runs):
        sample = make_sampler(SamplingParams(temperature=1.0, seed=seed), (0,), CPU)
        steps, _ = drain(
            decode_drafts(
                MarkovForward(table), Likeliest(table), sample, output_of(4), Clock(), prompt_ids=(0,), draft_tokens=3
            )
        )
        drawn[tuple(step.token_id for step in steps)] += 1
        accepted, drafted = accepted + steps[1].accepted, drafted + steps[1].drafted
    assert 0.2 < accepted / drafted < 0.8  # both ends of a draft are in the sample
    statistic, cells = 0.0, 0
    for text in itertools.product(range(vocabulary), repeat=4):
        expected = runs * math.prod(float(probabilities[a, b]) for a, b in itertools.pairwise((0, *text)))
        statistic, cells = statistic + (drawn[text] - expected) ** 2 / expected, cells + 1
    assert statistic < chi_square_limit(cells - 1)


# Real classes


class Guide:
    """Drafts what a run without drafts drew, wrong now and then."""

    forward = None
    notes: tuple[str, ...] = ()

    def __init__(self, truth: Sequence[int], prompt_length: int) -> None:
        self.truth, self.prompt_length, self.random = truth, prompt_length, random.Random(1)

    def __call__(self, ids: Sequence[int], most: int) -> list[int]:
        done = len(ids) - self.prompt_length
        draft = list(self.truth[done : done + min(most, self.random.randrange(1, 5))])
        if draft and self.random.random() < 0.6:
            place = self.random.randrange(len(draft))
            draft[place] = (draft[place] + 1) % 90
        return draft


_RUNTIMES = {None: "transformers", "growing": "llminfer"}


def check_speculated(model: Any, kv: Any, *, options: CacheOptions | None = None) -> None:
    """The tokens and log-probabilities of the run without drafts, and the predicted bytes, in and beyond a window."""
    for length, params in ((SHORT, GREEDY), (LONG, SAMPLED)):
        prompt, count = prompt_of(length), 10
        plain = our_steps(model, prompt, count, params)
        truth = [step.token_id for step in plain]
        forward = make_forward(model, options=options, max_tokens=length + count - 1)
        torch.manual_seed(params.seed)
        steps, finished = drain(
            decode_drafts(
                forward,
                Guide(truth, length),
                make_sampler(params, prompt, model.device),
                output_of(count),
                Clock(),
                prompt_ids=prompt,
                draft_tokens=6,
                exact_length=exact_length(model.config),
            )
        )
        if finished.error is not None:
            raise finished.error
        assert_same(steps, [(step.token_id, step.logprob) for step in plain], f"prompt of {length}")
        assert sum(step.accepted for step in steps) < sum(step.drafted for step in steps)
        assert any(step.accepted for step in steps)
        runtime = _RUNTIMES.get(None if options is None else options.kind)
        for step in steps if runtime is not None else ():
            predicted = footprint(kv, tokens=step.cached_tokens, dtype="float32", runtime=runtime).total_bytes
            assert step.kv_bytes == predicted or (step.kv_bytes is None and predicted == 0)


# a type of each kind that can be cut back, and of each way to be fed
SPECULATING = (
    "llama",
    "gpt2",
    "gemma2",
    "mistral",
    "bloom",
    "bart",
    "gemma3n_text",
    "deepseek_v3",
    "llama4_text",
    "phi3",
)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in SPECULATING else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in CANNOT_RUN
    ],
)
def test_every_architecture_speculates_exactly_or_is_refused(model_type: str) -> None:
    config = tiny_config(model_type)
    if why_not_speculate(config) is not None:
        assert model_type not in SPECULATING
        with pytest.raises(UnsupportedArchitecture, match="cannot speculate"):
            check_speculation(Speculation(), CacheOptions(), config, model_type)
        return
    kv = read_model(json.loads(json.dumps(config.to_dict(), default=str)), source=model_type)
    model = tiny_model(config, torch.float32)
    prepare_for_comparison(model)
    check_speculated(model, kv)


@pytest.mark.parametrize("options", [CacheOptions(kind="static"), CacheOptions(kind="none")], ids=["static", "none"])
def test_other_caches_that_go_back_speculate_too(options: CacheOptions) -> None:
    model = tiny_model(tiny_config("llama"), torch.float32)
    check_speculated(model, None, options=options)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_growing_cache_speculates_and_its_buffers_follow(model_type: str) -> None:
    config = tiny_config(model_type)
    kv = read_model(json.loads(json.dumps(config.to_dict(), default=str)), source=model_type)
    check_speculated(tiny_model(config, torch.float32), kv, options=CacheOptions(kind="growing"))


def test_a_prompt_fed_in_chunks_smaller_than_a_draft_speculates_too() -> None:
    model = tiny_model(tiny_config("gemma2"), torch.float32)
    check_speculated(model, None, options=CacheOptions(prefill_chunk=2))


@pytest.mark.parametrize("way", [PlainForward, PreparedForward, UncachedForward])
def test_the_last_logits_are_those_of_one_token_after_the_other(way: Any) -> None:
    model = tiny_model(tiny_config("gemma2"), torch.float32)
    ids, together, apart = prompt_of(LONG), way(model), way(model)
    with torch.inference_mode():
        together(ids[:5])
        apart(ids[:5])
        rows = together.last(ids[5:9], 4)
        expected = torch.cat([apart([token_id]) for token_id in ids[5:9]])
        assert rows.shape == expected.shape
        assert torch.allclose(rows, expected, atol=1e-5)
        assert together.last(ids[9:], 1).shape == (1, rows.shape[1])


def test_a_window_that_is_full_goes_back_while_it_keeps_its_past() -> None:
    model = tiny_model(tiny_config("mistral"), torch.float32)
    ids, forward, other = prompt_of(LONG), make_forward(model), make_forward(model)
    with torch.inference_mode():
        forward(ids)
        held = forward.kv_bytes
        assert not forward.crop(LONG - 1)  # what has left the window is gone
        assert keep_past(forward.cache, True)
        forward.last([3, 4, 5, 6], 4)
        assert forward.kv_bytes > held
        assert forward.crop(LONG + 2)
        assert forward.kv_bytes == held
        assert not forward.crop(LONG)  # and what the crop has let go, too
        keep_past(forward.cache, False)
        expected = other([*ids, 3, 4, 9])
        assert torch.allclose(forward([9]), expected, atol=1e-5)


# The real model


PASSAGE = (
    "The harbour master wrote down every ship: the Gannet with coal from Leith, the Petrel with salt from Cadiz,"
    " and the Heron with nothing at all.\n"
)
COPYING = f"{PASSAGE}\n{PASSAGE}\nThe harbour master wrote"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5},
        {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.3, "min_new_tokens": 20, "seed": 2},
    ],
    ids=["greedy", "sampled", "penalties"],
)
def test_the_real_model_says_the_same_with_drafts(smollm: Any, sampling: dict[str, Any]) -> None:
    full = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, **sampling}
    stop = StopCriteria(max_new_tokens=24)
    options: dict[str, Any] = {"sampling": full, "stop": stop, "raw": True, "bad_words": [" Cadiz"]}
    plain = trace_of(api.generate(smollm, COPYING, **options))
    drafted = trace_of(api.generate(smollm, COPYING, **options, speculate="prompt-lookup"))
    assert_same(drafted.steps, [(step.token_id, step.logprob) for step in plain.steps], "with drafts")
    assert drafted.text == plain.text
    assert drafted.finished.kv.total_bytes == drafted.steps[-1].kv_bytes == plain.steps[-1].kv_bytes
    if full["temperature"] == 0.0:
        assert drafted.acceptance_rate > 0.5
        assert drafted.tokens_per_forward > 1.5


def trace_of(events: Any) -> Trace:
    trace = Trace()
    for event in events:
        trace.add(event)
    if trace.finished.error is not None:
        raise trace.finished.error
    return trace


# A model that drafts


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> Any:
    return api.load(tiny_llama)


@pytest.fixture
def drafts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model is as large as the other here, so by its cost it would never draft."""
    monkeypatch.setattr("llminfer.engine.speculative_loop.relative_cost", lambda draft, loaded: 0.0)


def small_draft(folder: Path, model_type: str = "gpt2", **options: Any) -> Any:
    tokenizer = byte_level_tokenizer()
    config = tiny_config(model_type, vocab_size=len(tokenizer), **options)
    return api.load(save_tiny_checkpoint(folder, config, tokenizer=tokenizer))


def with_and_without(target: Any, draft: Any, **sampling: Any) -> Trace:
    """The run with a draft model, after a look that it says what the run without says."""
    sampling = {"temperature": 0.0, **sampling}
    options: dict[str, Any] = {"sampling": sampling, "stop": StopCriteria(max_new_tokens=30, ignore_eos=True)}
    plain = trace_of(api.generate(target, "A prompt", **options))
    drafted = trace_of(api.generate(target, "A prompt", **options, draft=draft, draft_tokens=5))
    assert_same(drafted.steps, [(step.token_id, step.logprob) for step in plain.steps], "with a draft model")
    cache = drafted.finished.draft_cache
    assert cache.kv.total_bytes == cache.kv_bytes
    for step in drafted.steps:
        assert step.kv_bytes == footprint(target.kv, tokens=step.cached_tokens, dtype="float32").total_bytes
    return drafted


@pytest.mark.usefixtures("drafts_for_nothing")
def test_a_model_that_drafts_for_itself_is_always_right(target: Any) -> None:
    trace = with_and_without(target, target)
    assert trace.acceptance_rate == 1.0
    assert trace.tokens_per_forward > 4
    assert trace.started.draft_model == target.name


def test_a_draft_model_as_large_as_the_other_never_runs(target: Any) -> None:
    # without a seed, a run may end at an EOS before anything could be drafted
    options: dict[str, Any] = {"sampling": {"seed": 1}, "stop": StopCriteria(max_new_tokens=20, ignore_eos=True)}
    trace = trace_of(api.generate(target, "A prompt", draft=target, **options))
    assert trace.started.draft_cost == 1.0
    assert trace.drafted == 0
    assert trace.finished.draft_cache is None
    assert any("costs 1.00 of the model's: no draft would pay" in note for note in trace.finished.notes)


@pytest.mark.usefixtures("drafts_for_nothing")
@pytest.mark.parametrize("model_type", ["gpt2", "mistral"])  # the second with windows that fill
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 5, "seed": 3}])
def test_another_model_that_drafts_is_mostly_wrong_and_changes_nothing(
    target: Any, tmp_path: Path, model_type: str, sampling: dict[str, Any]
) -> None:
    trace = with_and_without(target, small_draft(tmp_path, model_type), **sampling)
    assert trace.drafted > 0
    assert trace.accepted < trace.drafted


@pytest.mark.usefixtures("drafts_for_nothing")
def test_drafts_end_where_the_draft_models_context_does(target: Any, tmp_path: Path) -> None:
    trace = with_and_without(target, small_draft(tmp_path, n_positions=40, max_position_embeddings=40))
    assert trace.finished.draft_cache.cached_tokens <= 40
    assert any("beyond the draft model's 40 tokens" in note for note in trace.finished.notes)


def test_a_draft_model_with_another_vocabulary_is_refused_before_the_weights_are_read(
    target: Any, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level_tokenizer(["another", "two"])
    folder = save_tiny_checkpoint(tmp_path, tiny_config("gpt2", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    draft = api.load(folder)
    with pytest.raises(UsageError, match="another vocabulary"):
        api.generate(target, "x", draft=draft)
    monkeypatch.setattr(load_module, "_load_weights", lambda *arguments: pytest.fail("the weights were read"))
    with pytest.raises(UsageError, match="another vocabulary"):
        load_module.load(inspect_checkpoint(tiny_llama), speculation=Speculation(kind="draft-model"), draft=draft)


# A chat


@pytest.mark.usefixtures("drafts_for_nothing")
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("drafts", [False, True], ids=["lookup", "model"])
def test_answers_are_the_same_with_drafts_turn_by_turn(tmp_path: Path, model_type: str, drafts: bool) -> None:
    target = small_draft(tmp_path, model_type, max_position_embeddings=512)
    sampling, stop = {"temperature": 1.0, "top_k": 2, "seed": 1}, StopCriteria(max_new_tokens=12, ignore_eos=True)
    draft = target if drafts else None
    kind = None if drafts else "prompt-lookup"
    plain = Conversation(target, sampling=sampling, stop=stop)
    drafted = Conversation(target, sampling=sampling, stop=stop, speculate=kind, draft_tokens=4, draft=draft)
    for text in ("Hello, hello.", "Hello again, hello.", "And again."):
        expected, trace = trace_of(plain.ask(text)), trace_of(drafted.ask(text))
        assert trace.token_ids == expected.token_ids
        assert trace.started.reused_tokens == expected.started.reused_tokens
        assert trace.steps[-1].kv_bytes == expected.steps[-1].kv_bytes == trace.finished.kv.total_bytes
    assert drafted.messages == plain.messages


# What is refused


def test_what_cannot_go_back_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_checkpoint(tmp_path, tiny_config("mamba2", vocab_size=300))
    monkeypatch.setattr(load_module, "_load_weights", lambda *arguments: pytest.fail("the weights were read"))
    with pytest.raises(UnsupportedArchitecture, match="linear_attention layers cannot be cut back"):
        load_module.load(inspect_checkpoint(folder), speculation=Speculation())


@pytest.mark.parametrize(
    "options", [CacheOptions(kind="quantized"), CacheOptions(window=16)], ids=["quantized", "window"]
)
def test_caches_that_do_not_go_back_are_refused(options: CacheOptions) -> None:
    with pytest.raises(UsageError, match="cannot be cut back"):
        GenerationRequest(speculation=Speculation(), cache=options)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_number_of_draft_tokens_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidParams, match="--draft-tokens"):
        Speculation(draft_tokens=count)


@pytest.mark.usefixtures("drafts_for_nothing")
def test_a_saved_cache_holds_what_was_accepted_and_nothing_else(target: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampling": {"temperature": 1.0, "top_k": 2, "seed": 4}, "raw": True}
    options["stop"] = StopCriteria(max_new_tokens=20, ignore_eos=True)
    files: dict[str, dict[str, Any]] = {"plain": {}, "drafted": {"draft": target}}
    for text in ("a prompt", "a prompt that goes on"):  # the second time from the file
        traces = {
            name: trace_of(api.generate(target, text, **options, **drafts, cache=CacheOptions(file=tmp_path / name)))
            for name, drafts in files.items()
        }
        assert traces["plain"].token_ids == traces["drafted"].token_ids
        assert 0 < traces["drafted"].accepted < traces["drafted"].drafted
        plain, drafted = (load_file(tmp_path / name) for name in files)
        assert plain["token_ids"].equal(drafted["token_ids"])
        assert {name: part.shape for name, part in plain.items()} == {n: part.shape for n, part in drafted.items()}
        assert all(torch.allclose(plain[name], drafted[name], atol=1e-5) for name in plain)
    assert traces["plain"].started.reused_tokens == traces["drafted"].started.reused_tokens > 5
