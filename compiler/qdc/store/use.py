"""Who uses the store: builds and fetches hold it for their whole run, `gc` only while nobody does.

One `flock` on one file, shared or exclusive; it ends with the processes that hold it. Knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.redact import without_credentials


def lock_file(root: Path) -> Path:
    return root / "locks" / "use"


@contextlib.contextmanager
def in_use(root: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the store at `root` against `gc`; `waiting` is called once where a `gc` must end first.

    Any number of processes hold it at a time. A store that cannot be written is not held: nobody here can sweep it.
    """
    try:
        descriptor = _open(lock_file(root))
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the store at `root` alone. Raises QdcError `store.in_use`, which names who is in the way."""
    descriptor = _open(lock_file(root))
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QdcError(
                "store.in_use",
                f"the store is in use by {', '.join(users(root)) or 'a process of another user, host or container'}",
                file=root,
                exit_code=COULD_NOT,
                hint="run the same command again when that has ended",
            ) from None
        yield
    finally:
        os.close(descriptor)


def users(root: Path) -> list[str]:
    """The processes that have the lock's file open, each with its command, as far as this user may see."""
    wanted, found = os.path.realpath(lock_file(root)), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            held = [_link(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")].count(wanted)
            if held > (int(name) == os.getpid()):
                found.append(f"`{_command(name)}` (process {name})")
    return found


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _command(process: str) -> str:
    """`qdc build x.yaml` of a process's command line."""
    with open(f"/proc/{process}/cmdline", "rb") as stream:
        words = [word.decode(errors="replace") for word in stream.read().split(b"\0") if word]
    for index, word in enumerate(words[:4]):
        if word.rpartition("/")[2] == "qdc":
            words = ["qdc", *words[index + 1 :]]
    return without_credentials(" ".join(words))[:120]
