"""A plain model folder as an `Image` without configuration and layers: files, and nothing that starts them.

Links are followed while they stay in the folder; a snapshot in a hub's cache may point to the blobs beside it. What
leads elsewhere, and what is no regular file, is not read and is named. Standard library only.
"""

from __future__ import annotations

import os
import shlex
import stat
from functools import cached_property
from pathlib import Path

from qdc.core.errors import QdcError
from qdc.formats import tar
from qdc.formats.image import Cut, Image
from qdc.formats.overlay import Entry, Overlay
from qdc.formats.ranges import FileRange, RangeReader


class ModelFolder(Image):
    """`Entry.layer` of its files is always 0, but there is no layer: `origin` is None."""

    def __init__(self, root: Path, shown: str | None = None) -> None:
        super().__init__(shown or str(root), None, [])
        self.root = root.resolve()
        self._roots = [self.root]
        if self.root.parent.name == "snapshots":
            self._roots.append(self.root.parent.parent / "blobs")

    @cached_property
    def overlay(self) -> Overlay:
        overlay, odd = Overlay(), []
        room = tar.Room()
        for folder, folders, names in os.walk(self.root, onerror=self._unreadable):
            folders.sort()
            for name in sorted(names) + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
                path = Path(folder, name)
                shown = path.relative_to(self.root).as_posix()
                room.take(shown, None, self.where)
                why, size, mode = self._look(path)
                if why:
                    odd.append(self._cut(f"{shown[:200]!r} {why}"))
                else:
                    overlay.entries[shown] = Entry(shown, "file", 0, 0, size, mode)
        self.cuts += odd[:20]
        return overlay

    def _look(self, path: Path) -> tuple[str | None, int, int]:
        """Why a file is not read, or its size and mode."""
        try:
            real = path.resolve(strict=True)
            info = real.stat()
        except (OSError, RuntimeError) as error:
            return f"cannot be read: {getattr(error, 'strerror', None) or 'links in a circle'}", 0, 0
        if not any(real.is_relative_to(root) for root in self._roots):
            return "is a link out of the folder; it is not followed", 0, 0
        if stat.S_ISDIR(info.st_mode):
            return "is a link to a folder; it is not followed", 0, 0
        if not stat.S_ISREG(info.st_mode):
            return "is no regular file; it is not read", 0, 0
        return None, info.st_size, stat.S_IMODE(info.st_mode)

    def _unreadable(self, error: OSError) -> None:
        name = os.path.relpath(str(error.filename), self.root)
        self.cuts.append(self._cut(f"{name[:200]!r} cannot be read: {error.strerror}"))

    @staticmethod
    def _cut(why: str) -> Cut:
        return Cut(0, QdcError("image.folder", why, exit_code=4))

    def content(self, entry: Entry) -> RangeReader:
        return FileRange(self.root / entry.path)

    def origin(self, entry: Entry) -> str | None:
        return None

    def excerpt(self, entry: Entry, start: int, length: int) -> str:
        return f"tail -c +{start + 1} {shlex.quote(str(self.root / entry.path))} | head -c {length}"


def open_folder(path: Path, shown: str | None = None) -> ModelFolder:
    """Raises QdcError `image.folder` where there is no folder."""
    if not path.is_dir():
        raise QdcError("image.folder", f"{path} is no folder", hint="folder:DIR is a folder with a model", exit_code=4)
    return ModelFolder(path, shown)
