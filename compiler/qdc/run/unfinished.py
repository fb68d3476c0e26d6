"""Unfinished work of a stage, at the remote: one tar a key, so that another node can go on with it.

`partial/<key>/<n>.tar`, n: the youngest file's mtime in ns, so that the newer of two works is known by its name. What a
stage leaves in its partial folder is whole at any instant: it writes beside (names with a dot), and renames.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from qdc.core.errors import QdcError
from qdc.store.remote import Remote

Files = dict[str, int]
"""Path in the partial folder -> mtime in ns."""


def files(folder: Path) -> Files:
    """The files below a folder, without those that are being written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        with contextlib.suppress(OSError):
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                found[name.as_posix()] = path.stat().st_mtime_ns
    return found


def send(remote: Remote, key: str, folder: Path, listed: Files) -> bool:
    """Put these files of a partial folder there; False where one went meanwhile, and nothing was sent."""
    with tempfile.NamedTemporaryFile(dir=folder.parent, prefix=".tar-") as file:
        try:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for name in listed:
                    tar.add(folder / name, name, recursive=False)
        except OSError:
            return False
        file.flush()
        place = Path(file.name)
        remote.send(_name(key, max(listed.values())), place, place.stat().st_size, lambda count: None)
    for older in _there(remote, key)[:-1]:
        remote.remove(_name(key, older))
    return True


def fetch(remote: Remote, key: str, folder: Path) -> bool:
    """Let a partial folder hold what is there, where that is newer; False where it stays as it is."""
    there = _there(remote, key)
    if not there or there[-1] <= max(files(folder).values(), default=-1):
        return False
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tar-") as beside:
        place, made = Path(beside, "tar"), Path(beside, "made")
        remote.fetch(_name(key, there[-1]), place)
        try:
            with tarfile.open(place) as tar:
                tar.extractall(made, filter="data")
        except (OSError, tarfile.TarError):
            return False
        # A tar knows no ns: the youngest there is the youngest here, and the name of what is sent next is later.
        for path in made.rglob("*"):
            os.utime(path, ns=(there[-1], there[-1]))
        shutil.rmtree(folder)
        shutil.move(made, folder)
    return True


def forget(remote: Remote, key: str) -> None:
    """Remove what is there of a finished stage."""
    with contextlib.suppress(QdcError):
        for number in _there(remote, key):
            remote.remove(_name(key, number))


def _name(key: str, number: int) -> str:
    return f"partial/{key}/{number}.tar"


def _there(remote: Remote, key: str) -> list[int]:
    names = (name.removesuffix(".tar") for name in remote.listed(f"partial/{key}") if name.endswith(".tar"))
    return sorted(int(name) for name in names if name.isdecimal())
