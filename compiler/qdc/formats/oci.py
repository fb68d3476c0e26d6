"""Images on disk: OCI layout folders and archives (docker-archive, and the dual form that is both).

One interface, `Image`: configuration bytes, layers, the visible files with the place of their bytes, and what
the enclosing documents say about all of them (`declared`), which a caller compares with the bytes. Never
unpacks, executes or imports anything of an image. Wrong digests are not errors here: they are for the caller
to judge. Standard library only.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.formats import ranges, tar
from qdc.formats.overlay import Entry, Hidden, Overlay
from qdc.formats.ranges import FileRange, GzipRange, RangeReader, SubRange

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_JSON = 64 << 20
MAX_DEPTH = 64


@dataclass(frozen=True)
class Declared:
    """One blob as another document describes it: what it is, where that is said, digest `sha256:..`, size."""

    what: str
    where: str
    digest: str
    size: int | None
    blob: RangeReader


@dataclass
class Layer:
    """One layer; `number` counts from 0.

    `digest`: as the image manifest names the stored blob (None in a plain archive); `diff_id`: as the
    configuration names the uncompressed tar (None if it names fewer); `content`: the uncompressed bytes.
    """

    number: int
    blob: RangeReader
    digest: str | None
    diff_id: str | None

    @cached_property
    def content(self) -> RangeReader:
        if self.blob.size >= 4:
            start = self.blob.read(0, 4)
            if start[:2] == b"\x1f\x8b":
                return GzipRange(self.blob, self.name)
            if start == b"\x28\xb5\x2f\xfd":
                raise _bad("zstd", f"{self.name}: zstd layers are not read; re-export the image raw or gzip")
        return self.blob

    @property
    def name(self) -> str:
        """The digest that evidence cites: that of the uncompressed tar."""
        return self.diff_id or self.digest or f"layer {self.number}"

    @cached_property
    def members(self) -> list[tar.Member]:
        return tar.members(self.content, self.name)


class Image:
    """An image to read. `config` is the parsed `config_bytes`; `image_id` is `sha256:` of those bytes.

    `commands`: for each layer the shell command that prints its stored bytes, for a person who checks by hand.
    """

    def __init__(
        self,
        where: str,
        config_bytes: bytes,
        layers: list[tuple[RangeReader, str | None]],
        *,
        commands: tuple[str, ...] = (),
        tags: tuple[str, ...] = (),
        declared: tuple[Declared, ...] = (),
    ) -> None:
        self.where, self.config_bytes, self.tags, self.declared = where, config_bytes, tags, declared
        self.commands = commands
        self.config = as_object(parse_json(config_bytes, "the image configuration"), "the image configuration")
        self.image_id = f"sha256:{sha256_bytes(config_bytes)}"
        rootfs = self.config.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        self.diff_ids = [item for item in diff_ids if isinstance(item, str)] if isinstance(diff_ids, list) else []
        padded: list[str | None] = [*self.diff_ids, *([None] * len(layers))]
        self.layers = [Layer(number, blob, digest, padded[number]) for number, (blob, digest) in enumerate(layers)]

    @cached_property
    def overlay(self) -> Overlay:
        overlay = Overlay()
        for layer in self.layers:
            overlay.add(layer.number, layer.members)
        return overlay

    def files(self) -> dict[str, Entry]:
        """Path (no leading slash) -> visible regular file; links and folders are not listed."""
        return {path: entry for path, entry in sorted(self.overlay.entries.items()) if entry.type == "file"}

    @property
    def hidden(self) -> list[Hidden]:
        """Files that later layers hide."""
        return self.overlay.hidden

    def find(self, path: str) -> Entry | None:
        """The regular file that `path` shows, links followed inside the image; None if there is none."""
        entry = self.overlay.resolve(path)
        return entry if entry is not None and entry.type == "file" else None

    def open(self, path: str) -> RangeReader:
        """The bytes of the file at `path`. Raises QdcError `image.no-file`."""
        entry = self.find(path)
        if entry is None:
            raise _bad("no-file", f"{self.where}: no file /{path.strip('/')} in the image")
        return SubRange(self.layers[entry.layer].content, entry.offset, entry.size, entry.path)

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


def open_image(path: Path, *, shown: str | None = None, prints: str | None = None, links: bool = False) -> Image:
    """An OCI layout (a folder) or an archive (a file: docker-archive or dual, also gzip as a whole).

    `shown`: how reports name it (default: its path). `prints`: for a `path` that will not stay, the shell command
    that prints the archive, or the folder that commands may name. `links`: whether files of a layout may be links (the
    folder is the store's own). Raises QdcError `image.*`, `tar.*` or `bytes.*`
    (exit 4) when it is none of them or cannot be read.
    """
    where = shown or str(path)
    if path.is_dir():
        return _from_layout(_Folder(path, prints or str(path), links), where)
    source: RangeReader = FileRange(path)
    if source.size >= 2 and source.read(0, 2) == b"\x1f\x8b":
        source = GzipRange(source, path.name)
    store = _Archive(source, path.name, prints or f"cat {shlex.quote(str(path))}")
    return _from_archive(store, where) if "manifest.json" in store.files else _from_layout(store, where)


class _Folder:
    def __init__(self, root: Path, prints: str, links: bool = False) -> None:
        self.root, self.prints, self.links = root, prints, links

    def command(self, name: str) -> str:
        return f"cat {shlex.quote(f'{self.prints}/{name}')}"

    def get(self, name: str) -> RangeReader | None:
        path = self.root / tar.clean_path(name, "layout")
        return FileRange(path) if path.is_file() and (self.links or not path.is_symlink()) else None


class _Archive:
    def __init__(self, source: RangeReader, what: str, prints: str) -> None:
        self.source = source
        self.prints = f"{prints} | gzip -dc" if isinstance(source, GzipRange) else prints
        overlay = Overlay()
        overlay.add(0, tar.members(source, what))
        self.overlay = overlay
        self.files = {path for path, entry in overlay.entries.items() if entry.type == "file"}

    def command(self, name: str) -> str:
        return f"{self.prints} | tar -xO {shlex.quote(name)}"

    def get(self, name: str) -> RangeReader | None:
        entry = self.overlay.resolve(tar.clean_path(name, "archive"))
        if entry is None or entry.type != "file":
            return None
        return SubRange(self.source, entry.offset, entry.size, entry.path)


def _from_layout(store: _Folder | _Archive, where: str) -> Image:
    layout = _document(store, "oci-layout", where)
    if layout.get("imageLayoutVersion") != "1.0.0":
        raise _bad("layout", f"{where}: not an OCI layout of version 1.0.0")
    declared: list[Declared] = []
    tags: list[str] = []
    manifest, said_in, depth = _document(store, "index.json", where), "index.json", 0
    while "manifests" in manifest:
        if (depth := depth + 1) > 4:
            raise _bad("index", f"{where}: indexes inside indexes")
        chosen = _choose(manifest["manifests"], where)
        notes = chosen.get("annotations")
        tag = notes.get("org.opencontainers.image.ref.name") if isinstance(notes, dict) else None
        tags += [tag] if isinstance(tag, str) else []
        declared.append(_declared(store, "manifest", said_in, chosen, where))
        manifest = as_object(_load(declared[-1].blob, "manifest", where), f"{where}: manifest")
        said_in = declared[-1].digest
    declared.append(_declared(store, "configuration", said_in, manifest.get("config"), where))
    config = declared[-1].blob
    listed = manifest.get("layers")
    if not isinstance(listed, list):
        raise _bad("manifest", f"{where}: the image manifest lists no layers")
    layers: list[tuple[RangeReader, str | None]] = []
    for number, layer in enumerate(listed):
        declared.append(_declared(store, f"layer {number}", said_in, layer, where))
        layers.append((declared[-1].blob, declared[-1].digest))
    return Image(
        where,
        _small(config, "configuration", where),
        layers,
        commands=tuple(store.command(f"blobs/sha256/{str(digest)[7:]}") for _, digest in layers),
        tags=tuple(tags),
        declared=tuple(declared),
    )


def _from_archive(store: _Archive, where: str) -> Image:
    listed = parse_json(_small(_blob(store, "manifest.json", where), "manifest.json", where), "manifest.json")
    if not isinstance(listed, list) or len(listed) != 1:
        raise _bad("archive", f"{where}: manifest.json must describe exactly one image")
    described = as_object(listed[0], "manifest.json")
    names, tags = described.get("Layers"), described.get("RepoTags") or []
    config_name = described.get("Config")
    if not isinstance(names, list) or not isinstance(config_name, str) or not isinstance(tags, list):
        raise _bad("archive", f"{where}: manifest.json needs Config and Layers")
    declared: list[Declared] = []

    def blob(what: str, name: Any) -> tuple[RangeReader, str | None]:
        if not isinstance(name, str):
            raise _bad("archive", f"{where}: manifest.json: {what} is not a file name")
        found = _blob(store, name, where)
        hexes = re.fullmatch(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?", name)
        digest = f"sha256:{hexes[1]}" if hexes else None
        if digest:
            declared.append(Declared(what, "manifest.json", digest, None, found))
        return found, digest

    config, _ = blob("configuration", config_name)
    layers = [blob(f"layer {number}", name) for number, name in enumerate(names)]
    config_bytes = _small(config, "configuration", where)
    if "index.json" in store.files and "oci-layout" in store.files:
        other = _from_layout(store, where)
        declared += other.declared
        if other.config_bytes != config_bytes or [x.digest for x in other.layers] != [d for _, d in layers]:
            raise _bad("two-images", f"{where}: manifest.json and index.json describe different images")
    return Image(
        where,
        config_bytes,
        layers,
        commands=tuple(store.command(name) for name in names),
        tags=tuple(tag for tag in tags if isinstance(tag, str)),
        declared=tuple(declared),
    )


def parse_json(data: bytes, what: str) -> Any:
    """JSON of untrusted bytes. Raises QdcError `image.json` on anything that is not plain JSON of moderate depth:

    duplicate names, numbers beyond floats, texts that are not UTF-8, more than 64 levels.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("duplicate names")
        return table

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [item for inner in level for item in _inside(inner)]
        if level:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        return value
    except (ValueError, RecursionError) as error:
        raise _bad("json", f"{what}: not JSON ({error})") from error


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def as_object(value: Any, what: str) -> dict[str, Any]:
    """`value` if it is a JSON object; else QdcError `image.json`."""
    if not isinstance(value, dict):
        raise _bad("json", f"{what}: not a JSON object")
    return value


def _choose(manifests: Any, where: str) -> dict[str, Any]:
    if not isinstance(manifests, list) or not all(isinstance(item, dict) for item in manifests):
        raise _bad("index", f"{where}: the index lists no manifests")
    if len(manifests) > 1:
        wanted = {"os": "linux", "architecture": "amd64"}
        manifests = [
            item
            for item in manifests
            if isinstance(item.get("platform"), dict)
            and all(item["platform"].get(key) == value for key, value in wanted.items())
        ]
    if len(manifests) != 1:
        raise _bad("index", f"{where}: {len(manifests)} images fit; give a layout that holds one")
    return as_object(manifests[0], "index")


def _declared(store: _Folder | _Archive, what: str, said_in: str, descriptor: Any, where: str) -> Declared:
    descriptor = as_object(descriptor, f"{where}: descriptor of the {what}")
    digest, size = descriptor.get("digest"), descriptor.get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise _bad("digest", f"{where}: the {what} has no sha256 digest")
    if type(size) is not int:
        raise _bad("size", f"{where}: the {what} has no size")
    return Declared(what, said_in, digest, size, _blob(store, f"blobs/sha256/{digest[7:]}", where))


def _blob(store: _Folder | _Archive, name: str, where: str) -> RangeReader:
    found = store.get(name)
    if found is None:
        raise _bad("missing", f"{where}: {name} is missing")
    return found


def _document(store: _Folder | _Archive, name: str, where: str) -> dict[str, Any]:
    return as_object(_load(_blob(store, name, where), name, where), f"{where}: {name}")


def _load(blob: RangeReader, what: str, where: str) -> Any:
    return parse_json(_small(blob, what, where), f"{where}: {what}")


def _small(blob: RangeReader, what: str, where: str) -> bytes:
    if blob.size > MAX_JSON:
        raise _bad("too-large", f"{where}: {what} has {blob.size} bytes")
    return blob.read(0, blob.size)


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"image.{id}", message, exit_code=4)


__all__ = ["Declared", "Image", "Layer", "as_object", "open_image", "parse_json", "ranges"]
