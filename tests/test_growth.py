"""The benchmark of steps against the context runs, and its figures are what they are called."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.tiny_checkpoints import save_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "growth.py"


@pytest.fixture
def growth() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("growth", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["growth"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_slope_is_that_of_the_line_through_the_points(growth: Any) -> None:
    fixed, slope = growth.fit([(64, 1.0 + 64 * 0.5), (128, 1.0 + 128 * 0.5), (512, 1.0 + 512 * 0.5)])
    assert fixed == pytest.approx(1.0)
    assert slope == pytest.approx(0.5)
    assert growth.fit([(64, 1.0)]) is None


def test_the_benchmark_prints_one_document(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    folder = save_tiny_checkpoint(tmp_path, config)
    command = [sys.executable, str(SCRIPT), "--model", str(folder), "--contexts", "64,256", "--rounds", "2", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["context"] for row in found["contexts"]] == [64, 256]
    assert set(found["slopes"]) == {"growing", "growing, with moves", "dynamic", "generate()"}
    assert found["slopes"]["generate()"]["of_generate"] == 1
    short, long = found["contexts"]
    token_bytes = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, float32
    # the steps lie around the context: three tokens before it are where every round begins
    assert short["dynamic"]["cache_bytes"] == short["generate()"]["cache_bytes"] == 61 * token_bytes
    assert short["growing"]["cache_bytes"] == 256 * token_bytes
    assert short["growing"]["move_s"] is None
    assert long["growing"]["move_s"] > 0
