"""A command in a terminal of a given width: what it wrote, and what a terminal emulator shows of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pyte

_ROWS = 400
# a status that was there while something was under way
_ERASED = re.compile(r"[^\n]*\r\n\x1b\[\?25h\r\x1b\[1A\x1b\[2K")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The lines as they were written, without colours, and the screen's lines."""

    written: list[str]
    screen: list[str]
    code: int


def run_in_terminal(*arguments: object, width: int, folder: Path | None = None, **environment: str) -> Shown:
    """Run `llminfer` with standard output and standard error in one terminal, as its users do."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, width, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "llminfer", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**kept, "TERM": "xterm", "HF_HUB_OFFLINE": "1", **environment},
    )
    os.close(theirs)
    data = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        data += part
    os.close(ours)
    screen = pyte.Screen(width, _ROWS)
    pyte.ByteStream(screen).feed(data)
    text = _ESCAPES.sub("", _ERASED.sub("", data.decode()))
    written = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    return Shown(written=written, screen=[line.rstrip() for line in screen.display], code=process.wait())
