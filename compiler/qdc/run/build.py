"""plan -> artifacts: runs what is stale, publishes it, and writes the build record.

As many stages of the "compute" lane as the user allows run at a time, and one of the "io" lane beside them. After every
finished stage the plan is made anew, so that an output that did not change leaves what follows fresh.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.instances import Instance
from qdc.graph.plan import Plan, Stage, plan
from qdc.graph.table import KINDS
from qdc.run.code import files
from qdc.run.log import Decisions
from qdc.run.settings import Settings
from qdc.store.store import Store
from qdc.store.use import in_use

if TYPE_CHECKING:
    from qdc.run import process
    from qdc.run.through import Through


class Listener(Protocol):
    """Hears how a build goes. All calls come from one thread."""

    def planned(self, plan: Plan) -> None: ...
    def started(self, name: str) -> None: ...
    def progress(self, name: str, done: int, total: int, note: str) -> None: ...
    def finished(self, name: str, seconds: float, output: str) -> None: ...


@dataclass
class Ran:
    """A stage of this build: `ran` is False when its output was in the store, or was `fetched` from the remote."""

    name: str
    ran: bool
    seconds: float
    output: str
    fetched: bool = False

    def as_json(self) -> dict[str, Any]:
        row = {"name": self.name, "ran": self.ran, "seconds": round(self.seconds, 3), "output": self.output}
        return {**row, "fetched": self.fetched}


@dataclass
class _Running:
    stage: Stage
    worker: process.Worker
    output: Path
    resources: ExitStack = field(default_factory=ExitStack)


LOOK_AGAIN_S, HEAR_S = 0.2, 0.05
"""How soon to look again at a stage that another build is making, and to hear of one that is asked for elsewhere."""


class Build:
    """One build of one recipe's instances in one store; `before(stage)` is called before a stage runs, may raise.

    `signature`: of qdc's own files when the instances were made (`graph.signature`); a worker that finds others looks
    whether its stage's code still means the same."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        instances: list[Instance],
        listener: Listener,
        before: Callable[[Stage], None] = lambda stage: None,
        signature: str = "",
    ) -> None:
        self.store, self.settings, self.instances, self.listener = store, settings, instances, listener
        self.before, self.signature = before, signature
        self.seconds: dict[str, float] = {}
        self.running: dict[str, _Running] = {}
        self.elsewhere: set[str] = set()
        self.decisions: Decisions | None = None
        self.through: Through | None = None
        self.asked = False

    @property
    def notes(self) -> list[str]:
        """What the user must hear of the remote: what was wrong there and was not used."""
        return [f"{text}; it was not used" for text in self.through.notes] if self.through is not None else []

    def plan(self) -> Plan:
        return plan(self.instances, self.store.record, self.store.latest, files(self.store))

    def run(self, only: set[str] | None = None) -> list[Ran]:
        """Run until all (or all that `only` names) is fresh. Raises QdcError of the first stage that fails."""
        with in_use(self.store.root):
            return self._run(only)

    def _run(self, only: set[str] | None) -> list[Ran]:
        current = self.plan()
        self.decisions = Decisions(current)
        self.listener.planned(current)
        try:
            while True:
                wanted = [stage for stage in current.stages if only is None or stage.instance.name in only]
                self._welcome(wanted)
                if all(stage.state == "fresh" for stage in wanted):
                    break
                self._start_ready(wanted)
                self._wait()
                current = self.plan()
                self.decisions.plan(current)
        finally:
            self._stop()
            self.store.memo.save()
        for stage in wanted:
            self.store.counted(stage.instance.name, str(stage.key))
        return [
            Ran(
                stage.instance.name,
                stage.instance.name in self.seconds,
                self.seconds.get(stage.instance.name, 0.0),
                stage.output or "",
                self.through is not None and stage.key in self.through.fetched,
            )
            for stage in wanted
        ]

    def _wait(self) -> None:
        """Serve the workers until one has ended, and finish its stage."""
        from qdc.run import process

        workers = [item.worker for item in self.running.values()]
        ended = process.wait_any(workers, HEAR_S if self.asked else LOOK_AGAIN_S if self.elsewhere else None)
        if ended is not None:
            self._finish(ended)

    def _stop(self) -> None:
        """End what runs, and let go of what it holds."""
        if self.through is not None:
            self.through.close()
        if not self.running:
            return
        from qdc.run import process

        process.stop([item.worker for item in self.running.values()])
        for item in self.running.values():
            item.resources.close()

    def _welcome(self, wanted: list[Stage]) -> None:
        """Say which stages have come from the remote or were finished by another build meanwhile."""
        if self.through is not None:
            for name, done, total, note in self.through.heard():
                self.listener.progress(name, done, total, note)
            for stage in wanted:
                if stage.state == "fresh" and stage.key in self.through.came:
                    seconds = self.through.came.pop(stage.key)
                    self._became(stage.instance.name, "fetched", stage.output)
                    self.listener.finished(stage.instance.name, seconds, stage.output or "")
                    self.elsewhere.discard(stage.instance.name)
        for stage in wanted:
            if stage.state == "fresh" and stage.instance.name in self.elsewhere:
                self.listener.finished(stage.instance.name, 0.0, stage.output or "")
        self.elsewhere.clear()

    def _fetches(self, stage: Stage) -> bool:
        """Whether the remote, if there is one, is asked for a stage or gives its output."""
        if self.settings.remote is None:
            return False
        if self.through is None:
            from qdc.run.through import Through

            self.through = Through(self.store, self.settings.remote)
        taken = self.through.takes(stage.instance.name, str(stage.key))
        self.asked = self.asked or taken
        return taken

    def _start_ready(self, wanted: list[Stage]) -> None:
        """Start every stale stage whose lane has room; of two with the same key, one."""
        self.asked = False
        for stage in wanted:
            if stage.state != "stale" or stage.instance.name in self.running or self._fetches(stage):
                continue
            others = [item.stage for item in self.running.values()]
            beside = sum(other.instance.lane == stage.instance.lane for other in others)
            room = self.settings.jobs if stage.instance.lane == "compute" else 1
            if beside < room and all(other.key != stage.key for other in others):
                self._start(stage)

    def _start(self, stage: Stage) -> None:
        """Start a stage, or note that another build makes it (or has just made it): waiting for its lock would
        leave this build's own workers unserved, and two builds could wait for each other."""
        from qdc.run import process

        instance, key = stage.instance, str(stage.key)
        resources = ExitStack()
        try:
            lock = resources.enter_context(self.store.lock(key, wait=False))
            if lock is None or self.store.record(key) is not None:
                resources.close()
                self.elsewhere.add(instance.name)
                self.listener.progress(instance.name, 0, 0, "another build makes it")
                return
            self.before(stage)
            work = resources.enter_context(self.store.staging())
            inputs = {}
            for role, digest in stage.inputs.items():
                self.store.link_out(digest, work / "inputs" / role)
                inputs[role] = str(work / "inputs" / role)
            output = work / "output"
            output.mkdir()
            job = {
                "module": KINDS[instance.kind].module,
                "params": instance.params,
                "inputs": inputs,
                "digests": stage.inputs,
                "output": str(output),
                "partial": str(self.store.partial(key)),
                "threads": self.settings.threads,
                "packages": instance.packages,
                "kind": instance.kind,
                "code": instance.code,
                "data": bool(KINDS[instance.kind].data),
                "signature": self.signature,
            }
            python = self.settings.train_python if instance.environment == "train" else sys.executable
            self.listener.started(instance.name)
            log, report = self.store.log_path(key), self._report(instance)
            worker = process.start(instance.name, python, job, work, log, report, keep=(lock,))
        except BaseException:
            resources.close()
            raise
        self.running[instance.name] = _Running(stage, worker, output, resources)

    def _became(self, name: str, state: str, output: str | None = None) -> None:
        if self.decisions is not None:
            self.decisions.became(name, state, output)

    def _report(self, instance: Instance) -> Callable[[int, int, str], None]:
        return lambda done, total, note: self.listener.progress(instance.name, done, total, note)

    def _finish(self, worker: process.Worker) -> None:
        """Publish what an ended worker made, or raise its failure; its lock and staging folder go either way."""
        item = self.running.pop(worker.name)
        with item.resources:
            self._became(worker.name, "failed")
            if worker.process.returncode != 0:
                raise worker.failure(worker.process.returncode)
            if not any(path.is_file() for path in item.output.rglob("*")):
                raise QdcError(
                    "stage.empty", f"stage {worker.name} left no output", file=worker.log, exit_code=COULD_NOT
                )
            tree = self.store.publish(item.output)
            self.store.add_record(str(item.stage.key), self._record(item.stage, tree.digest, worker))
            if self.store.record(str(item.stage.key)) is None:
                raise QdcError(
                    "store.lost",
                    f"the store lost what stage {worker.name} made",
                    file=self.store.root,
                    exit_code=COULD_NOT,
                    hint="something else writes to the store, or its disk fails; `qdc store verify` reads all of it",
                )
            self.store.forget_partial(str(item.stage.key))
        self._became(worker.name, "ran", tree.digest)
        self.seconds[worker.name] = worker.seconds
        self.listener.finished(worker.name, worker.seconds, tree.digest)

    def _record(self, stage: Stage, output: str, worker: process.Worker) -> dict[str, Any]:
        instance = stage.instance
        return {
            "instance": instance.name,
            "stage": instance.kind,
            "determinism": instance.determinism,
            "components": instance.components(stage.inputs),
            "output": output,
            "seconds": round(worker.seconds, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "threads": self.settings.threads,
            "hardware": hardware(),
        }


def hardware() -> dict[str, Any]:
    """What the build record says of this machine: architecture, cores, processor model."""
    import platform

    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"machine": platform.machine(), "cores": os.cpu_count(), "processor": model}


def save_build(store: Store, record: dict[str, Any]) -> str:
    """Keep a build record under a new id (UTC time and a counter); returns the id."""
    with store.lock("builds"):
        base = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        taken, number = set(store.builds()), 0
        while (id := f"{base}-{number}") in taken:
            number += 1
        store.add_build({**record, "build": id})
    return id


def artifact_json(store: Store, tree_digest: str, name: str) -> Any:
    """A JSON file of a published artifact; QdcError if it is not there or damaged."""
    return json.loads(store.read(tree_digest, name))
