"""Reading from a registry: manifests, and blobs whole or by range, each held against its digest.

A client of the OCI distribution API. What a registry sends is untrusted: sizes are bounded, digests are computed
here, an answer that is not what was asked for is not read on. `wire` makes the requests, `push` sends images.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import CHUNK, sha256_bytes
from qdc.formats.oci import as_object, parse_json
from qdc.image.credentials import Credentials, Logins
from qdc.image.reference import Reference, is_digest, parse
from qdc.image.transport import Answer, Counts, Dropped, Request
from qdc.image.wire import PAUSES_S, Wire

__all__ = ["Document", "Reference", "Registry", "connect", "parse", "platform_manifest"]

MANIFEST_LIMIT = 4 << 20
"""Bytes of a manifest; registries refuse longer ones too."""
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ACCEPT = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all, or 0 where that is not known)"""


def _quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Document:
    """A manifest or an index. `digest`: of `data`, `sha256:` and 64 hex."""

    data: bytes
    media_type: str
    digest: str

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_TYPES

    def value(self) -> dict[str, Any]:
        """Its JSON object. Raises QdcError `image.json`."""
        what = f"manifest {self.digest[:19]}"
        return as_object(parse_json(self.data, what), what)


def platform_manifest(document: Document, os_: str = "linux", architecture: str = "amd64") -> str:
    """The digest of the one image in an index that is for a platform. Raises QdcError `registry.platform` (exit 4)."""
    listed = document.value().get("manifests")
    wanted = (os_, architecture)
    found: list[dict[str, Any]] = []
    others = set()
    for entry in listed if isinstance(listed, list) else ():
        platform = entry.get("platform") if isinstance(entry, dict) else None
        if isinstance(platform, dict):
            given = (platform.get("os"), platform.get("architecture"))
            if given == wanted:
                found.append(entry)
            elif "unknown" not in given:  # So attestations are marked.
                others.add("/".join(str(part)[:32] for part in given))
    plain = [entry for entry in found if not entry["platform"].get("variant")]
    digests = [entry.get("digest") for entry in (plain or found)]
    if len(digests) != 1 or not isinstance(digests[0], str) or not is_digest(digests[0]):
        there = f"it has {', '.join(sorted(others))}" if not digests else f"{len(digests)} fit"
        raise QdcError(
            "registry.platform",
            f"the index {document.digest[:19]} has no one image for {os_}/{architecture}: {there or 'it is empty'}",
            hint="name an image that is built for this platform, by its own digest",
            exit_code=COULD_NOT,
        )
    return digests[0]


class Begun:
    """The part of a blob that is there already: `size` bytes whose digest is in `state`."""

    def __init__(self, stream: IO[bytes] | None = None) -> None:
        """Reads `stream` from where it stands to its end."""
        self.state = hashlib.sha256()
        self.size = 0
        while stream is not None and (chunk := stream.read(CHUNK)):
            self.take(chunk)

    def take(self, chunk: bytes) -> None:
        self.state.update(chunk)
        self.size += len(chunk)


