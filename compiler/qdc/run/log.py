"""The log of every build: what was decided about each stage, and why. A few kB a build, also of one that failed.

`log/<id>.json` in the store answers `qdc why STAGE LOG` later, when recipe, code and records have moved on. An id
begins with L, so that no build has it. A build that had nothing to do leaves none. This module decides nothing.
"""

from __future__ import annotations

import json
import time
from typing import Any

from qdc.core import canonical
from qdc.core.files import write_atomic
from qdc.graph.plan import Plan
from qdc.store.store import Store

MAX_EDITS = 20
MAX_REASONS = 12
"""Reasons kept of a stage; how many there were is kept too."""

Json = dict[str, Any]


class Decisions:
    """What a build decided: stage -> {state, key, reasons, more}, in the plan's order."""

    def __init__(self, plan: Plan) -> None:
        self.stages: dict[str, Json] = {}
        self.plan(plan)

    def plan(self, plan: Plan) -> None:
        """Take over the states of stages that have not been decided yet."""
        for stage in plan.stages:
            known = self.stages.get(stage.instance.name)
            if known is None or known["state"] == "waiting":
                reasons = list(stage.reasons)
                self.stages[stage.instance.name] = {
                    "state": stage.state,
                    "key": stage.key,
                    "reasons": reasons[:MAX_REASONS],
                    "more": max(0, len(reasons) - MAX_REASONS),
                }

    def became(self, name: str, state: str, output: str | None = None) -> None:
        """A stage ran, was fetched, or failed."""
        self.stages[name] |= {"state": state} | ({"output": output} if output else {})

    def of(self, names: dict[str, str]) -> Decisions:
        """Those of some stages, under other names: name there -> name here."""
        part = Decisions(Plan(()))
        for name, shared in names.items():
            part.stages[name] = self.stages[shared]
        return part

    @property
    def acted(self) -> bool:
        """Whether anything was done or should have been."""
        return any(stage["state"] != "fresh" for stage in self.stages.values())


def write_log(
    store: Store, started: float, recipe_file: str, recipe: str, edits: list[Json], decisions: Decisions, outcome: Json
) -> str:
    """Keep the log of a build; returns its id. `outcome`: {result: done | failed | interrupted, build, error}."""
    base = time.strftime("L%Y%m%d-%H%M%S", time.gmtime(started))
    with store.lock("log"):
        taken, number = set(logs(store)), 0
        while (id := f"{base}-{number}") in taken:
            number += 1
        value = {
            "log": id,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 3),
            "recipe_file": recipe_file,
            "recipe_name": recipe,
            "edits": edits[:MAX_EDITS],
            "stages": decisions.stages,
            **outcome,
        }
        write_atomic(store.root / "log" / f"{id}.json", canonical.dumps(value))
    return id


def logs(store: Store) -> list[str]:
    """Log ids, oldest first."""
    return sorted(path.stem for path in (store.root / "log").glob("*.json"))


def read_log(store: Store, id: str) -> Json | None:
    """A log; None where it is not there or cannot be read."""
    try:
        value = json.loads((store.root / "log" / f"{id}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def log_of_build(store: Store, build: str) -> Json | None:
    """The log of the run that made a build."""
    for id in reversed(logs(store)):
        value = read_log(store, id)
        if value is not None and value.get("build") == build:
            return value
    return None
