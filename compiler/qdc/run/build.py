"""plan -> artifacts: lets an executor run what is stale, keeps its records, and writes the build record.

After every finished stage the plan is made anew, so that an output that did not change leaves what follows fresh.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.instances import Instance
from qdc.graph.plan import Plan, Stage, plan
from qdc.run.code import files
from qdc.run.log import Decisions
from qdc.run.settings import Settings
from qdc.store.store import Store
from qdc.store.use import in_use

if TYPE_CHECKING:
    from qdc.run.executor import Ended, Executor
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
    resources: ExitStack


LOOK_AGAIN_S, HEAR_S = 0.2, 0.05
"""How soon to look again at a stage that another build is making, and to hear of one that is asked for elsewhere."""


class Build:
    """One build of one recipe's instances in one store; `before(stage)` is called before a stage runs, may raise.

    `signature`: of qdc's own files when the instances were made (`graph.signature`). `names`: name of an instance here
    -> its name in its recipe, where they differ (instances of several recipes). `going`: a stage that fails is noted in
    `failed`, under its key, and what does not need it goes on."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        instances: list[Instance],
        listener: Listener,
        before: Callable[[Stage], None] = lambda stage: None,
        signature: str = "",
        names: Mapping[str, str] | None = None,
        going: bool = False,
    ) -> None:
        self.store, self.settings, self.instances, self.listener = store, settings, instances, listener
        self.before, self.signature, self.names, self.going = before, signature, names or {}, going
        self.seconds: dict[str, float] = {}
        self.running: dict[str, _Running] = {}
        self.failed: dict[str, QdcError] = {}
        self.elsewhere: set[str] = set()
        self.decisions: Decisions | None = None
        self.through: Through | None = None
        self.executor: Executor | None = None
        self.asked = False

    @property
    def notes(self) -> list[str]:
        """What the user must hear of the remote: what was wrong there and was not used."""
        return [f"{text}; it was not used" for text in self.through.notes] if self.through is not None else []

    def plan(self) -> Plan:
        return plan(
            self.instances, self.store.record, lambda name: self.store.latest(self._real(name)), files(self.store)
        )

    def _real(self, name: str) -> str:
        return self.names.get(name, name)

    def run(self, only: set[str] | None = None) -> list[Ran]:
        """Run until all (or all that `only` names) is fresh, or all that can be; returns what is, in the plan's order.

        Raises QdcError of the first stage that fails, unless it is `going` on.
        """
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
                if self._done(wanted):
                    break
                self._start_ready(wanted)
                self._wait()
                current = self.plan()
                self.decisions.plan(current)
        finally:
            self._stop()
            self.store.memo.save()
        fresh = [stage for stage in wanted if stage.state == "fresh"]
        for stage in fresh:
            self.store.counted(self._real(stage.instance.name), str(stage.key))
        return [
            Ran(
                stage.instance.name,
                stage.instance.name in self.seconds,
                self.seconds.get(stage.instance.name, 0.0),
                stage.output or "",
                self.through is not None and stage.key in self.through.fetched,
            )
            for stage in fresh
        ]

    def _done(self, wanted: list[Stage]) -> bool:
        """Whether nothing is left to do: all is fresh, or what is not needs a stage that failed."""
        if all(stage.state == "fresh" for stage in wanted):
            return True
        able = any(stage.state == "stale" and stage.key not in self.failed for stage in wanted)
        return bool(self.failed) and not self.running and not able

    def _wait(self) -> None:
        """Serve the stages that run until one has ended, and finish it."""
        limit_s = HEAR_S if self.asked else LOOK_AGAIN_S if self.elsewhere else None
        if self.executor is None:
            time.sleep(limit_s or 0.0)
        elif self.running or limit_s is not None:
            ended = self.executor.wait(limit_s)
            if ended is not None:
                self._finish(ended)

    def _stop(self) -> None:
        """End what runs, and let go of what it holds, whatever goes wrong meanwhile."""
        with ExitStack() as last:
            for item in self.running.values():
                last.enter_context(item.resources)
            if self.executor is not None:
                last.callback(self.executor.stop)
            if self.through is not None:
                self.through.close()

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
        """Start every stale stage that there is room for; of two with the same key, one."""
        self.asked = False
        for stage in wanted:
            key = str(stage.key)
            if stage.state != "stale" or key in self.running or key in self.failed or self._fetches(stage):
                continue
            if self._executor(wanted).room(stage.instance, [item.stage.instance for item in self.running.values()]):
                with self._failing(stage):
                    self._start(stage)

    def _executor(self, wanted: list[Stage]) -> Executor:
        """What runs stages, ready for all that may have to run."""
        if self.executor is None:
            from qdc.run.executor import executor

            self.executor = executor(self.store, self.settings, self.signature)
            self.executor.prepare([stage for stage in wanted if stage.state != "fresh"])
        return self.executor

    @contextlib.contextmanager
    def _failing(self, stage: Stage) -> Iterator[None]:
        """A failure in here is that stage's alone, where the build is to go on."""
        try:
            yield
        except QdcError as error:
            self._became(stage.instance.name, "failed")
            if not self.going:
                raise
            self.failed[str(stage.key)] = error

    def _start(self, stage: Stage) -> None:
        """Start a stage, or note that another build makes it (or has just made it): waiting for its lock would
        leave this build's own stages unserved, and two builds could wait for each other."""
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
            self.listener.started(instance.name)
            named = replace(stage, instance=replace(instance, name=self._real(instance.name)))
            assert self.executor is not None
            self.executor.start(named, self._report(instance), lock)
        except BaseException:
            resources.close()
            raise
        self.running[key] = _Running(stage, resources)

    def _became(self, name: str, state: str, output: str | None = None) -> None:
        if self.decisions is not None:
            self.decisions.became(name, state, output)

    def _report(self, instance: Instance) -> Callable[[int, int, str], None]:
        return lambda done, total, note: self.listener.progress(instance.name, done, total, note)

    def _finish(self, ended: Ended) -> None:
        """Keep what an ended stage made, or its failure; its lock and staging folder go either way."""
        item = self.running.pop(ended.key)
        name = item.stage.instance.name
        with item.resources, contextlib.closing(ended), self._failing(item.stage):
            record = ended.record()
            self.store.add_record(ended.key, record)
            if self.store.record(ended.key) is None:
                raise QdcError(
                    "store.lost",
                    f"the store lost what stage {self._real(name)} made",
                    file=self.store.root,
                    exit_code=COULD_NOT,
                    hint="something else writes to the store, or its disk fails; `qdc store verify` reads all of it",
                )
            self.store.forget_partial(ended.key)
            self._became(name, "ran", record["output"])
            self.seconds[name] = record["seconds"]
            self.listener.finished(name, record["seconds"], record["output"])


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
