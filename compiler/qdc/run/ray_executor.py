"""The executor that runs training stages on a Ray cluster; the driver is `run.build`, as for any other.

Each stage has a thread here: it pushes inputs that only this store has, starts the task, starts it again where its node
or worker was lost, and fetches the output. Stages of the compiler's own environment (layers, image) run on this
machine: they only describe what the build's store must hold anyway. Tasks end with the build; what they began stays.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.instances import Instance
from qdc.graph.plan import Stage
from qdc.run import ray_cluster
from qdc.run.about import about_digest
from qdc.run.executor import Ended, Local, Report
from qdc.run.lease import holder_of
from qdc.run.settings import Settings
from qdc.store.remote import FIELDS, Remote
from qdc.store.store import Store
from qdc.store.transfer import Transfer

HEAR_S, LOOK_S, GRACE_S, LOST_S = 0.2, 5.0, 30.0, 20.0
"""How often to hear of running tasks and to look at the cluster; how long a stage may wait for a node that can run it,
and the head may be silent."""
AT_ONCE = 256
FORGOTTEN_S = 300.0
_MB = 10**6


class Board:
    """Holds what tasks say until the build takes it: an actor beside the build. It ends with the build, or when no
    build has asked for `FORGOTTEN_S`."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.asked = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while time.monotonic() - self.asked < FORGOTTEN_S:
            time.sleep(1.0)
        os._exit(0)

    def say(self, rows: list[Any]) -> None:
        self.rows += rows

    def heard(self) -> list[Any]:
        self.asked = time.monotonic()
        rows, self.rows = self.rows, []
        return rows