class Registry:
    """The repository of `reference`, opened by `connect`. Every method raises QdcError `registry.*` (exit 4)."""

    def __init__(self, reference: Reference, *, credentials: Credentials | None = None, ca: str | None = None) -> None:
        self.reference = reference
        self.wire = Wire(reference, credentials, ca)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.wire.close()

    @property
    def counts(self) -> Counts:
        return self.wire.counts

    def path(self, *parts: str) -> str:
        """Of the API, below the repository."""
        return "/".join(("/v2", self.reference.repository, *parts))

    # Manifests

    def manifest(self, reference: str | None = None) -> Document:
        """The manifest or index that a tag or a digest names (None: what this registry's own reference names)."""
        wanted = reference or self.reference.selector
        request = Request("GET", self.path("manifests", wanted), {"Accept": _ACCEPT})

        def read() -> tuple[Answer, bytes | None]:
            with self.wire.ask(request, (200,)) as answer:
                return answer, answer.whole(MANIFEST_LIMIT)

        answer, data = self.wire.again(read)
        if data is None:
            raise self.wire.error("too-large", f"the manifest {wanted} has more than {MANIFEST_LIMIT >> 20} MiB")
        digest = f"sha256:{sha256_bytes(data)}"
        said = wanted if is_digest(wanted) else answer.headers.get("Docker-Content-Digest", digest)
        if said != digest:
            raise self._lies(f"the manifest {wanted}", said, digest)
        return Document(data, self._media_type(answer, data), digest)

    def _media_type(self, answer: Answer, data: bytes) -> str:
        """Of a manifest: as the document itself says, else as the answer does."""
        said = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            own = as_object(parse_json(data, "manifest"), "manifest").get("mediaType")
        except QdcError as error:
            message = f"what it gives as a manifest ({said or 'of no type'}) is none: {error.message}"
            raise self.wire.error("manifest", message) from None
        if isinstance(own, str) and own != said and said in (*INDEX_TYPES, *MANIFEST_TYPES):
            raise self.wire.error("manifest", f"a manifest that says it is {own} comes as {said}")
        return own if isinstance(own, str) else said

    def manifest_digest(self, tag: str) -> str | None:
        """The digest that a tag points at, as the registry says; None where it has no such tag, or does not say."""
        request = Request("HEAD", self.path("manifests", tag), {"Accept": _ACCEPT})
        with self.wire.ask(request, (200, 404)) as answer:
            return answer.headers.get("Docker-Content-Digest") if answer.status == 200 else None

    def image(self, reference: str | None = None) -> Document:
        """The image manifest that a tag or digest names: of an index, the one for linux/amd64."""
        document = self.manifest(reference)
        if document.is_index:
            document = self.manifest(platform_manifest(document))
        if document.media_type not in MANIFEST_TYPES:
            message = f"it gives a document of another kind than an image: {document.media_type[:80] or 'of no type'}"
            raise self.wire.error("manifest", message)
        return document

    # Blobs

    def blob_size(self, digest: str) -> int | None:
        """Bytes of a blob of the repository; None where it has none of that digest."""
        with self.wire.ask(Request("HEAD", self.path("blobs", digest)), (200, 404)) as answer:
            if answer.status == 404:
                return None
            if answer.length is None:
                raise self.wire.error("answer", f"it does not say how large {digest[:19]} is")
            return answer.length

    def blob_range(self, digest: str, start: int, end: int) -> bytes:
        """The bytes `start` to `end` of a blob, both included; nothing of them can be checked here.

        A registry that answers with the whole blob is not listened to (`registry.no-ranges`).
        """
        return self.wire.again(lambda: self._range(digest, start, end, end - start + 1))

    def _range(self, digest: str, start: int, end: int, wanted: int) -> bytes:
        request = Request("GET", self.path("blobs", digest), {"Range": f"bytes={start}-{end}"})
        with self.wire.ask(request, (200, 206, 416)) as answer:
            if answer.status == 200:
                message = f"it sends a blob whole where bytes {start} to {end} were asked for"
                raise self.wire.error("no-ranges", message, "export the image, and read the file")
            if answer.status == 416:
                raise self.wire.error("range", f"{digest[:19]} has no bytes {start} to {end}")
            self._check_part(answer, start, end)
            data = answer.whole(wanted)
        if data is None or len(data) > wanted:
            raise self.wire.error(
                "range", f"it sends more than the {wanted} bytes of {digest[:19]} that were asked for"
            )
        if len(data) < wanted:
            raise Dropped(f"{len(data)} of {wanted} bytes came")
        return data

    def _check_part(self, answer: Answer, start: int, end: int | None) -> None:
        said = re.fullmatch(r"bytes (\d+)-(\d+)/(?:\d+|\*)", answer.headers.get("Content-Range", ""))
        if said is None or int(said[1]) != start or (end is not None and int(said[2]) != end):
            raise self.wire.error("range", "it answers with another part of a blob than was asked for")

    def blob(
        self,
        digest: str,
        sink: IO[bytes],
        progress: Progress = _quiet,
        *,
        size: int | None = None,
        begun: Begun | None = None,
    ) -> int:
        """Write a whole blob to `sink` and return its size; goes on where a connection broke off.

        `size`: what it must be, where that is known; `begun`: what `sink` has of it already. `sink` holds unchecked
        bytes until this returns; where the whole is not what `digest` says (`registry.digest`), they are worthless.
        """
        held = begun or Begun()
        tries = 0
        while size is None or held.size < size:
            before = held.size
            try:
                with self._rest(digest, held.size) as answer:
                    self._pour(answer, digest, sink, held, size, progress)
                break
            except Dropped as error:
                tries = 0 if held.size > before else tries + 1
                if tries > len(PAUSES_S):
                    raise self.wire.dropped(error) from None
                time.sleep(PAUSES_S[max(tries - 1, 0)])
        found = f"sha256:{held.state.hexdigest()}"
        if found != digest or (size is not None and held.size != size):
            raise self._lies(f"a blob of {held.size} bytes", digest, found)
        return held.size

    @contextlib.contextmanager
    def _rest(self, digest: str, start: int) -> Iterator[Answer]:
        """A blob from byte `start` on."""
        request = Request("GET", self.path("blobs", digest), {"Range": f"bytes={start}-"} if start else {})
        with self.wire.ask(request, (200, 206, 416)) as answer:
            if answer.status == 206:
                self._check_part(answer, start, None)
            yield answer

    def _pour(
        self, answer: Answer, digest: str, sink: IO[bytes], held: Begun, size: int | None, progress: Progress
    ) -> None:
        """Append what `answer` has. Raises Dropped where it ends too early."""
        if answer.status == 416:
            return  # Nothing after what is here: the digest says whether that is all.
        skipped = held.size if answer.status == 200 else 0  # The blob comes whole: what is here is passed over.
        start = held.size - skipped
        total = size if size is not None else start + answer.length if answer.length is not None else 0
        if size is not None and answer.length is not None and start + answer.length != size:
            raise self._lies(f"the size of {digest[:19]}", f"{size} bytes", f"{start + answer.length} bytes")
        while chunk := answer.read(CHUNK):
            passed = min(skipped, len(chunk))
            skipped -= passed
            chunk = chunk[passed:]
            if size is not None and held.size + len(chunk) > size:
                raise self._lies(f"the size of {digest[:19]}", f"{size} bytes", "more")
            sink.write(chunk)
            held.take(chunk)
            progress(held.size, total)
        if total and held.size < total:
            raise Dropped(f"{held.size} of {total} bytes came")

    def _lies(self, what: str, wanted: str, found: str) -> Exception:
        message = f"{what} is not what its digest says: expected {wanted}, got {found}"
        return self.wire.error("digest", message, "do not use it; if it stays so, the registry is broken or dishonest")


def connect(reference: Reference) -> Registry:
    """The registry of `reference`, with the login and the CA certificates that the user's settings give for it.

    Logins are Docker's (`docker login`); QDC_REGISTRY_CA or SSL_CERT_FILE name CA certificates.
    """
    ca = os.environ.get("QDC_REGISTRY_CA") or os.environ.get("SSL_CERT_FILE")
    return Registry(reference, credentials=Logins().of(reference.host), ca=ca)
