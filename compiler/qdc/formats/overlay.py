"""The file system that a stack of layers makes: whiteouts, replaced files, hard and symbolic links.

Takes the members of each layer's tar in order and answers which layer's bytes a path shows. Files that a
later entry hides are kept as evidence. Links are followed inside the image only. Memory and work are bounded
whatever the layers hold. Standard library only.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

from qdc.core.errors import QdcError
from qdc.formats.tar import Member, Room

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
MAX_LINKS = 40
MAX_STEPS = 60_000_000
"""Parts of paths followed and entries looked at; an image of 100,000 files takes about a million."""
_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class Entry:
    """`layer` counts from 0; `offset` is that of the data in the layer's uncompressed tar; sizes in bytes."""

    path: str
    type: str
    layer: int
    offset: int
    size: int
    mode: int
    link: str | None = None


@dataclass(frozen=True, slots=True)
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
        self._room, self._steps = Room(), 0
        self._children: dict[str, list[str]] = {}
        """Folder -> what was ever put there; what is no longer in `entries` is passed over."""
        self._parents: dict[str, str] = {}
        self._linked: dict[str, int] = {}
        """Hard link to a lower layer's file -> the layer that has the link."""

    def add(self, layer: int, members: Iterable[Member], what: str = "layer") -> None:
        """Apply one layer. Raises QdcError `overlay.*` on link loops and hard links to nothing, `tar.too-many` when

        the image has too many entries, and what `members` raises; entries before that stay.
        """
        done: set[str] = set()
        for member in members:
            try:
                self._apply(layer, member, done, what)
            except QdcError as error:
                raise QdcError(error.id, f"{what}: {error.message}", exit_code=4) from error

    def resolve(self, path: str) -> Entry | None:
        """The entry that `path` shows after following every link, or None. Raises QdcError on a link loop."""
        return self.entries.get(self._follow(path.strip("/")))

    def _apply(self, layer: int, member: Member, done: set[str], what: str) -> None:
        """A whiteout hides only what lower layers have, wherever it stands in its layer."""
        self._room.take(member.path, member.link, what)
        folder, name = posixpath.split(member.path)
        if not name.startswith(WHITEOUT):
            if name:
                self._put(self._join(self._place(folder), name), layer, member)
            return
        place = self._place(folder)
        path = place if name == OPAQUE else self._join(place, name[len(WHITEOUT) :])
        mark = f"{path}/" if name == OPAQUE else path
        if mark not in done:
            done.add(mark)
            self._hide(path, layer, member.path, below=layer, keep=name == OPAQUE)

    def _put(self, path: str, layer: int, member: Member) -> None:
        entry = Entry(path, member.type, layer, member.offset, member.size, member.mode, member.link)
        if member.type == "hardlink":
            folder, name = posixpath.split(member.link or "")
            source = self.entries.get(self._join(self._place(folder), name))
            if source is None:
                why = f"{member.path!r} is a hard link to {member.link!r}, which is not there"
                raise QdcError("overlay.hardlink", why, exit_code=4)
            entry = Entry(path, source.type, source.layer, source.offset, source.size, source.mode, source.link)
        before = self.entries.get(path)
        if entry.type != "dir" or (before is not None and before.type != "dir"):
            self._hide(path, layer, member.path)
        self.entries[path] = entry
        if entry.layer != layer:
            self._linked[path] = layer
        if entry.type == "symlink":
            self._parents.clear()
        self._enter(path, layer, member.path)

    def _enter(self, path: str, layer: int, by: str) -> None:
        """Make `path` findable from the folders above it; a file in the place of one of them is gone."""
        while path:
            self._spend(1)
            folder = posixpath.dirname(path)
            siblings = self._children.get(folder)
            if siblings is None:
                self._children[folder] = [path]
            else:
                siblings.append(path)
                return
            above = self.entries.get(folder)
            if above is not None and above.type not in ("dir", "symlink"):
                self._gone(above, layer, by)
            path = folder

    def _hide(self, path: str, layer: int, by: str, below: int | None = None, keep: bool = False) -> None:
        """Take away `path` (not itself if `keep`) and all under it; of what is put there, only by layers `below`."""
        if path not in self.entries and path not in self._children:
            return
        stack, seen = [path], []
        while stack:
            victim = stack.pop()
            inside = self._children.get(victim)
            self._spend(1 + len(inside or ()))
            entry = self.entries.get(victim)
            mine = entry is not None and below is not None and self._linked.get(victim, entry.layer) >= below
            if entry is not None and not mine and not (keep and victim == path):
                self._gone(entry, layer, by)
            if inside is not None:
                stack.extend(inside)
                seen.append(victim)
        for folder in reversed(seen):
            unique = dict.fromkeys(self._children.pop(folder, ()))
            left = [item for item in unique if item in self.entries or item in self._children]
            if left:
                self._children[folder] = left

    def _gone(self, entry: Entry, layer: int, by: str) -> None:
        del self.entries[entry.path]
        self._linked.pop(entry.path, None)
        if entry.type == "symlink":
            self._parents.clear()
        if entry.type != "dir":
            self.hidden.append(Hidden(entry, layer, by))

    def _place(self, folder: str) -> str:
        """The real folder behind `folder`: symbolic links among its parts followed."""
        place = self._parents.get(folder)
        if place is None:
            if len(self._parents) >= _REMEMBERED:
                self._parents.clear()
            place = self._parents[folder] = self._follow(folder)
            self._spend(folder.count("/") + 1)
        return place

    def _follow(self, path: str) -> str:
        todo, done, links = path.split("/")[::-1] if path else [], "", 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = posixpath.dirname(done)
                continue
            here = f"{done}/{part}" if done else part
            entry = self.entries.get(here)
            if entry is not None and entry.type == "symlink":
                links += 1
                if links > MAX_LINKS:
                    raise QdcError("overlay.loop", f"{path[:200]!r} goes through too many links", exit_code=4)
                link = entry.link or ""
                done = "" if link.startswith("/") else done
                parts = link.split("/")
                self._steps += len(parts)
                todo.extend(reversed(parts))
            else:
                done = here
        return path if done == path else done

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise QdcError("overlay.work", "its links and whiteouts take too long to follow", exit_code=4)

    @staticmethod
    def _join(folder: str, name: str) -> str:
        return f"{folder}/{name}" if folder else name
