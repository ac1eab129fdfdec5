"""Write docs/cli.md from the command line's own help.

python scripts/write_cli_docs.py
"""

from __future__ import annotations

import contextlib
import io
import os
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

A prompt that begins with `-` follows `--`, so that it is no option: `llminfer generate -q -- "-5 + 3 ="`.

## What goes in and out

- Texts (prompts, `--system`, `--stop`, `--bad-words`, a model's name) are UTF-8; other bytes are refused before a \
model is looked for. Names of other files may be any bytes.
- The model's text, JSON and CSV are written as UTF-8 whatever the console's encoding is. Tables and messages \
follow the console, and what it lacks becomes something alike (`x` for `×`) or an escape.
- On a terminal, control characters and changes of the writing direction in a model's text are shown (`\\x1b`) and \
not obeyed; line breaks and tabs pass. In a pipe or a file the text is exact. Names and messages that models bring \
are shown in the same way wherever they are printed.
- Standard output that is closed, or full, is an error (1) that says so, where it can be before the model runs. \
What cannot be written to standard error is left out, and changes neither the data nor the exit code. A reader of \
standard output that leaves early ends the command quietly.
- With `-n 0` nothing runs: the text is empty, the prompt's tokens are counted and the cache that they would take \
is predicted. A `--prompt-cache` stays as it was.
- With `--json`, whatever fails once the command line is read leaves one document with `error`.
- A chat template is a program of the model. It runs in a sandbox without files and network, and whatever it raises \
is an error in one line, but it is trusted to end and to be modest with memory: Ctrl-C ends one that is not, \
`ulimit -v` bounds its memory, `--raw` leaves it out.
"""
TEXTS = """## Texts from files and pipes

Prompts are read as UTF-8, or as the Unicode that a byte order mark at their beginning names; the mark is no part of
them. UTF-16 without a mark and bytes that are no text are refused by name.

- `--prompt-file`, standard input: the whole text is the prompt, but for one line end (LF or CR LF) at its end.
- `--prompts`: each line is a prompt, or an object in a `.jsonl` or `.ndjson` file. LF and CR LF end a line and nothing
  else does: a lone CR stays in the text, as do the other characters that Unicode calls line ends. Lines of white space
  are left out. A pipe will do, as in `--prompts <(...)`.

## Many prompts

A line that cannot run gets a record with an `error` and the others run; the exit code is then 1. In float32 each line
gets the tokens that it gets alone. In 16 bits rounding may differ with the number of rows that decode together, as in
every engine, and a near tie may fall the other way.

Rows decode together in a joined dynamic cache, each as long as the longest. One starts beside the others when the cache
of all of them, at their limits, has room in the memory that the device reports as free (on Linux also what the control
groups leave), less a tenth; until then it waits. A smaller `--max-new-tokens` lets more of them in. A row alone is
always tried: it may end before its limit. Where the memory or the cache's size is not known, `--batch-size` alone
decides. When something fails with several rows at once, half of them go on and the others start over when these have
ended, with the same tokens; what fails with one row alone ends that row.

`--engine native`, `--compile`, speculation and all that is said about the cache are for single runs, and refused.

`--output` is in the order of the input. `--resume` goes on with a file that was made from the same lines by the same
model (all bytes of its weights) with the same options, else it is refused; a file from before these were recorded is
gone on with, and a note says so. Errors and interrupted lines are done again.
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
    return "\n".join([INTRODUCTION, *sections, TEXTS])


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"  # whatever terminal this runs in
    PAGE.write_text(page(), encoding="utf-8")
