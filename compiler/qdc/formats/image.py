"""An image to read: configuration, layers, the files that they show, and the bytes of each, wherever they lie.

One interface for every place (`oci` opens layouts and archives, `folder` a model folder). Never unpacks, executes or
imports anything of an image. Wrong digests are not errors here: they are for the caller to judge. What cannot be
read of one layer is a `Cut`; what other layers show stays readable. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.formats import ranges, tar
from qdc.formats.overlay import Entry, Hidden, Overlay
from qdc.formats.packed import PackedRange, only_forward, packing
from qdc.formats.ranges import Allowance, BytesRange, RangeReader, SubRange
from qdc.formats.strict import as_object, parse_json
from qdc.formats.survey import Pool, Survey, Wanted, survey

MAX_JSON = 64 << 20
MAX_LAYERS = 256
_CHECKPOINTS = 1024
"""Copies of a decompressor that all layers of an image may keep together."""

_AT_ONCE = 32 << 20
"""Bytes of a file that is read at once where going back in it is dear."""


@dataclass(frozen=True)
class Declared:
    """One blob as another document describes it: what it is, where that is said, digest `sha256:..`, size."""

    what: str
    where: str
    digest: str
    size: int | None
    blob: RangeReader


@dataclass(frozen=True)
class Cut:
    """A layer whose members are not all known: what it has beyond those that were read can change what is shown."""

    layer: int
    error: QdcError

    @property
    def why(self) -> str:
        return self.error.message


@dataclass
class Layer:
    """One layer; `number` counts from 0.

    `digest`: as the image manifest names the stored blob (None in a plain archive); `diff_id`: as the
    configuration names the uncompressed tar (None if it names fewer); `content`: the uncompressed bytes;
    `partial`: no more of it is read than must be; `stored`: SHA-256 (hex) of the stored bytes and `surveyed`: what
    one pass found, where there was one.
    """

    number: int
    blob: RangeReader
    digest: str | None
    diff_id: str | None
    allowance: Allowance
    checkpoints: int = 64
    partial: bool = False
    stored: str | None = None
    surveyed: Survey | None = None

    @cached_property
    def content(self) -> RangeReader:
        kind = packing(ranges.fetcher(self.blob)(0, 4))
        if kind is None:
            return self.blob
        reader = PackedRange(self.blob, kind, self.name, self.allowance, self.checkpoints)
        reader.trailer = self.partial
        return reader

    @property
    def name(self) -> str:
        """The digest that evidence cites: that of the uncompressed tar."""
        return self.diff_id or self.digest or f"layer {self.number}"

    @property
    def size(self) -> int:
        """Bytes of the uncompressed tar."""
        known = self.surveyed.size if self.surveyed is not None else None
        return self.content.size if known is None else known

    def survey(self, pool: Pool) -> None:
        """Read a compressed layer once, from its start to its end; a raw one is read by range."""
        if self.surveyed is None and isinstance(self.content, PackedRange):
            whole, content = hashlib.sha256(), self.content
            with ranges.Hashing() as hashing:
                content.watch = lambda data: hashing.take(whole, data)
                self.surveyed = survey(content.stream(), self.name, pool)
                content.watch = None
            if self.surveyed.size is not None:
                self.stored = whole.hexdigest()

    def members(self, room: tar.Room) -> Iterator[tar.Member]:
        """In order; of a survey only once. Raises QdcError where they cannot be read on."""
        if self.surveyed is None:
            yield from tar.walk(self.content, self.name, room)
            return
        left = self.surveyed.members
        left.reverse()
        while left:
            yield left.pop()
        if self.surveyed.error is not None:
            raise self.surveyed.error


class _Files(Mapping[str, Entry]):
    """The regular files among entries, sorted by path; of a million, it adds little to what there is."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries
        self._paths = sorted(path for path, entry in entries.items() if entry.type == "file")

    def __getitem__(self, path: str) -> Entry:
        entry = self._entries[path]
        if entry.type != "file":
            raise KeyError(path)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)


