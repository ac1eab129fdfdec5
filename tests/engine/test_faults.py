"""Runs that break after they began: what was produced stays, and one line says where, why and what to try."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from llminfer.api import generate
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.load import load
from llminfer.errors import GenerationFailed, OutOfMemory
from llminfer.events import Finished, Started

RunCli = Callable[..., tuple[int, bytes, str]]
Scripted = Callable[..., Path]
PIECES = ["zero ", "one ", "two ", "three ", "four ", "five "]

OUT_OF_MEMORY = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "python": lambda: MemoryError(),
    "cpu allocator": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
}


@pytest.fixture
def break_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Breaks the n-th forward (0 is the prefill) by raising, or by changing its logits."""

    def at(
        step: int, make: Callable[[], Exception] | None = None, *, logits: Callable[[Any], Any] | None = None
    ) -> None:
        real, calls = GPT2LMHeadModel.forward, 0

        @functools.wraps(real)
        def forward(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 == step and make is not None:
                raise make()
            outputs = real(*arguments, **options)
            if calls - 1 == step and logits is not None:
                outputs.logits = logits(outputs.logits.clone())
            return outputs

        monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)

    return at


# Out of memory


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("step", [0, 4])
def test_out_of_memory_keeps_the_text_and_says_what_to_try(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None], kind: str, step: int
) -> None:
    break_forward(step, OUT_OF_MEMORY[kind])
    code, out, err = run_cli("generate", "a", "-m", scripted(PIECES), "-n", "20", "--temperature", "0")
    assert code == 1
    assert out.decode() == "".join(PIECES[:step])
    # K and V of one layer with one head of 64, float32; the prompt is BOS and a letter
    now, limit = 2 * 64 * 4 * (2 + step), 2 * 64 * 4 * 21
    assert err.splitlines()[-2:] == [
        f"error: out of memory on cpu at step {step}, with {2 + step} tokens of context, whose KV cache takes "
        f"{now / 1024:.2f} KiB (predicted; {limit / 1024:.2f} KiB at the limit of 21)",
        "hint: try a shorter prompt or a smaller --max-new-tokens or --dtype bfloat16",
    ]
    assert f"stopped   error, after {step} tokens" in err
    assert "Traceback" not in err


def test_out_of_memory_as_json(run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]) -> None:
    break_forward(4, OUT_OF_MEMORY["torch"])
    code, out, err = run_cli("generate", "a", "-m", scripted(PIECES), "-n", "20", "--temperature", "0", "--json")
    document = json.loads(out)
    assert code == 1
    assert document["finish_reason"] == "error"
    assert document["text"] == "zero one two three "
    assert len(document["token_ids"]) == len(document["steps"]) == 4
    assert document["error"]["exit_code"] == 1
    assert document["error"]["message"].startswith("out of memory on cpu at step 4, with 6 tokens of context")
    assert document["kv_cache"]["cached_tokens"] == 5
    assert len(err.splitlines()) == 2


def test_out_of_memory_in_16_bits_does_not_advise_16_bits(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]
) -> None:
    break_forward(0, OUT_OF_MEMORY["torch"])
    _, _, err = run_cli("generate", "a", "-m", scripted(PIECES), "--dtype", "bfloat16", "-q")
    assert err.splitlines()[-1] == "hint: try a shorter prompt or a smaller --max-new-tokens"


def test_out_of_memory_without_a_cache(run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]) -> None:
    break_forward(1, OUT_OF_MEMORY["torch"])
    code, out, err = run_cli("generate", "a", "-m", scripted(PIECES), "--cache", "none", "-q", "--temperature", "0")
    assert (code, out) == (1, b"zero ")
    assert err.splitlines()[0] == "error: out of memory on cpu at step 1, with 3 tokens of context"


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_out_of_memory_while_loading(
    run_cli: RunCli, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OUT_OF_MEMORY[kind]()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    code, out, err = run_cli("generate", "a", "-m", tiny_llama)
    assert (code, out) == (1, b"")
    assert err.splitlines() == [
        f"error: out of memory while loading the weights of {tiny_llama}",
        "hint: try --dtype bfloat16, or a smaller model",
    ]


def test_debug_shows_what_the_error_was_made_from(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]
) -> None:
    break_forward(1, OUT_OF_MEMORY["torch"])
    with pytest.raises(OutOfMemory) as caught:
        run_cli("generate", "a", "-m", scripted(PIECES), "-q", "--debug")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_library_yields_a_finished_with_the_error(scripted: Scripted, break_forward: Callable[..., None]) -> None:
    loaded = load(inspect_checkpoint(scripted(PIECES)), device="cpu")
    break_forward(2, OUT_OF_MEMORY["python"])
    events = list(generate(loaded, "a", sampling={"temperature": 0}))
    finished = events[-1]
    assert isinstance(events[0], Started)
    assert isinstance(finished, Finished)
    assert (len(events), finished.reason) == (4, "error")
    assert isinstance(finished.error, OutOfMemory)
    assert isinstance(finished.error.__cause__, MemoryError)


