"""Where stages run. The build decides which; an executor starts them, hears of them and says which has ended.

`Local` runs them on this machine. `run.ray_executor` has the other one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from qdc.graph.instances import Instance
from qdc.graph.plan import Stage
from qdc.run import process
from qdc.run.attempt import Attempt
from qdc.run.settings import Settings
from qdc.store.store import Store

Report = Callable[[int, int, str], None]


class Ended(Protocol):
    """A stage that has ended."""

    key: str

    def record(self) -> dict[str, Any]:
        """What goes under its key, once its output is in the build's store. Raises QdcError where it failed."""
        ...

    def close(self) -> None: ...


class Executor(Protocol):
    """All calls come from one thread, and reports are made in that thread."""

    def prepare(self, stages: list[Stage]) -> None:
        """Before the first start: raises QdcError where one of the stages that may run could not."""
        ...

    def room(self, instance: Instance, beside: list[Instance]) -> bool:
        """Whether it may start beside those that run."""
        ...

    def start(self, stage: Stage, report: Report, lock: int) -> None: ...

    def wait(self, limit_s: float | None) -> Ended | None:
        """Serve all until one has ended or `limit_s` has passed (None)."""
        ...

    def stop(self) -> None:
        """End what runs; finished and partial work is kept."""
        ...


class Local:
    """As many stages of the compute lane as the user allows run at a time, and one of the io lane beside them."""

    def __init__(self, store: Store, settings: Settings, signature: str) -> None:
        self.store, self.settings, self.signature = store, settings, signature
        self.running: dict[int, Attempt] = {}

    def prepare(self, stages: list[Stage]) -> None: ...

    def room(self, instance: Instance, beside: list[Instance]) -> bool:
        same = sum(other.lane == instance.lane for other in beside)
        return same < (self.settings.jobs if instance.lane == "compute" else 1)

    def start(self, stage: Stage, report: Report, lock: int) -> None:
        attempt = Attempt(self.store, self.settings, stage, self.signature, report, lock)
        self.running[id(attempt.worker)] = attempt

    def wait(self, limit_s: float | None) -> Ended | None:
        ended = process.wait_any([attempt.worker for attempt in self.running.values()], limit_s)
        return None if ended is None else self.running.pop(id(ended))

    def stop(self) -> None:
        with contextlib.ExitStack() as last:
            for attempt in self.running.values():
                last.callback(attempt.close)
            process.stop([attempt.worker for attempt in self.running.values()])
            self.running.clear()


def executor(store: Store, settings: Settings, signature: str) -> Executor:
    """The one that the settings name."""
    if settings.executor == "ray":
        from qdc.run.ray_executor import Ray

        return Ray(store, settings, signature)
    return Local(store, settings, signature)
