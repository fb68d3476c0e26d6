"""Patches of engines, ours and published ones: for which versions each was written, and what it provides.

A patch counts only for the versions that it names. What it provides are features of `engines.json` that the version
lacks (`window`, `zero-draft`, ...) or words that only a patch provides (`window-above`, `dtype`, `short-verify`).
Knows no patch's code: that is in `qdc.serving.patches`, for those written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from qdc.tables.cells import read
from qdc.tables.engines import order


@dataclass(frozen=True)
class Patch:
    """`first`, `last`: engine versions, both included; `provides`: what an engine can do with it; `source`: who says
    for which versions it was written."""

    name: str
    platform: str
    first: str
    last: str
    provides: frozenset[str]
    source: str

    def fits(self, version: str, platform: str) -> bool:
        """Whether it was written for this version on this platform."""
        given = order(version)
        return given is not None and platform == self.platform and _key(self.first) <= given <= _key(self.last)


def names() -> list[str]:
    """The names of all patches, sorted."""
    return sorted(_table())


def row(name: str) -> Patch | None:
    """The patch of that name, None if there is none."""
    return _table().get(name)


def provided(declared: Iterable[str], version: str, platform: str) -> set[str]:
    """What the `declared` patches provide to this version on this platform; unknown names provide nothing."""
    patches = [patch for name in declared if (patch := row(name)) is not None]
    return {thing for patch in patches if patch.fits(version, platform) for thing in patch.provides}


def providing(thing: str, version: str, platform: str) -> list[str]:
    """Names of the patches that provide `thing` to this version on this platform, sorted."""
    return [name for name, patch in sorted(_table().items()) if thing in provided([name], version, platform)]


def _key(version: str) -> tuple[int, ...]:
    key = order(version)
    assert key is not None
    return key


@cache
def _table() -> dict[str, Patch]:
    return {
        name: Patch(name, row["platform"], row["from"], row["to"], frozenset(row["provides"]), row["source"])
        for name, row in read("patches.json").items()
    }
