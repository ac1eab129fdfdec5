"""The examples run, and the library's own documentation says what is true."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llminfer
import llminfer.api
import llminfer.engine.conversation

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".sh"})
SAYS = {
    "alternatives.py": ["' Paris'"],
    "answer.sh": ["answer: ", "reason: length", "KV bytes: "],
    "footprints.py": ["llama-3.1-8b          13,107,200,000 B  fits"],
    "many.sh": ["16 sequences of 8000 tokens"],
    "stream.py": ["ended: ", " ms "],
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_run(example: Path, tmp_path: Path, default_checkpoint: Path) -> None:
    shim = tmp_path / "bin" / "llminfer"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llminfer "$@"\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(example)] if example.suffix == ".sh" else [sys.executable, str(example)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for text in SAYS[example.name]:
        assert text in result.stdout


def test_every_example_is_described_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(example.name in readme for example in EXAMPLES)


def test_the_doctests_of_the_package(default_checkpoint: Path) -> None:
    names = {name: getattr(llminfer, name) for name in llminfer.__all__}
    for module in (llminfer, llminfer.api, llminfer.engine.conversation):
        result = doctest.testmod(module, extraglobs={**names, "model": llminfer.load()})
        assert result.attempted
        assert result.failed == 0


def test_the_page_of_the_library_is_true(default_checkpoint: Path) -> None:
    page = ROOT / "docs" / "library.md"
    result = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert result.attempted > 20
    assert result.failed == 0


def test_the_public_names_are_what_they_say() -> None:
    for name in llminfer.__all__:
        assert getattr(llminfer, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = llminfer.no_such_name