class Image:
    """`config` is the parsed `config_bytes`; `image_id` is `sha256:` of those bytes, "" without any.

    `commands`: for each layer the shell command that prints its stored bytes, for a person who checks by hand;
    `config_command`: the one that prints the configuration.
    `transfer`: what was fetched over a network, (bytes, requests), or None where nothing is; then layers are not read
    whole unless asked for, and of files only those of up to `small` bytes.
    """

    small = 64 << 20
    transfer: Callable[[], tuple[int, int]] | None = None

    def __init__(
        self,
        where: str,
        config_bytes: bytes | None,
        layers: list[tuple[RangeReader, str | None]],
        *,
        commands: tuple[str, ...] = (),
        config_command: str | None = None,
        tags: tuple[str, ...] = (),
        declared: tuple[Declared, ...] = (),
        allowance: Allowance | None = None,
    ) -> None:
        if len(layers) > MAX_LAYERS:
            raise _bad("layers", f"{where}: {len(layers)} layers; engines take no more than 127")
        self.where, self.config_bytes, self.tags, self.declared = where, config_bytes or b"", tags, declared
        self.commands, self.config_command = commands, config_command
        what = f"{where}: the image configuration"
        self.config = {} if config_bytes is None else as_object(parse_json(config_bytes, what), what)
        self.image_id = "" if config_bytes is None else f"sha256:{sha256_bytes(config_bytes)}"
        rootfs = self.config.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        self.diff_ids = [item for item in diff_ids if isinstance(item, str)] if isinstance(diff_ids, list) else []
        padded: list[str | None] = [*self.diff_ids, *([None] * len(layers))]
        self.allowance = allowance or Allowance(sum(blob.size for blob, _ in layers))
        each = _CHECKPOINTS // max(1, len(layers))
        self.layers = [
            Layer(number, blob, digest, padded[number], self.allowance, each)
            for number, (blob, digest) in enumerate(layers)
        ]
        self.cuts: list[Cut] = []

    def survey(self, wanted: Wanted) -> None:
        """Read each compressed layer once, now: what is `wanted` of it need not be read again."""
        pool = Pool(wanted, self.allowance)
        for layer in self.layers:
            try:
                layer.survey(pool)
            except QdcError:
                continue  # Whoever asks for its content is told.

    @cached_property
    def overlay(self) -> Overlay:
        overlay, room = Overlay(), tar.Room()
        for layer in self.layers:
            try:
                overlay.add(layer.number, layer.members(room), layer.name)
            except QdcError as error:
                self.cuts.append(Cut(layer.number, error))
        sparse = [entry for entry in overlay.entries.values() if entry.type == "sparse"]
        for entry in sparse[:5]:
            why = f"{entry.path[:200]!r} is stored as a sparse file, which is not read"
            self.cuts.append(Cut(entry.layer, _bad("sparse", why)))
        return overlay

    @property
    def trusted(self) -> list[int]:
        """Layers that were not read to their end, because their gzip trailer says that nothing follows."""
        readers = [layer.__dict__.get("content") for layer in self.layers]
        return [number for number, reader in enumerate(readers) if isinstance(reader, PackedRange) and reader.trusted]

    def files(self) -> Mapping[str, Entry]:
        """Path (no leading slash) -> visible regular file, sorted; links and folders are not listed."""
        return self._files

    @cached_property
    def _files(self) -> Mapping[str, Entry]:
        return _Files(self.overlay.entries)

    def require_whole(self, layer: int = 0) -> None:
        """Raises what hides members of any layer from `layer` on: what is shown is certain only without."""
        self.files()
        for cut in self.cuts:
            if cut.layer >= layer:
                raise cut.error

    @property
    def hidden(self) -> list[Hidden]:
        """Files that later layers hide."""
        return self.overlay.hidden

    def find(self, path: str) -> Entry | None:
        """The regular file that `path` shows, links followed inside the image; None if there is none."""
        try:
            entry = self.overlay.resolve(path)
        except QdcError:  # Links in a circle show nothing.
            return None
        return entry if entry is not None and entry.type == "file" else None

    def open(self, path: str) -> RangeReader:
        """The bytes of the file at `path`. Raises QdcError `image.no-file`."""
        entry = self.find(path)
        if entry is None:
            raise _bad("no-file", f"{self.where}: no file /{path.strip('/')} in the image")
        return self.content(entry)

    def content(self, entry: Entry) -> RangeReader:
        """The bytes of a file, visible or hidden."""
        layer = self.layers[entry.layer]
        kept = layer.surveyed.kept.get(entry.offset) if layer.surveyed is not None else None
        if kept is not None and len(kept) == entry.size:
            return BytesRange(kept, entry.path)
        part = SubRange(layer.content, entry.offset, entry.size, entry.path)
        if entry.size <= _AT_ONCE and only_forward(part):
            return BytesRange(part.read(0, entry.size), entry.path)
        return part

    def known_digest(self, entry: Entry) -> str | None:
        """SHA-256 (hex) of a file that a survey has hashed."""
        surveyed = self.layers[entry.layer].surveyed if entry.layer < len(self.layers) else None
        return surveyed.files.get(entry.offset) if surveyed is not None else None

    def origin(self, entry: Entry) -> str | None:
        """The digest of the layer that holds the file, as evidence cites it."""
        return self.layers[entry.layer].name

    def command(self, layer: int) -> str:
        """The shell command that prints the uncompressed tar of layer `layer`."""
        stored = self.commands[layer] if layer < len(self.commands) else "cat LAYER"
        try:
            content = self.layers[layer].content
        except QdcError:
            return stored
        return f"{stored} | {content.kind} -dc" if isinstance(content, PackedRange) else stored

    def excerpt(self, entry: Entry, start: int, length: int) -> str:
        """The shell command that prints bytes of a file, counted as evidence counts them: in its layer's tar."""
        return f"{self.command(entry.layer)} | tail -c +{start + 1} | head -c {length}"

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of the file at `path`; the whole file (at most 64 MiB) when `length` is None."""
        reader = self.open(path)
        length = reader.size - offset if length is None else length
        if length > MAX_JSON:
            raise _bad("too-large", f"{self.where}: {length} bytes of {path} asked for at once")
        return reader.read(offset, length)

    @property
    def settings(self) -> dict[str, Any]:
        """The `config` object of the configuration (Entrypoint, Cmd, Env, Labels), or an empty one."""
        settings = self.config.get("config")
        return settings if isinstance(settings, dict) else {}

    @property
    def labels(self) -> dict[str, str]:
        labels = self.settings.get("Labels")
        return {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"image.{id}", message, exit_code=4)
