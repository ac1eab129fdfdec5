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


def make_console(stream: TextIO) -> Console:
    """A console that never wraps, never reads markup or emoji codes, and colours only where wanted."""
    color = wants_color(stream)
    return Console(
        file=stream,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )
