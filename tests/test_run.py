"""Running builds: two at once, damage, workers that end badly. Stages are one-line scripts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from qdc.cli.progress import Quiet
from qdc.graph.instances import Instance
from qdc.run import process
from qdc.run.build import Build
from qdc.run.settings import Settings
from qdc.store.store import Store

STAGE = """
import json, os, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_bytes())
output = Path(job["output"])
with open(job["params"]["trace"], "a") as trace:
    trace.write(job["params"]["name"] + "\\n")
exec(job["params"]["code"])
"""
WRITE = "(output / 'x').write_text(job['params']['name'])"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that run the code in their parameters."""

    def start(
        name: str, python: str, job: dict[str, Any], work: Path, log: Path, progress: Any, keep: tuple[int, ...] = ()
    ) -> process.Worker:
        reading, writing = os.pipe()
        (work / "job.json").write_text(json.dumps(job))
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", STAGE, str(work / "job.json")],
            pass_fds=[writing, *keep],
            start_new_session=True,
        )
        os.close(writing)
        return process.Worker(name, child, os.fdopen(reading, "rb", buffering=0), log, time.monotonic(), progress)

    monkeypatch.setattr(process, "start", start)


class Scripts:
    """Instances whose stages are scripts, and how often each ran."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "trace"

    def instance(self, name: str, code: str = WRITE, lane: str = "io", **inputs: str) -> Instance:
        params = {"name": name, "code": code, "trace": str(self.trace)}
        return Instance(name, "prompts", params, inputs, "code", {}, "exact", "core", lane)

    def ran(self) -> list[str]:
        return self.trace.read_text().split() if self.trace.exists() else []


@pytest.fixture
def made(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def build(store: Path, *instances: Instance) -> list[str]:
    """Names of the stages that this build ran."""
    ran = Build(Store(store), Settings(sys.executable, 1), list(instances), Quiet()).run()
    return [stage.name for stage in ran if stage.ran]


def test_two_builds_at_once_share_the_work_and_both_end(tmp_path: Path, made: Scripts) -> None:
    """In opposite orders: neither may wait for the other while it holds what the other needs."""
    slow = f"time.sleep(0.6); {WRITE}"
    a, b = made.instance("a", slow), made.instance("b", slow)
    after = made.instance("c", WRITE, one="a", two="b")
    found: dict[str, list[str]] = {}
    threads = [
        Thread(
            target=lambda name=name, order=order: found.update({name: build(tmp_path / "store", *order)}), daemon=True
        )
        for name, order in (("first", (a, b, after)), ("second", (b, a, after)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == ["first", "second"], "a build did not end"
    assert sorted(made.ran()) == ["a", "b", "c"]
    assert sorted(found["first"] + found["second"]) == ["a", "b", "c"]


def test_a_worker_holds_the_lock_on_its_key_until_it_ends(tmp_path: Path, made: Scripts) -> None:
    store = Store(tmp_path)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(store.lock("key"))
        assert lock is not None
        child = subprocess.Popen(["sleep", "30"], pass_fds=[lock])
    try:
        with store.lock("key", wait=False) as held:
            assert held is None
    finally:
        child.kill()
        child.wait()
    with store.lock("key", wait=False) as held:
        assert held is not None
