"""plan(instances, lookup): which stages are fresh, stale or waiting, and why. Pure: all facts are handed in.

A stage is fresh when a record under its key has its output here; stale when all its inputs are known and no
record is; waiting when an input is stale or waiting, so that its key is not known yet (it may turn out fresh).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from qdc.graph.instances import LOCK, Instance

Lookup = Callable[[str], "dict[str, Any] | None"]
Files = Callable[[str], "dict[str, str] | None"]
"""Digest of a kind's code -> its files and their digests, where that is remembered."""
State = Literal["fresh", "stale", "waiting"]


@dataclass(frozen=True)
class Stage:
    """One planned instance. `output`: tree digest when fresh; `key`: null while waiting."""

    instance: Instance
    state: State
    key: str | None
    output: str | None
    inputs: dict[str, str] = field(default_factory=dict)
    reasons: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"name": self.instance.name, "state": self.state, "reasons": list(self.reasons), "key": self.key}


@dataclass(frozen=True)
class Plan:
    stages: tuple[Stage, ...]

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.instance.name == name)

    @property
    def fresh(self) -> bool:
        return all(stage.state == "fresh" for stage in self.stages)

    def names(self, state: State) -> list[str]:
        return [stage.instance.name for stage in self.stages if stage.state == state]


def plan(instances: list[Instance], lookup: Lookup, latest: Lookup | None = None, files: Files | None = None) -> Plan:
    """Decide each instance (given in an order in which inputs come first).

    `lookup(key)` gives the record under a key or None; `latest(name)` the last record of an instance and
    `files(digest)` what was in a kind's code, both for reasons alone.
    """
    done: dict[str, Stage] = {}
    for instance in instances:
        done[instance.name] = _decide(instance, done, lookup, latest, files)
    return Plan(tuple(done.values()))


def _decide(
    instance: Instance, done: dict[str, Stage], lookup: Lookup, latest: Lookup | None, files: Files | None
) -> Stage:
    digests: dict[str, str] = {}
    waits = []
    for role, source in sorted(instance.inputs.items()):
        if source.startswith("tree:"):
            digests[role] = source[5:]
        elif source.startswith(LOCK):
            waits.append({"kind": "lock", "what": source[len(LOCK) :], "was": None, "now": None})
        elif (output := done[source].output) is not None:
            digests[role] = output
        else:
            waits.append({"kind": "upstream", "what": source, "was": None, "now": done[source].state})
    if waits:
        return Stage(instance, "waiting", None, None, digests, tuple(waits))
    key = instance.key(digests)
    record = lookup(key)
    if record is not None:
        return Stage(instance, "fresh", key, record["output"], digests)
    before = latest(instance.name) if latest else None
    return Stage(instance, "stale", key, None, digests, tuple(explain(before, instance.components(digests), files)))


def explain(before: dict[str, Any] | None, now: dict[str, Any], files: Files | None = None) -> list[dict[str, Any]]:
    """What differs between the last record's key components and the present ones, smallest parts first."""
    if before is None:
        return [{"kind": "new", "what": "never built in this store", "was": None, "now": None}]
    was = before["components"]
    reasons: list[dict[str, Any]] = []
    for path, old, new in differences(was["params"], now["params"]):
        reasons.append({"kind": "parameter", "what": path, "was": old, "now": new})
    for kind, name in (("inputs", "input"), ("packages", "package")):
        for path, old, new in differences(was[kind], now[kind]):
            reasons.append({"kind": name, "what": path, "was": old, "now": new})
    if was.get("code") != now["code"]:
        reasons += _code_reasons(was.get("code"), now, files)
    for part in ("determinism", "scheme"):
        if was.get(part) != now[part]:
            reasons.append({"kind": part, "what": now["stage"], "was": was.get(part), "now": now[part]})
    return reasons or [
        {"kind": "output", "what": "the output is missing or damaged", "was": before.get("output"), "now": None}
    ]


def _code_reasons(was: str | None, now: dict[str, Any], files: Files | None) -> list[dict[str, Any]]:
    """The files of a stage's code that changed, where both sides are remembered; else that it changed."""
    old = files(was) if files and was else None
    new = files(now["code"]) if files else None
    if old is None or new is None:
        return [{"kind": "code", "what": now["stage"], "was": was, "now": now["code"]}]
    return [{"kind": "file", "what": path, "was": a, "now": b} for path, a, b in differences(old, new)]


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Leaf paths at which two JSON values differ, in order, with both values (None where absent)."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in sorted(a.keys() | b.keys()):
            found += differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            item
            for index, (x, y) in enumerate(zip(a, b, strict=True))
            for item in differences(x, y, f"{path}.{index}" if path else str(index))
        ]
    return [] if a == b and type(a) is type(b) else [(path, a, b)]
