"""`--engine native` as a user runs it, on tiny models and on the built-in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llminfer.api import generate
from llminfer.cli.app import run
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.load import load
from llminfer.engine.model import LoadedModel
from llminfer.engine.native import build
from llminfer.engine.native.library import library
from llminfer.events import Trace
from llminfer.params import Execution, StopCriteria
from tests.tiny_checkpoints import save_tiny_checkpoint
from tests.tiny_models import tiny_config

Cli = Callable[..., tuple[int, bytes, str]]
RUN = ("--raw", "-t", "0", "-n", "6", "--ignore-eos", "--json")
PROMPTS = ("Why is the sky blue?", "写一首关于海的诗。", "def fibonacci(n):", "List three colours 🎨.")


def document(run_cli: Cli, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = run_cli("generate", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_tokens_are_those_of_transformers(run_cli: Cli, tiny_llama: Path) -> None:
    plain = document(run_cli, "once upon a time", "--model", tiny_llama, *RUN)
    native = document(run_cli, "once upon a time", "--model", tiny_llama, *RUN, "--engine", "native")
    assert native["token_ids"] == plain["token_ids"]
    assert native["kv_cache"]["kind"] == "growing"
    assert (plain["engine"], native["engine"], native["weights"]) == ("transformers", "native", "float32")
    assert native["kv_cache"]["predicted_bytes"] == native["kv_cache"]["measured_bytes"] > 0
    assert any("native step" in note for note in native["notes"])


def test_a_model_without_a_native_step_runs_over_native_matrices(run_cli: Cli, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "gpt2", tiny_config("gpt2", vocab_size=300))
    plain = document(run_cli, "once upon a time", "--model", folder, *RUN)
    native = document(run_cli, "once upon a time", "--model", folder, *RUN, "--engine", "native")
    assert native["token_ids"] == plain["token_ids"]
    assert any("its matrices alone are native" in note for note in native["notes"])


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_other_caches_go_with_native_matrices(run_cli: Cli, tiny_llama: Path, cache: str) -> None:
    plain = document(run_cli, "once upon a time", "--model", tiny_llama, *RUN)
    native = document(run_cli, "once upon a time", "--model", tiny_llama, *RUN, "--engine", "native", "--cache", cache)
    assert native["token_ids"] == plain["token_ids"]


def test_a_window_keeps_its_cache(run_cli: Cli, tiny_llama: Path) -> None:
    common = ("--model", tiny_llama, "-t", "0", "-n", "4", "--raw", "--engine", "native")
    code, _, err = run_cli("generate", "x", "--kv-window", "8", *common)
    assert code == 0, err


def test_a_saved_cache_is_gone_on_with(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    common = ("--model", tiny_llama, *RUN, "--engine", "native")
    plain = document(run_cli, "once upon a time there was", *common)
    kept = tmp_path / "kept.safetensors"
    document(run_cli, "once upon a time", *common, "--prompt-cache", kept)
    again = document(run_cli, "once upon a time there was", *common, "--prompt-cache", kept)
    assert again["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    "arguments",
    [("--device", "cuda"), ("--dtype", "bfloat16"), ("--compile",)],
)
def test_what_does_not_go_together_is_refused_at_once(run_cli: Cli, arguments: tuple[str, ...]) -> None:
    code, out, err = run_cli("generate", "x", "--model", "./no-such-model", "--engine", "native", *arguments)
    assert (code, out) == (2, b"")
    assert err.startswith("error: ")
    assert "no-such-model" not in err


def test_a_missing_compiler_is_one_line(run_cli: Cli, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    code, out, err = run_cli("generate", "x", "--model", tiny_llama, "--engine", "native")
    assert (code, out) == (2, b"")
    assert "needs a C++ compiler" in err
    assert "llminfer[native]" in err


def test_a_compiler_that_is_not_there_is_named(
    run_cli: Cli, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path))
    library.cache_clear()
    try:
        code, out, err = run_cli("generate", "x", "--model", tiny_llama, "--engine", "native")
    finally:
        library.cache_clear()
    assert (code, out) == (2, b"")
    assert "/no/such/compiler" in err


@pytest.fixture(scope="module")
def native_smollm(default_checkpoint: Path) -> LoadedModel:
    """The built-in model on the native engine, from its file's own 4-bit blocks."""
    execution = Execution(engine="native", weights="int4")
    return load(inspect_checkpoint(default_checkpoint), execution=execution)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_built_in_model_loses_nothing_with_four_bits(
    smollm: LoadedModel, native_smollm: LoadedModel, prompt: str, sampling: dict[str, Any]
) -> None:
    traces = []
    for loaded in (smollm, native_smollm):
        trace = Trace()
        for event in generate(loaded, prompt, sampling=sampling, stop=StopCriteria(max_new_tokens=20)):
            trace.add(event)
        traces.append(trace)
    plain, native = traces
    assert native.token_ids == plain.token_ids
    for ours, theirs in zip(native.steps, plain.steps, strict=True):
        assert abs(ours.logprob - theirs.logprob) < 2e-3
    assert native_smollm.weights_bytes is not None
    assert smollm.weights_bytes is not None
    assert native_smollm.weights_bytes < smollm.weights_bytes / 5


def test_help_names_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    assert "native" in capsys.readouterr().out
