"""The figures of a run, against a clock whose times are known."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import Draw
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from llminfer.events import Finished, Started, Step, Trace, percentile
from llminfer.params import SamplingParams, StopCriteria


class FakeTime:
    """A time source that moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, duration_s: float) -> None:
        self.now_s += duration_s


class NoText:
    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class ScriptedForward:
    """Spends the scripted time on each call, then points at the scripted id."""

    notes: tuple[str, ...] = ()
    kv_bytes = None
    cache = None

    def __init__(self, time: FakeTime, ids: list[int], durations_s: list[float], fail: BaseException | None = None):
        self.time, self.ids, self.durations_s, self.fail, self.calls = time, ids, durations_s, fail, []

    def __call__(self, new_ids: list[int]) -> torch.Tensor:
        self.time.spend(self.durations_s[len(self.calls)])
        self.calls.append(list(new_ids))
        if self.fail is not None and len(self.calls) == len(self.ids) + 1:
            raise self.fail
        row = torch.zeros(1, 10)
        row[0, self.ids[len(self.calls) - 1]] = 1.0
        return row


def scripted_run(
    ids: list[int],
    *,
    limit: int = 300,
    eos: frozenset[int] = frozenset({2}),
    prompt: tuple[int, ...] = (7,) * 5,
    fail: BaseException | None = None,
    output_s: float = 0.0,
    interrupt_at: int | None = None,
) -> tuple[Trace, ScriptedForward]:
    """A run whose prefill takes 1 s, a further forward 0.1 s, a sample 0.01 s."""
    time = FakeTime()
    clock = Clock(now=time)
    forward = ScriptedForward(time, ids, [1.0] + [0.1] * (len(ids) + 1), fail)

    def sample(logits: torch.Tensor) -> Draw:
        time.spend(0.01)
        return Draw(token_id=int(logits.argmax()), logprob=-0.5)

    output = Output(
        detokenizer=NoText(),
        matcher=StopMatcher(()),
        eos_ids=eos,
        limit=TokenLimit(tokens=limit),
        token_text=str,
    )
    trace = Trace()
    trace.add(
        Started(
            model="m", device="cpu", device_name="cpu", dtype="float32", threads=1, cache="dynamic",
            prompt_ids=prompt, prompt_text="", sampling=SamplingParams(), stop=StopCriteria(), eos_ids=(2,),
            context_limit=None, load_s=0.0, tokenize_s=0.0, kv_at_limit=None,
        )
    )  # fmt: skip
    steps = decode(forward, sample, output, clock, prompt_ids=prompt)
    try:
        step = next(steps)
        while True:
            trace.add(step)
            time.spend(output_s)
            step = steps.throw(KeyboardInterrupt()) if step.index == interrupt_at else next(steps)
    except StopIteration as end:
        trace.add(end.value)
    return trace, forward


def test_rates_divide_the_right_things() -> None:
    trace, forward = scripted_run([9, 8, 7, 6, 5], limit=5)
    assert trace.ttft_s == pytest.approx(1.01)
    assert trace.prefill_tokens_per_s == pytest.approx(5 / 1.0)
    assert trace.tpot_s == pytest.approx(0.11)
    assert trace.decode_tokens_per_s == pytest.approx(1 / 0.11)
    assert trace.itl_s == pytest.approx([0.11] * 4)
    # the whole prompt first, then one token at a time, and no forward after the last
    assert forward.calls == [[7] * 5, [9], [8], [7], [6]]
    assert [step.cached_tokens for step in trace.steps] == [5, 6, 7, 8, 9]


def test_the_parts_of_the_decode_add_up_to_the_whole() -> None:
    trace, _ = scripted_run([9, 8, 7, 6], limit=4, output_s=0.02)
    parts = trace.decode_parts_s()
    assert parts["forward"] == pytest.approx(0.3)
    assert parts["sampling"] == pytest.approx(0.03)
    assert parts["output"] == pytest.approx(0.06)
    assert parts["unaccounted"] == pytest.approx(0.0, abs=1e-9)
    assert sum(parts.values()) == pytest.approx(trace.decode_s)


def test_one_token_has_no_time_per_output_token() -> None:
    trace, _ = scripted_run([9], limit=1)
    assert (trace.tpot_s, trace.decode_tokens_per_s, trace.decode_s, trace.itl_s) == (None, None, None, [])
    assert trace.ttft_s == pytest.approx(1.01)


@pytest.mark.parametrize(
    ("limit", "count", "reason"), [(1, 1, "length"), (2, 2, "length"), (3, 3, "eos"), (10, 3, "eos")]
)
def test_eos_counts_and_wins_over_the_limit(limit: int, count: int, reason: str) -> None:
    trace, _ = scripted_run([9, 9, 2], limit=limit)
    assert (len(trace.token_ids), trace.finished.reason) == (count, reason)
    assert trace.text == "<9>" * min(count, 2)
    assert trace.finished.detail == (2 if reason == "eos" else None)


def test_without_eos_ids_the_run_goes_to_the_limit() -> None:
    trace, _ = scripted_run([9, 2, 2, 9], limit=4, eos=frozenset())
    assert (trace.token_ids, trace.finished.reason) == ([9, 2, 2, 9], "length")


def test_eos_in_the_prompt_stops_nothing() -> None:
    trace, _ = scripted_run([9, 9], limit=2, prompt=(2, 7, 2))
    assert trace.token_ids == [9, 9]


def test_an_interrupt_between_tokens_keeps_them() -> None:
    trace, _ = scripted_run([9, 8, 7], interrupt_at=1)
    assert (trace.token_ids, trace.finished.reason, trace.finished.cached_tokens) == ([9, 8], "interrupted", 6)


def test_an_interrupt_during_a_forward_keeps_what_was_made() -> None:
    trace, _ = scripted_run([9, 8], fail=KeyboardInterrupt())
    assert (trace.token_ids, trace.finished.reason) == ([9, 8], "interrupted")


def test_a_failing_forward_ends_the_run_with_its_error() -> None:
    fault = RuntimeError("boom")
    trace, _ = scripted_run([9, 8], fail=fault)
    assert (trace.token_ids, trace.finished.reason, trace.finished.error) == ([9, 8], "error", fault)


def test_the_device_is_synchronised_before_the_clock_is_read() -> None:
    order = []
    clock = Clock(synchronize=lambda: order.append("sync"), now=lambda: order.append("read") or 0.0)
    clock.lap()
    assert order == ["read", "sync", "read"]


def test_a_delayed_device_is_waited_for() -> None:
    time, pending = FakeTime(), [0.0]

    def synchronize() -> None:
        time.spend(pending.pop() if pending else 0.0)

    clock = Clock(synchronize, now=time)
    clock.lap()
    pending.append(0.5)  # a kernel that was only launched
    assert clock.lap() == pytest.approx(0.5)


@given(values=st.lists(st.floats(0, 1e3), min_size=2, max_size=50))
def test_percentiles_are_linear_between_neighbours(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (50, 95, 99):
        assert percentile(values, percent) == pytest.approx(expected[percent - 1])
    assert percentile([], 50) is None


def test_finished_and_step_are_frozen() -> None:
    trace, _ = scripted_run([9], limit=1)
    with pytest.raises(AttributeError):
        trace.steps[0].token_id = 3  # type: ignore[misc]
    assert isinstance(trace.steps[0], Step)
    assert isinstance(trace.finished, Finished)
