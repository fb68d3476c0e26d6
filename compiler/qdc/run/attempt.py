"""One stage on its way in one store: its inputs linked, its worker started, what it made published.

The same on this machine and on a node of a cluster. Knows no plan; whoever starts it holds the lock on its key.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.plan import Stage
from qdc.graph.table import KINDS
from qdc.run import process
from qdc.run.machine import hardware
from qdc.run.settings import Settings
from qdc.store.store import Store


class Attempt:
    """A started stage. `lock`: the open file of the lock on its key, which its worker holds too.

    `signature`: of qdc's own files when the key was made (`graph.signature`); a worker that finds others looks whether
    its stage's code still means the same.
    """

    def __init__(
        self, store: Store, settings: Settings, stage: Stage, signature: str, report: process.Progress, lock: int
    ) -> None:
        self.store, self.settings, self.stage, self.key = store, settings, stage, str(stage.key)
        instance = stage.instance
        with ExitStack() as resources:
            work = resources.enter_context(store.staging())
            inputs = {}
            for role, digest in stage.inputs.items():
                store.link_out(digest, work / "inputs" / role)
                inputs[role] = str(work / "inputs" / role)
            self.output = work / "output"
            self.output.mkdir()
            job = {
                "module": KINDS[instance.kind].module,
                "params": instance.params,
                "inputs": inputs,
                "digests": stage.inputs,
                "output": str(self.output),
                "partial": str(store.partial(self.key)),
                "threads": settings.threads,
                "processes": settings.processes.get(instance.kind, 1),
                "device": settings.device if KINDS[instance.kind].has_models else "cpu",
                "packages": instance.packages,
                "kind": instance.kind,
                "code": instance.code,
                "data": bool(KINDS[instance.kind].data),
                "signature": signature,
            }
            python = settings.train_python if instance.environment == "train" else sys.executable
            log = store.log_path(self.key)
            self.worker = process.start(instance.name, python, job, work, log, report, keep=(lock,))
            self._resources = resources.pop_all()

    def record(self) -> dict[str, Any]:
        """Publish what the ended worker made; returns its record, which is not kept yet. Raises QdcError."""
        worker, instance = self.worker, self.stage.instance
        if worker.process.returncode != 0:
            raise worker.failure(worker.process.returncode)
        if not any(path.is_file() for path in self.output.rglob("*")):
            raise QdcError("stage.empty", f"stage {worker.name} left no output", file=worker.log, exit_code=COULD_NOT)
        return {
            "instance": instance.name,
            "stage": instance.kind,
            "determinism": instance.determinism,
            "components": instance.components(self.stage.inputs),
            "output": self.store.publish(self.output).digest,
            "seconds": round(worker.seconds, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "threads": self.settings.threads,
            "hardware": hardware() | self._trained_on(),
        }

    def _trained_on(self) -> dict[str, Any]:
        """Device and processes of a stage that has models."""
        if not KINDS[self.stage.instance.kind].has_models:
            return {}
        count = self.settings.processes.get(self.stage.instance.kind, 1)
        return {"device": self.settings.device} | ({"processes": count} if count > 1 else {})

    def close(self) -> None:
        """Let go of the staging folder. The worker has ended."""
        self._resources.close()
