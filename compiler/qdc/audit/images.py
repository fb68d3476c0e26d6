"""From a place and a name to an image that can be read, wherever it lies; nothing of it is executed."""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from qdc.audit import documents, packages
from qdc.audit.claims import MANIFEST
from qdc.core.errors import QdcError
from qdc.formats import oci
from qdc.formats.folder import open_folder
from qdc.formats.image import Image
from qdc.formats.ranges import Allowance, truncated
from qdc.formats.survey import Wanted

PLACES = "oci:DIR, archive:FILE, docker:NAME, registry:REF, folder:DIR"


@contextmanager
def open_image(
    place: str, name: str, *, shown: str | None = None, prints: str | None = None, digests: bool | None = None
) -> Iterator[Image]:
    """`place`: `oci` (a layout: a folder or a tar), `archive` (a file), `docker` (a name that the local engine knows),

    `registry` (a reference), `folder` (a model's). Behind a `#` in `name`: which of several images, by tag, platform
    (`linux/arm64`) or digest. `shown`, `prints`: see `formats.oci.open_image`; for a folder or file that is gone when
    the report is read. `digests`: whether all bytes are to be read (None: yes, but not over a network).
    Raises QdcError `image.*`, `registry.*` (exit 4) when it is not there or cannot be read.
    """
    wanted = Wanted(lambda path: documents.wanted(path) or packages.wanted(path), documents.small)
    if place in ("oci", "archive"):
        path, choice = _split(name)
        yield oci.open_image(path, shown=shown, prints=prints, choice=choice, wanted=_unless(digests is False, wanted))
    elif place == "folder":
        yield open_folder(_split(name)[0], shown)
    elif place == "docker":
        with tempfile.TemporaryFile(prefix="qdc-audit-", buffering=0) as spool:
            yield _of_engine(name, spool, wanted)
    elif place == "registry":
        from qdc.audit.remote import open_remote
        from qdc.image.registry import connect, parse

        text, _, choice = name.partition("#")
        with connect(parse(text)) as registry:
            yield open_remote(registry, f"registry:{text}", choice or None, _unless(digests is not True, wanted))
    else:
        raise QdcError("image.place", f"{place!r} is no place for an image", hint=PLACES)


def read_manifest(reader: Image) -> dict[str, Any]:
    """The content manifest in the image. Raises QdcError `image.no-manifest` for an image that has none."""
    entry = reader.find(MANIFEST)
    reader.require_whole(entry.layer if entry is not None else 0)
    if entry is None:
        raise QdcError("image.no-manifest", f"{reader.where} holds no /{MANIFEST}", exit_code=4)
    return oci.as_object(oci.parse_json(reader.read(MANIFEST), MANIFEST), MANIFEST)


def _unless(no: bool, wanted: Wanted) -> Wanted | None:
    return None if no else wanted


def _split(name: str) -> tuple[Path, str | None]:
    """A path, and what stands behind the last `#` unless the path itself has it."""
    path, mark, choice = name.rpartition("#")
    if mark and path and not Path(name).exists():
        name, found = path, choice
    else:
        found = ""
    if not Path(name).exists():
        raise QdcError("image.missing", f"there is no {name}", exit_code=4)
    return Path(name), found or None


class _Spool:
    """Bytes that come once and in order, in an unnamed file for what is read later (`ranges.RangeReader`)."""

    def __init__(self, file: IO[bytes], what: str) -> None:
        self.file, self.what = file, what

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self.file.fileno(), length, offset) if offset >= 0 and length >= 0 else b""
        if len(data) != length or offset < 0:
            raise truncated(self.what, offset, length, self.size)
        return data

    def passing(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(self.file.fileno(), rest) :]
            yield chunk


def _of_engine(name: str, spool: IO[bytes], wanted: Wanted) -> Image:
    """What `docker save NAME` writes, read while it comes; nothing is started."""
    import docker
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    where, prints = f"docker:{name}", f"docker save {shlex.quote(name)}"
    try:
        found = docker.from_env().images.get(name)
        source, allowance = _Spool(spool, where), Allowance(int(found.attrs.get("Size") or 0))
        chunks = source.passing(found.save(named=True))
        return oci.open_archive(source, where, where, prints, allowance, None, chunks, wanted)
    except (DockerException, RequestException, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = f"{tempfile.gettempdir()} needs room for it; TMPDIR names another folder" if full else None
        raise QdcError("image.docker", f"docker cannot give {name}: {error}", hint=hint, exit_code=4) from error
