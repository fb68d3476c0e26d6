"""Compressed sizes of layers that an export has sampled: a cache in the store, which a plan reads.

Losing it costs a plan its better figure.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from qdc.core.files import write_atomic
from qdc.store.store import Store


def remember(store: Store, ratios: Mapping[str, float]) -> None:
    """`ratios`: `diff_id` (64 hex) -> compressed size by size."""
    for diff_id, ratio in ratios.items():
        place = _place(store, diff_id)
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(place, json.dumps({"ratio": ratio}).encode())


def known(store: Store, diff_id: str) -> float | None:
    """What was remembered of the layer."""
    try:
        ratio = json.loads(_place(store, diff_id).read_bytes())["ratio"]
        return float(ratio) if 0 < float(ratio) < 2 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _place(store: Store, diff_id: str) -> Path:
    name = diff_id.removeprefix("sha256:")
    return store.root / "memo" / "compressed" / f"{name if re.fullmatch('[0-9a-f]{64}', name) else 'none'}.json"
