"""Read-through: outputs that the remote has are fetched beside the running stages, in threads.

A stage whose key has no record here is asked for there; whatever goes wrong there is noted, and the stage runs. Knows
keys, not recipes; the build asks, and hears in its own thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Literal

from qdc.core.errors import QdcError
from qdc.graph.plan import Plan
from qdc.store.remote import Refused, Remote
from qdc.store.store import Store
from qdc.store.transfer import END_S, Stopped, Transfer

_MB = 10**6


class Through:
    """`notes`: what the user must hear of; `fetched`: keys of what came; `came`: key -> seconds, until the build takes
    it."""

    def __init__(self, store: Store, url: str) -> None:
        self.store, self.remote = store, Remote(url)
        self.notes: list[str] = []
        self.fetched: set[str] = set()
        self.came: dict[str, float] = {}
        self._answers: dict[str, Literal["asked", "here", "absent"]] = {}
        self._events: queue.SimpleQueue[tuple[str, int, int, str]] = queue.SimpleQueue()
        self._stop, self._one, self._opening = threading.Event(), threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._off = False

    def takes(self, name: str, key: str) -> bool:
        """Whether the output of a stage is asked for or on its way; asks at the first call for its key."""
        if key not in self._answers and not self._off:
            self._answers[key] = "asked"
            thread = threading.Thread(target=self._ask, args=(name, key), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._answers.get(key) == "asked"

    def heard(self) -> list[tuple[str, int, int, str]]:
        """What there is to tell since the last call: stage, done, total (MB), note."""
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def close(self) -> None:
        """Stop what is under way; what came is kept and gone on with."""
        self._stop.set()
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _ask(self, name: str, key: str) -> None:
        answer: Literal["here", "absent"] = "absent"
        try:
            if self._fetch(name, key):
                answer = "here"
        except Stopped:
            pass
        except QdcError as error:
            self._note(f"{name}: {error.message}")
            self._off = self._off or not isinstance(error, Refused)
        except Exception as error:
            self._note(f"{name}: {self.remote.name}: {self.remote.words(error)}")
        self._answers[key] = answer

    def _fetch(self, name: str, key: str) -> bool:
        with self._opening:
            self.remote.open()

        def told(done: int, total: int) -> None:
            self._events.put((name, done // _MB, total // _MB, "MB from the remote"))

        transfer = Transfer(self.store, self.remote, told, self._stop)
        rows = transfer.records(key)
        try:
            if not rows:
                return False
            with self._one, self.store.lock(key, wait=False) as held:
                # Where another build makes it, this one's own look at the store will find that out.
                if held is None or self._stop.is_set() or self.store.record(key) is not None:
                    return False
                started = time.monotonic()
                self._events.put((name, 0, 0, "fetched from the remote"))
                if transfer.fetch_stage(key, rows) is None:
                    return False
                self.came[key] = time.monotonic() - started
                self.fetched.add(key)
                return True
        finally:
            for text in transfer.moved.refused:
                self._note(f"{name}: {text}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def fetch_recipe(transfer: Transfer, plan: Callable[[], Plan]) -> dict[str, str]:
    """Fetch every stage of a recipe that the remote has; `plan()` decides anew. Returns stage -> output that came."""
    came, absent = dict[str, str](), set[str | None]()
    while stale := [stage for stage in plan().stages if stage.state == "stale" and stage.key not in absent]:
        for stage in stale:
            absent.add(stage.key)
            record = transfer.fetch_stage(str(stage.key))
            if record is not None:
                came[stage.instance.name] = record["output"]
    return came
