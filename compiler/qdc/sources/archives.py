"""The checkpoint in a tar archive or in a wheel: its files one after the other, each as a stream.

Only plain files of one folder are given, under their plain names, so that no archive can write anywhere else. What
the files mean is not known here.
"""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

Wanted = Callable[[str], bool]


class ArchiveError(Exception):
    """An archive that is not one, or that holds no checkpoint."""


def tar_files(path: Path, wanted: Wanted) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, stream) of the `wanted` files beside the topmost config.json of a tar, compressed or not.

    Raises ArchiveError.
    """
    try:
        with tarfile.open(path, "r:*") as archive:
            members = archive.getmembers()
            folder = _folder([member.name for member in members if member.isfile()])
            for member in members:
                place = _parts(member.name)
                if place[:-1] != folder or not place or not wanted(place[-1]):
                    continue
                if not member.isfile():
                    if member.isdir():
                        continue
                    raise ArchiveError(f"`{member.name}` is a link or a device, and no file")
                stream = archive.extractfile(member)
                assert stream is not None
                yield place[-1], stream
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ArchiveError(f"no readable tar archive: {error}") from None


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in PurePosixPath(name).parts if part not in (".", "/"))


def _folder(names: list[str]) -> tuple[str, ...]:
    """The folder of the one topmost config.json."""
    places = sorted((_parts(name)[:-1] for name in names if _parts(name)[-1:] == ("config.json",)), key=len)
    if not places:
        raise ArchiveError("it holds no config.json, so it is no checkpoint")
    if len(places) > 1 and len(places[1]) == len(places[0]):
        raise ArchiveError(f"it holds more than one checkpoint: {'/'.join(places[0])} and {'/'.join(places[1])}")
    return places[0]


def wheel_files(path: Path, folder: str, wanted: Wanted) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, stream) of the `wanted` files right below `folder` in a wheel. Raises ArchiveError."""
    prefix = _parts(folder)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            inside = [name for name in names if _parts(name)[:-1] == prefix and wanted(_parts(name)[-1])]
            if "config.json" not in {_parts(name)[-1] for name in inside}:
                homes = sorted({"/".join(_parts(name)[:-1]) for name in names if _parts(name)[-1] == "config.json"})
                raise ArchiveError(
                    f"the wheel has no config.json in `{folder}`"
                    + (f"; it has one in {', '.join(homes)}" if homes else "")
                )
            for name in inside:
                with archive.open(name) as stream:
                    yield _parts(name)[-1], stream
    except (zipfile.BadZipFile, EOFError, zlib.error, OSError, NotImplementedError, RuntimeError) as error:
        raise ArchiveError(f"no readable wheel: {error}") from None
