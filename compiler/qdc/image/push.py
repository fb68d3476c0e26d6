"""An image of the store into a registry: only the blobs that it lacks, streamed, and the tag last.

Digests stay: the registry's manifest is `export.oci_manifest`. A registry that breaks off, refuses or lies leaves blobs
behind at most: no tag points at an image that is not whole. This module does not know the store: contents come through
`resolve`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from qdc.core.errors import COULD_NOT, WRONG_USE, QdcError
from qdc.core.files import sha256_bytes
from qdc.image.base import ROLE
from qdc.image.config import BASE_NAME
from qdc.image.export import MANIFEST_TYPE, Progress, oci_manifest, quiet, stored_layers
from qdc.image.layers import VirtualImage, read_image
from qdc.image.reference import Reference
from qdc.image.registry import Registry
from qdc.image.tar import Resolve
from qdc.image.transport import Dropped, Request
from qdc.image.wire import PAUSES_S

_BROKEN = "no tag points at it; look at the registry's own log and storage"
_BYTES = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True)
class Pushed:
    """`reference`: with the tag that points at it; `digest`: of its manifest, `sha256:` and 64 hex; `blobs`: how many
    were sent; `sent`: bytes of all bodies that went out, the manifest's included."""

    image: VirtualImage
    reference: Reference
    digest: str
    blobs: int
    sent: int


@dataclass(frozen=True)
class _Blob:
    """`chunks`: makes the bytes, anew each time; `home`: a repository of the same registry that may have them."""

    digest: str
    size: int
    what: str
    chunks: Callable[[], Iterator[bytes]]
    home: str | None = None


def push(image_folder: Path, resolve: Resolve, registry: Registry, progress: Progress = quiet) -> Pushed:
    """Send the image to the repository of `registry` under its reference's tag, or the tag that its own name has.

    Raises QdcError `registry.*` (exit 4).
    """
    image = read_image(image_folder)
    named = registry.reference
    if named.digest is not None:
        raise QdcError(
            "export.destination",
            f"`{named}` names a digest, and the image has its own",
            hint=f"give registry:{named.name} or registry:{named.name}:TAG",
            exit_code=WRONG_USE,
        )
    tag = named.tag or image.name.rpartition(":")[2]
    blobs = _blobs(image, resolve, _home(image, named))
    total = sum(blob.size for blob in blobs)
    done = sent = 0
    for blob in blobs:
        if registry.blob_size(blob.digest) != blob.size:
            sent += _send(registry, blob, partial(_report, progress, done, total))
        done += blob.size
        progress(done, total)
    digest = _point(registry, tag, oci_manifest(image))
    return Pushed(image, Reference(named.host, named.repository, tag), digest, sent, registry.counts.sent)


def _report(progress: Progress, before: int, total: int, part: int) -> None:
    progress(before + part, total)


def _home(image: VirtualImage, destination: Reference) -> str | None:
    """The repository of the base, where that is another one of the same registry."""
    labels = json.loads(image.config)["config"].get("Labels", {})
    host, _, repository = str(labels.get(BASE_NAME, "")).partition("/")
    return repository if host == destination.host and repository != destination.repository else None


def _blobs(image: VirtualImage, resolve: Resolve, home: str | None) -> list[_Blob]:
    """Every blob once: layers, base first, then the config."""
    found = []
    for digest, layer in stored_layers(image).items():
        chunks = partial(image.chunks, layer, resolve)
        place = home if layer.role == ROLE else None
        found.append(_Blob(f"sha256:{digest}", layer.stored[1], f"the {layer.role} layer", chunks, place))
    return [*found, _Blob(f"sha256:{image.id}", len(image.config), "the config", partial(iter, (image.config,)))]


def _send(registry: Registry, blob: _Blob, progress: Callable[[int], None]) -> bool:
    """Upload a blob; what has arrived when the connection breaks off is not sent again, where the registry keeps it.

    False where the registry took it from another repository of its own.
    """
    place: str | None = None
    if blob.home is not None and _mounted(registry, blob):
        return False
    start = tries = 0
    while True:
        try:
            if place is None:
                place, start = _begin(registry), 0
            _put(registry, place, blob, start, progress)
            break
        except Dropped as error:
            reached = start
            place, start = _arrived(registry, place, blob.size)
            tries = 0 if start > reached else tries + 1
            if tries > len(PAUSES_S):
                raise registry.wire.dropped(f"{error}, while {blob.what} was sent") from None
            time.sleep(PAUSES_S[max(tries - 1, 0)])
    found = registry.blob_size(blob.digest)
    if found != blob.size:
        there = "does not have it" if found is None else f"has {found} bytes of it"
        message = f"it took {blob.what} ({blob.size} bytes) and then {there}"
        raise registry.wire.error("digest", message, _BROKEN)
    return True


