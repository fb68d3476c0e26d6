"""Who runs a stage, of all that share a remote: one file a key there, made by one, renewed while the stage runs.

`leases/<key>.json`: {holder, beat}. Whoever finds one watches it: a beat that stands still for `LOST_S` on that
clock is of a runner that has ended, and its lease may be taken. A holder is a store (whose own locks keep its builds
apart), so that a build that is started again need not wait for itself.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.core.files import write_atomic
from qdc.store.remote import Remote

BEAT_S = 3.0
LOST_S = 15.0
LOOK_S = 0.5


class Lease:
    """The lease on one key, for `holder`."""

    def __init__(self, remote: Remote, key: str, holder: str) -> None:
        self.remote, self.name, self.holder, self.beat = remote, f"leases/{key}.json", holder, 0

    def take(self, done: Callable[[], bool], waits: Callable[[], None]) -> bool:
        """Take the lease, once nobody else has it; False when `done()` says meanwhile that there is no need."""
        seen, since = b"", time.monotonic()
        while True:
            if done():
                return False
            if self.remote.create(self.name, self._data()):
                return True
            found = self.remote.whole(self.name) or b""
            if found != seen:
                seen, since = found, time.monotonic()
            if _holder(found) == self.holder or time.monotonic() - since > LOST_S:
                self.renew()
                return True
            waits()
            time.sleep(LOOK_S)

    def renew(self) -> None:
        """Show that its holder lives."""
        self.beat += 1
        self.remote.write(self.name, self._data())

    def release(self) -> None:
        with contextlib.suppress(QdcError):
            self.remote.remove(self.name)

    def _data(self) -> bytes:
        return canonical.dumps({"holder": self.holder, "beat": [self.beat, uuid.uuid4().hex]})


def holder_of(root: Path) -> str:
    """A name for the store at `root` that says nothing of it."""
    place = root / "memo" / "holder"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return place.read_text("ascii")
    made = uuid.uuid4().hex
    write_atomic(place, made.encode())
    return made


def _holder(data: bytes) -> Any:
    try:
        return json.loads(data)["holder"]
    except (ValueError, KeyError, TypeError):
        return None
