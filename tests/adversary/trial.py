"""One history as it happens: a world, qdc on it, the oracle beside it, and what the two say after each step."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from adversary.clock import Clock
from adversary.driver import Engine, Outcome
from adversary.oracle import KIND, Disk, Expected, Oracle, digest_of
from adversary.world import Meaning, World

from qdc.core.errors import QdcError
from qdc.store.store import Store

FRESH, STALE, OTHER = "wrongly fresh", "wrongly stale", "otherwise wrong"
ATTEMPTS = 8


class Wrong(AssertionError):
    """A decision that is not right. `kind`: wrongly fresh, wrongly stale, or otherwise wrong."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind, self.what = kind, what


@dataclass
class Count:
    """What was seen over many histories."""

    histories: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    builds: int = 0
    decisions: int = 0
    reran: int = 0
    wrong: Counter[str] = field(default_factory=Counter)


def scratch() -> Path:
    """Where worlds are made: in memory, if that can be."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="qdc-world-", dir=memory if memory.is_dir() else None))


class Trial:
    """A world and what happens to it. `keys`: key of the engine -> sense of the oracle.

    `forgetful`: memos were lost, so that nobody knows any more which output was a stage's last.
    """

    def __init__(self, count: Count | None = None) -> None:
        self.count = count or Count()
        self.root = scratch()
        self.clock = Clock(self.root / "probe")
        self.world = World(self.root / "world")
        self.engine = Engine(self.world, self.clock)
        self.oracle = Oracle()
        self.keys: dict[str, str] = {}
        self.builds = 0
        self.forgetful = False
        self.clock.advance()

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def meaning(self) -> Meaning:
        return self.world.meaning

    @property
    def disk(self) -> Disk:
        return Disk(self.world.store)

    def expect(self) -> Expected:
        return self.oracle.expect(self.meaning, self.disk)

    def settle(self, maybe: frozenset[str] = frozenset()) -> Expected:
        """Build to the end and judge every decision; then a build with nothing to do must do nothing.

        `maybe`: senses whose records an interrupted build may have finished.
        """
        expected, damaged = self.expect(), self.disk.damaged()
        ran: Counter[str] = Counter()
        for attempt in range(ATTEMPTS):
            outcome = self.engine.build()
            self.count.builds += 1
            if attempt == 0:
                self._judge_states(outcome.states, expected, maybe)
            ran.update(expected.senses[stage] for stage in outcome.ran)
            if outcome.error is None:
                break
            if not (isinstance(outcome.error, QdcError) and outcome.error.id == "store.damaged" and damaged):
                raise outcome.error
        else:
            raise Wrong(OTHER, f"the build does not come to an end: {outcome.error}")
        self._judge_runs(ran, expected, maybe, repeats=attempt > 0)
        self._judge_outputs(outcome, expected)
        for key in {*expected.must, *maybe}:
            for stage, sense in expected.senses.items():
                if sense == key:
                    self.oracle.made(key, expected.outputs[stage])
        if self.disk.damaged() - damaged:
            raise Wrong(OTHER, "an object is damaged that was not before")
        self._judge_quiet(expected, outcome)
        self.last = expected
        return expected

    def _judge_quiet(self, expected: Expected, outcome: Outcome) -> None:
        """Right after a build, a plan finds everything fresh. The build's record is written then, as qdc does."""
        states = self.engine.plan()
        self.count.decisions += len(states)
        self.keys |= {str(key): expected.senses[stage] for stage, (_, key) in states.items()}
        bad = [f"{stage} is {state}" for stage, (state, _) in states.items() if state != "fresh"]
        if bad:
            raise Wrong(STALE, f"right after a build {', '.join(bad)}")
        self.builds += 1
        rows = [{"name": stage, "key": states[stage][1], "output": output} for stage, output in outcome.outputs.items()]
        image = {"artifact": outcome.outputs["pack"]}
        Store(self.world.store).add_build(
            {"build": f"{self.builds:04}", "recipe_file": str(self.world.recipe), "stages": rows, "image": image}
        )

    def _judge_states(self, states: dict[str, str], expected: Expected, maybe: frozenset[str]) -> None:
        for stage, state in states.items():
            sense = expected.senses[stage]
            self.count.decisions += 1
            if sense in maybe or sense in expected.found:
                continue
            if state == "fresh" and sense in expected.must:
                raise Wrong(FRESH, f"the plan calls {stage} fresh")
            if state == "stale" and sense not in expected.must:
                raise Wrong(STALE, f"the plan calls {stage} stale")

    def _judge_runs(self, ran: Counter[str], expected: Expected, maybe: frozenset[str], repeats: bool) -> None:
        names = {sense: stage for stage, sense in expected.senses.items()}
        self.count.decisions += len(KIND)
        self.count.reran += ran.total()
        for sense in expected.must:
            if sense not in maybe and not ran[sense]:
                raise Wrong(FRESH, f"{names[sense]} did not run")
        for sense, times in ran.items():
            if sense not in expected.must and sense not in maybe:
                raise Wrong(STALE, f"{names[sense]} ran")
            if times > 1 and not repeats:
                raise Wrong(STALE, f"{names[sense]} ran {times} times")

    def _judge_outputs(self, outcome: Outcome, expected: Expected) -> None:
        for stage in KIND:
            if outcome.outputs[stage] != digest_of(expected.outputs[stage]):
                raise Wrong(FRESH, f"the output of {stage} is not what its code, values and inputs make")

    def interrupted(self, outcome: Outcome, expected: Expected) -> frozenset[str]:
        """Take note of what a build had recorded before it was stopped; returns what it may have recorded."""
        done = {expected.senses[stage] for stage in outcome.recorded}
        for stage in outcome.recorded:
            self.oracle.made(expected.senses[stage], expected.outputs[stage])
        return frozenset(expected.senses[stage] for stage in outcome.ran) - done
