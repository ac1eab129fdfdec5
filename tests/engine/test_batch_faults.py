"""Memory that runs out at any allocation of a batch: every job has one result, and who goes on gets its tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from llminfer.api import generate, generate_batch, generate_samples
from llminfer.cli.prompts import ManyPrompts, write_results
from llminfer.engine import batch_generate as many
from llminfer.engine.batch_loop import Row, decode_batch
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.kv_cache.batched import JoinedCache
from llminfer.engine.load import load
from llminfer.engine.machine.clock import Clock
from llminfer.engine.model import LoadedModel
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.events import Finished, Trace
from llminfer.jobs import Job, read_jobs
from llminfer.params import SamplingParams, StopCriteria
from llminfer.request import make_request
from tests.engine.test_batch_loop import CONFIGS, alone, collect, output_of

ERRORS = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "other": lambda: RuntimeError("boom"),
}
PROMPTS, LIMITS = [[5, 9, 77, 3], [7], [11, 12], [1] * 9], [2, 4, 3, 3]
SAMPLED = {"temperature": 0.9, "repetition_penalty": 1.2}


class Allocations(TorchDispatchMode):
    """Counts the operations that make a tensor; those numbered in `broken` raise. `sites` are our lines that asked."""

    def __init__(self, broken: Iterable[int] = (), kind: str = "memory", *, sites: bool = False) -> None:
        super().__init__()
        self.broken, self.kind, self.count = broken, kind, 0
        self.sites: dict[str, list[int]] | None = {} if sites else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            number, self.count = self.count, self.count + 1
            if self.sites is not None:
                self.sites.setdefault(_site(), []).append(number)
            if number in self.broken:
                raise ERRORS[self.kind]()
        return func(*args, **(kwargs or {}))


def _site() -> str:
    """The innermost lines of ours on the stack, of the engine and of the batch."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if "/llminfer/engine/" in frame.f_code.co_filename:
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found[:2])


def rows_of(model: Any) -> list[Row]:
    return [
        Row(
            key=number,
            prompt_ids=prompt,
            sample=make_sampler(SamplingParams(seed=number, **SAMPLED), prompt, model.device),
            output=output_of(limit),
        )
        for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **CONFIGS[name])).eval()


def chosen(model: Any) -> list[int]:
    """Of each line of ours that makes tensors the first time, one in the middle, and the last."""
    rows = rows_of(model)
    with Allocations(sites=True) as clean:
        collect(decode_batch(model, rows, Clock(), batch_size=3))
    assert clean.sites is not None
    assert any("batched.py:" in site for site in clean.sites)
    return sorted({numbers[at] for numbers in clean.sites.values() for at in (0, len(numbers) // 2, -1)})


def check_each(model: Any, numbers: Iterable[int], kind: str) -> None:
    expected = [
        alone(model, prompt, limit, SamplingParams(seed=number, **SAMPLED))
        for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]
    ended = 0
    for number in numbers:
        rows = rows_of(model)
        with Allocations({number}, kind):
            ids, finished, _ = collect(decode_batch(model, rows, Clock(), batch_size=3))
        assert set(finished) == set(range(len(PROMPTS))), number
        broken = [key for key, end in finished.items() if end.reason == "error"]
        ended += len(broken)
        assert len(broken) <= 1, number
        for key, tokens in enumerate(expected):
            got = ids.get(key, [])
            assert got == (tokens[: len(got)] if key in broken else tokens), (number, key)
    assert ended, "no row was ever alone in what broke"


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "memory"), ("llama", "other"), ("gemma3_text", "memory"), ("lfm2", "memory")]
)
def test_an_error_at_any_line_ends_one_row_at_most_and_changes_no_token(name: str, kind: str) -> None:
    model = tiny(name)
    check_each(model, chosen(model), kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stride"), [("llama", 1), ("gpt2", 1), ("gemma3_text", 17), ("lfm2", 7), ("qwen3_next", 7)]
)
def test_an_error_at_any_allocation_ends_one_row_at_most_and_changes_no_token(name: str, stride: int) -> None:
    """At each, or in the larger models, whose lines are the same, at one in several."""
    model = tiny(name)
    rows = rows_of(model)
    with Allocations() as clean:
        collect(decode_batch(model, rows, Clock(), batch_size=3))
    check_each(model, range(0, clean.count, stride), "memory")


