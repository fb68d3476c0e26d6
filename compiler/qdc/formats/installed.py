"""An installed Python distribution, as its `*.dist-info` folder tells it: METADATA, RECORD, entry points, origin.

Takes bytes, imports nothing. Standard library only. Form: PEP 376 and 427, entry points and direct_url.json of the
packaging specifications.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import posixpath
import re
from dataclasses import dataclass
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError

METADATA = re.compile(r"(?:(?P<root>.*)/)?(?P<info>[^/]+\.dist-info)/METADATA")
HEADER = 1 << 16
"""Bytes of METADATA that hold its name and version."""
MAX_ROWS = 1_000_000
_COMPILED = re.compile(r"(?:.*/)?__pycache__/.*|.*\.py[co]")


@dataclass(frozen=True)
class Listed:
    """A row of RECORD: `path` in the image; SHA-256 (64 hex) and size in bytes, None where the row has none."""

    path: str
    sha256: str | None
    size: int | None


def name_and_version(metadata: bytes) -> tuple[str, str] | None:
    """From the headers of METADATA, which end at the first empty line; None without both."""
    head = re.split(rb"\r?\n\r?\n", metadata[:HEADER], maxsplit=1)[0].decode("utf-8", "replace")
    found: dict[str, str] = {}
    for line in head.splitlines():
        field, colon, value = line.partition(":")
        if colon and field.lower() in ("name", "version"):
            found.setdefault(field.lower(), value.strip())
    return (found["name"], found["version"]) if found.get("name") and found.get("version") else None


def canonical_name(name: str) -> str:
    """`Flash_Attn` and `flash.attn` are `flash-attn` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def record(data: bytes, root: str, what: str) -> list[Listed]:
    """Rows of a RECORD below `root` (a folder of the image), compiled leftovers and itself left out.

    A row that leaves the image is dropped. Raises QdcError `installed.record` on what is no RECORD.
    """
    rows = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(data.decode("utf-8"), newline=""))):
            if number > MAX_ROWS:
                raise ValueError(f"more than {MAX_ROWS} rows")
            if not row:
                continue
            path = _placed(root, row[0])
            if path is None or _COMPILED.fullmatch(path) or path.endswith(".dist-info/RECORD"):
                continue
            rows.append(Listed(path, _hash(row[1]) if len(row) > 1 else None, _size(row[2]) if len(row) > 2 else None))
    except (csv.Error, ValueError, RecursionError) as error:
        raise QdcError("installed.record", f"{what}: not a RECORD ({error})", exit_code=COULD_NOT) from error
    return rows


def entry_points(data: bytes) -> dict[str, dict[str, str]]:
    """Group -> name -> object reference; lines of another form are left out."""
    groups: dict[str, dict[str, str]] = {}
    group = ""
    for line in data[:HEADER].decode("utf-8", "replace").splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif "=" in line and not line.startswith(("#", ";")) and group:
            name, _, reference = line.partition("=")
            groups.setdefault(group, {})[name.strip()] = reference.strip()
    return groups


def origin(document: Any) -> dict[str, Any]:
    """What direct_url.json says: `{url, editable, commit}`, as far as it says it."""
    found: dict[str, Any] = {}
    if not isinstance(document, dict):
        return found
    if isinstance(document.get("url"), str):
        found["url"] = document["url"]
    folder, version = document.get("dir_info"), document.get("vcs_info")
    if isinstance(folder, dict) and folder.get("editable") is True:
        found["editable"] = True
    if isinstance(version, dict) and isinstance(version.get("commit_id"), str):
        found["commit"] = version["commit_id"]
    return found


def compiled(path: str) -> bool:
    """Whether a file is a compiled leftover, which no RECORD need list."""
    return _COMPILED.fullmatch(path) is not None


def _placed(root: str, text: str) -> str | None:
    text = text.replace("\\", "/")
    path = posixpath.normpath(text if text.startswith("/") else posixpath.join("/", root, text)).lstrip("/")
    return path if path and path != "." else None


def _hash(text: str) -> str | None:
    algorithm, equals, digest = text.partition("=")
    if not equals or algorithm != "sha256":
        return None
    try:
        raw = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    except (binascii.Error, ValueError):
        return digest
    return raw.hex() if len(raw) == 32 else digest


def _size(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
