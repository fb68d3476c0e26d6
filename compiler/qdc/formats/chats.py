"""A file of conversations: JSON Lines, one object with `messages` a line. Knows no tokenizer and no server."""

from __future__ import annotations

import json
from typing import Any


def messages(line: str | bytes) -> list[dict[str, Any]] | None:
    """The messages of one line, each with texts `role` and `content`; None where it is no such line, or has none."""
    try:
        found = json.loads(line if isinstance(line, str) else line.decode("utf-8"))["messages"]
        good = isinstance(found, list) and all(
            isinstance(message["role"], str) and isinstance(message["content"], str) for message in found
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if good and found else None
