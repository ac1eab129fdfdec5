"""`kv-size --plot`: bytes against context, one line for each model and runtime, with the memory as a line.

plotext draws in the terminal, matplotlib writes PNG and SVG; an HTML file is the SVG in a page, so
that it opens without a network. Both come with the extra `plot` and are imported when asked for.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from llminfer.errors import UsageError
from llminfer.kv.results import Curve

SUFFIXES = (".png", ".svg", ".html")
_POINTS = 240
_INSTALL = "install them with: pip install 'llminfer[plot]'"


def points(curve: Curve) -> tuple[list[int], list[int]]:
    """Lengths and their bytes: evenly spread, and at each corner and just before and after it."""
    last = max(curve.last_tokens, 1)
    lengths = {1 + (last - 1) * step // _POINTS for step in range(_POINTS + 1)}
    for corner in curve.corners:
        lengths |= {length for length in (corner - 1, corner, corner + 1) if 1 <= length <= last}
    ordered = sorted(lengths)
    return ordered, [curve.bytes_of(length) for length in ordered]


def draw(curves: Sequence[Curve], *, memory_bytes: int | None = None, width: int = 100, color: bool = False) -> str:
    """The curves as text for a terminal, in GiB (MiB when all are small).

    Raises:
        UsageError: when plotext is not installed.
    """
    try:
        import plotext
    except ImportError:
        raise UsageError("--plot - needs plotext, which is not installed", hint=_INSTALL) from None
    drawn = [(curve.label, *points(curve)) for curve in curves]
    factor, unit = _unit([size for _, _, sizes in drawn for size in sizes])
    plotext.clear_figure()
    plotext.plotsize(width, 24)
    if not color:
        plotext.theme("clear")
    for label, lengths, sizes in drawn:
        plotext.plot(lengths, [size / factor for size in sizes], label=label)
    if memory_bytes is not None:
        last = max(lengths[-1] for _, lengths, _ in drawn)
        plotext.plot([1, last], [memory_bytes / factor] * 2, label="memory")
    plotext.title("KV cache")
    plotext.xlabel("tokens per sequence")
    plotext.ylabel(unit)
    text = str(plotext.build())
    text = text if color else plotext.uncolorize(text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def save(curves: Sequence[Curve], path: Path, *, memory_bytes: int | None = None) -> None:
    """Write the curves to a .png, .svg or .html file.

    Raises:
        UsageError: for another suffix, or when matplotlib is not installed.
        OSError: when the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"--plot cannot write {path.name!r}", hint=f"known: {', '.join(SUFFIXES)}, or - for the terminal"
        )
    figure = _figure(curves, memory_bytes)
    if suffix == ".html":
        stream = StringIO()
        figure.savefig(stream, format="svg")
        picture = stream.getvalue()
        page = f"<!DOCTYPE html>\n<meta charset='utf-8'>\n<title>{html.escape('KV cache')}</title>\n"
        path.write_text(page + picture[picture.index("<svg") :], encoding="utf-8")
    else:
        figure.savefig(path, format=suffix[1:], dpi=150)


def _figure(curves: Sequence[Curve], memory_bytes: int | None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot to a file needs matplotlib, which is not installed", hint=_INSTALL) from None
    drawn = [(curve.label, *points(curve)) for curve in curves]
    factor, unit = _unit([size for _, _, sizes in drawn for size in sizes])
    figure = Figure(figsize=(9, 5.5), layout="constrained")  # no pyplot: no display, no state between calls
    axes = figure.subplots()
    for label, lengths, sizes in drawn:
        # matplotlib takes $ for mathematics and a leading _ for "not in the legend"
        axes.plot(lengths, [size / factor for size in sizes], label=f"\u200b{label}".replace("$", r"\$"))
    if memory_bytes is not None:
        axes.axhline(memory_bytes / factor, color="black", linestyle="--", linewidth=1, label="memory")
    axes.set(xlabel="tokens per sequence", ylabel=unit, title="KV cache", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _unit(sizes: Sequence[int]) -> tuple[int, str]:
    return (1024**3, "GiB") if max(sizes, default=0) >= 1024**3 else (1024**2, "MiB")
