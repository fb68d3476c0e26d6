"""A store elsewhere, at any URL that fsspec opens, with the layout of the local one.

Reads and writes files by name and gives documents only where they are what their names say. What it says of the
address and of what a back end says of itself has no credentials in it. Knows nothing of the local store.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.core.redact import hide, secrets
from qdc.store.trees import Tree, sound
from qdc.store.verify import record_problem

PAUSES_S = (0.3, 1.0, 3.0)
"""Between tries of what may work later."""
ATOMIC = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"}
"""Back ends in which a file appears whole or not at all; in others it is written beside its place, and moved."""
DOCUMENT = 256 * 1024 * 1024
"""Bytes of the largest tree, record or build that is read."""
FIELDS = ("stage", "determinism", "components", "output", "seconds", "finished", "threads", "hardware")
OPTIONAL = ("kept", "imported")
"""Fields of a record that are taken over; any other stays where it is."""
_HEX = re.compile(r"[0-9a-f]{64}\Z")
BUILD_ID = re.compile(r"\d{8}-\d{6}-\d+\Z")

T = TypeVar("T")


class RemoteError(QdcError):
    """The remote cannot be read or written: it does not answer, or refuses."""


class Refused(QdcError):
    """What the remote gave is not what it is called; nothing of it was kept."""


class Remote:
    """`name`: its address as it may be shown. Opens the back end on first use; its methods may be called by threads."""

    def __init__(self, url: str, sleep: Callable[[float], object] = time.sleep) -> None:
        self._url, self._sleep, self._hidden = url, sleep, secrets(url)
        self.name = hide(url, self._hidden)
        self._opened: tuple[Any, str, bool] | None = None

    def open(self) -> None:
        """Raises QdcError where no back end can be had for the address."""
        if self._opened is not None:
            return
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            scheme = self._url.partition("://")[0]
            more = f"pip install 'qdc[{scheme}]'" if scheme == "s3" else f"install fsspec's back end for {scheme}"
            raise QdcError(
                "remote.package", f"{self.name}: {self.words(error)}", exit_code=COULD_NOT, hint=more
            ) from None
        except Exception as error:
            raise QdcError(
                "remote.url",
                f"{self.name} is no address of a store: {self.words(error)}",
                exit_code=WRONG_USE,
                hint="--remote, QDC_REMOTE or `remote` in config.yaml: s3://bucket/folder, file:///folder, ...",
            ) from None
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._opened = (fs, root.rstrip("/"), bool(protocols & ATOMIC))

    # Files

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        return self._try(lambda fs, path: int(fs.info(path)["size"]), name)

    def part(self, name: str, start: int, end: int) -> bytes | None:
        """Bytes `start` to `end` of a file, or more where the back end knows no ranges; None if it is not there."""
        return self._try(lambda fs, path: bytes(fs.cat_file(path, start=start, end=end)), name)

    def whole(self, name: str) -> bytes | None:
        """All bytes of a small file, which may be empty; None if it is not there."""
        return self._try(lambda fs, path: bytes(fs.cat_file(path)), name)

    def listed(self, folder: str) -> list[str]:
        """Names of the files in a folder, without unfinished ones."""
        rows = self._try(lambda fs, path: list(fs.ls(path, detail=False)), folder) or []
        names = (str(row).rstrip("/").rpartition("/")[2] for row in rows)
        return sorted(name for name in names if name and not name.startswith("."))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        self._place(name, len(data), lambda fs, path: fs.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; whether it was. Of many that try at once, one does."""

        self.open()
        assert self._opened is not None
        atomic = self._opened[2]

        def make(fs: Any, path: str) -> bool:
            if not atomic:
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True

        return bool(self._try(make, name, absent=False))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._try(lambda fs, path: fs.rm_file(path), name)

    def send(self, name: str, source: Path, size: int, sent: Callable[[int], None]) -> None:
        """Write a file from disk, whole or not at all; `sent` is told of bytes on their way."""
        from fsspec.callbacks import Callback

        class Counted(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                sent(inc)

        self._place(name, size, lambda fs, path: fs.put_file(str(source), path, callback=Counted()))

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to disk. Raises RemoteError; what was copied by then is nothing to go by."""
        self._try(lambda fs, path: fs.get_file(path, str(target)), name, absent=False)

    # Documents

    def document(self, name: str) -> Any:
        """A JSON file; None if it is not there. Raises Refused where it is not JSON."""
        size = self.size(name)
        if size is None:
            return None
        if size > DOCUMENT:
            raise self._refused(name, f"it has {size} bytes; no such document is that large")
        data = self._try(lambda fs, path: bytes(fs.cat_file(path)), name)
        if data is None:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._refused(name, "it is not JSON; it is truncated or damaged") from None

    def tree(self, digest: str) -> Tree | None:
        """A tree that has this digest and sound paths; None if it is not there. Raises Refused."""
        name = f"trees/{digest}.json"
        value = self.document(name)
        if value is None:
            return None
        try:
            tree = sound(value)
        except ValueError as error:
            raise self._refused(name, str(error)) from None
        if tree.digest != digest:
            raise self._refused(name, f"its digest is {tree.digest}")
        return tree

    def records(self, key: str) -> tuple[list[dict[str, Any]], list[Refused]]:
        """The records under `key` that may be taken over, first first, with their number `n`, and those refused."""
        good, bad = [], []
        for number in self.record_numbers(key):
            name = f"records/{key}/{number}.json"
            try:
                value = self.document(name)
                if value is not None:
                    good.append({**self._record(name, key, value), "n": number})
            except Refused as refused:
                bad.append(refused)
        return good, bad

    def record_numbers(self, key: str) -> list[int]:
        """Numbers of the records under `key`, in order."""
        names = (name.removesuffix(".json") for name in self.listed(f"records/{key}") if name.endswith(".json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _record(self, name: str, key: str, value: Any) -> dict[str, Any]:
        problem = record_problem(key, value)
        if problem is None and not _HEX.match(value["output"]):
            problem = "its output is no digest"
        if problem is None and value["components"].get("stage") != value.get("stage"):
            problem = f"it is of a stage `{value.get('stage')}`, its key is not"
        if problem is None and not all(isinstance(value.get(field), str) for field in ("instance", "determinism")):
            problem = "it names no stage instance"
        if problem is None and not isinstance(value.get("seconds"), int | float):
            problem = "it does not say how long the stage took"
        if problem is not None:
            raise self._refused(name, problem)
        taken = {field: value.get(field) for field in ("instance", *FIELDS)}
        return {**taken, **{field: value[field] for field in OPTIONAL if field in value}}

    def builds(self) -> list[str]:
        """Ids of the builds, oldest first."""
        names = (name.removesuffix(".json") for name in self.listed("builds") if name.endswith(".json"))
        return sorted(name for name in names if BUILD_ID.match(name))

    def build(self, id: str) -> dict[str, Any] | None:
        """A build record that names itself, its stages' keys and outputs; None if it is not there. Raises Refused."""
        name = f"builds/{id}.json"
        value = self.document(name)
        if value is None:
            return None
        try:
            outputs = {stage["output"] for stage in value["stages"]}
            digests = outputs | {stage["key"] for stage in value["stages"]}
            good = value["build"] == id and value["image"]["artifact"] in outputs and all(map(_HEX.match, digests))
        except (KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise self._refused(name, "it is no build record of that name")
        return dict(value)

    # How

    def words(self, error: BaseException) -> str:
        """What a back end says, on one line and without credentials."""
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        said = hide(" ".join(str(said).split()), self._hidden)[:200]
        return said if isinstance(error, OSError) and said else f"{type(error).__name__}{': ' if said else ''}{said}"

    def _refused(self, name: str, why: str) -> Refused:
        return Refused(
            "remote.refused",
            f"{self.name}: {name} was refused: {why}",
            exit_code=COULD_NOT,
            hint="nothing of it was kept; remove it there and push it again from a store that has it",
        )

    def refuse_object(self, sha256: str, why: str) -> Refused:
        """The error for an object that is not what it is called."""
        return self._refused(object_name(sha256), why)

    def _place(self, name: str, size: int, act: Callable[[Any, str], object]) -> None:
        """Let `act` write a file; beside its place first, unless it can appear there only whole."""
        self.open()
        assert self._opened is not None
        _, root, atomic = self._opened
        folder, _, last = f"{root}/{name}".rpartition("/")

        def whole(fs: Any, path: str) -> None:
            if atomic:
                act(fs, path)
                return
            fs.makedirs(folder, exist_ok=True)
            beside = f"{folder}/.{last}.{uuid.uuid4().hex}"
            try:
                act(fs, beside)
                fs.mv(beside, path)
            except BaseException:
                _forget(fs, beside)
                raise

        self._try(whole, name, absent=False)
        there = self.size(name)
        if there != size:
            raise RemoteError(
                "remote.lost",
                f"{self.name}: of {name}, {size} bytes were sent and {there} are there",
                exit_code=COULD_NOT,
            )

    def _try(self, act: Callable[[Any, str], T], name: str, *, absent: bool = True) -> T | None:
        """`act` on a file, again after a pause where that may help; None where there is no such file."""
        self.open()
        assert self._opened is not None
        fs, root, _ = self._opened
        for pause in (*PAUSES_S, None):
            try:
                return act(fs, f"{root}/{name}")
            except (FileNotFoundError, NotADirectoryError) as error:
                if absent:
                    return None
                raise self._failed(name, error) from None
            except QdcError:
                raise
            except Exception as error:
                if pause is None or not may_work_later(error):
                    raise self._failed(name, error) from None
                self._sleep(pause)
        raise AssertionError("unreachable")

    def _failed(self, name: str, error: Exception) -> RemoteError:
        denied = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
        hint = "what was moved is kept: run the same command to go on"
        if denied:
            hint = "give its back end credentials that may do this (for S3: AWS_PROFILE or AWS_ACCESS_KEY_ID, ...)"
        id = "remote.denied" if denied else "remote.failed"
        return RemoteError(id, f"{self.name}: {name}: {self.words(error)}", exit_code=COULD_NOT, hint=hint)


def may_work_later(error: BaseException) -> bool:
    """Whether an error of a back end may be one of the network or of a busy server."""
    if isinstance(error, PermissionError | FileExistsError | IsADirectoryError | NotImplementedError):
        return False
    if isinstance(error, OSError | asyncio.TimeoutError | TimeoutError | EOFError):
        return True
    room = type(error).__module__.partition(".")[0]
    return room in ("aiohttp", "botocore", "aiobotocore", "urllib3") and "Credentials" not in type(error).__name__


def object_name(sha256: str) -> str:
    return f"objects/sha256/{sha256[:2]}/{sha256}"


def _forget(fs: Any, path: str) -> None:
    try:
        fs.rm_file(path)
    except Exception:  # What failed before is what the user must hear of.
        return
