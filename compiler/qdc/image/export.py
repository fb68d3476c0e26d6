"""An image of the store as a thing that engines load: OCI layout, single tar file, or straight into Docker.

Everything is streamed and every layer is checked against its digest on the way. A file or folder appears
under its name only when it is whole. The tar file is both an OCI layout and what `docker save` writes
(its `manifest.json` points into `blobs/`): Docker 20.10, podman and skopeo load it. This module does not
know the store: contents come through `resolve`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from qdc.core import canonical, files
from qdc.core.errors import COULD_NOT, QdcError
from qdc.image import beside
from qdc.image.layers import Layer, VirtualImage, read_image
from qdc.image.tar import BLOCK, END, Entry, Resolve, header, padded, tar_size

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
GZIP_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class _Blob:
    """A file of the layout: in memory (`data`), or one layer that is streamed."""

    path: str
    size: int
    data: bytes = b""
    layer: Layer | None = None


def oci_manifest(image: VirtualImage) -> bytes:
    """The OCI image manifest of `image`; its SHA-256 is the manifest digest. Layers are raw, but those of a given base
    that came compressed."""
    return canonical.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": CONFIG_TYPE,
                "digest": f"sha256:{image.id}",
                "size": len(image.config),
            },
            "layers": [_descriptor(layer) for layer in image.layers],
        }
    )


def _descriptor(layer: Layer) -> dict[str, Any]:
    digest, size = layer.stored
    media_type = LAYER_TYPE if layer.gzip is None else GZIP_LAYER_TYPE
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}


def stored_layers(image: VirtualImage) -> dict[str, Layer]:
    """SHA-256 of each layer as it is stored -> the layer, base first, each once."""
    return {layer.stored[0]: layer for layer in image.layers}


def _blobs(image: VirtualImage, *, docker: bool) -> list[_Blob]:
    """Every file of the layout, small ones first, each blob once; with Docker's index when `docker`."""
    manifest = oci_manifest(image)
    digest = files.sha256_bytes(manifest)
    descriptor = {
        "mediaType": MANIFEST_TYPE,
        "digest": f"sha256:{digest}",
        "size": len(manifest),
        "annotations": {
            "io.containerd.image.name": f"docker.io/library/{image.name}",
            "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
        },
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [descriptor]}
    small = {
        "oci-layout": canonical.dumps({"imageLayoutVersion": "1.0.0"}),
        "index.json": canonical.dumps(index),
        f"blobs/sha256/{digest}": manifest,
        f"blobs/sha256/{image.id}": image.config,
    }
    if docker:
        small["manifest.json"] = canonical.dumps(
            [
                {
                    "Config": f"blobs/sha256/{image.id}",
                    "RepoTags": [image.name],
                    "Layers": [f"blobs/sha256/{layer.stored[0]}" for layer in image.layers],
                }
            ]
        )
    blobs = [_Blob(path, len(data), data) for path, data in sorted(small.items())]
    return blobs + [
        _Blob(f"blobs/sha256/{digest}", layer.stored[1], layer=layer) for digest, layer in stored_layers(image).items()
    ]


def archive_chunks(image: VirtualImage, resolve: Resolve) -> Iterator[bytes]:
    """The single tar file, piece by piece; the same bytes for the same image, always."""
    for folder in ("blobs", "blobs/sha256"):
        yield header(Entry(folder, "dir", 0o755))
    for blob in _blobs(image, docker=True):
        yield header(Entry(blob.path, "file", 0o644, blob.size))
        yield from _content(image, blob, resolve)
        yield bytes(-blob.size % BLOCK)
    yield END


def _content(image: VirtualImage, blob: _Blob, resolve: Resolve) -> Iterator[bytes]:
    return iter((blob.data,)) if blob.layer is None else image.chunks(blob.layer, resolve)


def archive_size(image: VirtualImage) -> int:
    """Bytes of the single tar file, without reading any layer."""
    entries = [Entry(folder, "dir", 0o755) for folder in ("blobs", "blobs/sha256")]
    entries += [Entry(blob.path, "file", 0o644, blob.size) for blob in _blobs(image, docker=True)]
    return tar_size(entries)


def archive_frame(image: VirtualImage) -> bytes:
    """All that the single tar file holds beside the layers."""
    blobs = _blobs(image, docker=True)
    return b"".join(header(Entry(blob.path, "file", 0o644, blob.size)) + padded(blob.data) for blob in blobs) + END


