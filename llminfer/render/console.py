"""Whether and how to colour what people read. Rich is told; it is not left to guess.

Colour goes to terminals only. `NO_COLOR` (set to anything) means not one escape code, and
`FORCE_COLOR` (set to anything but 0) colours pipes too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console


def wants_color(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether escape codes may be written to `stream`."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") != "0":
        return True
    return stream.isatty() and environment.get("TERM") != "dumb"


_CODES = {"red": 31, "yellow": 33, "cyan": 36, "dim": 2}


def colored(text: str, color: str, stream: TextIO) -> str:
    """Text in a colour, or dim, where the stream takes colour."""
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if wants_color(stream) else text


def make_console(stream: TextIO, *, color: bool | None = None, width: int | None = None) -> Console:
    """A console that never wraps, never reads markup or emoji codes, and colours only where wanted.

    Args:
        color: whether to colour; what the stream and the environment say when not given.
        width: columns; those of the terminal when not given.
    """
    color = wants_color(stream) if color is None else color
    return Console(
        file=stream,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )
