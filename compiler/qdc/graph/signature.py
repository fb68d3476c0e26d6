"""Whether qdc's own files are the ones that they were, by their stat: what makes reading them again unnecessary.

Two equal signatures mean equal code. Different ones may mean only a touch: then digests decide (`graph.code`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from qdc.core import canonical

PACKAGE = Path(__file__).resolve().parent.parent
TICK_NS = 50_000_000


def package_signature() -> str:
    """Digest of path, size, mtime, ctime and inode of each file of the package and the data beside it.

    Where a file is so young that another edit within the same tick would look alike, the digest is like no other.
    """
    rows, started, youngest = [], time.time_ns(), 0
    roots = [PACKAGE]
    templates = PACKAGE.parents[1] / "templates"
    if templates.is_dir() and (PACKAGE.parents[1] / "compiler" / "qdc") == PACKAGE:
        roots.append(templates)
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                place = os.path.join(folder, name)
                status = os.stat(place)
                rows.append([place, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
                youngest = max(youngest, status.st_mtime_ns, status.st_ctime_ns)
    return canonical.digest([rows, os.urandom(16).hex() if youngest >= started - TICK_NS else ""])
