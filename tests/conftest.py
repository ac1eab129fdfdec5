"""Shared by all tests: a cache of the project's own, the real model, tiny models with tokenizers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# tests that may be skipped, and where; any other skip fails
MAY_SKIP = (ROOT / "tests" / "may_skip.txt").read_text(encoding="utf-8").splitlines()

# before anything reads them: tests share one cache, kept between runs, and never ask the network
os.environ.setdefault("LLMINFER_CACHE", str(ROOT / ".cache" / "llminfer"))
os.environ["HF_HUB_OFFLINE"] = "1"
# on tiny models a second thread waits longer than it works, the more so beside other programs
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("LLMINFER_MODEL", None)
# a shell that runs us in the background has Ctrl-C ignored, and what we start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fail_a_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skip that nobody has agreed to: it may hide that a step before is missing."""
    if report.skipped and not hasattr(report, "wasxfail") and report.nodeid.split("[")[0] not in MAY_SKIP:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped and is not in tests/may_skip.txt: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_a_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_a_skip(report)
    return report


@pytest.fixture(scope="session")
def default_checkpoint() -> Path:
    """The converted checkpoint of the built-in model; a missing package fails, it does not skip."""
    from llminfer.engine.checkpoints.builtin import (
        DEFAULT_GENERATION,
        DEFAULT_MODEL_INSTALL_COMMAND,
        find_default_model,
    )
    from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf

    path = find_default_model()
    assert path is not None, f"run: {DEFAULT_MODEL_INSTALL_COMMAND}"
    return checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION)


@pytest.fixture(scope="session")
def smollm(default_checkpoint: Path):  # type: ignore[no-untyped-def]
    """The built-in model, loaded in float32."""
    from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
    from llminfer.engine.load import load

    return load(inspect_checkpoint(default_checkpoint), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama, a byte-level tokenizer and a chat template."""
    from tests.tiny_checkpoints import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder whose model, greedy, emits the given texts one token each after any prompt."""
    from tests.tiny_checkpoints import save_scripted_checkpoint

    def make(pieces: list[str | int], **options: object) -> Path:
        return save_scripted_checkpoint(tmp_path_factory.mktemp("scripted"), pieces, **options)

    return make


@pytest.fixture
def run_cli(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[int, bytes, str]]:
    """Runs the command line in this process: exit code, standard output in bytes, standard error."""
    from llminfer.cli.app import run

    def call(*arguments: str | Path) -> tuple[int, bytes, str]:
        capfdbinary.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return code, out, err.decode()

    return call
