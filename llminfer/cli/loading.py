"""Loading a model on the command line: what people see on the way, and what is quicker in a process of our own."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from llminfer.hub import hide_bars
from llminfer.request import LoadRequest

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel
    from llminfer.loader import LoadProgress, Progress


def load(request: LoadRequest, *, verbose: bool, **asked: Any) -> tuple[LoadedModel, LoadedModel | None]:
    """The model, and the one that drafts for it, with what people see on the way; `asked` is for `load_model`."""
    from llminfer.loader import load_model

    with quick_start(), no_data(), _shown(verbose) as progress:
        return load_model(request, progress=progress, **asked)


@contextmanager
def _shown(verbose: bool) -> Iterator[Progress]:
    """Shows one stage after the other; a bar for a conversion, which takes long."""
    with ExitStack() as stack:
        stage, advance = "", None

        def show(event: LoadProgress) -> None:
            nonlocal stage, advance
            if event.stage != stage:
                stack.close()
                stage, advance = event.stage, None
                if stage == "convert":
                    from llminfer.render.progress import progress_bar

                    advance = stack.enter_context(progress_bar(f"converting {event.name}, once", shown=verbose))
                elif stage == "fetch":
                    if not (verbose and sys.stderr.isatty()):
                        hide_bars()
                else:
                    stack.enter_context(status(f"loading {event.name}", verbose))
            if stage == "load":
                from llminfer.engine.load import quiet_transformers

                quiet_transformers()
            if advance is not None and event.step:
                advance(event.step, event.done, event.total)

        yield show


@contextmanager
def no_data() -> Iterator[None]:
    """What libraries print while they load is no data, so it goes to standard error, from Rust and C++ as well."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def quick_start() -> Iterator[None]:
    """Import, convert and load without looking for garbage: what comes in stays for as long as the process does.

    Looking through it again and again takes a tenth of the time. Only for the first import of torch: a
    process that has it already may hold garbage that this would keep.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def status(text: str, verbose: bool) -> Iterator[None]:
    """A line on the terminal while something is under way, gone afterwards."""
    if not verbose or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from llminfer.render.console import make_console

    with make_console(sys.stderr).status(text):
        yield