@pytest.mark.parametrize("broken", ["join", "keep", "_forward"])
def test_what_breaks_again_and_again_lets_every_row_run_alone(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are never possible: each runs by itself, and gets its tokens."""
    model = tiny("llama")
    from llminfer.engine import batch_loop as batch

    owner: Any = batch if broken == "_forward" else JoinedCache
    real = getattr(owner, broken)

    def fail(*arguments: Any, **options: Any) -> Any:
        rows = {
            "join": lambda: len(arguments[0].lengths) + options.get("copies", 1),
            "keep": lambda: len(arguments[0].lengths),
            "_forward": lambda: len(arguments[1]),
        }[broken]()
        if rows > 1:
            raise ERRORS["memory"]()
        return real(*arguments, **options)

    monkeypatch.setattr(owner, broken, fail)
    ids, finished, loads = collect(decode_batch(model, rows_of(model), Clock(), batch_size=3))
    assert [end.reason for end in finished.values()] == ["length"] * len(PROMPTS)
    for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        assert ids[number] == alone(model, prompt, limit, SamplingParams(seed=number, **SAMPLED))
    assert broken == "keep" or all(load.rows == 1 for load in loads)


# Whole runs, to the file


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> LoadedModel:
    return load(inspect_checkpoint(tiny_llama), device="cpu", dtype="float32")


class _NoInterrupt:
    pending = False


def written(loaded: LoadedModel, folder: Path, mode: Any) -> tuple[int, list[dict[str, Any]], list[Job]]:
    """Exit code and records of three prompts, run under the mode."""
    file, output = folder / "in.txt", folder / "out.jsonl"
    file.write_text("one\na longer one\nthree\n")
    output.unlink(missing_ok=True)
    asked = ManyPrompts(file=file, batch_size=2, output=output, resume=False)
    common = make_request(sampling={"seed": 3, "temperature": 0.9}, stop=StopCriteria(max_new_tokens=3))
    jobs = [job for job in read_jobs(file, common) if isinstance(job, Job)]
    results = generate_batch(loaded, [job.request for job in jobs], batch_size=2)
    with mode:
        code = write_results(results, jobs, asked, _NoInterrupt(), verbose=False, origin={})
    return code, [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]], jobs


def test_results_are_written_in_order_wherever_memory_runs_out(
    loaded: LoadedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Allocations(sites=True) as clean:
        code, records, jobs = written(loaded, tmp_path, clean)
    assert (code, len(records)) == (0, 3)
    expected = []
    for job in jobs:
        trace = Trace()
        for event in generate(loaded, job.request):
            trace.add(event)
        expected.append(trace.token_ids)
    assert clean.sites is not None
    firsts = sorted({numbers[0] for numbers in clean.sites.values()})
    for number in firsts:
        code, records, _ = written(loaded, tmp_path, Allocations({number}))
        assert [record["line"] for record in records] == [1, 2, 3]
        assert code == int(any("error" in record for record in records))
        for record, tokens in zip(records, expected, strict=True):
            assert "error" in record or record["token_ids"] == tokens, number
    # memory that is gone for good
    for number in firsts[:: max(len(firsts) // 4, 1)]:
        code, records, _ = written(loaded, tmp_path, Allocations(range(number, sys.maxsize)))
        assert ([record["line"] for record in records], code) == ([1, 2, 3], 1)
        assert all("error" in record or record["token_ids"] in expected for record in records)
    assert "a bug" not in capfd.readouterr().err


def test_results_that_wait_are_written_when_the_run_breaks(loaded: LoadedModel, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    file = tmp_path / "in.txt"
    asked = ManyPrompts(file=file, batch_size=2, output=output, resume=False)
    file.write_text("one\ntwo\n")
    jobs = list(read_jobs(file, make_request(stop=StopCriteria(max_new_tokens=1))))

    def results() -> Any:
        yield replace(next(generate_batch(loaded, ["two"], batch_size=1)), index=1)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_results(results(), jobs, asked, _NoInterrupt(), verbose=False, origin={})
    assert b'"line": 2' in output.read_bytes()


# Room


def test_a_row_that_does_not_fit_waits_and_one_alone_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, most = tiny("llama"), []

    def fits(rows: Any, held_bytes: int) -> bool:
        most.append(len(rows))
        return len(rows) <= 2

    ids, finished, loads = collect(decode_batch(model, rows_of(model), Clock(), batch_size=4, fits=fits))
    assert max(load.rows for load in loads) == 2
    assert most
    assert [finished[number].reason for number in range(4)] == ["length"] * 4
    ids, finished, loads = collect(
        decode_batch(model, rows_of(model), Clock(), batch_size=4, fits=lambda rows, held_bytes: False)
    )
    assert {load.rows for load in loads} == {1}
    assert ids[1] == alone(model, PROMPTS[1], LIMITS[1], SamplingParams(seed=1, **SAMPLED))


def test_room_is_that_of_all_rows_at_the_limit_of_the_longest(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, two heads of 8, float32: 256 B a token and row, and each layer once more while rows join."""
    rows = [Row(key=0, prompt_ids=[1] * 10, sample=None, output=output_of(11)),  # type: ignore[arg-type]
            Row(key=1, prompt_ids=[1], sample=None, output=output_of(5))]  # type: ignore[arg-type]  # fmt: skip
    need = 2 * 20 * 256 * 2
    fits = many._fits(loaded)
    for left, held, expected in [
        (need, 0, False),
        (need * 10 // 9 + 1, 0, True),
        (need * 10 // 9 - 9, 0, False),
        (0, need, True),
        (None, 0, True),
    ]:
        monkeypatch.setattr(many, "available_bytes", lambda device, left=left: left)
        assert fits(rows, held) is expected, (left, held)


def test_samples_that_do_not_fit_together_are_those_of_their_seeds(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sampling": {"seed": 3}, "stop": StopCriteria(max_new_tokens=4)}
    together = [trace.token_ids for trace in generate_samples(loaded, "hello", 5, **options).traces]
    monkeypatch.setattr(many, "_fits", lambda loaded: lambda rows, held_bytes: len(rows) <= 2)
    samples = generate_samples(loaded, "hello", 5, **options)
    assert [trace.token_ids for trace in samples.traces] == together
    assert samples.peak.rows == 2


def test_a_broken_text_ends_its_row_alone() -> None:
    model = tiny("llama")
    rows = rows_of(model)

    class Broken:
        def push(self, token_id: int) -> str:
            raise ValueError("no such id")

        flush = push

    rows[2].output.detokenizer = Broken()  # type: ignore[assignment]
    _, finished, _ = collect(decode_batch(model, rows, Clock(), batch_size=3))
    assert [finished[number].reason for number in range(4)] == ["length", "length", "error", "length"]
    assert isinstance(finished[2], Finished)
