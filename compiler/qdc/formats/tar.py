"""The table of contents of a tar, with the byte offset of every member; contents are never unpacked.

Reads ustar, GNU (long names, base-256 numbers) and PAX archives from a `RangeReader`. Written for hostile
input: whatever the bytes, the answer is a list of members or a QdcError (`tar.*`), in bounded memory. It does
not know what the members mean (whiteouts and layers are `overlay`'s). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qdc.core.errors import QdcError
from qdc.formats.ranges import RangeReader

BLOCK = 512
MAX_MEMBERS = 5_000_000
MAX_EXTENSION = 1 << 20
MAX_PATH = 4096
_TYPES = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hardlink", b"2": "symlink", b"5": "dir",
          b"3": "device", b"4": "device", b"6": "device", b"S": "sparse"}  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One member: `path` as in the archive without leading `/` or `./`; `offset` of its data in bytes.

    `type`: file, dir, symlink, hardlink, device or sparse (whose data is not contiguous and is not read).
    """

    path: str
    type: str
    offset: int
    size: int
    mode: int
    link: str | None = None


def members(source: RangeReader, what: str = "tar") -> list[Member]:
    """All members in archive order. Raises QdcError `tar.*` on a malformed, truncated or hostile archive."""
    found: list[Member] = []
    for member in _walk(source, what):
        found.append(member)
        if len(found) > MAX_MEMBERS:
            raise _bad("too-many", f"{what}: more than {MAX_MEMBERS} members")
    return found


def clean_path(path: str, what: str) -> str:
    """`path` relative to the root, without `.` parts. Raises QdcError on `..`, NUL, or absurd length."""
    if len(path) > MAX_PATH or "\0" in path:
        raise _bad("path", f"{what}: a member's path is too long or holds a NUL")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _bad("traversal", f"{what}: member {path!r} leaves its root")
    return "/".join(parts)


def _walk(source: RangeReader, what: str) -> Iterator[Member]:
    at, total = 0, source.size
    long: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    while at + BLOCK <= total:
        block = source.read(at, BLOCK)
        if not block.strip(b"\0"):
            if at == 0 and total > 2 * BLOCK and source.read(BLOCK, BLOCK).strip(b"\0"):
                raise _bad("header", f"{what}: not a tar")
            return
        _check(block, at, what)
        kind, size = block[156:157], _number(block[124:136], at, what)
        data = at + BLOCK
        if kind in (b"L", b"K", b"x", b"g", b"X"):
            if size > MAX_EXTENSION or data + size > total:
                raise _bad("extension", f"{what}: an extension header of {size} bytes at {at}")
            text = source.read(data, size)
            if kind in (b"L", b"K"):
                long["path" if kind == b"L" else "linkpath"] = _text(text.split(b"\0", 1)[0])
            else:
                (everywhere if kind == b"g" else long).update(_pax(text, at, what))
            at = data + _padded(size)
            continue
        fields = {**everywhere, **long}
        long = {}
        if "size" in fields:
            size = _decimal(fields["size"], at, what)
        member = _member(block, kind, fields, data, size, what)
        stored = size if member.type in ("file", "sparse") else 0
        if data + stored > total:
            raise _bad("truncated", f"{what}: {member.path!r} needs {stored} bytes at {data}, but it ends at {total}")
        at = data + _padded(stored)
        if member.path or member.type != "dir":
            yield member
    if at != total and source.read(at, total - at).strip(b"\0"):
        raise _bad("truncated", f"{what}: half a header at {at}")


def _member(block: bytes, kind: bytes, fields: dict[str, str], data: int, size: int, what: str) -> Member:
    name = _text(block[:100].split(b"\0", 1)[0])
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    raw = fields.get("path") or (f"{_text(prefix)}/{name}" if prefix else name)
    type_ = _TYPES.get(kind)
    if type_ is None:
        raise _bad("type", f"{what}: member {raw!r} has the unknown type {kind!r}")
    if type_ == "file" and raw.endswith("/"):
        type_ = "dir"
    if any(field.startswith("GNU.sparse.") for field in fields):
        type_ = "sparse"
    link = None
    if type_ in ("symlink", "hardlink"):
        link = fields.get("linkpath") or _text(block[157:257].split(b"\0", 1)[0])
        if len(link) > MAX_PATH or "\0" in link:
            raise _bad("path", f"{what}: the link of {raw!r} is too long or holds a NUL")
        link = clean_path(link, what) if type_ == "hardlink" else link
    mode = _number(block[100:108], data - BLOCK, what) & 0o7777
    return Member(clean_path(raw, what), type_, data, size if type_ in ("file", "sparse") else 0, mode, link)


def _check(block: bytes, at: int, what: str) -> None:
    stored = _number(block[148:156], at, what)
    plain = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in plain) if stored != sum(plain) else stored
    if stored not in (sum(plain), signed):
        raise _bad("checksum", f"{what}: the header at {at} has a wrong checksum")


def _number(field: bytes, at: int, what: str) -> int:
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40 or value >= 1 << 62:
            raise _bad("number", f"{what}: a number out of range in the header at {at}")
        return value
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        raise _bad("number", f"{what}: {field!r} is not a number (header at {at})")
    return int(digits, 8)


def _decimal(text: str, at: int, what: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise _bad("number", f"{what}: PAX size {text[:40]!r} (header at {at})")
    return int(text)


def _pax(data: bytes, at: int, what: str) -> dict[str, str]:
    records: dict[str, str] = {}
    position = 0
    while position < len(data) and data[position] != 0:
        space = data.find(b" ", position, position + 20)
        digits = data[position:space] if space > 0 else b""
        if not digits.isdigit():
            raise _bad("pax", f"{what}: malformed PAX header at {at}")
        end = position + int(digits)
        record = data[space + 1 : end - 1]
        if end > len(data) or end <= space or data[end - 1 : end] != b"\n" or b"=" not in record:
            raise _bad("pax", f"{what}: malformed PAX header at {at}")
        key, value = record.split(b"=", 1)
        records[_text(key)] = _text(value)
        position = end
    return records


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"tar.{id}", message, exit_code=4)