def export_archive(image_folder: Path, resolve: Resolve, file: Path, progress: Progress = quiet) -> VirtualImage:
    """Write the image as one tar `file`, replacing one that is there. Raises QdcError `export.*` (exit 4)."""
    image = read_image(image_folder)
    total = archive_size(image)
    written(file, total, _watched(archive_chunks(image, resolve), total, progress))
    return image


def written(file: Path, size: int, chunks: Iterable[bytes]) -> int:
    """Write about `size` bytes to `file`, which appears whole or stays as it was; return how many it became."""
    with _writing(file, size), beside.new_file(file) as stream:
        return _pour(chunks, stream)


def export_oci(image_folder: Path, resolve: Resolve, dest_dir: Path, progress: Progress = quiet) -> VirtualImage:
    """Write the image as an OCI layout folder, with its Dockerfile, whose build context the folder is.

    Replaces an OCI layout or an empty folder; refuses to replace anything else. Raises QdcError `export.*`.
    """
    image = read_image(image_folder)
    if dest_dir.exists() and not (dest_dir / "oci-layout").is_file() and any(dest_dir.iterdir()):
        raise QdcError(
            "export.occupied",
            "this folder is no OCI layout and is not empty; it is left as it is",
            file=dest_dir,
            hint="name another folder",
            exit_code=COULD_NOT,
        )
    blobs = _blobs(image, docker=False)
    dockerfile = image_folder / "Dockerfile"
    if dockerfile.is_file():
        blobs.append(_Blob("Dockerfile", dockerfile.stat().st_size, dockerfile.read_bytes()))
    total = sum(blob.size for blob in blobs)
    done = 0
    with _writing(dest_dir, total), beside.new_folder(dest_dir) as folder:
        for blob in blobs:
            path = folder / blob.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as stream:
                chunks = _watched(_content(image, blob, resolve), total, progress, done)
                done += _pour(chunks, stream)
                os.fsync(stream.fileno())
            path.chmod(0o644)
    return image


def _watched(chunks: Iterable[bytes], total: int, progress: Progress, done: int = 0) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        progress(done, total)


def _pour(chunks: Iterable[bytes], stream: IO[bytes]) -> int:
    """Write all chunks to an unbuffered stream; return how many bytes."""
    size = 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            rest = rest[stream.write(rest) :]
        size += len(chunk)
    return size


@contextlib.contextmanager
def _writing(place: Path, size: int) -> Iterator[None]:
    """Turn the failures of writing `size` bytes at `place` into QdcErrors that say what to do."""
    hint = "free some space there, or export to another disk"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.sweep(place)
        free = shutil.disk_usage(place.parent).free
        if free < size:
            raise QdcError(
                "export.disk-full",
                f"the export needs {size:,} bytes, but the disk has {free:,} left",
                file=place,
                hint=hint,
                exit_code=COULD_NOT,
            )
        yield
    except OSError as error:
        full = error.errno in _FULL
        raise QdcError(
            "export.disk-full" if full else "export.write",
            "the disk is full; nothing was left behind" if full else f"cannot write here: {error.strerror}",
            file=place,
            hint=hint if full else None,
            exit_code=COULD_NOT,
        ) from error


def export_docker(image_folder: Path, resolve: Resolve, client: Any, progress: Progress = quiet) -> VirtualImage:
    """Load the image into the engine of `client` (a docker SDK client) from a stream: no file is written.

    Raises QdcError `export.docker` when the engine refuses it or holds another image ID afterwards.
    """
    import docker.errors
    import requests.exceptions

    image = read_image(image_folder)
    total = archive_size(image)
    try:
        answers = client.api.load_image(_watched(archive_chunks(image, resolve), total, progress), quiet=True)
        for answer in answers or ():
            if "error" in answer:
                raise _docker_error(image, str(answer["error"]))
        found = client.images.get(image.name).id
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise _docker_error(image, str(error)) from error
    if found != f"sha256:{image.id}":
        raise _docker_error(image, f"it holds {found} under this name, expected sha256:{image.id}")
    return image


def _docker_error(image: VirtualImage, why: str) -> QdcError:
    return QdcError(
        "export.docker",
        f"the Docker engine did not load {image.name}: {why}",
        hint="check `docker version` and the engine's free disk space, or export to archive:FILE",
        exit_code=COULD_NOT,
    )
