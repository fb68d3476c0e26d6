"""An image in a registry, looked into without pulling it: blobs as ranges of bytes that are fetched when they are read.

What is fetched is read ahead in windows that grow while reading goes on, and kept for a while. A layer is read until
its members are known; one that takes too many bytes or requests is left, and says so (`registry.enough`): that is how
a compressed layer is stopped early. With `whole` nothing is left out, and nothing is stored.
"""

from __future__ import annotations

import shlex
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdc.core.errors import QdcError
from qdc.formats import oci
from qdc.formats.image import Image
from qdc.formats.overlay import Entry
from qdc.formats.ranges import RangeReader, truncated
from qdc.formats.survey import Wanted

if TYPE_CHECKING:
    from qdc.image.registry import Registry

FIRST, JUMP, LONGEST, NEAR = 1 << 15, 1 << 12, 1 << 20, 1 << 16
"""Bytes fetched at a blob's start, after a jump, and at most; what is so near that it is no jump."""
LAYER_BYTES, LAYER_REQUESTS = 8 << 20, 100
ALL_BYTES, ALL_REQUESTS = 64 << 20, 1000
KEPT = 32 << 20
SMALL = 1 << 18
"""Bytes of a file that is fetched to be hashed."""


class Purse:
    """What an image's blobs share: the windows that are kept, and what may still be fetched (`whole`: anything)."""

    def __init__(self, whole: bool) -> None:
        self.whole, self.bytes, self.requests, self.kept = whole, ALL_BYTES, ALL_REQUESTS, 0
        self.windows: OrderedDict[tuple[int, int], bytes] = OrderedDict()


class RemoteBlob:
    """`ask(start, end)` gives a blob's bytes from start to end, both included."""

    def __init__(self, ask: Callable[[int, int], bytes], size: int, what: str, purse: Purse) -> None:
        self._ask, self._size, self.what, self._purse = ask, size, what, purse
        self._left, self._requests = LAYER_BYTES, LAYER_REQUESTS
        self._starts: list[int] = []
        self._end, self._step = 0, FIRST

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Raises QdcError `registry.*`, and `registry.enough` where no more is to be fetched."""
        if offset < 0 or length < 0 or offset + length > self._size:
            raise truncated(self.what, offset, length, self._size)
        parts = []
        while length > 0:
            part = self._held(offset)[:length]
            if not part:
                self._fetch(offset, length)
                continue
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def _held(self, offset: int) -> bytes:
        """What is kept from `offset` on."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return b""
        key = (id(self), self._starts[at])
        window = self._purse.windows.get(key)
        if window is None:
            del self._starts[at]
            return self._held(offset)
        self._purse.windows.move_to_end(key)
        return window[offset - key[1] :]

    def _fetch(self, offset: int, length: int) -> None:
        near = 0 <= offset - self._end <= NEAR
        longest = 8 * LONGEST if self._purse.whole else LONGEST
        self._step = min(2 * self._step, longest) if near and self._end else FIRST if not self._end else JUMP
        length = min(max(length, self._step), self._size - offset)
        self._pay(length)
        data = self._ask(offset, offset + length - 1)
        purse, key = self._purse, (id(self), offset)
        purse.windows[key] = data
        purse.kept += len(data)
        insort(self._starts, offset)
        self._end = offset + length
        while purse.kept > KEPT + length:
            purse.kept -= len(purse.windows.popitem(last=False)[1])

    def _pay(self, length: int) -> None:
        purse = self._purse
        if purse.whole:
            return
        if min(self._left, purse.bytes) < length or min(self._requests, purse.requests) < 1:
            why = f"{self.what}: {LAYER_BYTES - self._left} bytes in {LAYER_REQUESTS - self._requests} requests were"
            raise QdcError("registry.enough", f"{why} fetched, and no more (--digests reads all)", exit_code=4)
        self._left, purse.bytes = self._left - length, purse.bytes - length
        self._requests, purse.requests = self._requests - 1, purse.requests - 1


class _Blobs:
    """The blobs of a repository under the names of a layout (`oci.Blobs`)."""

    def __init__(self, registry: Registry, purse: Purse) -> None:
        self.registry, self.purse = registry, purse
        self._given: dict[str, RemoteBlob] = {}

    def get(self, name: str, size: int | None = None) -> RangeReader | None:
        digest = f"sha256:{name.rpartition('/')[2]}"
        if digest not in self._given:
            size = self.registry.blob_size(digest) if size is None else size
            if size is None:
                return None

            def ask(start: int, end: int) -> bytes:
                return self.registry.blob_range(digest, start, end)

            self._given[digest] = RemoteBlob(ask, size, digest, self.purse)
        return self._given[digest]

    def command(self, name: str) -> str:
        reference = self.registry.reference
        scheme = "http" if reference.loopback else "https"
        address = f"{scheme}://{reference.address}/v2/{reference.repository}/blobs/sha256:{name.rpartition('/')[2]}"
        return f"curl -fsSL {shlex.quote(address)}"


class RemoteImage(Image):
    """An image of which only parts are fetched."""

    small = SMALL

    def excerpt(self, entry: Entry, start: int, length: int) -> str:
        layer = self.layers[entry.layer]
        if layer.content is layer.blob and length > 0:
            return f"{self.commands[entry.layer]} -r {start}-{start + length - 1}"
        return super().excerpt(entry, start, length)


def open_remote(registry: Registry, where: str, choice: str | None, wanted: Wanted | None) -> Image:
    """The image that the registry's reference names. `choice`: of an index, by platform or digest.

    `wanted`: what to look out for where every layer is to be read whole; None to fetch only what has to be seen.
    """
    purse = Purse(whole=wanted is not None)
    store = _Blobs(registry, purse)
    document = registry.manifest()
    value, said_in = document.value(), document.digest
    if document.is_index:
        chosen = oci.choose(value.get("manifests"), where, choice)
        document = registry.manifest(str(chosen.get("digest")))
        value, said_in = document.value(), document.digest
    image = oci.from_manifest(store, value, said_in, where, make=RemoteImage)
    tag = registry.reference.tag
    image.tags = (str(registry.reference).partition("@")[0],) if tag else ()
    counts = registry.counts
    image.transfer = lambda: (counts.received, counts.requests)
    for layer in image.layers:
        layer.partial = wanted is None
    if wanted is not None:
        image.survey(wanted)
    return image
