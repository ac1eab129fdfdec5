"""`--weights` on the command line: refused early, said in the summary, counted in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llminfer.params import WEIGHTS
from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint

Cli = Callable[..., tuple[int, bytes, str]]
RUN = ("--raw", "-t", "0", "-n", "5", "--ignore-eos")
ROWS, COLUMNS = 304, 64  # of the embedding and the output layer


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in bfloat16 whose layers are large enough to be packed."""
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=COLUMNS,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    pieces = [f"piece {number}" for number in range(ROWS - 259)]
    folder = tmp_path_factory.mktemp("bfloat16-llama")
    return save_tiny_checkpoint(folder, config, tokenizer=byte_level_tokenizer(pieces))


def document(run_cli: Cli, *arguments: Any) -> dict[str, Any]:
    code, out, err = run_cli("generate", "the tide", *RUN, "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("arguments", [("--dtype", "bfloat16"), ("--dtype", "float16"), ("--device", "cuda")])
def test_what_does_not_go_with_weights_is_told_before_anything_loads(run_cli: Cli, arguments: tuple[str, ...]) -> None:
    code, out, err = run_cli("generate", "x", "--model", "./no-such-model", "--weights", "int8", *arguments)
    assert (code, out) == (2, b"")
    assert "no-such-model" not in err, "the model was looked for first"
    assert err.startswith("error: --weights int8 ")
    assert len(err.splitlines()) == 2


def test_an_unknown_format_names_the_known(run_cli: Cli) -> None:
    code, _, err = run_cli("generate", "x", "--weights", "int3")
    assert code == 2
    assert "float32, float16, int8, int4" in err


def test_a_quantized_checkpoint_is_refused_before_its_weights_load(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("llminfer.engine.load._load_weights", lambda *_: pytest.fail("the weights were read"))
    code, _, err = run_cli("generate", "x", "-m", folder, "--weights", "int4", *RUN)
    assert code == 4
    assert "already quantized" in err


def test_the_bytes_held_are_those_of_the_format(run_cli: Cli, untied: Path) -> None:
    held = {name: document(run_cli, "-m", untied, "--weights", name) for name in WEIGHTS}
    plain = document(run_cli, "-m", untied, "--dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    elements = sum(parameter.numel() for parameter in model.parameters())
    norms = 5 * COLUMNS
    linears = elements - norms - ROWS * COLUMNS
    rows = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64) + ROWS
    assert plain["weights"] is None
    assert plain["weights_bytes"] == 4 * elements + buffers
    assert {name: run["weights"] for name, run in held.items()} == {name: name for name in WEIGHTS}
    for run in (plain, *held.values()):
        assert sum(run["weights_parts"].values()) == run["weights_bytes"]
    # the embedding stays in the checkpoint's 16 bits, where float32 was not asked for
    assert {name: run["weights_parts"]["embedding"] for name, run in held.items()} == {
        name: (4 if name == "float32" else 2) * ROWS * COLUMNS for name in WEIGHTS
    }
    assert {run["weights_parts"]["rest"] for run in held.values()} == {4 * norms + buffers}
    in_layers = {name: run["weights_parts"]["linear_layers"] for name, run in held.items()}
    assert in_layers["float32"] == 4 * linears
    assert in_layers["float16"] == 2 * linears
    assert in_layers["int8"] == linears + 2 * rows
    # the output layer has 8 bits there; the others are filled up to the rows of a panel, which processors differ in
    head = ROWS * COLUMNS + 2 * ROWS
    assert (linears - ROWS * COLUMNS) * 5 // 8 + head <= in_layers["int4"] <= linears
    assert held["float32"]["token_ids"] == plain["token_ids"]
    assert {run["dtype"] for run in held.values()} == {"float32"}
    assert "weights int8: 15 linear layers" in " ".join(held["int8"]["notes"])


def test_a_bfloat16_checkpoint_is_packed_as_its_float32_copy_is(run_cli: Cli, untied: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((untied / name).read_bytes())
    for name in ("float16", "int4"):
        narrow, wide = (document(run_cli, "-m", folder, "--weights", name) for folder in (untied, tmp_path))
        assert narrow["token_ids"] == wide["token_ids"]
        for ours, theirs in zip(narrow["steps"], wide["steps"], strict=True):
            assert abs(ours["logprob"] - theirs["logprob"]) < 1e-3


def test_the_summary_says_what_is_held(run_cli: Cli, untied: Path) -> None:
    code, _, err = run_cli("generate", "x", "-m", untied, "--weights", "int8", *RUN, "-v")
    assert code == 0
    line = next(line for line in err.splitlines() if line.startswith("weights"))
    assert line.startswith("weights   int8 · ")
    assert line.endswith(" held")
    _, _, err = run_cli("generate", "x", "-m", untied, "--dtype", "float32", *RUN, "-v")
    assert "weights   float32 · " in err


def test_the_built_in_model_runs_from_int8(run_cli: Cli) -> None:
    run = document(run_cli, "--weights", "int8")
    assert len(run["token_ids"]) == 5
    assert run["weights_bytes"] < 140e6
    assert run["kv_cache"]["predicted_bytes"] == run["kv_cache"]["measured_bytes"]
