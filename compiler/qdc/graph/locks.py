"""The hash-pinned locks of the environments: what stages run in and what the image serves with."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "environments"
_WITH_DRAFTER = {"ngram": ("serve-ngram",)}
"""Kind of drafter -> locks of what the engine needs for it beside its own."""
_LINE = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")


def lock_text(name: str) -> str:
    """The text of the lock of environment `name` ("train", "serve", "dev", ...)."""
    return (FOLDER / f"{name}.lock").read_text(encoding="utf-8")


def serve_lock(kind: str | None) -> str:
    """The text of the lock of what the image's engine runs in, when it serves a drafter of `kind` (None for none)."""
    return "".join(map(lock_text, ("serve", *_WITH_DRAFTER.get(kind or "", ()))))


def versions(text: str) -> dict[str, str]:
    """Package (normalised name) -> version of each pinned line of a lock."""
    found = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found
