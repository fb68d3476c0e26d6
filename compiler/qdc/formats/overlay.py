"""The file system that a stack of layers makes: whiteouts, replaced files, hard and symbolic links.

Takes the members of each layer's tar in order and answers which layer's bytes a path shows. Files that a
later entry hides are kept as evidence. Links are followed inside the image only. Standard library only.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

from qdc.core.errors import QdcError
from qdc.formats.tar import Member

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
MAX_LINKS = 40


@dataclass(frozen=True)
class Entry:
    """`layer` counts from 0; `offset` is that of the data in the layer's uncompressed tar; sizes in bytes."""

    path: str
    type: str
    layer: int
    offset: int
    size: int
    mode: int
    link: str | None = None


@dataclass(frozen=True)
class Hidden:
    """A file of a lower layer that the image no longer shows, and what hides it."""

    entry: Entry
    by_layer: int
    by: str


class Overlay:
    """Feed layers from the lowest with `add`; then `entries`, `hidden` and `resolve` answer."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.hidden: list[Hidden] = []
        self._children: dict[str, set[str]] = {}
        self._parents: dict[str, str] = {}

    def add(self, layer: int, members: Iterable[Member]) -> None:
        """Apply one layer. Raises QdcError `overlay.*` on link loops and hard links to nothing."""
        members = list(members)
        for member in members:
            folder, name = posixpath.split(member.path)
            if name == OPAQUE:
                for child in sorted(self._children.get(self._place(folder), ())):
                    self._hide(child, layer, member.path)
            elif name.startswith(WHITEOUT):
                self._hide(posixpath.join(self._place(folder), name[len(WHITEOUT) :]), layer, member.path)
        for member in members:
            folder, name = posixpath.split(member.path)
            if name and not name.startswith(WHITEOUT):
                self._put(posixpath.join(self._place(folder), name), layer, member)

    def resolve(self, path: str) -> Entry | None:
        """The entry that `path` shows after following every link, or None. Raises QdcError on a link loop."""
        return self.entries.get(self._follow(path.strip("/")))

    def _put(self, path: str, layer: int, member: Member) -> None:
        entry = Entry(path, member.type, layer, member.offset, member.size, member.mode, member.link)
        if member.type == "hardlink":
            folder, name = posixpath.split(member.link or "")
            source = self.entries.get(posixpath.join(self._place(folder), name))
            if source is None:
                why = f"{member.path!r} is a hard link to {member.link!r}, which is not there"
                raise QdcError("overlay.hardlink", why, exit_code=4)
            entry = Entry(path, source.type, source.layer, source.offset, source.size, source.mode, source.link)
        before = self.entries.get(path)
        if entry.type != "dir" or (before is not None and before.type != "dir"):
            self._hide(path, layer, member.path)
        self.entries[path] = entry
        if entry.type == "symlink":
            self._parents.clear()
        while path:
            folder = posixpath.dirname(path)
            siblings = self._children.setdefault(folder, set())
            if path in siblings:
                break
            siblings.add(path)
            path = folder

    def _hide(self, path: str, layer: int, by: str) -> None:
        stack = [path]
        while stack:
            victim = stack.pop()
            stack.extend(sorted(self._children.pop(victim, ())))
            entry = self.entries.pop(victim, None)
            if entry is not None:
                if entry.type == "symlink":
                    self._parents.clear()
                if entry.type != "dir":
                    self.hidden.append(Hidden(entry, layer, by))
        self._children.get(posixpath.dirname(path), set()).discard(path)

    def _place(self, folder: str) -> str:
        """The real folder behind `folder`: symbolic links among its parts followed."""
        if folder not in self._parents:
            self._parents[folder] = self._follow(folder)
        return self._parents[folder]

    def _follow(self, path: str) -> str:
        todo, done, links = path.split("/")[::-1] if path else [], "", 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = posixpath.dirname(done)
                continue
            here = posixpath.join(done, part)
            entry = self.entries.get(here)
            if entry is not None and entry.type == "symlink":
                links += 1
                if links > MAX_LINKS:
                    raise QdcError("overlay.loop", f"{path!r} goes through too many links", exit_code=4)
                link = entry.link or ""
                done = "" if link.startswith("/") else done
                todo.extend(link.split("/")[::-1])
            else:
                done = here
        return done
