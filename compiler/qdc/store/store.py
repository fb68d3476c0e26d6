"""The content-addressed store: files by digest, trees of files, and records of what made them.

    objects/sha256/<2 hex>/<64 hex>   read-only files, each once
    trees/<64 hex>.json               a folder as data
    records/<key>/<n>.json            what a stage made under a key (n counts differing reruns)
    builds/<id>.json                  build records
    logs/<key>.log, partial/<key>/    what a failed or running stage leaves, for that key alone
    memo/                             stat memos and other caches; deleting it costs time only
    staging/, locks/                  work in progress

Publishing is: hash and fsync each file, rename it into objects, write the tree, then the record, each atomically.
A kill at any instant leaves either no record or a whole one. The store knows nothing of recipes or stages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import fsync_folder, sha256_bytes, sha256_file, write_atomic
from qdc.store.memo import REMEMBERED, StatMemo
from qdc.store.seal import mark, sealed
from qdc.store.trees import Tree

LOST = "when it was made, the records before it had lost their outputs"


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError into a QdcError that says that the store cannot be written."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise QdcError(
            "store.disk",
            f"cannot write to the store: {reason}",
            file=error.filename,
            exit_code=COULD_NOT,
            hint="free space or choose another place with --store; what was finished is kept",
        ) from error


class Store:
    """A store at `root` (made on first write). What it cannot write is a QdcError with exit code 4."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memo = StatMemo(root / "memo" / "stat")

    # Files and trees

    def object_path(self, sha256: str) -> Path:
        """Where the file with this digest is, or would be."""
        return self.root / "objects" / "sha256" / sha256[:2] / sha256

    def resolve(self, sha256: str) -> Path:
        """The file with this digest; QdcError if it is not here."""
        path = self.object_path(sha256)
        if not path.is_file():
            raise QdcError(
                "store.missing",
                f"the store has no object {sha256}",
                file=path,
                exit_code=COULD_NOT,
                hint="`qdc build RECIPE` makes what is missing",
            )
        return path

    def tree(self, digest: str) -> Tree | None:
        """The tree with this digest, or None if it is not here or not what its name says."""
        try:
            value = json.loads((self.root / "trees" / f"{digest}.json").read_bytes())
            tree = Tree.from_json(value)
        except (OSError, ValueError, TypeError):
            return None
        return tree if tree.digest == digest else None

    def has_tree(self, digest: str) -> bool:
        """Whether the tree and each of its files are here with their sizes (contents: see `verify`)."""
        tree = self.tree(digest)
        return tree is not None and all(self.has(entry.sha256, entry.size) for entry in tree.entries)

    def has(self, sha256: str, size: int) -> bool:
        """Whether the object is here with that size, and as it came as far as stat shows."""
        path = self.object_path(sha256)
        try:
            status = os.stat(path)
            return status.st_size == size and (sealed(status) or self._still(path, sha256, status))
        except OSError:
            return False

    def _still(self, path: Path, sha256: str, status: os.stat_result) -> bool:
        """Read an object that lost its seal (it was written to, or came with a copy of the store); where its content is
        what its name says, it is sealed again."""
        if (self.memo.digest(path) if status.st_size >= REMEMBERED else sha256_file(path)) != sha256:
            return False
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime_ns == status.st_mtime_ns:
                mark(path, status.st_mtime_ns)
                self.memo.learn_object(path, sha256)
        return True

    def ingest(self, folder: Path) -> Tree:
        """Copy a folder of the user's into the store; files known by stat are not read again."""
        from qdc.store.intake import ingest

        return ingest(self, folder)

    def publish(self, folder: Path) -> Tree:
        """Move a finished staging folder into the store; returns its tree."""
        from qdc.store.intake import publish

        return publish(self, folder)

    @disk_errors()
    def adopt(self, path: Path, sha256: str) -> bool:
        """Make the file at `path`, on the store's disk and with that digest, the object `sha256`; it was sealed before
        or while it was hashed (else the first look reads it again).

        Returns False where the store had the object already; the file is then left as it is.
        """
        final, status = self.object_path(sha256), os.stat(path)
        if self.has(sha256, status.st_size):
            return False
        final.parent.mkdir(parents=True, exist_ok=True)
        if status.st_mode & 0o777 != 0o444:
            os.chmod(path, 0o444)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(path, final)
        fsync_folder(final.parent)
        return True

    @disk_errors()
    def add_tree(self, tree: Tree) -> None:
        """Keep the list of a tree's files; the files themselves are kept by `adopt`."""
        if self.tree(tree.digest) is None:
            write_atomic(self.root / "trees" / f"{tree.digest}.json", canonical.dumps(tree.as_json()))

    def link_out(self, digest: str, folder: Path) -> None:
        """Fill `folder` with the tree: links to the objects, which are read-only; nothing is copied.

        Each object is checked: a small one is read, another read again only where its stat memo differs.
        """
        tree = self.tree(digest)
        if tree is None:
            raise QdcError("store.missing", f"the store has no tree {digest}", exit_code=COULD_NOT)
        folder.mkdir(parents=True, exist_ok=True)
        for entry in tree.entries:
            source = self.resolve(entry.sha256)
            found = sha256_file(source) if entry.size < REMEMBERED else self.memo.digest(source)
            if found != entry.sha256:
                raise self.damaged(entry.sha256, entry.path)
            target = folder / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())

    def read(self, tree_digest: str, name: str) -> bytes:
        """The content of one file of a tree, checked against its digest. For small files."""
        tree = self.tree(tree_digest)
        entry = tree.find(name) if tree else None
        if entry is None:
            raise QdcError("store.missing", f"the store has no {name} of {tree_digest}", exit_code=COULD_NOT)
        data = self.resolve(entry.sha256).read_bytes()
        if sha256_bytes(data) != entry.sha256:
            raise self.damaged(entry.sha256, entry.path)
        return data

    def damaged(self, sha256: str, name: str) -> QdcError:
        """Remove a damaged object, so that a build makes it again; returns the error to raise. `name`: what it is."""
        self.discard(sha256)
        return QdcError(
            "store.damaged",
            f"object {sha256} ({name}) is damaged and was removed",
            exit_code=COULD_NOT,
            hint="run the build again: it makes the object anew",
        )

    def verify(self) -> list[str]:
        """Read every object; return the digests of those whose content is not what their name says."""
        from qdc.store.verify import damaged_objects

        return [item.name for item in damaged_objects(self.root)]

    def discard(self, sha256: str) -> None:
        """Remove a damaged object, so that a build makes it again."""
        with contextlib.suppress(FileNotFoundError):
            self.object_path(sha256).unlink()

    # Records

    def record(self, key: str) -> dict[str, Any] | None:
        """The selected record under `key` (the first, unless `select` named one), or None.

        Unreadable ones and those without output do not count.
        """
        folder = self.root / "records" / key
        for number in self._numbers(folder):
            value = _read_json(folder / f"{number}.json")
            if value is not None and value.get("key") == key and self.has_tree(value.get("output", "")):
                return value
        return None

    def record_with(self, key: str, output: str) -> dict[str, Any] | None:
        """The record under `key` whose output is the tree `output`, selected or not."""
        folder = self.root / "records" / key
        rows = (_read_json(folder / f"{number}.json") for number in self._numbers(folder))
        return next((row for row in rows if row and (row.get("key"), row.get("output")) == (key, output)), None)

    def _numbers(self, folder: Path) -> list[int]:
        """Numbers of the records in a folder, the selected one first."""
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        numbers = sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())
        chosen = (_read_json(folder / "selected.json") or {}).get("n") if "selected.json" in names else None
        return sorted(numbers, key=lambda number: (number != chosen, number))

    def record_numbers(self, key: str) -> list[int]:
        """Numbers of the records under `key`; more than one where reruns differed."""
        return sorted(self._numbers(self.root / "records" / key))

    @disk_errors()
    def select(self, key: str, number: int, because: str) -> None:
        """Let record `number` under `key` be the one that counts."""
        write_atomic(self.root / "records" / key / "selected.json", canonical.pretty({"n": number, "because": because}))

    @disk_errors()
    def add_record(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Keep `value` as the next record under `key`, unless one with the same output is there.

        Where no earlier record has its output any more, this one counts from now on, even if an object of theirs
        comes back: what is fresh does not change by itself.
        """
        folder = self.root / "records" / key
        folder.mkdir(parents=True, exist_ok=True)
        counted, numbers = self.record(key), self._numbers(folder)
        for number in numbers:
            old = _read_json(folder / f"{number}.json")
            if old is not None and old.get("key") == key and old.get("output") == value["output"]:
                if counted == old and number != numbers[0]:
                    self.select(key, number, LOST)
                return old
        number = max(numbers, default=0) + 1
        if counted is None and numbers:
            self.select(key, number, LOST)
        value = {**value, "key": key, "n": number}
        write_atomic(folder / f"{number}.json", canonical.pretty(value))
        write_atomic(self.root / "memo" / "latest" / f"{_safe(value['instance'])}.json", canonical.dumps({"key": key}))
        return value

    def counted(self, instance: str, key: str) -> None:
        """Remember that a build used the record under `key` for a stage: what comes later is compared with that."""
        place = self.root / "memo" / "latest" / f"{_safe(instance)}.json"
        if (_read_json(place) or {}).get("key") != key:
            with contextlib.suppress(OSError):
                write_atomic(place, canonical.dumps({"key": key}))

    def latest(self, instance: str) -> dict[str, Any] | None:
        """The record that counts, or else any, under the key that a stage instance of any recipe last had."""
        key = str((_read_json(self.root / "memo" / "latest" / f"{_safe(instance)}.json") or {}).get("key"))
        folder = self.root / "records" / key
        readable = (_read_json(folder / f"{number}.json") for number in self._numbers(folder))
        return self.record(key) or next((value for value in readable if value is not None), None)

    # Builds

    @disk_errors()
    def add_build(self, build: dict[str, Any]) -> None:
        write_atomic(self.root / "builds" / f"{build['build']}.json", canonical.pretty(build))

    def builds(self) -> list[str]:
        """Build ids, oldest first."""
        return sorted(path.stem for path in (self.root / "builds").glob("*.json"))

    def build(self, id: str) -> dict[str, Any] | None:
        return _read_json(self.root / "builds" / f"{id}.json")

    # Work in progress

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh folder on the store's disk; gone at the end, and swept later if the process dies."""
        base = self.root / "staging"
        with contextlib.ExitStack() as held:
            with self.lock("staging"), disk_errors():
                base.mkdir(parents=True, exist_ok=True)
                self._sweep(base)
                import tempfile

                work = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
                held.enter_context(self.lock(work.name))
            try:
                yield work
            finally:
                self._remove(work)

    def sweep_staging(self) -> None:
        """Remove the staging folders of processes that have ended."""
        if (self.root / "staging").is_dir():
            with self.lock("staging"), disk_errors():
                self._sweep(self.root / "staging")

    def _sweep(self, base: Path) -> None:
        """Remove the staging folders that nobody holds any more. (A process ID would not tell: another container
        that shares the store has its own.)"""
        for path in base.iterdir():
            with self.lock(path.name, wait=False) as lock:
                if lock is not None:
                    self._remove(path)

    def _remove(self, work: Path) -> None:
        """Remove a staging folder and its lock, whose name no other folder will have."""
        import shutil

        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.root / "locks" / work.name).unlink()

    def partial(self, key: str) -> Path:
        """Where a stage keeps unfinished work for this key alone."""
        path = self.root / "partial" / key
        with disk_errors():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def forget_partial(self, key: str) -> None:
        import shutil

        shutil.rmtree(self.root / "partial" / key, ignore_errors=True)

    def log_path(self, key: str) -> Path:
        path = self.root / "logs" / f"{key}.log"
        with disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def lock(self, name: str, *, wait: bool = True) -> Iterator[int | None]:
        """Hold the lock `name` against other holders; it ends with the processes that hold it, however they end.

        Gives the lock's open file: a child that inherits it holds the lock too. Without `wait`, gives None at once
        where somebody else holds it.
        """
        path = self.root / "locks" / name
        with disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = descriptor
            except BlockingIOError:
                held = None
            yield held
        finally:
            os.close(descriptor)


def _safe(name: str) -> str:
    return name.replace(":", "+").replace("/", "+")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
