"""The files that a script sees: those of the image, with what only a running container has left undecided.

A path below /proc, /sys, /dev, /run, a volume or a mount is `unknown`; nothing outside of the image is looked at.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from qdc.audit.shell_patterns import pattern
from qdc.core.errors import QdcError
from qdc.formats.oci import Image

VOLATILE = ("/proc", "/sys", "/dev", "/run", "/var/run", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf",
            "/.dockerenv", "/run/.containerenv")  # fmt: skip
MAX_SCRIPT, MAX_ENTRIES = 1 << 20, 200_000


class Files(Protocol):
    """Absolute paths to what is there. `kind`: `file`, `dir`, `gone`, or `unknown`."""

    def kind(self, path: str) -> str: ...

    def real(self, path: str) -> str: ...

    def mode(self, path: str) -> int: ...

    def size(self, path: str) -> int: ...

    def link(self, path: str) -> bool: ...

    def text(self, path: str) -> str | None: ...

    def match(self, pieces: list[tuple[str, bool]], cwd: str, written: Mapping[str, Any]) -> list[str] | None: ...


class ImageFiles:
    """The files of an image; `mounts`: further paths that only the running container knows."""

    def __init__(self, image: Image, mounts: Iterable[str] = ()) -> None:
        self.image = image
        self.entries = image.overlay.entries
        self.volatile = (*VOLATILE, *(posixpath.normpath(mount) for mount in mounts))
        self.folders = {"/"}
        for path in self.entries:
            folder = posixpath.dirname(f"/{path}")
            while folder not in self.folders:
                self.folders.add(folder)
                folder = posixpath.dirname(folder)

    def real(self, path: str) -> str:
        """The path behind links where it leads to something, else the path itself, without `.` and `..`."""
        try:
            entry = self.image.overlay.resolve(path)
        except QdcError:
            entry = None
        return f"/{entry.path}" if entry is not None else posixpath.normpath(f"/{path.lstrip('/')}")

    def kind(self, path: str) -> str:
        real = self.real(path)
        if any(real == place or real.startswith(f"{place}/") for place in self.volatile):
            return "unknown"
        entry = self.entries.get(real.lstrip("/"))
        if entry is not None and entry.type == "symlink":
            return "gone"
        if real in self.folders or (entry is not None and entry.type == "dir"):
            return "dir"
        if entry is None:
            return "gone"
        return "file" if entry.type == "file" else "unknown"

    def mode(self, path: str) -> int:
        entry = self.entries.get(self.real(path).lstrip("/"))
        return entry.mode if entry is not None else 0o755

    def size(self, path: str) -> int:
        entry = self.entries.get(self.real(path).lstrip("/"))
        return entry.size if entry is not None else 0

    def link(self, path: str) -> bool:
        entry = self.entries.get(posixpath.normpath(path).lstrip("/"))
        return entry is not None and entry.type == "symlink"

    def text(self, path: str) -> str | None:
        """The text of a file; None for bytes that are no text, and for more than a megabyte."""
        try:
            if self.size(path) > MAX_SCRIPT:
                return None
            data = self.image.read(self.real(path))
            return None if b"\0" in data else data.decode()
        except (QdcError, UnicodeDecodeError):
            return None

    def match(self, pieces: list[tuple[str, bool]], cwd: str, written: Mapping[str, Any]) -> list[str] | None:
        """Paths that a pattern for files shows; None where that is not known."""
        if len(self.entries) > MAX_ENTRIES:
            return None
        names = [path for path, content in written.items() if content.kind != "gone"]
        gone = {path for path, content in written.items() if content.kind == "gone"}
        return match_files([*(f"/{path}" for path in self.entries), *self.folders, *names], gone, pieces, cwd)


def match_files(names: Iterable[str], gone: set[str], pieces: list[tuple[str, bool]], cwd: str) -> list[str] | None:
    """The paths in `names` that `pieces` (text, quoted) show from folder `cwd`, as a shell would write them."""
    whole = "".join(text for text, _ in pieces)
    absolute = whole.startswith("/")
    depth = len([part for part in whole.split("/") if part])
    compiled = pattern([(text.replace("\n", "\n"), quoted) for text, quoted in pieces])
    parts = whole.split("/")
    if compiled is None or "//" in whole or whole.endswith("/") or "." in parts or ".." in parts:
        return None
    base = "" if absolute else posixpath.normpath(cwd).rstrip("/")
    found = set()
    for name in {*names, *VOLATILE, "/tmp", "/etc", "/var"}:
        shown = name if absolute else name[len(base) + 1 :] if name.startswith(f"{base}/") else ""
        if not shown or len([part for part in shown.split("/") if part]) != depth or name in gone:
            continue
        if compiled.fullmatch(shown) and _levels(parts, shown.split("/")):
            if any(name == place or name.startswith(f"{place}/") for place in VOLATILE):
                return None
            found.add(shown)
    first = posixpath.normpath(whole if absolute else f"{base}/{whole}")
    if any(first.startswith(f"{place}/") for place in VOLATILE):
        return None
    return sorted(found)


def _levels(wanted: list[str], shown: list[str]) -> bool:
    """Names with a leading dot are only matched by a pattern that has it."""
    return len(wanted) == len(shown) and all(
        not name.startswith(".") or part.startswith(".") for part, name in zip(wanted, shown, strict=True)
    )
