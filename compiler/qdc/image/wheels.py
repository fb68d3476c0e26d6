"""Python wheels as entries of a layer: unpacked straight into a tar, without pip, running nothing.

A wheel's schemes map below one site folder, as `pip install --target` does: purelib, platlib and data to
the folder itself, scripts to `bin`, headers to `include`. Compiled leftovers are left out. This module does
not know where wheels come from.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from qdc.core.errors import COULD_NOT, QdcError
from qdc.image.tar import BLOCK, CHUNK, END, Entry, arranged, header

PYTHON = "/usr/bin/python3"
_SCHEMES = {"purelib": "", "platlib": "", "data": "", "scripts": "bin/", "headers": "include/"}
MOST = 200
"""Times its own size that a wheel may unpack to; the largest known need 10. Deflate alone reaches 1032."""
_COMPILED = re.compile(r"(.*/)?__pycache__/.*|.*\.py[co]")


@dataclass(frozen=True)
class Member:
    """One file of the layer: its entry (no digest yet) and where its content is."""

    entry: Entry
    wheel: int
    info: zipfile.ZipInfo
    content: bytes | None = None
    sha256: str | None = None


def _bad(wheel: Path, why: str) -> QdcError:
    return QdcError("image.wheel", f"this wheel cannot be unpacked: {why}", file=wheel, exit_code=COULD_NOT)


def distribution(wheel: Path) -> tuple[str, str]:
    """(name, version) by the wheel's file name."""
    parts = wheel.name.removesuffix(".whl").split("-")
    if len(parts) not in (5, 6):
        raise _bad(wheel, "its name is not that of a wheel")
    return parts[0], parts[1]


def _installed_path(name: str, data_folder: str, wheel: Path) -> str:
    """Where a member goes, relative to the site folder."""
    if not name.startswith(data_folder + "/"):
        return name
    scheme, _, rest = name[len(data_folder) + 1 :].partition("/")
    if scheme not in _SCHEMES or not rest:
        raise _bad(wheel, f"{name} is in no known scheme")
    return _SCHEMES[scheme] + rest


def _record(text: str, wheel: Path) -> dict[str, str]:
    """RECORD: member -> SHA-256 (64 hex), for rows that have one."""
    digests = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) < 2 or not row[1]:
            continue
        algorithm, _, value = row[1].partition("=")
        if algorithm == "sha256":
            try:
                digests[row[0]] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
            except ValueError as error:
                raise _bad(wheel, f"its RECORD is damaged at {row[0]}") from error
    return digests


def _record_moved(text: str, data_folder: str, wheel: Path, changed: Mapping[str, bytes]) -> bytes:
    """RECORD with the places and digests of what is really written; row order kept."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in csv.reader(io.StringIO(text)):
        if row and not _COMPILED.fullmatch(row[0]):
            rest = row[1:]
            if (data := changed.get(row[0])) is not None:
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                rest = [f"sha256={digest}", str(len(data))]
            writer.writerow([_installed_path(row[0], data_folder, wheel), *rest])
    return out.getvalue().encode()


def _script(archive: zipfile.ZipFile, wheel: Path, info: zipfile.ZipInfo, digest: str | None) -> bytes:
    """A script with the image's interpreter in its first line, where the wheel asks for that."""
    data = archive.read(info)
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise _bad(wheel, f"{info.filename} is not what its RECORD says")
    first, newline, rest = data.partition(b"\n")
    if first.rstrip(b"\r") in (b"#!python", b"#!pythonw"):
        return b"#!" + PYTHON.encode() + newline + rest
    return data


