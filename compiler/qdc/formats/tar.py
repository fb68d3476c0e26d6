"""The table of contents of a tar, with the byte offset of every member; contents are never unpacked.

Reads ustar, GNU (long names, base-256 numbers) and PAX archives from a `RangeReader`, as the engines' own readers do.
Written for hostile input: whatever the bytes, the answer is members or a QdcError (`tar.*`) that names the archive and
the place, in bounded memory. It does not know what the members mean (whiteouts and layers are `overlay`'s). Standard
library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qdc.core.errors import QdcError
from qdc.formats.ranges import RangeReader, Short, fetcher

BLOCK = 512
MAX_MEMBERS = 1_200_000
MAX_TEXT = 128 << 20
"""Bytes of all paths and links together."""
MAX_EXTENSION = 1 << 20
MAX_PATH = 4096
LONG = 4 << 20
"""Bytes of a member behind which it is worth asking whether more follows."""
_TYPES = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hardlink", b"2": "symlink", b"5": "dir",
          b"3": "device", b"4": "device", b"6": "device", b"S": "sparse"}  # fmt: skip
_KEPT, _SPARSE = (b"path", b"linkpath", b"size", b"GNU.sparse.name"), b"GNU.sparse."
_EXTENSIONS = (b"L", b"K", b"x", b"g", b"X")


@dataclass(frozen=True, slots=True)
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


class Room:
    """How many members an image may have, and how long all their names may be together."""

    def __init__(self) -> None:
        self.members, self.text = MAX_MEMBERS, MAX_TEXT

    def take(self, path: str, link: str | None, what: str) -> None:
        """Raises QdcError `tar.too-many` when there is none left."""
        self.members -= 1
        self.text -= len(path) + len(link or "")
        if self.members < 0 or self.text < 0:
            limit = f"{MAX_MEMBERS} members" if self.members < 0 else f"{MAX_TEXT >> 20} MiB of names"
            raise _bad("too-many", f"{what}: more than {limit}; the last read is {path[:200]!r}")


def members(source: RangeReader, what: str = "tar") -> list[Member]:
    """All members in archive order. Raises QdcError `tar.*` on a malformed, truncated or hostile archive."""
    return list(walk(source, what, Room()))


def clean_path(path: str, what: str) -> str:
    """`path` relative to the root, without `.` parts. Raises QdcError on `..`, NUL, or absurd length."""
    if len(path) > MAX_PATH or "\0" in path:
        raise _bad("path", f"{what}: a member's path is too long or holds a NUL")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _bad("traversal", f"{what}: member {path[:200]!r} leaves its root")
    return "/".join(parts)


def walk(source: RangeReader, what: str, room: Room) -> Iterator[Member]:
    """Each member as soon as its header is read. Raises QdcError `tar.*` as `members` does."""
    at, last = 0, ""
    fetch, open_end = fetcher(source), isinstance(source, Short)
    long: dict[str, str] = {}
    modes: dict[int, int] = {}
    while len(block := fetch(at, BLOCK)) == BLOCK:
        if not block.strip(b"\0"):
            if at == 0 and fetch(BLOCK, BLOCK).strip(b"\0"):
                raise _bad("header", f"{what}: not a tar")
            return
        if at == 0 and not _begins_a_tar(block):
            raise _bad("header", f"{what}: not a tar")
        try:
            _check(block, at, what)
            kind, size = block[156:157], _number(block[124:136], at, what)
            data = at + BLOCK
            if kind in _EXTENSIONS:
                text = _extension(fetch, data, size, what)
                if kind in (b"L", b"K"):
                    long["path" if kind == b"L" else "linkpath"] = _text(text.split(b"\0", 1)[0])
                elif kind == b"g":
                    _refuse_global(_pax(text, at, what), at, what)
                else:
                    long.update(_pax(text, at, what))
                at = data + _padded(size)
                continue
            fields, long = long, {}
            size = _decimal(fields["size"], at, what) if "size" in fields else size
            member = _member(block, kind, fields, data, size, modes, what)
        except QdcError as error:
            raise QdcError(error.id, f"{error.message}{_after(last)}", exit_code=4) from error
        stored = size if member.type in ("file", "sparse") else 0
        if stored and not open_end and data + stored > source.size:
            raise _cut(member, what, source.size)
        at, last = data + _padded(stored), member.path
        if member.path or member.type != "dir":
            room.take(member.path, member.link, what)
            yield member
            if stored and isinstance(source, Short):
                if stored >= LONG and source.ends_after(at):
                    return
                if not fetch(data + stored - 1, 1):
                    raise _cut(member, what, source.size)
    if block.strip(b"\0"):
        if at == 0 and b"ustar" not in block:
            raise _bad("header", f"{what}: not a tar")
        raise _bad("truncated", f"{what}: half a header at {at}{_after(last)}")


def _begins_a_tar(block: bytes) -> bool:
    """Whether a file's first block is meant as a header: it says so, or its checksum is right."""
    if block[257:262] == b"ustar":
        return True
    try:
        _check(block, 0, "")
    except QdcError:
        return False
    return True


