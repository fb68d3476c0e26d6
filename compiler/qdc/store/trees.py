"""A folder as data: a tree is the sorted list of its files with size, mode and SHA-256.

A tree's digest names the folder's content and nothing else (no owner, time or place). Modes are 0o644 or 0o755.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, order=True)
class Entry:
    """One file: `path` with `/` from the folder's root, `size` in bytes, `sha256` in 64 hex digits."""

    path: str
    size: int
    mode: int
    sha256: str


@dataclass(frozen=True)
class Tree:
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    @property
    def digest(self) -> str:
        return canonical.digest(self.as_json())

    def as_json(self) -> list[Any]:
        return [[entry.path, entry.size, entry.mode, entry.sha256] for entry in self.entries]

    @classmethod
    def from_json(cls, value: list[Any]) -> Tree:
        return cls(tuple(Entry(*item) for item in value))

    def find(self, path: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.path == path), None)


def list_files(folder: Path, *, links: bool = False) -> list[Path]:
    """Every file below `folder`, sorted by its path; with `links`, a link to a file counts as that file.

    Raises QdcError for anything else (other links, devices) and OSError for a folder that cannot be read: nothing
    below `folder` is passed over.
    """

    def fail(error: OSError) -> None:
        raise error

    found = []
    for place, folders, names in os.walk(folder, onerror=fail):
        for path in (Path(place) / name for name in (*folders, *names)):
            if path.is_symlink() and not (links and path.is_file()):
                raise QdcError("store.link", f"a link, but not to a file: {path}", exit_code=COULD_NOT)
            if path.is_file():
                found.append(path)
            elif not path.is_dir():
                raise QdcError("store.special", f"neither file nor folder: {path}", exit_code=COULD_NOT)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def sound(value: Any) -> Tree:
    """A tree that came from elsewhere. Raises ValueError where it is not one, or a path would leave its folder."""
    try:
        tree = Tree.from_json(value)
    except (TypeError, ValueError):
        raise ValueError("it is not a list of files") from None
    seen: set[str] = set()
    for entry in tree.entries:
        if not (isinstance(entry.path, str) and isinstance(entry.sha256, str) and _DIGEST.match(entry.sha256)):
            raise ValueError("it is not a list of files")
        if type(entry.size) is not int or entry.size < 0 or entry.mode not in (0o644, 0o755):
            raise ValueError(f"`{entry.path}` has no sound size and mode")
        parts = entry.path.split("/")
        if not all(parts) or {".", ".."} & set(parts) or "\0" in entry.path:
            raise ValueError(f"the path `{entry.path}` leaves its folder")
        if entry.path in seen:
            raise ValueError(f"it has `{entry.path}` twice")
        seen.add(entry.path)
    if any("/".join(entry.path.split("/")[:end]) in seen for entry in tree.entries for end in _ends(entry.path)):
        raise ValueError("a file is also a folder")
    return tree


def _ends(path: str) -> range:
    return range(1, path.count("/") + 1)
