"""One monotonic clock; the device is synchronised before it is read."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Laps and elapsed time in seconds, from the moment the clock is made.

    Args:
        synchronize: waits until the device has done all it was given; nothing on a CPU.
        now: the monotonic time source.
    """

    __slots__ = ("_last_s", "_now", "_start_s", "_synchronize")

    def __init__(
        self, synchronize: Callable[[], None] = lambda: None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize, self._now = synchronize, now
        self._start_s = self._last_s = now()

    def lap(self) -> float:
        """Seconds since the last lap (or the start), with the device's work done."""
        self._synchronize()
        now_s = self._now()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s

    def skip(self) -> None:
        """Leave the time since the last lap out of everything that is measured."""
        self._start_s += self.lap()

    def elapsed(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last_s - self._start_s