# Everything else that a forward may raise


def test_an_unforeseen_error_keeps_the_text(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]
) -> None:
    break_forward(3, lambda: RuntimeError("the shapes do not match\nmore about it"))
    code, out, err = run_cli("generate", "a", "-m", scripted(PIECES), "-q", "--temperature", "0")
    assert (code, out) == (1, b"zero one two ")
    assert err == "error: step 3 failed: RuntimeError: the shapes do not match\nhint: --debug shows where\n"


def test_held_back_text_comes_out_when_a_run_breaks(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]
) -> None:
    break_forward(2, lambda: RuntimeError("broken"))
    folder = scripted(["a", "EN", "D"])
    # "EN" is held, since it may be the beginning of the stop text
    code, out, _ = run_cli("generate", "a", "-m", folder, "-q", "--temperature", "0", "--stop", "END")
    assert (code, out) == (1, b"aEN")


def test_a_cache_that_cannot_be_made_is_one_line(
    run_cli: RunCli, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr("llminfer.engine.generate.make_forward", fail)
    code, out, err = run_cli("generate", "a", "-m", scripted(PIECES))
    assert (code, out) == (1, b"")
    assert "ValueError: no such layer\nhint: --debug shows where\n" in err


# Logits that are no numbers


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("step", [0, 3])
def test_nan_stops_the_run_at_its_step(run_cli: RunCli, scripted: Scripted, temperature: str, step: int) -> None:
    folder = scripted(PIECES, nan_after=step)
    options = ("-m", folder, "--temperature", temperature, "--seed", "1")
    code, out, err = run_cli("generate", "a", *options, "-q")
    assert code == 1
    assert err.splitlines() == [
        f"error: the model returned NaN in the logits at step {step}, computing in float32",
        "hint: the weights may be damaged",
    ]
    document = json.loads(run_cli("generate", "a", *options, "--json")[1])
    assert (document["finish_reason"], len(document["token_ids"])) == ("error", step)
    assert document["text"].encode() == out
    if temperature == "0":
        assert out.decode() == "".join(PIECES[:step])


def test_nan_in_16_bits_advises_32(run_cli: RunCli, scripted: Scripted) -> None:
    folder = scripted(PIECES, nan_after=2)
    code, out, err = run_cli("generate", "a", "-m", folder, "--temperature", "0", "--dtype", "float16", "-q")
    assert (code, out) == (1, b"zero one ")
    assert "at step 2, computing in float16\nhint: try --dtype float32\n" in err


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize(("value", "what"), [(-math.inf, "only -inf"), (math.inf, "+inf"), (math.nan, "NaN")])
def test_rows_without_a_finite_best_stop_the_run(
    run_cli: RunCli,
    scripted: Scripted,
    break_forward: Callable[..., None],
    temperature: str,
    value: float,
    what: str,
) -> None:
    break_forward(1, logits=lambda logits: logits.fill_(value))
    code, _, err = run_cli("generate", "a", "-m", scripted(PIECES), "--temperature", temperature, "-q")
    assert code == 1
    assert err.startswith(f"error: the model returned {what} in the logits at step 1, ")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_some_masked_logits_are_legal(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None], temperature: str
) -> None:
    def mask(logits: torch.Tensor) -> torch.Tensor:
        keep = int(logits[0, -1].argmax())
        masked = torch.full_like(logits, -math.inf)
        masked[..., keep] = logits[..., keep]
        return masked

    break_forward(1, logits=mask)
    code, out, err = run_cli("generate", "a", "-m", scripted(PIECES), "-n", "2", "-t", temperature, "-q")
    assert (code, err) == (0, "")
    assert out.decode().endswith("one ")


def test_one_nan_among_numbers_is_enough(
    run_cli: RunCli, scripted: Scripted, break_forward: Callable[..., None]
) -> None:
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        logits[..., 7] = math.nan
        return logits

    break_forward(2, logits=spoil)
    code, out, _ = run_cli("generate", "a", "-m", scripted(PIECES), "--temperature", "0", "-q")
    assert (code, out) == (1, b"zero one ")


def test_the_kinds_of_errors_share_their_exit_code() -> None:
    assert {kind.exit_code for kind in (GenerationFailed, *GenerationFailed.__subclasses__())} == {1}