def _mounted(registry: Registry, blob: _Blob) -> bool:
    """Ask the registry to take a blob from the repository that it is at home in; whether it has it now."""
    path = registry.path("blobs", "uploads", "") + "?" + urlencode({"mount": blob.digest, "from": blob.home})
    try:
        with registry.wire.ask(Request("POST", path, body=_nothing), (201, 202)) as answer:
            mounted = answer.status == 201
    except QdcError:
        return False  # Whoever may not read there sends the blob.
    return mounted and registry.blob_size(blob.digest) == blob.size


def _begin(registry: Registry) -> str:
    """Where a new upload goes."""
    request = Request("POST", registry.path("blobs", "uploads", ""), body=_nothing)
    with registry.wire.ask(request, (202,)) as answer:
        return _place(registry, answer.headers.get("Location"))


def _nothing() -> Iterator[bytes]:
    return iter(())


def _place(registry: Registry, location: str | None) -> str:
    if not location:
        raise registry.wire.error("answer", "it does not say where an upload goes")
    return location


def _put(registry: Registry, place: str, blob: _Blob, start: int, progress: Callable[[int], None]) -> None:
    """Send a blob from byte `start` on and end its upload. Raises Dropped where the connection breaks off."""
    mark = "&" if "?" in place else "?"
    headers = dict(_BYTES)
    if start:
        headers["Content-Range"] = f"{start}-{blob.size - 1}"
    url, body = f"{place}{mark}digest={blob.digest}", _from(blob, start, progress)
    with registry.wire.ask(Request("PUT", url, headers, body, blob.size - start), (201,), once=True) as answer:
        said = answer.headers.get("Docker-Content-Digest", blob.digest)
        if said != blob.digest:
            message = f"it took {blob.what} as {said[:80]}, and it is {blob.digest}"
            raise registry.wire.error("digest", message, _BROKEN)


def _from(blob: _Blob, start: int, progress: Callable[[int], None]) -> Callable[[], Iterator[bytes]]:
    """A body: the bytes of a blob from `start` on. The whole is read, so that its digest is checked to the end."""

    def body() -> Iterator[bytes]:
        at = 0
        try:
            for chunk in blob.chunks():
                rest = chunk[max(0, start - at) :] if at < start else chunk
                at += len(chunk)
                if rest:
                    yield rest
                    progress(at)
        except OSError as error:
            raise QdcError(
                "image.content",
                f"{blob.what} cannot be read: {error.strerror}",
                file=error.filename,
                hint="run `qdc store verify`",
                exit_code=COULD_NOT,
            ) from error

    return body


def _arrived(registry: Registry, place: str | None, size: int) -> tuple[str | None, int]:
    """Where a broken upload goes on, and after how many bytes; (None, 0) where it must begin anew."""
    if place is None:
        return None, 0
    try:
        with registry.wire.ask(Request("GET", place), (200, 204), once=True) as answer:
            said = re.fullmatch(r"(?:bytes=)?0-([0-9]+)", answer.headers.get("Range", ""))
            onward = answer.headers.get("Location") or place
    except (Dropped, QdcError):
        return None, 0
    there = int(said[1]) + 1 if said and said[1] != "0" else 0
    return (onward, there) if 0 < there < size else (None, 0)


def _point(registry: Registry, tag: str, manifest: bytes) -> str:
    """Let the tag point at the manifest, whose blobs are all there, and look that it does; returns its digest."""
    digest = f"sha256:{sha256_bytes(manifest)}"
    if registry.manifest_digest(tag) != digest:
        headers = {"Content-Type": MANIFEST_TYPE}
        path = registry.path("manifests", tag)
        request = Request("PUT", path, headers, partial(iter, (manifest,)), len(manifest))
        with registry.wire.ask(request, (201,)):
            pass
        if registry.manifest(tag).digest != digest:
            message = f"it took the manifest {digest[:19]}, and its tag `{tag}` has another one"
            raise registry.wire.error(
                "digest", message, "someone else may have pushed the same tag just now; push again"
            )
    return digest
