"""A JSON document as path -> leaf, so that two of them can be compared leaf by leaf.

Paths are dotted; items of a list whose items all have a distinct `name` (or `path`, `role`, `rule`) are
addressed by it, `training[finetune].steps`, others by index, and `training[]` is a leaf that holds the order.
Lists of scalars are leaves. Different documents always have different leaves. Engine arguments (`["--k", "v"]`)
become a mapping by name, and JSON inside them is opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "(absent)"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_NAMES = ("name", "path", "role", "rule")


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of `value` by path; an empty mapping is a leaf."""
    if isinstance(value, Mapping):
        if not value:
            return {path: {}}
        result: dict[str, Any] = {}
        for key in value:
            label = _label(str(key))
            joint = "." if path and not label.startswith("[") else ""
            result |= flatten(value[key], f"{path}{joint}{label}")
        return result
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        labels = _labels(value)
        result = {f"{path}[]": labels}
        for label, item in zip(labels, value, strict=True):
            plain = _label(label)
            result |= flatten(item, path + (plain if plain.startswith("[") else f"[{plain}]"))
        return result
    return {path: value}


def get(value: Any, path: str) -> Any:
    """The value at a dotted path of mappings, or None."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """Engine arguments by name without the dashes; flags are True; JSON objects are opened; `--a=b` is read.

    A name given twice keeps the last value, as argparse does; words that belong to no name are kept under "".
    """
    result: dict[str, Any] = {}
    loose: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            loose.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if not equals and index < len(words) and not words[index].startswith("--"):
            text, equals = words[index], "="
            index += 1
        result[name.replace("_", "-")] = _opened(text) if equals else True
    if loose:
        result[""] = loose
    return result


def _opened(text: str) -> Any:
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, dict) else text
    return text


def _label(key: str) -> str:
    """A plain word as it is, anything else quoted in brackets."""
    return key if _PLAIN.fullmatch(key) else f"[{json.dumps(key, ensure_ascii=False)}]"


def _labels(items: list[Any]) -> list[str]:
    for name in _NAMES:
        labels = [item.get(name) if isinstance(item, Mapping) else None for item in items]
        if all(isinstance(label, str) for label in labels) and len(set(labels)) == len(labels):
            return [str(label) for label in labels]
    return [str(index) for index in range(len(items))]
