"""A skip may hide that a step before the tests is missing: only those that are listed pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import test_sanitized
from scripts.test_capabilities import PROCESSORS, TESTS, lesser
from tests.conftest import MAY_SKIP, ROOT, fail_a_skip


def report(nodeid: str, **fields: Any) -> Any:
    return SimpleNamespace(**{"nodeid": nodeid, "skipped": True, "outcome": "skipped", "longrepr": "why", **fields})


def test_a_skip_that_is_not_listed_fails() -> None:
    unknown, listed, expected = (
        report("tests/x.py::test_x"),
        report(f"{MAY_SKIP[0]}[7-4]"),
        report("tests/x.py", wasxfail=""),
    )
    for found in (unknown, listed, expected):
        fail_a_skip(found)
    assert [unknown.outcome, listed.outcome, expected.outcome] == ["failed", "skipped", "skipped"]
    assert "tests/x.py::test_x was skipped" in unknown.longrepr


@pytest.mark.parametrize("nodeid", MAY_SKIP)
def test_what_is_listed_is_there(nodeid: str) -> None:
    file, name = nodeid.split("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_runs_on_lesser_processors_and_under_sanitizers_are_of_tests_that_are_there() -> None:
    assert all(Path(ROOT / file).is_file() for file in (*TESTS, *test_sanitized.TESTS))
    for processors in PROCESSORS.values():
        assert next(iter(processors)) == "default"
    assert "default" in lesser()
