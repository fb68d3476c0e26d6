"""How the lock beside a recipe fits it: decided where a build is planned, and by `qdc lock`.

The state comes from `qdc.sources`; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.registry import LOCK, Found, Topic

TOPIC = Topic()


@TOPIC.rule(
    "SRC04",
    "error",
    summary="The lock beside the recipe is absent, lacks a source of the recipe, or holds another one for it.",
    why="A stage's key covers the bytes of what it reads. A lock that is older than the recipe does not say them.",
    fix="Run `qdc lock RECIPE` and commit the lock with the recipe.",
    evidence="Follows from what a stage's key covers.",
    failing='target: {base: {hf: Qwen/Qwen3.5-4B, revision: "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"}}',
    passing='target: {base: {hf: Qwen/Qwen3.5-4B, revision: "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"}}',
    final="nobody knows the bytes that would be built",
    needs=(LOCK,),
)
def the_lock_fits(loaded: Loaded) -> Iterator[Found]:
    for place, why in loaded.lock.lacking.items() if loaded.lock else ():
        yield Found(_pin(loaded, place), f"`{place}` is not locked: {why}", f"type `qdc lock {loaded.document.file}`")


@TOPIC.rule(
    "SRC05",
    "error",
    summary="A source serves other bytes than the lock says, under the same name and revision.",
    why="Same name, other bytes: chat templates have changed this way, and a build would silently be of another model.",
    fix="Find out what changed. To take the new bytes, remove the lock, run `qdc lock RECIPE`, and read the change.",
    evidence="https://github.com/ollama/ollama/issues/13409",
    failing='target: {base: {hf: Qwen/Qwen3.5-4B, revision: "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"}}',
    passing='target: {base: {hf: Qwen/Qwen3.5-4B, revision: "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"}}',
    final="the bytes are not those that were pinned",
    needs=(LOCK,),
)
def the_bytes_are_those_of_the_lock(loaded: Loaded) -> Iterator[Found]:
    for place, (file, was, now) in loaded.lock.changed.items() if loaded.lock else ():
        message = f"`{file}` of `{place}` has changed: the lock says {was}, the source now serves {now}"
        hint = "to take the new bytes, remove the lock, type `qdc lock`, and look at what changed with git"
        yield Found(_pin(loaded, place), message, hint)


def _pin(loaded: Loaded, place: str) -> Path_:
    """The field that pins a source."""
    path = tuple(int(part) if part.isdecimal() else part for part in place.split("."))
    given = loaded.document.values
    return next(((*path, field) for field in ("revision", "sha256") if (*path, field) in given), path)
