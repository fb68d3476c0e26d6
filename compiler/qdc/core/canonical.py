"""Canonical JSON: one value, one byte string, so that digests of data mean something.

Sorted keys, no white space, UTF-8, no NaN or infinity; floats by Python's shortest round-trip repr.
Changing anything here changes every key and every image: bump `graph.instances.SCHEME` with it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def dumps(value: Any) -> bytes:
    """Canonical bytes of a JSON value. Raises ValueError on NaN, infinity; TypeError on other types."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 (64 hex digits) of `dumps(value)`."""
    return hashlib.sha256(dumps(value)).hexdigest()


def pretty(value: Any) -> bytes:
    """Sorted, indented JSON with a final newline: for files that people read; as deterministic as `dumps`."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
