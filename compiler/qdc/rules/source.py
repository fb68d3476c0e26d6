"""What must not travel in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_SECRET = re.compile(r"\b(hf_|ghp_)[A-Za-z0-9]{20,}")


@TOPIC.rule(
    "SRC09",
    "error",
    summary="A text has the form of an access token.",
    why="The recipe is in every build record, and its product fields are in every image: the token would be published.",
    fix="Remove it, keep it in your own settings, and revoke it.",
    evidence="Follows from what the manifest and the build record hold.",
    failing='accept: [{rule: DRF02, because: "hf_abcdefghijklmnopqrstuvwx"}]',
    passing="accept: []",
    final="a secret must not be published",
)
def no_secrets(loaded: Loaded) -> Iterator[Found]:
    for path, text in _texts(loaded.data, ()):
        if (found := _SECRET.search(text)) is not None:
            start = found.group(1)
            yield Found(path, f"this text has the form of an access token (`{start}...`)", "remove it and revoke it")


def _texts(value: Any, path: Path_) -> Iterator[tuple[Path_, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))
    elif isinstance(value, str):
        yield path, value
