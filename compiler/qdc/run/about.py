"""What a qdc is, so that two of them can be held against each other: version, Python, and every file of the package."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.files import sha256_file
from qdc.graph.signature import PACKAGE

SHOWN = 4
IGNORED = {".pyc", ".typed"}


@functools.cache
def about() -> dict[str, Any]:
    """{qdc, python, files: path in the package -> SHA-256}; the locks of the environments are among the files."""
    from qdc import __version__

    paths = sorted(path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in IGNORED)
    files = {path.relative_to(PACKAGE).as_posix(): sha256_file(path) for path in paths if _counts(path)}
    return {"qdc": __version__, "python": platform.python_version(), "files": files}


def _counts(path: Path) -> bool:
    return "__pycache__" not in path.parts


def about_digest() -> str:
    return canonical.digest(about())


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """In words, what of theirs is not as here; empty where all is."""
    said = [
        f"{name} {theirs.get(key)} (here {mine[key]})"
        for key, name in (("qdc", "qdc"), ("python", "Python"))
        if theirs.get(key) != mine[key]
    ]
    ours, there = mine["files"], theirs.get("files") or {}
    odd = sorted(name for name in ours.keys() | there.keys() if ours.get(name) != there.get(name))
    locks = [name for name in odd if name.startswith("environments/") and name.endswith(".lock")]
    said += [f"{Path(name).name} {str(there.get(name))[:12]} (here {str(ours.get(name))[:12]})" for name in locks]
    code = [name for name in odd if name not in locks]
    if code:
        more = f" and {len(code) - SHOWN} more" if len(code) > SHOWN else ""
        said.append(f"qdc's own files differ: {', '.join(code[:SHOWN])}{more}")
    return said
