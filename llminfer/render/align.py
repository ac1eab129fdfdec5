"""Text in columns, by the cells that it takes on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[bool] = ()) -> list[str]:
    """Rows as lines, their columns two spaces apart; never cut and never wrapped.

    Args:
        rows: cells, the same number in each row.
        right: for each column, whether it is set to the right, as numbers are; none when not given.
    """
    sides = right or [False] * len(rows[0])
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for cell, width, to_right in zip(row, widths, sides, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if to_right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return lines
