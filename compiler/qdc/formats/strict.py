"""JSON of untrusted bytes, strictly and in bounded memory. Standard library only."""

from __future__ import annotations

import json
import math
from typing import Any

from qdc.core.errors import QdcError

MAX_BYTES = 64 << 20
MAX_VALUES = 2_000_000
"""Values in one document; the largest tokenizers have about a million."""
MAX_DEPTH = 64


def parse_json(data: bytes, what: str) -> Any:
    """Raises QdcError `image.json` on anything that is not plain JSON of moderate size and depth:

    duplicate names, numbers beyond floats, texts that are not UTF-8, more than 64 levels or two million values.
    """
    if len(data) > MAX_BYTES or data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise _bad(f"{what}: {len(data)} bytes of JSON with too many values")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [item for inner in level for item in _inside(inner)]
            if not level:
                return value
        raise ValueError(f"more than {MAX_DEPTH} levels")
    except (ValueError, RecursionError) as error:
        raise _bad(f"{what}: not JSON ({error})") from error


def as_object(value: Any, what: str) -> dict[str, Any]:
    """`value` if it is a JSON object; else QdcError `image.json`."""
    if not isinstance(value, dict):
        raise _bad(f"{what}: not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate names")
    return table


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number")
    return value


def _inside(value: Any) -> list[Any]:
    """The values in `value` that may hold others."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in inner if isinstance(item, dict | list)]


def _bad(message: str) -> QdcError:
    return QdcError("image.json", message, exit_code=4)
