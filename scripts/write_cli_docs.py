"""Write docs/cli.md from the command line's own help.

python scripts/write_cli_docs.py
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from llminfer.cli.app import COMMANDS, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
INTRODUCTION = """# The command line

Written by `scripts/write_cli_docs.py` from the commands' own help; a test keeps it so.

Data goes to standard output, everything else to standard error. Exit codes:

| code | means |
|---|---|
| 0 | finished, whatever the reason |
| 1 | failure: a run that broke, a disk that is full |
| 2 | usage: the request itself is wrong |
| 3 | model not available: no such model, or not all of it, or no such device |
| 4 | architecture not supported |
| 5 | does not fit the stated memory |
| 130 | interrupted; text and summary are kept |
"""


def help_of(*arguments: str) -> str:
    """What the command prints for `--help`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run([*arguments, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def page() -> str:
    """The whole page."""
    sections = [f"## `llminfer {name}`\n\n```text\n{help_of(name)}\n```\n" for name in COMMANDS]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
