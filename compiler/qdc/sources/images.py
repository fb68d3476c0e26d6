"""An image of a registry as the files of an OCI layout: what a lock pins of `image.base.ref`, and how it is fetched.

Its digest names the manifest, or an index of which linux/amd64 is taken. Knows no recipe and no store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.formats.oci import as_object, parse_json
from qdc.image.base import check_platform, layout
from qdc.image.reference import is_digest
from qdc.image.registry import Begun, Progress, Registry

CONFIG_LIMIT = 4 << 20


@dataclass(frozen=True)
class Blob:
    """`digest`: `sha256:` and 64 hex; `size` in bytes."""

    digest: str
    size: int

    @property
    def path(self) -> str:
        return f"blobs/sha256/{self.sha256}"

    @property
    def sha256(self) -> str:
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True)
class Listing:
    """`documents`: path in the layout -> bytes, all but the config and the layers."""

    documents: dict[str, bytes]
    config: Blob
    layers: tuple[Blob, ...]


def listing(registry: Registry) -> Listing:
    """What the registry's own reference names. Raises QdcError."""
    manifest = registry.image()
    value = manifest.value()
    layers = value.get("layers")
    if not isinstance(layers, list) or not layers:
        raise registry.wire.error("manifest", "the image manifest lists no layers")
    documents = layout(manifest.data, manifest.media_type)
    documents[f"blobs/sha256/{sha256_bytes(manifest.data)}"] = manifest.data
    config = _blob(registry, value.get("config"), "configuration")
    if config.size > CONFIG_LIMIT:
        raise registry.wire.error("too-large", f"the image's configuration has {config.size} bytes")
    return Listing(documents, config, tuple(_blob(registry, layer, "layer") for layer in layers))


def _blob(registry: Registry, descriptor: Any, what: str) -> Blob:
    if isinstance(descriptor, dict):
        digest, size = descriptor.get("digest"), descriptor.get("size")
        if isinstance(digest, str) and is_digest(digest) and type(size) is int and size >= 0:
            return Blob(digest, size)
    raise registry.wire.error("manifest", f"the image manifest names a {what} without a sha256 digest and a size")


def check_config(path: Path) -> None:
    """Raises QdcError `base.platform` where the image is for another platform."""
    check_platform(as_object(parse_json(path.read_bytes(), "the image's configuration"), "the image's configuration"))


def download(registry: Registry, blob: Blob, place: Path, progress: Progress) -> None:
    """Fetch a blob to the file `place`, going on with what is there. Raises QdcError.

    Where a part was there before and the whole is not what the digest says, it is fetched once more from its start.
    """
    with place.open("ab+") as stream:
        stream.seek(0)
        begun = Begun(stream)
        resumed = begun.size > 0
        try:
            registry.blob(blob.digest, stream, progress, size=blob.size, begun=begun)
        except QdcError as error:
            if error.id == "registry.digest":
                stream.truncate(0)
            if error.id != "registry.digest" or not resumed:
                raise
            registry.blob(blob.digest, stream, progress, size=blob.size)
