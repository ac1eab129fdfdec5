"""What people read, fitted to the width of their terminal: nothing is broken inside a word or a number.

In a pipe or a file there is no width, so nothing is broken or left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len

from llminfer.render.align import aligned

_SEPARATOR = " ·"


def width_of(stream: TextIO, environment: Mapping[str, str] = os.environ) -> int | None:
    """The columns of the terminal that a stream writes to, which `COLUMNS` may state; None where it is no terminal."""
    stated = environment.get("COLUMNS", "")
    if not stream.isatty():
        return None
    if stated.isdecimal() and int(stated) > 0:
        return int(stated)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def broken(text: str, width: int | None, *, indent: int = 0) -> list[str]:
    """Text as lines of at most `width` columns, broken after ` ·` where that fills a third of a line, else at a space.

    All lines but the first are indented. A word that is longer than a line is left whole.
    """
    lines = []
    while width is not None and cell_len(text) > width:
        spaces = [at for at, character in enumerate(text) if character == " " and text[:at].strip() and at >= indent]
        fitting = [at for at in spaces if cell_len(text[:at]) <= width]
        after_parts = [at for at in fitting if text[:at].endswith(_SEPARATOR) and at - indent > width // 3]
        at = next((places[-1] for places in (after_parts, fitting) if places), spaces[0] if spaces else 0)
        if not at:
            break
        lines.append(text[:at].rstrip())
        text = " " * indent + text[at:].lstrip()
    return [*lines, text]


def fitted(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[bool],
    width: int | None,
    drop: Sequence[str] = (),
) -> tuple[str | None, list[str]]:
    """A table as its heading and its aligned lines; columns named in `drop` go one after the other until it fits.

    A table that is still too wide has no heading and is told row by row, as parts that break like a line.
    """
    kept = list(range(len(headings)))
    for name in ("", *drop):
        kept = [index for index in kept if headings[index] != name or not name]
        cells = [[row[index] for index in kept] for row in (headings, *rows)]
        lines = aligned(cells, right=[numbers[index] for index in kept])
        if width is None or max(map(cell_len, lines)) <= width:
            return lines[0], lines[1:]
    told = []
    for row in rows:
        parts = (f"{headings[index]} {row[index]}".strip() for index in kept)
        told += broken(f"{_SEPARATOR} ".join(parts), width, indent=2)
    return None, told
