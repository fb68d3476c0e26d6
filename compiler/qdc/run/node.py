"""The node's side of a stage on a cluster: a Ray task. Inputs come from the remote, the output and its record go there.

The node has a store of its own (a cache), in which a stage is run as on any machine. Who else runs it, on this node or
on another, is known by the key's lock and its lease; what another made meanwhile is taken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.instances import Instance
from qdc.graph.plan import Stage
from qdc.graph.signature import package_signature
from qdc.run import process, unfinished
from qdc.run.about import about_digest
from qdc.run.attempt import Attempt
from qdc.run.lease import BEAT_S, Lease
from qdc.run.settings import settings
from qdc.store.remote import Remote
from qdc.store.store import Store
from qdc.store.transfer import Transfer
from qdc.store.use import in_use

HEAR_S, LOOK_S = 0.2, 0.3
LOST = (-signal.SIGKILL, -signal.SIGTERM)
"""Exits of a stage's process that something outside of it caused: it may be started again."""
_MB = 10**6

Json = dict[str, Any]


def run_stage(order: Json, board: Any) -> Json:
    """Make the output of `order` (see `run.ray_executor`) and push it. Returns {node, and one of: record; error: what
    a QdcError says; lost: why the stage may be started again}."""
    os.environ.update(order["environment"])
    said = Said(board, order["key"])
    node = {"node": socket.gethostname()}
    try:
        said.progress(0, 0, f"on {node['node']}")
        return {**node, "record": _make(order, said)}
    except Lost as lost:
        return {**node, "lost": str(lost)}
    except QdcError as error:
        return {**node, "error": {**error.as_json(), "exit": error.exit_code}}
    finally:
        said.flush(last=True)


class Lost(Exception):
    """The stage's process was ended from outside."""


class Said:
    """Takes what a stage says, and tells it to the driver's board a few times a second."""

    def __init__(self, board: Any, key: str) -> None:
        self.board, self.key = board, key
        self.rows: list[tuple[str, str, Any]] = []
        self.log: Path | None = None
        self.position = 0

    def follow(self, log: Path) -> None:
        """From now on, tell what is added to this file too."""
        self.log, self.position = log, log.stat().st_size if log.exists() else 0

    def progress(self, done: int, total: int, note: str) -> None:
        self.rows.append((self.key, "progress", (done, total, note)))

    def flush(self, *, last: bool = False) -> None:
        import ray

        if self.log is not None:
            with contextlib.suppress(OSError), self.log.open("rb") as stream:
                stream.seek(self.position)
                if data := stream.read():
                    self.position += len(data)
                    self.rows.append((self.key, "log", data))
        rows, self.rows = self.rows, []
        if rows or last:
            # The build may have ended; then nobody is told.
            with contextlib.suppress(ray.exceptions.RayError):
                told = self.board.say.remote(rows)
                if last:
                    ray.get(told, timeout=10)


def node_store(given: str | None) -> Path:
    """Where this node keeps what it works with. `given`: the driver's setting."""
    place = os.environ.get("QDC_NODE_STORE") or given
    if place:
        return Path(place).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qdc" / "node"


def _make(order: Json, said: Said) -> Json:
    """The record of the stage, with its output at the remote."""
    if order["about"] != about_digest():
        raise QdcError("ray.mismatch", f"the node {socket.gethostname()} has another qdc", exit_code=COULD_NOT)
    key, store, remote = order["key"], Store(node_store(order["store"])), Remote(order["remote"])
    stage = Stage(Instance.from_json(order["instance"]), "stale", key, None, order["inputs"])

    def told(done: int, total: int) -> None:
        said.progress(done // _MB, total // _MB, "MB to or from the remote")
        said.flush()

    transfer = Transfer(store, remote, told)
    with in_use(store.root), _locked(store, key, said) as lock:
        if store.record(key) is None and _begun(transfer, key, order["holder"], said):
            with _beating(Lease(remote, key, order["holder"]), store, order["partial_s"]):
                if transfer.fetch_stage(key) is None:
                    transfer.fetch_trees(stage.inputs.values())
                    unfinished.fetch(remote, key, store.partial(key))
                    store.add_record(key, _work(order, store, stage, said, lock))
                    store.forget_partial(key)
        transfer.push_records([key])
        unfinished.forget(remote, key)
        return dict(store.record(key) or {})


@contextlib.contextmanager
def _locked(store: Store, key: str, said: Said) -> Iterator[int]:
    """The node's lock on a key, waited for while another task here has it."""
    while True:
        with store.lock(key, wait=False) as lock:
            if lock is not None:
                yield lock
                return
        said.progress(0, 0, "another build makes it on this node")
        said.flush()
        time.sleep(LOOK_S)


def _begun(transfer: Transfer, key: str, holder: str, said: Said) -> bool:
    """Take the lease on a key; False where what another made came from the remote meanwhile."""

    def waits() -> None:
        said.progress(0, 0, "another build makes it on another node")
        said.flush()

    return Lease(transfer.remote, key, holder).take(lambda: transfer.fetch_stage(key) is not None, waits)


@contextlib.contextmanager
def _beating(lease: Lease, store: Store, partial_s: float) -> Iterator[None]:
    """Renew a lease and send unfinished work while the stage runs; the lease goes at the end."""
    key, over = Path(lease.name).stem, threading.Event()

    def beat() -> None:
        sent, since = unfinished.Files(), time.monotonic()
        while not over.wait(BEAT_S):
            with contextlib.suppress(QdcError, OSError):
                lease.renew()
                if time.monotonic() - since >= partial_s:
                    folder = store.partial(key)
                    now = unfinished.files(folder)
                    if now and now != sent and unfinished.send(lease.remote, key, folder, now):
                        sent = now
                    since = time.monotonic()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        lease.release()


def _work(order: Json, store: Store, stage: Stage, said: Said, lock: int) -> Json:
    """Run the stage in this node's train environment; returns its record."""
    mine = replace(settings(), threads=order["threads"], processes=order["processes"], device=order["device"])
    said.follow(store.log_path(order["key"]))
    attempt = Attempt(store, mine, stage, package_signature(), said.progress, lock)
    try:
        while process.wait_any([attempt.worker], HEAR_S) is None:
            said.flush()
        if attempt.worker.process.returncode in LOST and attempt.worker.error is None:
            raise Lost(f"its process was ended by signal {-attempt.worker.process.returncode}")
        return attempt.record()
    finally:
        if attempt.worker.process.returncode is None:
            process.stop([attempt.worker])
        attempt.close()