@dataclass
class Task:
    """A stage on the cluster."""

    key: str
    stage: Stage
    report: Report
    made: dict[str, Any] | None = None
    error: QdcError | None = None
    reference: Any = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def record(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        assert self.made is not None
        return self.made

    def close(self) -> None: ...


class Ray:
    """See `run.executor.Executor`."""

    def __init__(self, store: Store, settings: Settings, signature: str) -> None:
        self.store, self.settings = store, settings
        self.local = Local(store, settings, signature)
        self.tasks: dict[str, Task] = {}
        self.ray: Any = None
        self.url = self.address = ""
        self.board: Any = None
        self.function: Any = None
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._taking, self._over = threading.Lock(), threading.Event()
        self._there: set[str] = set()
        self._looked = self._answered = self._able = time.monotonic()

    # What a build asks for

    def prepare(self, stages: list[Stage]) -> None:
        """Join the cluster and hold it against what the stages need, before the first of them starts."""
        if not (theirs := [stage.instance for stage in stages if _theirs(stage.instance)]):
            return
        cluster = self.settings.cluster
        self.url = ray_cluster.need_remote(self.settings.remote)
        ray_cluster.load(cluster)
        self._try_remote()
        self.ray, self.address = ray_cluster.join(cluster)
        ray_cluster.compare(self.ray)
        why = ray_cluster.lacking(self.ray, [(item.name, self.settings.need(item.kind)) for item in theirs])
        if why is not None:
            raise ray_cluster.too_little(why)
        self._start_board()

    def _try_remote(self) -> None:
        """Raises QdcError where the remote cannot be written."""
        remote, probe = Remote(self.url), f"leases/{uuid4().hex}"
        remote.create(probe, b"")
        remote.remove(probe)

    def _start_board(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from qdc.run import node

        here = NodeAffinitySchedulingStrategy(self.ray.get_runtime_context().get_node_id(), soft=False)
        # Detached: an actor that Ray may let go of when it counts no handles has been seen to go while it was in use.
        mine = {"name": f"board-{uuid4().hex}", "lifetime": "detached", "scheduling_strategy": here}
        self.board = self.ray.remote(Board).options(num_cpus=0, **mine).remote()
        self.function = self.ray.remote(node.run_stage)
        threading.Thread(target=self._pump, daemon=True).start()

    def room(self, instance: Instance, beside: list[Instance]) -> bool:
        here = [other for other in beside if not _theirs(other)]
        return len(beside) - len(here) < AT_ONCE if _theirs(instance) else self.local.room(instance, here)

    def start(self, stage: Stage, report: Report, lock: int) -> None:
        if not _theirs(stage.instance):
            self.local.start(stage, report, lock)
            return
        task = Task(str(stage.key), stage, report)
        self.tasks[task.key] = task
        threading.Thread(target=self._follow, args=(task,), daemon=True).start()

    def wait(self, limit_s: float | None) -> Ended | None:
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            if self.local.running and (ended := self.local.wait(0.0)) is not None:
                return ended
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=0.05 if self.local.running or until else HEAR_S)
                if isinstance(event, Task):
                    del self.tasks[event.key]
                    return event
                self._hear(*event)
            self._look()
            if until is not None and time.monotonic() >= until:
                return None

    def stop(self) -> None:
        """End what runs: a request first, so that stages leave their work in order, then force."""
        self.local.stop()
        if self.ray is None:
            return
        ended = threading.Thread(target=self._leave, daemon=True)
        ended.start()
        ended.join(10.0)

    def _leave(self) -> None:
        for force in (False, True):
            for task in self.tasks.values():
                task.stopping.set()
                if task.reference is not None:
                    with contextlib.suppress(Exception):
                        self.ray.cancel(task.reference, force=force)
            waiting = [task.reference for task in self.tasks.values() if task.reference is not None]
            if waiting:
                self.ray.wait(waiting, num_returns=len(waiting), timeout=4.0)
        with self._taking:
            self._over.set()
        with contextlib.suppress(Exception):
            self.ray.kill(self.board)
        self.ray.shutdown()

    # What runs

    def _follow(self, task: Task) -> None:
        try:
            task.made = self._run(task)
        except QdcError as error:
            task.error = error
        except Exception as error:
            self._events.put((task.key, "log", f"{error}\n".encode()))
            name, words = task.stage.instance.name, ray_cluster.words(getattr(error, "cause", None) or error)
            task.error = QdcError(
                "ray.task",
                f"stage {name}: its task failed: {words}",
                file=self.store.log_path(task.key),
                exit_code=COULD_NOT,
            )
        self._events.put(task)

    def _run(self, task: Task) -> dict[str, Any]:
        """Run a stage to its end, wherever; returns its record, with its output in this store."""

        def told(done: int, total: int) -> None:
            self._events.put((task.key, "progress", (done // _MB, total // _MB, "MB to or from the remote")))

        transfer = Transfer(self.store, Remote(self.url), told, task.stopping)
        transfer.push_trees([digest for digest in task.stage.inputs.values() if digest not in self._there])
        self._there.update(task.stage.inputs.values())
        answer = self._answer(task)
        if "error" in answer:
            raise self._error(task, answer)
        transfer.fetch_trees([answer["record"]["output"]])
        self._there.add(answer["record"]["output"])
        record = {name: answer["record"].get(name) for name in FIELDS}
        instance = task.stage.instance
        return {**record, "instance": instance.name, "components": instance.components(task.stage.inputs)}

    def _answer(self, task: Task) -> dict[str, Any]:
        """What the node says at the end; started again where node or worker was lost, as often as the settings say."""
        ray, cluster, instance = self.ray, self.settings.cluster, task.stage.instance
        need = self.settings.need(instance.kind)
        memory = {"memory": int(need.memory)} if need.memory else {}
        options = {"num_cpus": need.cpus, "num_gpus": need.gpus, **memory, "max_retries": 0, "name": instance.name}
        for left in range(cluster.retries, -1, -1):
            self._events.put((task.key, "progress", (0, 0, "waits for a node")))
            task.reference = self.function.options(**options).remote(self._order(task), self.board)
            try:
                answer: dict[str, Any] = ray.get(task.reference)
                lost = answer.get("lost")
                lost = f"{lost} on {answer['node']}" if lost else None
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:
                answer, lost = {}, f"its worker was lost: {ray_cluster.words(error)[:160]}"
            with contextlib.suppress(ray.exceptions.RayError):
                self._take()
            if lost is None:
                return answer
            if task.stopping.is_set():
                raise QdcError("interrupted", "the build was stopped", exit_code=130)
            then = "it is started again" if left else "it is not started again"
            self._events.put((task.key, "log", f"qdc: {lost}; {then}\n".encode()))
            self._events.put((task.key, "progress", (0, 0, f"{lost}; {then}")))
        raise QdcError(
            "ray.lost",
            f"stage {instance.name}: {lost}; it was started {cluster.retries + 1} times",
            file=self.store.log_path(task.key),
            exit_code=COULD_NOT,
            hint="its node may lack memory: raise `ray: {needs: ...}`; finished stages and partial work are kept",
        )

    def _order(self, task: Task) -> dict[str, Any]:
        """All that a node must know. It goes from process to process, and is kept nowhere."""
        cluster, instance = self.settings.cluster, task.stage.instance
        return {
            "key": task.key,
            "instance": instance.as_json(),
            "inputs": task.stage.inputs,
            "remote": self.url,
            "environment": {name: os.environ[name] for name in cluster.passed if name in os.environ},
            "store": cluster.store,
            "partial_s": cluster.partial_s,
            "threads": self.settings.threads,
            "processes": self.settings.processes,
            "device": self.settings.device,
            "about": about_digest(),
            "holder": holder_of(self.store.root),
        }

    def _error(self, task: Task, answer: dict[str, Any]) -> QdcError:
        said = answer["error"]
        message = f"{said['message']} (on {answer['node']})"
        log, hint = self.store.log_path(task.key), said["hint"]
        return QdcError(said["id"], message, file=log, hint=hint, exit_code=said["exit"])

    # What is heard

    def _pump(self) -> None:
        """Take what tasks say, as long as there is a cluster."""
        with contextlib.suppress(Exception):
            while not self._over.wait(HEAR_S):
                self._take()

    def _take(self) -> None:
        """Take what the board has. One thread at a time, so that nothing comes after the end of its stage."""
        with self._taking:
            if self._over.is_set():
                return
            for row in self.ray.get(self.board.heard.remote()):
                self._events.put(row)

    def _hear(self, key: str, what: str, value: Any) -> None:
        if what == "log":
            with self.store.log_path(key).open("ab") as stream:
                stream.write(value)
        elif key in self.tasks:
            self.tasks[key].report(*value)

    def _look(self) -> None:
        """Raises QdcError where the cluster has gone, or no node is left that can run a stage."""
        now = time.monotonic()
        if self.ray is None or not self.tasks or now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            socket.create_connection(ray_cluster.place(self.address), 2.0).close()
        except OSError:
            if now - self._answered > LOST_S:
                raise QdcError(
                    "ray.gone",
                    f"the cluster at {self.address} does not answer any more",
                    exit_code=COULD_NOT,
                    hint="finished stages are kept, and partial work; run the same command again to go on",
                ) from None
            return
        self._answered = now
        names = [(task.stage.instance.name, task.stage.instance.kind) for task in self.tasks.values()]
        why = ray_cluster.lacking(self.ray, [(name, self.settings.need(kind)) for name, kind in names])
        if why is None:
            self._able = now
        elif now - self._able > GRACE_S:
            raise ray_cluster.too_little(why)


def _theirs(instance: Instance) -> bool:
    """Whether a stage runs on the cluster."""
    return instance.environment == "train"
