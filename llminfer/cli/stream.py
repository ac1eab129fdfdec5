"""The events of a run to standard output as they come; Ctrl-C ends the run and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llminfer.cli.errors import say
from llminfer.cli.standard_streams import write_text

if TYPE_CHECKING:
    from types import FrameType

    from llminfer.events import Event, Finished, Step, Trace


def text_of(event: Step | Finished) -> str:
    """What a reader sees of an event."""
    return event.text


def stream(
    events: Generator[Event, None, None], *, announce: bool, show: Callable[[Step | Finished], str] | None = text_of
) -> Trace:
    """Write what `show` makes of each event, until the run has ended or was interrupted; `announce` it first."""
    from llminfer.events import Finished, Started, Step, Trace
    from llminfer.render.summary import started_line

    trace = Trace()
    with interrupts() as interrupt:
        event: Event | None = next(events)
        while event is not None:
            trace.add(event)
            # from the first token on: what is being written is written to its end
            interrupt.may_wait = isinstance(event, Step | Finished)
            if isinstance(event, Started) and announce:
                say(started_line(event))
            if isinstance(event, Step | Finished) and show is not None:
                write_text(show(event))
            if isinstance(event, Finished):
                break
            event = events.throw(KeyboardInterrupt()) if interrupt.pending else next(events, None)
    return trace


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed, and whether it may wait for the step that is under way."""

    pending: bool = False
    may_wait: bool = False


@contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Ctrl-C ends the run after the step that is under way, so that no token is lost; a second one at once.

    Where whoever started us has Ctrl-C ignored, as shells do for what runs in the background, it stays so.
    """
    state = Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield state
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if state.pending or not state.may_wait:
            raise KeyboardInterrupt
        state.pending = True

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: whoever runs us there decides
        yield state
        return
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, previous)
