"""From a place and a name to an image that can be read: OCI layout, archive, or a Docker engine's image."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qdc.audit.claims import MANIFEST
from qdc.core.errors import QdcError
from qdc.formats import oci
from qdc.formats.oci import Image


@contextmanager
def open_image(place: str, name: str, *, shown: str | None = None, prints: str | None = None) -> Iterator[Image]:
    """`place`: `oci` (a folder), `archive` (a file), `docker` (a name that the local engine knows).

    `shown`, `prints`: see `formats.oci.open_image`; for a folder or file that is gone when the report is read.
    Raises QdcError `image.*` (exit 4) when it is not there or cannot be read.
    """
    if place in ("oci", "archive"):
        path = Path(name)
        if not path.exists():
            raise QdcError("image.missing", f"there is no {name}", exit_code=4)
        yield oci.open_image(path, shown=shown, prints=prints)
    elif place == "docker":
        with tempfile.TemporaryDirectory(prefix="qdc-audit-") as folder:
            archive = Path(folder) / "image.tar"
            _save(name, archive)
            yield oci.open_image(archive, shown=f"docker:{name}", prints=f"docker save {shlex.quote(name)}")
    else:
        raise QdcError("image.place", f"{place!r} is no place for an image", hint="oci:DIR, archive:FILE, docker:NAME")


def read_manifest(reader: Image) -> dict[str, Any]:
    """The content manifest in the image. Raises QdcError `image.no-manifest` for an image that has none."""
    if reader.find(MANIFEST) is None:
        raise QdcError("image.no-manifest", f"{reader.where} holds no /{MANIFEST}", exit_code=4)
    return oci.as_object(oci.parse_json(reader.read(MANIFEST), MANIFEST), MANIFEST)


def _save(name: str, archive: Path) -> None:
    """What `docker save NAME` writes, in `archive`; nothing is started."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env()
        with archive.open("wb") as stream:
            for chunk in client.images.get(name).save(named=True):
                stream.write(chunk)
    except (DockerException, OSError) as error:
        raise QdcError("image.docker", f"docker cannot give {name}: {error}", exit_code=4) from error