def _members(archive: zipfile.ZipFile, wheel: Path, index: int, site: str) -> Iterator[Member]:
    name, version = distribution(wheel)
    record_name = f"{name}-{version}.dist-info/RECORD"
    data_folder = f"{name}-{version}.data"
    try:
        record_text = archive.read(record_name).decode()
    except KeyError as error:
        raise _bad(wheel, "it has no RECORD") from error
    record = _record(record_text, wheel)
    infos = [i for i in archive.infolist() if not i.is_dir() and not _COMPILED.fullmatch(i.filename)]
    changed = {
        info.filename: _script(archive, wheel, info, record.get(info.filename))
        for info in infos
        if info.filename.startswith(f"{data_folder}/scripts/")
    }
    for info in infos:
        path = _installed_path(info.filename, data_folder, wheel)
        executable = info.filename in changed or bool(info.external_attr >> 16 & 0o100)
        content = changed.get(info.filename)
        if info.filename == record_name:
            content = _record_moved(record_text, data_folder, wheel, changed)
        size = info.file_size if content is None else len(content)
        entry = Entry(f"{site}/{path}", "file", 0o755 if executable else 0o644, size)
        yield Member(entry, index, info, content, None if content is not None else record.get(info.filename))


def _same(first: Member, second: Member) -> bool:
    """Whether two wheels bring the same content for one path, so that either may stand."""
    return (first.entry.size, first.info.CRC, first.content) == (
        second.entry.size,
        second.info.CRC,
        second.content,
    )


def plan(archives: Sequence[zipfile.ZipFile], wheels: Sequence[Path], site: str) -> dict[str, Member]:
    """Path -> member, of all wheels. Raises QdcError `image.wheel` when two disagree about a path."""
    found: dict[str, Member] = {}
    for index, (archive, wheel) in enumerate(zip(archives, wheels, strict=True)):
        for member in _members(archive, wheel, index, site):
            other = found.setdefault(member.entry.path, member)
            if other is not member and not _same(other, member):
                raise _bad(wheel, f"{member.entry.path} differs from the one in {wheels[other.wheel].name}")
    return found


def write_wheels(
    wheels: Sequence[Path], site: str, out: IO[bytes], progress: Callable[[int, int], None]
) -> tuple[str, int]:
    """Write the layer tar of `wheels` unpacked under `site`; return its SHA-256 (64 hex) and size in bytes.

    One pass; every content is checked against its wheel's RECORD. `progress` gets (bytes done, bytes in all).
    The bytes depend on the wheels' contents only, not on their order or folder.
    """
    ordered = sorted(wheels, key=lambda wheel: wheel.name)
    archives: list[zipfile.ZipFile] = []
    try:
        for wheel in ordered:
            try:
                archives.append(zipfile.ZipFile(wheel))
            except zipfile.BadZipFile as error:
                raise _bad(wheel, str(error)) from error
            _check_size(archives[-1], wheel)
        found = plan(archives, ordered, site)
        entries = arranged(member.entry for member in found.values())
        total = sum(entry.size for entry in entries) or 1
        state, size, done = hashlib.sha256(), 0, 0
        for entry in entries:
            chunks: Iterator[bytes] = iter(())
            if entry.type == "file":
                member = found[entry.path]
                chunks = _checked(archives[member.wheel], ordered[member.wheel], member)
                done += entry.size
            for data in (header(entry), *_padded(chunks, entry.size)):
                state.update(data)
                size += out.write(data)
            progress(done, total)
        state.update(END)
        size += out.write(END)
    finally:
        for archive in archives:
            archive.close()
    return state.hexdigest(), size


def _check_size(archive: zipfile.ZipFile, wheel: Path) -> None:
    size = sum(info.file_size for info in archive.infolist())
    if size > MOST * wheel.stat().st_size:
        raise _bad(wheel, f"it claims {size:,} bytes, more than {MOST} times its own size")


def _padded(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    yield from chunks
    yield bytes(-size % BLOCK)


def _checked(archive: zipfile.ZipFile, wheel: Path, member: Member) -> Iterator[bytes]:
    """A member's content; QdcError when it is damaged, or is not what RECORD says."""
    if member.content is not None:
        yield member.content
        return
    state, done = hashlib.sha256(), 0
    try:
        with archive.open(member.info) as stream:
            while chunk := stream.read(CHUNK):
                state.update(chunk)
                done += len(chunk)
                yield chunk
    except (zipfile.BadZipFile, OSError) as error:
        raise _bad(wheel, f"{member.info.filename}: {error}") from error
    if done != member.entry.size or (member.sha256 is not None and state.hexdigest() != member.sha256):
        raise _bad(wheel, f"{member.info.filename} is not what its RECORD says")
