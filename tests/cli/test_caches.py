"""The options about caches on the command line: refused early, reported in the summary and in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compilers import needs_torch_compiler
from tests.tiny_checkpoints import save_tiny_checkpoint
from tests.tiny_models import tiny_config

Cli = Callable[..., tuple[int, bytes, str]]
RUN = ("--raw", "-t", "0", "-n", "5", "--ignore-eos", "--dtype", "float32")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cache", "paged"),
        ("--kv-bits", "4"),
        ("--cache", "quantized", "--kv-bits", "5"),
        ("--cache", "static", "--kv-window", "64"),
        ("--kv-window", "4"),
        ("--kv-window", "-1"),
        ("--prefill-chunk", "0"),
        ("--cache", "none", "--prefill-chunk", "8"),
        ("--cache", "none", "--prompt-cache", "x"),
        ("--cache", "quantized", "--prompt-cache", "x"),
        ("--prompt-cache", "no/such/folder/x"),
        ("--prompt-cache", "."),
        ("--num-samples", "2", "--cache", "static"),
        ("--num-samples", "2", "--cache", "growing"),
        ("--num-samples", "2", "--kv-window", "64"),
        ("--compile", "--kv-window", "64"),
        ("--engine", "native", "--cache", "static", "--kv-window", "64"),
        ("--num-samples", "2", "--prompt-cache", "x"),
    ],
)
def test_options_that_do_not_go_together_are_told_before_anything_loads(
    run_cli: Cli, arguments: tuple[str, ...]
) -> None:
    code, out, err = run_cli("generate", "x", "--model", "./no-such-model", *arguments)
    assert code == 2
    assert out == b""
    assert "no-such-model" not in err, "the model was looked for first"
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2


def test_a_missing_quantizer_is_told_before_anything_loads(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llminfer.kv.quantizers._has", lambda module: False)
    code, _, err = run_cli("generate", "x", "--model", "./no-such-model", "--cache", "quantized")
    assert code == 2
    assert "pip install optimum-quanto" in err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((), "dynamic"),
        (("--cache", "growing"), "growing"),
        (("--cache", "static"), "static"),
        (("--kv-window", "8"), "window"),
        (("--prefill-chunk", "3"), "dynamic"),
        (("--cache", "none"), "none"),
    ],
)
def test_the_document_names_the_cache_and_its_bytes(
    run_cli: Cli, tiny_llama: Path, arguments: tuple[str, ...], kind: str
) -> None:
    code, out, _ = run_cli("generate", "A prompt of some length", "-m", tiny_llama, *RUN, "--json", *arguments)
    assert code == 0
    cache = json.loads(out)["kv_cache"]
    assert cache["kind"] == kind
    assert cache["predicted_bytes"] == cache["measured_bytes"]
    assert cache["window"] == (8 if kind == "window" else None)
    assert cache["bits"] is None
    assert cache["reused_tokens"] == 0
    assert cache["prefill_chunk"] == (None if kind == "none" else 3 if "--prefill-chunk" in arguments else 2048)
    assert (cache["measured_bytes"] is None) == (kind == "none")


@needs_torch_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_quantized_cache_is_reported_with_its_bits(run_cli: Cli, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path, tiny_config("llama", vocab_size=300, head_dim=32, num_key_value_heads=2))
    code, out, _ = run_cli("generate", "A prompt", "-m", folder, *RUN, "--json", "--cache", "quantized")
    assert code == 0
    cache = json.loads(out)["kv_cache"]
    assert (cache["kind"], cache["bits"]) == ("quantized", 4)
    assert cache["predicted_bytes"] == cache["measured_bytes"]
    code, _, err = run_cli("generate", "A prompt", "-m", folder, *RUN, "--cache", "quantized", "--kv-bits", "2", "-v")
    assert code == 0
    assert "quantized to 2 bits" in err
    assert "equal to the byte" in err


def test_the_summary_says_what_was_reused(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    options = ("-m", tiny_llama, *RUN, "--prompt-cache", tmp_path / "cache.safetensors")
    code, first, err = run_cli("generate", "A prompt", *options)
    assert code == 0
    assert "cached before" not in err
    code, second, err = run_cli("generate", "A prompt", *options, "-v")
    assert code == 0
    assert first == second
    assert "9 prompt tokens, 8 of them cached" in err
    assert "8 tokens of the prompt were cached before and not fed again" in err
    assert "equal to the byte" in err


def test_a_file_of_another_model_is_an_error_and_no_text(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "cache.safetensors", tmp_path / "other"
    other.mkdir()
    save_tiny_checkpoint(other, tiny_config("gpt2", vocab_size=300))
    assert run_cli("generate", "A prompt", "-m", other, *RUN, "--prompt-cache", file)[0] == 0
    code, out, err = run_cli("generate", "A prompt", "-m", tiny_llama, *RUN, "--prompt-cache", file)
    assert code == 1
    assert out == b""
    assert "was made with another model (other, this is tiny-llama" in err


def test_a_cache_that_the_model_cannot_have_is_refused(run_cli: Cli, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path, tiny_config("mistral", vocab_size=300))
    code, out, err = run_cli("generate", "A prompt", "-m", folder, *RUN, "--kv-window", "64")
    assert code == 4
    assert out == b""
    assert "cannot have a windowed cache" in err
