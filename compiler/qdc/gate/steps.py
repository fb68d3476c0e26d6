"""The checks of one gate as they are made: what goes wrong while one is made is its outcome.

A fault of the image is `fail`; without an engine nobody can say, which is `not-run`. Knows no single check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from qdc.core.errors import QdcError
from qdc.gate.container import NoEngine, docker_errors
from qdc.gate.report import IDS, Check
from qdc.gate.served import Gone

Report = Callable[[int, int, str], None]


class Stop(Exception):
    """No further check can run."""


class Steps:
    """`checks`: those that are made so far; `engine`: the docker client, once there is one."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.checks: list[Check] = []
        self.engine: Any = None

    def done(self, check: Check) -> Check:
        self.checks.append(check)
        self.report(len(self.checks), len(IDS), f"{check.id}: {check.outcome}")
        return check

    def has(self, id: str) -> bool:
        return any(check.id == id for check in self.checks)

    @property
    def failed(self) -> bool:
        return any(check.outcome == "fail" for check in self.checks)

    def check(self, id: str, make: Callable[[], Check]) -> Check:
        """What `make` finds, or that it failed. Raises Stop when nothing is left to ask."""
        with self.step(id, stop=False):
            return self.done(make())
        return self.checks[-1]

    @contextlib.contextmanager
    def step(self, id: str, *, stop: bool = True) -> Iterator[None]:
        """What goes wrong inside is the outcome of check `id`.

        With `stop`, and where the server or the engine is gone, it is the end: Stop is raised.
        """
        try:
            yield
        except NoEngine as error:
            self.done(Check(id, "not-run", None, words(error)))
            raise Stop from error
        except Gone as error:
            away = self.away()
            self.done(Check(id, "not-run" if away else "fail", None, away or words(error)))
            raise Stop from error
        except QdcError as error:
            self.done(Check(id, "fail", None, words(error)))
            if stop:
                raise Stop from error

    def away(self) -> str | None:
        """Why the engine no longer answers; None while it does, and where there is none."""
        if self.engine is None:
            return None
        try:
            with docker_errors("asking the engine"):
                self.engine.ping()
        except QdcError as error:
            return error.message
        return None


def words(error: QdcError) -> str:
    """An error in one text."""
    return f"{error.message} ({error.hint})" if error.hint else error.message
