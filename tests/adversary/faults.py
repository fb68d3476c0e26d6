"""Trouble at the nth call that changes the store: the process dies there, the disk is full, nothing can be written."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = (
    "chmod",
    "fchmod",
    "fsync",
    "link",
    "mkdir",
    "pwrite",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "utime",
    "write",
)
"""Functions of `os` that change files. `open` is watched too, where it is for writing."""


class Killed(BaseException):
    """The process is dead: nothing that it does from here on reaches the disk."""


@dataclass
class Fault:
    """`kind`: "kill" (at call `at` and ever after), "SIGKILL" (the whole process, at call `at`), "full" (calls from
    `at` on), "read-only" (all calls).

    `calls`: how many there were; with `at` 0 they are only counted.
    """

    kind: str
    at: int = 0
    calls: int = 0
    struck: bool = False

    def check(self) -> None:
        self.calls += 1
        if self.kind == "read-only":
            self.struck = True
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "store")
        if self.at and self.calls >= self.at:
            self.struck = True
            if self.kind == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "kill":
                raise Killed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "store")


@contextlib.contextmanager
def striking(fault: Fault, store: Path) -> Iterator[None]:
    """Within, calls that change files below `store` meet the fault. Freeing space works on a full disk."""
    frees = ("remove", "rmdir", "unlink", "chmod", "fchmod", "utime", "fsync", "truncate")
    real = {name: getattr(os, name) for name in CALLS} | {"open": os.open}
    real_io_open, inside = io.open, str(store)

    def below(path: Any) -> bool:
        try:
            return isinstance(path, int) or os.fspath(path).startswith(inside)
        except TypeError:
            return False

    def watched(name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            spared = fault.kind == "full" and name in frees
            if not spared and (named.get("dir_fd") is not None or below(given[0])):
                fault.check()
            return real[name](*given, **named)

        return call

    def os_open(path: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and below(path):
            fault.check()
        return int(real["open"](path, flags, *given, **named))

    def io_open(path: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if not isinstance(path, int) and set(mode) & set("wxa+") and below(path):
            fault.check()
        return real_io_open(path, mode, *given, **named)

    for name in CALLS:
        setattr(os, name, watched(name))
    os.open, io.open, builtins.open = os_open, io_open, io_open
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        io.open, builtins.open = real_io_open, real_io_open
