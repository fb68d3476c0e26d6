"""A mark in an object's mtime that any later write takes away, so that a look at its stat tells a changed object.

The mark is the part below a second: an mtime says when the object came, and a write gives the file the clock's. A copy
of the store may lose the marks; objects are then read once and marked anew. Knows files, not the store.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK_NS = 271_828_000
"""Below a second, in whole microseconds: what file systems keep. A write has it by chance once in many thousands."""
SECOND_NS = 1_000_000_000


def seal(file: int | Path) -> None:
    """Give a finished file (open, or at a path) the present second and the mark as its mtime. Raises OSError."""
    mark(file, time.time_ns() - SECOND_NS)


def mark(file: int | Path, about_ns: int) -> None:
    """Give a file the second of `about_ns` and the mark as its mtime. Raises OSError."""
    mtime = about_ns // SECOND_NS * SECOND_NS + MARK_NS
    os.utime(file, ns=(mtime, mtime))


def sealed(status: os.stat_result) -> bool:
    """Whether nobody has written to the file since it was marked, as far as stat can show."""
    return status.st_mtime_ns % SECOND_NS == MARK_NS
