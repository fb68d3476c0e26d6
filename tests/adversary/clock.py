"""A clock that stands still, jumps, or goes back, for file times and for `time.time_ns` alike.

The kernel's own times are mapped to the world's: whatever is written between two `set`s has one and the same time, so
that two edits within one tick look alike, as they do where the kernel's clock is coarse.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000
_stat, _lstat, _fstat, _time_ns = os.stat, os.lstat, os.fstat, time.time_ns


class Clock:
    """`now`: the world's time in ns."""

    def __init__(self, probe: Path) -> None:
        self._probe_file = probe
        self.now = START_NS
        self.latest = START_NS
        self._real: list[int] = []
        self._world: list[int] = []
        self._ticks = 0
        self.set(START_NS)

    def advance(self, seconds: int = 10) -> None:
        """Go on from the latest time there ever was."""
        self.latest += seconds * SECOND_NS
        self.set(self.latest)

    def back(self, seconds: int) -> None:
        """Go back, to an instant that no file has."""
        self._ticks += 1
        self.set(self.latest - seconds * SECOND_NS - self._ticks)

    def set(self, now: int) -> None:
        last = self._probe()
        while (start := self._probe()) <= last:
            pass
        self._real.append(start)
        self._world.append(now)
        self.now = now

    def _probe(self) -> int:
        self._probe_file.write_bytes(b"x")
        return _stat(self._probe_file).st_ctime_ns

    def seen(self, real: int) -> int:
        """The world's time of a file's time. Times from before the world began, or set to the future, stay."""
        at = bisect.bisect_right(self._real, real) - 1
        return real if at < 0 or real > self._real[-1] + 3600 * SECOND_NS else self._world[at]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within, everything that asks for a time gets the world's."""

        def changed(real: Any) -> Any:
            def call(*given: Any, **named: Any) -> os.stat_result:
                status = real(*given, **named)
                kind, (row, more) = status.__reduce__()
                for name in ("st_mtime_ns", "st_ctime_ns"):
                    more[name] = self.seen(getattr(status, name))
                    more[name[:-3]] = more[name] / SECOND_NS
                return kind(row, more)

            return call

        os.stat, os.lstat, os.fstat = changed(_stat), changed(_lstat), changed(_fstat)
        time.time_ns = lambda: self.now
        try:
            yield
        finally:
            os.stat, os.lstat, os.fstat, time.time_ns = _stat, _lstat, _fstat, _time_ns
