"""User settings of a cluster: where it is, what a stage of a kind needs of a node, in how many processes it trains.

In config.yaml, all of it optional:

    executor: ray
    ray:
      address: 10.0.0.5:6379         # of the head; QDC_RAY_ADDRESS, RAY_ADDRESS; none: one of its own here
      store: /scratch/qdc            # each node's own store; QDC_NODE_STORE on a node goes before it
      pass: [AWS_ACCESS_KEY_ID]      # variables that reach the nodes' back end of the remote (not the stages)
      retries: 3                     # times that a stage is started again whose worker or node was lost
      partial_seconds: 60            # how often unfinished work goes to the remote, at most
      needs:
        default: {cpus: 1, gpus: 0, memory_gb: 2}
        distill: {cpus: 8, gpus: 4, memory_gb: 200}
    processes: {distill: 4}
    device: cuda                     # a stage with models then needs a card for each process, unless `gpus` says more

Nothing here is in a key. This module knows names and numbers, not Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from qdc.core.errors import QdcError

MEMORY_GB = 2.0


@dataclass(frozen=True)
class Need:
    """What a stage reserves of a node; `memory` in bytes."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: float = MEMORY_GB * 1e9

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs and {self.memory / 1e9:.3g} GB"


@dataclass(frozen=True)
class Cluster:
    """`address`: host:port of the head, or None for a cluster of this build's own on this machine. `passed`: names of
    environment variables; `needs`: kind of stage -> what it needs, `default` for all others."""

    address: str | None = None
    store: str | None = None
    passed: tuple[str, ...] = ()
    retries: int = 3
    partial_s: float = 60.0
    needs: Mapping[str, Need] = field(default_factory=dict)

    def need(self, kind: str) -> Need:
        return self.needs.get(kind) or self.needs.get("default") or Need()


def cluster(given: Any, address: str | None, threads: int, file: Path) -> Cluster:
    """`given`: the settings file's `ray`. Raises QdcError naming what is wrong in it."""
    values = _mapping(given, "ray", {"address", "store", "pass", "retries", "partial_seconds", "needs"}, file)
    named = (address, os.environ.get("QDC_RAY_ADDRESS"), values.get("address"), os.environ.get("RAY_ADDRESS"))
    found = next((str(value) for value in named if value), None)
    passed = values.get("pass", [])
    if not isinstance(passed, list) or not all(isinstance(name, str) for name in passed):
        _wrong("ray.pass", "a list of names of environment variables", passed, file)
    default = Need(cpus=float(threads))
    needs = {"default": default}
    for kind, value in _mapping(values.get("needs"), "ray.needs", {"default", *_kinds()}, file).items():
        place = f"ray.needs.{kind}"
        row = _mapping(value, place, {"cpus", "gpus", "memory_gb"}, file)
        needs[kind] = Need(
            _number(row.get("cpus", default.cpus), f"{place}.cpus", file),
            _number(row.get("gpus", 0), f"{place}.gpus", file),
            _number(row.get("memory_gb", MEMORY_GB), f"{place}.memory_gb", file) * 1e9,
        )
    return Cluster(
        None if found in (None, "local") else found,
        str(values["store"]) if values.get("store") else None,
        tuple(passed),
        int(_number(values.get("retries", 3), "ray.retries", file)),
        _number(values.get("partial_seconds", 60), "ray.partial_seconds", file),
        needs,
    )


def processes(given: Any, file: Path) -> dict[str, int]:
    """`given`: the settings file's `processes`: kind -> number. Raises QdcError for a kind that trains in one only."""
    if not given:
        return {}
    from qdc.graph.table import KINDS

    able = [kind for kind, row in KINDS.items() if row.parallel]
    found = {}
    for kind, value in _mapping(given, "processes", _kinds(), file).items():
        count = int(_number(value, f"processes.{kind}", file))
        if count < 1 or (count > 1 and kind not in able):
            _wrong(f"processes.{kind}", f"1 ({', '.join(able) or 'none'} can run in more)", value, file)
        found[kind] = count
    return found


def _kinds() -> set[str]:
    from qdc.graph.table import KINDS

    return set(KINDS)


def _mapping(value: Any, place: str, known: set[str], file: Path) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or set(value) - known:
        odd = ", ".join(sorted(map(str, set(value) - known))) if isinstance(value, dict) else value
        _wrong(place, f"a mapping of {', '.join(sorted(known))}", odd, file)
    return dict(value)


def _number(value: Any, place: str, file: Path) -> float:
    """A number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        _wrong(place, "a number from 0 up", value, file)
    return float(value)


def _wrong(place: str, wanted: str, value: Any, file: Path) -> NoReturn:
    raise QdcError(f"settings.{place}", f"{place} must be {wanted}, not `{value}`", file=file, hint=f"correct {file}")
