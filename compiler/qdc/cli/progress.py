"""How a build shows how far it is: bars on a terminal, plain lines in a pipe, nothing when asked to be quiet."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdc.graph.plan import Plan

LINE_INTERVAL_S = 10.0


class Quiet:
    """Says nothing."""

    def planned(self, plan: Plan) -> None: ...
    def started(self, name: str) -> None: ...
    def progress(self, name: str, done: int, total: int, note: str) -> None: ...
    def finished(self, name: str, seconds: float, output: str) -> None: ...
    def close(self) -> None: ...


class Lines(Quiet):
    """One line when a stage starts and ends, and every ten seconds in between."""

    def __init__(self) -> None:
        self.said: dict[str, float] = {}

    def planned(self, plan: Plan) -> None:
        stale, waiting = plan.names("stale"), plan.names("waiting")
        if stale:
            _line(f"{len(plan.names('fresh'))} fresh, {len(stale)} stale, {len(waiting)} waiting")

    def started(self, name: str) -> None:
        self.said[name] = time.monotonic()
        _line(f"{name}: started")

    def progress(self, name: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if now - self.said.get(name, 0.0) >= LINE_INTERVAL_S:
            self.said[name] = now
            _line(f"{name}: {f'{done}/{total} ' if total else ''}{note}".rstrip())

    def finished(self, name: str, seconds: float, output: str) -> None:
        _line(f"{name}: done in {seconds:.1f} s, output {output[:12]}")


class Bars(Quiet):
    """A live bar for each running stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self.tasks: dict[str, Any] = {}
        self.bars.start()

    def planned(self, plan: Plan) -> None:
        stale, waiting = plan.names("stale"), plan.names("waiting")
        if stale:
            self.bars.console.print(
                f"{len(plan.names('fresh'))} fresh, {len(stale)} stale, {len(waiting)} waiting", highlight=False
            )

    def started(self, name: str) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(name, total=None, note="")

    def progress(self, name: str, done: int, total: int, note: str) -> None:
        self.started(name)
        self.bars.update(self.tasks[name], completed=done, total=total or None, note=note)

    def finished(self, name: str, seconds: float, output: str) -> None:
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))
        self.bars.console.print(f"{name}  {seconds:.1f} s  {output[:12]}", highlight=False)

    def close(self) -> None:
        self.bars.stop()


def listener(quiet: bool) -> Quiet:
    """The listener that fits where the output goes."""
    if quiet:
        return Quiet()
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Lazy()
    return Lines()


class Lazy(Quiet):
    """Bars that are made when the first stage starts, so that a build with nothing to do imports no rich."""

    def __init__(self) -> None:
        self.bars: Bars | None = None

    def _made(self) -> Bars:
        if self.bars is None:
            self.bars = Bars()
        return self.bars

    def planned(self, plan: Plan) -> None:
        if not plan.fresh:
            self._made().planned(plan)

    def started(self, name: str) -> None:
        self._made().started(name)

    def progress(self, name: str, done: int, total: int, note: str) -> None:
        self._made().progress(name, done, total, note)

    def finished(self, name: str, seconds: float, output: str) -> None:
        self._made().finished(name, seconds, output)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.close()


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
