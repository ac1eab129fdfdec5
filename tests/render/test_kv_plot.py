"""The drawn curves: where their points are, and that each target is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llminfer.errors import UsageError
from llminfer.kv.results import Curve
from llminfer.render.kv_plot import draw, points, save

GIB = 1024**3
CURVES = (
    Curve(label="[a] $b_c$", bytes_of=lambda tokens: min(tokens, 100) * GIB, last_tokens=1000, corners=(100,)),
    Curve(label="_second", bytes_of=lambda tokens: tokens * GIB // 10, last_tokens=1000),
)


def test_points_cover_the_range_and_the_corners() -> None:
    lengths, sizes = points(CURVES[0])
    assert (lengths[0], lengths[-1]) == (1, 1000)
    assert {99, 100, 101} <= set(lengths)
    assert lengths == sorted(set(lengths))
    assert sizes == [min(length, 100) * GIB for length in lengths]
    assert points(Curve(label="", bytes_of=lambda tokens: tokens, last_tokens=1)) == ([1], [1])


def test_a_terminal_gets_text_with_the_names_and_the_memory() -> None:
    text = draw(CURVES, memory_bytes=50 * GIB)
    assert "[a] $b_c$" in text
    assert "memory" in text
    assert "GiB" in text
    assert "\x1b" not in text
    assert "\x1b" in draw(CURVES, color=True)


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.HTML", b"<!DOCTYPE html>")]
)
def test_files(tmp_path: Path, name: str, start: bytes) -> None:
    save(CURVES, tmp_path / name, memory_bytes=50 * GIB)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.bmp") as caught:
        save(CURVES, tmp_path / "a.bmp")
    assert ".svg" in str(caught.value.hint)


def test_a_missing_library_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotext", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: draw(CURVES), lambda: save(CURVES, tmp_path / "a.png")):
        with pytest.raises(UsageError, match="not installed") as caught:
            call()
        assert caught.value.hint == "install them with: pip install 'llminfer[plot]'"


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save(CURVES, tmp_path / "no" / "a.png")
