"""A progress bar on standard error; in a log, one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from llminfer.render.console import make_console
from llminfer.units import visible


@contextmanager
def progress_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that takes a stage's name, what is done, and what there is in all (0: unknown)."""
    if not shown:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        print(f"{visible(title)} ...", file=sys.stderr, flush=True)
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console(sys.stderr), transient=True) as progress:
        task = progress.add_task(visible(title), total=None)

        def advance(stage: str, done: int, total: int) -> None:
            progress.update(task, description=visible(f"{title}: {stage}"), completed=done, total=total or None)

        yield advance


@contextmanager
def count_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Give a function to call when one more is done; on a terminal a bar counts them."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (TextColumn("{task.description} {task.completed}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console(sys.stderr), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda: progress.advance(task)
