"""Push and pull: objects, then trees, then records, then builds, so that nothing is ever named before it is there.

Eight objects at a time; what is there with the right size is skipped. What comes is hashed on the way in and takes its
place only if its digest is right; what was begun is kept and gone on with. Knows stores and remotes, no recipes.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import CHUNK, sha256_file
from qdc.store.remote import Refused, Remote, object_name
from qdc.store.seal import seal
from qdc.store.store import Store
from qdc.store.trees import Entry, Tree

AT_ONCE = 8
PART = 8 * 1024 * 1024
"""Bytes that are asked for at a time."""
LOOK_S, END_S = 0.1, 5.0
"""How often to look whether to stop, and how long to wait for requests that are under way."""

Told = Callable[[int, int], None]
"""Told bytes moved or found there, and bytes in all. Called by the thread that asked for the transfer."""
T = TypeVar("T")


class Stopped(QdcError):
    """The transfer was told to stop; what was moved is kept."""

    def __init__(self) -> None:
        super().__init__("interrupted", "the transfer was stopped", exit_code=130)


@dataclass
class Moved:
    """What a transfer did. `there`: objects that needed no moving; `refused`: what the remote has and nobody takes."""

    objects: int = 0
    there: int = 0
    bytes: int = 0
    trees: int = 0
    records: int = 0
    builds: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Transfer:
    """Moves things between `store` and `remote`; `moved` counts them. `stop` ends it from another thread."""

    def __init__(
        self,
        store: Store,
        remote: Remote,
        told: Told = lambda done, total: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.store, self.remote, self.told = store, remote, told
        self.stop = stop or threading.Event()
        self.moved = Moved()

    # Pull

    def pull_build(self, id: str) -> None:
        """Fetch a build: what its stages made, their records, and its own record. Raises QdcError."""
        build = self.remote.build(id)
        if build is None:
            raise QdcError("remote.unknown", f"{self.remote.name} has no build {id}", exit_code=COULD_NOT)
        mine = self.store.build(id)
        if mine is not None and not _same_build(mine, build):
            raise QdcError(
                "remote.clash",
                f"build {id} of {self.remote.name} is another one than build {id} here",
                exit_code=COULD_NOT,
                hint="two machines began a build in the same second; pull into another store with --store",
            )
        outputs = {stage["output"] for stage in build["stages"]}
        trees = [self._tree(digest) for digest in sorted(outputs)]
        self._fetch_all(trees)
        for stage in build["stages"]:
            self._pull_record(stage["key"], stage["output"])
        if mine is None:
            self.store.add_build(build)
            self.moved.builds.append(id)

    def _pull_record(self, key: str, output: str) -> None:
        mine = self.store.record(key)
        if mine is None or mine["output"] != output:
            record = next((row for row in self.records(key) if row["output"] == output), None)
            if record is not None:
                self._add_record(key, record)

    def fetch_stage(self, key: str, rows: list[dict[str, Any]] | None = None) -> dict[str, Any] | None:
        """Fetch what the remote has under a key: its first record that may be taken, with all of its output.

        `rows`: its records, where they have been read. Returns the record as it is kept here, or None where the remote
        has none. Raises QdcError.
        """
        for record in self.records(key) if rows is None else rows:
            try:
                self._fetch_all([self._tree(record["output"])])
            except Refused as refused:
                self.moved.refused.append(refused.message)
                continue
            return self._add_record(key, record)
        return None

    def fetch_trees(self, digests: Iterable[str]) -> None:
        """Bring whole trees here by their digests. Raises QdcError where the remote lacks something."""
        self._fetch_all([self._tree(digest) for digest in digests if not self.store.has_tree(digest)])

    def records(self, key: str) -> list[dict[str, Any]]:
        """The remote's records under a key; those refused are noted."""
        good, bad = self.remote.records(key)
        self.moved.refused += [refused.message for refused in bad]
        return good

    def _add_record(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        value = {name: value for name, value in record.items() if name != "n"}
        kept = self.store.add_record(key, {**value, "fetched": True})
        self.moved.records += 1
        return kept

    def _tree(self, digest: str) -> Tree:
        tree = self.store.tree(digest) or self.remote.tree(digest)
        if tree is None:
            raise Refused(
                "remote.refused",
                f"{self.remote.name}: the tree {digest} is not there, although a record names it",
                exit_code=COULD_NOT,
                hint="push it again from a store that has it",
            )
        return tree

    def _fetch_all(self, trees: list[Tree]) -> None:
        """Bring all files of the trees here, and then the trees."""
        entries = {entry.sha256: entry for tree in trees for entry in tree.entries}
        self._each(list(entries.values()), self._fetch, lambda entry: entry.size)
        for tree in trees:
            if self.store.tree(tree.digest) is None:
                self.store.add_tree(tree)
                self.moved.trees += 1

    def _fetch(self, entry: Entry, moved: Callable[[int], None]) -> bool:
        """Bring one object here, going on with what is there of it; whether it had to be moved."""
        sha256 = entry.sha256
        with self.store.lock(f"fetch-{sha256}"):
            if self.store.has(sha256, entry.size):
                moved(entry.size)
                return False
            place = self.store.partial(sha256) / "bytes"
            found, resumed = self._receive(entry, place, moved)
            if found != sha256 and resumed:
                place.unlink()
                moved(-entry.size)
                found, _ = self._receive(entry, place, moved)
            if found == sha256:
                seal(place)
                self.store.adopt(place, sha256)
            self.store.forget_partial(sha256)
        if found != sha256:
            raise self.remote.refuse_object(sha256, f"its content has the SHA-256 {found}")
        return True

    def _receive(self, entry: Entry, place: Path, moved: Callable[[int], None]) -> tuple[str, bool]:
        """Append what is missing to the file at `place`; its SHA-256, and whether some of it was there before."""
        state, there = hashlib.sha256(), 0
        with place.open("ab+") as stream:
            stream.seek(0)
            while chunk := stream.read(CHUNK):
                state.update(chunk)
                there += len(chunk)
            resumed = there > 0
            if there > entry.size:
                stream.truncate(0)
                state, there = hashlib.sha256(), 0
            moved(there)
            while there < entry.size:
                data = self._part(entry, there)
                stream.write(data)
                state.update(data)
                there += len(data)
                moved(len(data))
        return state.hexdigest(), resumed

    def _part(self, entry: Entry, start: int) -> bytes:
        """The next bytes of an object. Raises Refused where it is not there or shorter than its size."""
        name, end = object_name(entry.sha256), min(start + PART, entry.size)
        try:
            data = self.remote.part(name, start, end)
        except QdcError:
            if self.remote.size(name) not in (None, entry.size):
                raise self._truncated(entry, self.remote.size(name)) from None
            raise
        if data is None:
            raise self.remote.refuse_object(entry.sha256, "it is not there, although a tree names it")
        if len(data) == entry.size and len(data) > end - start:
            return data[start:]
        if len(data) != end - start:
            raise self._truncated(entry, self.remote.size(name))
        return data

    def _truncated(self, entry: Entry, size: int | None) -> Refused:
        return self.remote.refuse_object(entry.sha256, f"it has {size} bytes in place of {entry.size}")

    # Push

    def push_build(self, build: dict[str, Any]) -> None:
        """Copy a build to the remote: all that its stages made, their records, and its own record. Raises QdcError."""
        id = build["build"]
        theirs = self._their_build(id)
        if theirs is not None and not _same_build(theirs, build):
            raise QdcError(
                "remote.clash",
                f"{self.remote.name} has another build {id}",
                exit_code=COULD_NOT,
                hint="two machines began a build in the same second; build again here for another id",
            )
        rows = [(stage["key"], stage["output"]) for stage in build["stages"]]
        self._push(rows)
        if theirs is None or len(theirs.get("measurements", [])) < len(build.get("measurements", [])):
            self.remote.write(f"builds/{id}.json", canonical.pretty(build))
            self.moved.builds.append(id)

    def push_records(self, keys: Iterable[str]) -> None:
        """Copy the selected record of each key, with its output."""
        found = ((key, self.store.record(key)) for key in keys)
        self._push([(key, record["output"]) for key, record in found if record is not None])

    def _their_build(self, id: str) -> dict[str, Any] | None:
        """The remote's build record of that name; one that is damaged there does not count."""
        try:
            return self.remote.build(id)
        except Refused as refused:
            self.moved.refused.append(refused.message)
            return None

    def _push(self, rows: list[tuple[str, str]]) -> None:
        self.push_trees(dict.fromkeys(output for _, output in rows))
        self._each(list(dict.fromkeys(rows)), self._send_record, lambda row: 0, objects=False)

    def push_trees(self, digests: Iterable[str]) -> None:
        """Copy whole trees to the remote: their objects, then their lists. Raises QdcError."""
        trees = []
        for digest in digests:
            tree = self.store.tree(digest)
            if tree is None or not self.store.has_tree(digest):
                raise QdcError(
                    "store.missing",
                    f"the store lacks the output {digest}, so it cannot be pushed",
                    file=self.store.root,
                    exit_code=COULD_NOT,
                    hint="`qdc build RECIPE` makes what is missing",
                )
            trees.append(tree)
        entries = {entry.sha256: entry for tree in trees for entry in tree.entries}
        self._each(list(entries.values()), self._send, lambda entry: entry.size)
        self._each(trees, self._send_tree, lambda tree: 0, objects=False)

    def _send(self, entry: Entry, moved: Callable[[int], None]) -> bool:
        name, path = object_name(entry.sha256), self.store.resolve(entry.sha256)
        if self.remote.size(name) == entry.size:
            moved(entry.size)
            return False
        if sha256_file(path) != entry.sha256:
            self.store.discard(entry.sha256)
            raise QdcError(
                "store.damaged",
                f"object {entry.sha256} ({entry.path}) is damaged and was removed",
                exit_code=COULD_NOT,
                hint="`qdc build RECIPE` makes it anew; then push again",
            )
        told = 0

        def sent(count: int) -> None:
            nonlocal told
            told += count
            moved(count)

        self.remote.send(name, path, entry.size, sent)
        moved(entry.size - told)
        return True

    def _send_tree(self, tree: Tree, moved: Callable[[int], None]) -> bool:
        name, data = f"trees/{tree.digest}.json", canonical.dumps(tree.as_json())
        moved(0)
        if self.remote.size(name) == len(data):
            return False
        self.remote.write(name, data)
        self.moved.trees += 1
        return True

    def _send_record(self, row: tuple[str, str], moved: Callable[[int], None]) -> bool:
        """Add the record of an output under the next free number, unless one with that output is there."""
        key, output = row
        record = self.store.record_with(key, output)
        moved(0)
        if record is None or any(there["output"] == output for there in self.remote.records(key)[0]):
            return False
        number = max(self.remote.record_numbers(key), default=0) + 1
        value = {name: value for name, value in record.items() if name != "fetched"} | {"n": number}
        self.remote.write(f"records/{key}/{number}.json", canonical.pretty(value))
        self.moved.records += 1
        return True

    # Many at a time

    def _each(
        self,
        items: list[T],
        work: Callable[[T, Callable[[int], None]], bool],
        weigh: Callable[[T], int],
        *,
        objects: bool = True,
    ) -> None:
        """`work` on every item, eight at a time; the first error stops all. Counts and tells in this thread."""
        self.remote.open()
        waiting, events, stop = deque(items), queue.SimpleQueue[Any](), threading.Event()

        def moved(count: int) -> None:
            if stop.is_set() or self.stop.is_set():
                raise Stopped
            events.put(count)

        def labour() -> None:
            try:
                while waiting and not stop.is_set():
                    try:
                        item = waiting.popleft()
                    except IndexError:
                        break
                    events.put((work(item, moved), weigh(item)))
            except BaseException as error:
                events.put(error)
            events.put(None)

        threads = [threading.Thread(target=labour, daemon=True) for _ in range(min(AT_ONCE, len(items)))]
        for thread in threads:
            thread.start()
        try:
            self._hear(events, len(threads), sum(map(weigh, items)), objects)
        finally:
            stop.set()
            until = time.monotonic() + END_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _hear(self, events: queue.SimpleQueue[Any], threads: int, total: int, objects: bool) -> None:
        done = 0
        while threads:
            try:
                event = events.get(timeout=LOOK_S)
            except queue.Empty:
                if self.stop.is_set():
                    raise Stopped from None
                continue
            if event is None:
                threads -= 1
            elif isinstance(event, BaseException):
                raise event
            elif isinstance(event, int):
                done += event
                self.told(done, total)
            elif objects and event[0]:
                self.moved.objects += 1
                self.moved.bytes += event[1]
            elif objects:
                self.moved.there += 1


def _same_build(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two records are of the same run; a gate may have added measurements to one of them."""
    return all(one.get(name) == two.get(name) for name in ("started", "recipe_digest", "image", "stages"))
