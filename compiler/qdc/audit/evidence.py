"""What an audit works with: facts from bytes, claims from words, verdicts, and where each was seen.

Evidence is `{layer, path, offset, length, text, command}`: the digest of the uncompressed layer, the path in the
image, the byte range in that layer's tar, a short text, and a shell command that shows the same bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.formats.oci import Image, as_object, parse_json
from qdc.formats.overlay import Entry

Evidence = dict[str, Any]
PROVED, REFUTED, RECORDED, UNREAD = "proved", "refuted", "recorded", "unread"


@dataclass
class Fact:
    """A value that the image's bytes show.

    `problems`: contradictions among the bytes themselves; a fact with any refutes every claim. `accepts`: what
    speaks against a claimed value, in words (default: that it is another value). `decides`: False where the bytes
    can refute a claim but not prove it.
    """

    value: Any
    evidence: list[Evidence] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    accepts: Callable[[Any], list[str]] | None = None
    decides: bool = True

    def against(self, claimed: Any) -> list[str]:
        """Why `claimed` is not what the bytes show; empty if it is."""
        if self.accepts is not None:
            return self.accepts(claimed)
        if same(claimed, self.value):
            return []
        return [f"the bytes say {brief(self.value)}, not {unlike(claimed, self.value)}"]


@dataclass(frozen=True)
class Claim:
    """`id`: a recipe path; `source`: who says so (`manifest`, `recipe`, `require`, a label, the tag)."""

    id: str
    value: Any
    source: str
    evidence: tuple[Evidence, ...] = ()


@dataclass
class Findings:
    """Facts by claim id; `unread`: claim ids (or prefixes ending in `.`) that could not be read, and why.

    `claims`: what must hold of any image, whoever says nothing of it; a fact with problems is refuted by them.
    """

    facts: dict[str, Fact] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    def fault(self, id: str, fact: Fact) -> None:
        """A fact whose problems need no claim to be refuted."""
        self.facts[id] = fact
        if fact.problems:
            self.claims.append(Claim(id, fact.value, "qdc"))

    def why_unread(self, id: str) -> str | None:
        for name, why in self.unread.items():
            if name in ("", id) or (name.endswith(".") and id.startswith(name)):
                return why
        return None


class Look:
    """An image seen through paths, as evidence. `sparing`: each byte is fetched, so that little is read: what needs
    many files, or large ones, is left out and marked unread. The default: where the image counts what it fetches."""

    def __init__(self, image: Image, *, sparing: bool | None = None) -> None:
        self.image = image
        self.sparing = getattr(image, "transfer", None) is not None if sparing is None else sparing

    def at(self, path: str, text: str, offset: int = 0, length: int | None = None, show: str = "") -> Evidence:
        """Evidence for `length` bytes (default: all) from `offset` in the file at `path`.

        `show` is appended to the shell command, for example `| sha256sum`.
        """
        entry = self.image.find(path)
        if entry is None:
            return self.absent(path, text)
        length = entry.size - offset if length is None else length
        start = entry.offset + offset
        command = self.image.excerpt(entry, start, length)
        return {
            "layer": self.image.origin(entry),
            "path": f"/{entry.path}",
            "offset": start,
            "length": length,
            "text": text,
            "command": f"{command} {show}".strip(),
        }

    def absent(self, path: str, text: str) -> Evidence:
        """Evidence that there is no file at `path` (no layer, no range)."""
        listing = " ; ".join(f"{self.command(layer.number)} | tar -t" for layer in self.image.layers)
        name = shlex.quote(path.strip("/"))
        command = f"( {listing} ) | grep -F {name}" if listing else f"find {shlex.quote(self.image.where)}"
        return {
            "layer": None,
            "path": f"/{path.strip('/')}",
            "offset": None,
            "length": None,
            "text": text,
            "command": command,
        }

    def configuration(self, text: str) -> Evidence:
        """Evidence in the image configuration (whose digest is the image ID); it lies in no layer."""
        return {
            "layer": None,
            "path": "(image configuration)",
            "offset": 0,
            "length": len(self.image.config_bytes),
            "text": text,
            "command": self.image.config_command,
        }

    def spot(self, path: str, needle: bytes, text: str) -> Evidence:
        """Evidence for the first place of `needle` in the file at `path`; the whole file if it is not there."""
        position = self.image.read(path).find(needle)
        return self.at(path, text, position, len(needle)) if position >= 0 else self.at(path, text)

    def command(self, layer: int) -> str:
        """The shell command that prints the uncompressed tar of layer `layer`."""
        return self.image.command(layer)

    def json(self, path: str) -> dict[str, Any] | None:
        """The JSON object in the file at `path`, None if there is no file. Raises QdcError on anything else."""
        if self.image.find(path) is None:
            return None
        return as_object(parse_json(self.image.read(path), path), path)

    def folder(self, path: str) -> dict[str, int]:
        """Name -> size of the files directly and deeper below folder `path`, and of those that links there lead to."""
        place = self._behind_folder(path.strip("/"))
        root = f"{place}/" if place else ""
        found = {name: entry.size for name, entry in self.image.files().items() if name.startswith(root)}
        found |= {name: entry.size for name in self._links if name.startswith(root) and (entry := self._behind(name))}
        return {name[len(root) :]: found[name] for name in sorted(found)}

    def names(self) -> Iterator[str]:
        """Paths of all files, and of all links that may lead to one: a hub's cache links each file of a model."""
        yield from self.image.files()
        yield from self._links

    @cached_property
    def _links(self) -> list[str]:
        return sorted(path for path, entry in self.image.overlay.entries.items() if entry.type == "symlink")

    def _behind_folder(self, path: str) -> str:
        """The folder that a path leads to, where links are followed; the path itself where that is no folder."""
        try:
            entry = self.image.overlay.resolve(path)
        except QdcError:
            return path
        return entry.path if entry is not None and entry.type == "dir" else path

    def _behind(self, path: str) -> Entry | None:
        try:
            return self.image.find(path)
        except QdcError:
            return None


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values say the same: `10000` and `10000.0` do, `7` and `"7"` do not."""
    return canonical.dumps(plain(a)) == canonical.dumps(plain(b))


def plain(value: Any) -> Any:
    """A JSON value whose whole numbers are integers, however they were written."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


TOO_MUCH = "not read where each byte is fetched"


def brief(value: Any, limit: int = 60) -> str:
    """A value in one short line."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else canonical.dumps(value).decode("utf-8", "replace")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def unlike(value: Any, other: Any) -> str:
    """A value in one short line that is not the line of `other`: text has quotes where only they tell it apart."""
    return brief(value) if brief(value) != brief(other) else brief(canonical.dumps(value).decode("utf-8", "replace"))


def reason(error: QdcError) -> str:
    """An error's message in one line, for a verdict."""
    return " ".join(error.message.split())[:200]
