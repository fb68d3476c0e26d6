"""Layers as tar files: the same entries and contents always give the same bytes.

USTAR headers written here, not by `tarfile`, so that no Python version changes a digest; a PAX record
only where USTAR cannot say a thing (long or non-ASCII names, 8 GiB and more). Owner 0 without names,
one fixed time. This module does not know what a layer is for, nor where contents are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from qdc.core.errors import COULD_NOT, QdcError

EPOCH = 1577836800
"""The time of every member and of every image, seconds: 2020-01-01T00:00:00Z."""

BLOCK = 512
CHUNK = 1 << 20
END = bytes(2 * BLOCK)
USTAR_SIZE_LIMIT = 8**11
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "dir": b"5"}

EntryType = Literal["file", "dir", "symlink", "hardlink"]
Resolve = Callable[[str], Path]
"""SHA-256 (64 hex digits) of a content -> a file that holds it."""


@dataclass(frozen=True)
class Entry:
    """One member. `path`: relative, "/"-separated, no trailing slash. `size` in bytes (files only).

    `sha256`: content digest of a file; `link`: target of a symlink (as stored) or hardlink (a path in the
    same layer). `uid`, `gid` and `xattrs` are 0 and empty except in a Debian base.
    """

    path: str
    type: EntryType
    mode: int
    size: int = 0
    sha256: str | None = None
    link: str | None = None
    uid: int = 0
    gid: int = 0
    xattrs: tuple[tuple[str, str], ...] = ()


def check_path(path: str) -> None:
    """Raise QdcError `image.path` unless `path` is a plain relative path that stays in the root."""
    parts = path.split("/")
    bad = any(part in ("", ".", "..") or part.startswith(".wh.") for part in parts) or "\0" in path
    try:
        path.encode()
    except UnicodeEncodeError:
        bad = True
    if bad:
        raise QdcError("image.path", f"a layer cannot hold the path {path!r}", exit_code=COULD_NOT)


def arranged(entries: Iterable[Entry]) -> list[Entry]:
    """Sorted by path, with every missing parent folder added (mode 755).

    Raises QdcError: a path twice, a path below something that is no folder, a path that leaves the root.
    """
    found: dict[str, Entry] = {}
    for entry in entries:
        check_path(entry.path)
        if entry.path in found:
            raise QdcError("image.path", f"{entry.path} is twice in one layer", exit_code=COULD_NOT)
        found[entry.path] = entry
    for path in list(found):
        parent = path
        while "/" in parent:
            parent = parent.rpartition("/")[0]
            holder = found.setdefault(parent, Entry(parent, "dir", 0o755))
            if holder.type != "dir":
                raise QdcError("image.path", f"{parent} is no folder but holds {path}", exit_code=COULD_NOT)
    return [found[path] for path in sorted(found)]


def _pax_record(key: str, value: bytes) -> bytes:
    body = b" " + key.encode() + b"=" + value + b"\n"
    length = len(body)
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


def _raw_header(
    name: bytes, prefix: bytes, kind: bytes, mode: int, size: int, link: bytes, uid: int, gid: int
) -> bytes:
    fields = b"".join(
        (
            name.ljust(100, b"\0"),
            b"%07o\0%07o\0%07o\0" % (mode, uid, gid),
            b"%011o\0%011o\0" % (size, EPOCH),
            b" " * 8,
            kind,
            link.ljust(100, b"\0"),
            b"ustar\x0000",
            bytes(64),
            b"%07o\0%07o\0" % (0, 0),
            prefix.ljust(155, b"\0"),
            bytes(12),
        )
    )
    return fields[:148] + b"%06o\0 " % sum(fields) + fields[156:]


def _split(name: bytes) -> tuple[bytes, bytes] | None:
    """USTAR (prefix, name), cut at the first slash that makes both fit; None when none does."""
    if len(name) <= 100:
        return b"", name
    cut = name.find(b"/", len(name) - 101)
    if 0 < cut <= 155 and cut < len(name) - 1:
        return name[:cut], name[cut + 1 :]
    return None


def header(entry: Entry) -> bytes:
    """The header blocks of one member: one block, or a PAX member before it where USTAR cannot say it."""
    name = entry.path.encode() + (b"/" if entry.type == "dir" else b"")
    link = (entry.link or "").encode()
    size = entry.size if entry.type == "file" else 0
    records = {f"SCHILY.xattr.{key}": value.encode("utf-8", "surrogateescape") for key, value in entry.xattrs}
    split = _split(name) if name.isascii() else None
    if split is None:
        records["path"] = name
        split = b"", name[:100].decode("ascii", "replace").encode("ascii", "replace")[:100]
    if len(link) > 100 or not link.isascii():
        records["linkpath"] = link
        link = link[:100].decode("ascii", "replace").encode("ascii", "replace")[:100]
    if size >= USTAR_SIZE_LIMIT:
        records["size"] = str(size).encode()
    blocks = b""
    if records:
        body = b"".join(_pax_record(key, records[key]) for key in sorted(records))
        blocks = _raw_header(b"././@PaxHeader", b"", b"x", 0o644, len(body), b"", 0, 0) + padded(body)
    ustar_size = 0 if "size" in records else size
    return blocks + _raw_header(
        split[1], split[0], _TYPES[entry.type], entry.mode, ustar_size, link, entry.uid, entry.gid
    )


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def tar_size(entries: Iterable[Entry]) -> int:
    """Bytes of the tar of `entries`, without reading any content."""
    total = len(END)
    for entry in entries:
        size = entry.size if entry.type == "file" else 0
        total += len(header(entry)) + size + (-size % BLOCK)
    return total


def file_chunks(path: Path, size: int) -> Iterator[bytes]:
    """The content of `path`, which must have exactly `size` bytes (else QdcError `image.content`)."""
    done = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK):
            done += len(chunk)
            if done > size:
                break
            yield chunk
    if done != size:
        raise QdcError(
            "image.content",
            f"the file should have {size} bytes but has {'more' if done > size else done}",
            file=path,
            hint="run `qdc store verify`",
            exit_code=COULD_NOT,
        )


def layer_chunks(entries: Iterable[Entry], resolve: Resolve) -> Iterator[bytes]:
    """The tar of `entries` (already arranged), piece by piece. The caller checks the digest of the whole."""
    for entry in entries:
        yield header(entry)
        if entry.type == "file" and entry.size:
            if entry.sha256 is None:
                raise ValueError(f"{entry.path}: a file entry without a digest")
            yield from file_chunks(resolve(entry.sha256), entry.size)
            if entry.size % BLOCK:
                yield bytes(-entry.size % BLOCK)
    yield END


def write_layer(entries: Iterable[Entry], resolve: Resolve, out: IO[bytes]) -> tuple[str, int]:
    """Write the tar of `entries` to `out`; return its SHA-256 (64 hex) and its size in bytes."""
    state, size = hashlib.sha256(), 0
    for chunk in layer_chunks(entries, resolve):
        state.update(chunk)
        size += out.write(chunk)
    return state.hexdigest(), size