def _extension(fetch: Callable[[int, int], bytes], data: int, size: int, what: str) -> bytes:
    text = b"" if size > MAX_EXTENSION else fetch(data, size)
    if len(text) != size:
        raise _bad("extension", f"{what}: an extension header of {size} bytes at {data}")
    return text


def _refuse_global(fields: dict[str, str], at: int, what: str) -> None:
    """A global header is passed over by engines and obeyed by others: one that changes members is two archives."""
    if fields:
        raise _bad("global", f"{what}: a global header sets {', '.join(sorted(fields))} for all members (at {at})")


def _after(last: str) -> str:
    return f", after {last[:200]!r}" if last else ""


def _cut(member: Member, what: str, end: int) -> QdcError:
    why = f"{what}: {member.path[:200]!r} needs {member.size} bytes at {member.offset}, but it ends at {end}"
    return _bad("truncated", why)


def _member(
    block: bytes, kind: bytes, fields: dict[str, str], data: int, size: int, modes: dict[int, int], what: str
) -> Member:
    name = _text(block[:100].split(b"\0", 1)[0])
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    raw = fields.get("GNU.sparse.name") or fields.get("path") or (f"{_text(prefix)}/{name}" if prefix else name)
    type_ = _TYPES.get(kind)
    if type_ is None:
        raise _bad("type", f"{what}: member {raw[:200]!r} has the unknown type {kind!r}")
    if kind == b"\0" and raw.endswith("/"):
        type_ = "dir"
    if any(field.startswith("GNU.sparse.") for field in fields):
        type_ = "sparse"
    link = None
    if type_ in ("symlink", "hardlink"):
        link = fields.get("linkpath") or _text(block[157:257].split(b"\0", 1)[0])
        if len(link) > MAX_PATH or "\0" in link:
            raise _bad("path", f"{what}: the link of {raw[:200]!r} is too long or holds a NUL")
        link = clean_path(link, what) if type_ == "hardlink" else link
    mode = _number(block[100:108], data - BLOCK, what) & 0o7777
    mode = modes.setdefault(mode, mode)
    return Member(clean_path(raw, what), type_, data, size if type_ in ("file", "sparse") else 0, mode, link)


def _check(block: bytes, at: int, what: str) -> None:
    stored = _number(block[148:156], at, what)
    plain = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if stored == plain:
        return
    if stored != plain - 256 * sum(byte > 127 for byte in block[:148] + block[156:]):  # As old tars count.
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
        if key in _KEPT or key.startswith(_SPARSE):
            records[_text(key) if key in _KEPT else "GNU.sparse."] = _text(value)
        position = end
    return records


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"tar.{id}", message, exit_code=4)
