"""Where images lie on disk: OCI layouts (a folder, or a tar of it) and docker-archives, plain or compressed as a whole.

Finds the documents, chooses one image of several, and opens it as an `Image`; `from_manifest` does so for any other
keeper of blobs. A compressed archive, and one that comes as a stream, is read once. Standard library only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qdc.core.errors import QdcError
from qdc.formats import ranges, survey, tar
from qdc.formats.image import MAX_JSON, MAX_LAYERS, Declared, Image, Layer
from qdc.formats.overlay import Overlay
from qdc.formats.packed import PackedRange, packing
from qdc.formats.ranges import Allowance, BytesRange, FileRange, RangeReader, SubRange
from qdc.formats.strict import as_object, parse_json
from qdc.formats.survey import Survey, Wanted

__all__ = [
    "Declared",
    "Image",
    "Layer",
    "MAX_JSON",
    "as_object",
    "choose",
    "from_manifest",
    "open_archive",
    "open_image",
    "parse_json",
    "ranges",
]

MAX_IMAGES = 1000
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REF = "org.opencontainers.image.ref.name"
_FULL_NAME = "io.containerd.image.name"
Surveyed = tuple[str | None, Survey]


class Blobs(Protocol):
    """A keeper of blobs under the names of an OCI layout."""

    def get(self, name: str, size: int | None = None) -> RangeReader | None:
        """The blob; `size`: what the descriptor says, for a keeper that has to be told."""

    def command(self, name: str) -> str:
        """The shell command that prints it."""


def open_image(
    path: Path,
    *,
    shown: str | None = None,
    prints: str | None = None,
    choice: str | None = None,
    wanted: Wanted | None = None,
    links: bool = False,
) -> Image:
    """An OCI layout (a folder) or an archive (a file: docker-archive, layout or both, also gzip or zstd as a whole).

    `shown`: how reports name it (default: its path). `prints`: for a `path` that will not stay, the shell command
    that prints the archive, or the folder that commands may name. `choice`: which of several images, by tag, platform
    (`linux/arm64`) or digest. `wanted`: what to look out for where everything is to be read: what is compressed is
    then read once. `links`: whether files of a layout may be links (the folder is the store's own). Raises QdcError
    `image.*`, `tar.*` or `bytes.*` (exit 4) when it is none of them or cannot be read.
    """
    where = shown or str(path)
    if path.is_dir():
        image = _from_layout(_Folder(path, prints or str(path), links), where, choice)
    else:
        if not path.is_file():
            raise _bad("archive", f"{where} is no file and no folder")
        file = FileRange(path)
        kind = packing(ranges.fetcher(file)(0, 4))
        allowance = Allowance(file.size)
        source = file if kind is None else PackedRange(file, kind, path.name, allowance, 256)
        commands = prints or f"cat {shlex.quote(str(path))}"
        streamed = source.stream() if isinstance(source, PackedRange) and wanted else None
        image = open_archive(source, path.name, where, commands, allowance, choice, streamed, wanted)
    if wanted is not None:
        image.survey(wanted)
    return image


def open_archive(
    source: RangeReader,
    what: str,
    where: str,
    prints: str,
    allowance: Allowance,
    choice: str | None = None,
    stream: Iterator[bytes] | None = None,
    wanted: Wanted | None = None,
) -> Image:
    """The image in an archive's bytes. `stream`: all of them in order, to be read once before `source` is."""
    store = _Archive(source, what, prints, allowance, stream, wanted)
    image = (_from_archive if "manifest.json" in store.files else _from_layout)(store, where, choice)
    store.give(image)
    return image


class _Folder:
    def __init__(self, root: Path, prints: str, links: bool = False) -> None:
        self.root, self.prints, self.links = root, prints, links

    def command(self, name: str) -> str:
        return f"cat {shlex.quote(f'{self.prints}/{name}')}"

    def get(self, name: str, size: int | None = None) -> RangeReader | None:
        path = self.root
        for part in tar.clean_path(name, "layout").split("/"):
            path /= part
            if path.is_symlink() and not self.links:
                return None
        return FileRange(path) if path.is_file() else None


class _Archive:
    def __init__(
        self,
        source: RangeReader,
        what: str,
        prints: str,
        allowance: Allowance,
        stream: Iterator[bytes] | None,
        wanted: Wanted | None,
    ) -> None:
        self.source, self.allowance = source, allowance
        self.prints = f"{prints} | {source.kind} -dc" if isinstance(source, PackedRange) else prints
        self.read = survey.Archived()
        if stream is not None and wanted is not None:
            self.read = survey.archive(stream, what, survey.Pool(wanted, allowance))
            if self.read.outer.error is not None:
                raise self.read.outer.error
            members: Iterator[tar.Member] = iter(self.read.outer.members)
        else:
            members = tar.walk(source, what, tar.Room())
        self.overlay = Overlay()
        self.overlay.add(0, members, what)
        self.files = {path for path, entry in self.overlay.entries.items() if entry.type == "file"}
        self._given: dict[int, RangeReader] = {}

    def command(self, name: str) -> str:
        return f"{self.prints} | tar -xO {shlex.quote(name)}"

    def get(self, name: str, size: int | None = None) -> RangeReader | None:
        entry = self.overlay.resolve(tar.clean_path(name, "archive"))
        if entry is None or entry.type != "file":
            return None
        if entry.offset in self.read.outer.kept:
            return BytesRange(self.read.outer.kept[entry.offset], entry.path)
        return self._given.setdefault(entry.offset, SubRange(self.source, entry.offset, entry.size, entry.path))

    def give(self, image: Image) -> None:
        """Tell the layers what the pass over the archive has found of them."""
        image.allowance = self.allowance
        for layer in image.layers:
            layer.allowance = self.allowance
            if isinstance(layer.blob, SubRange) and layer.blob.inner is self.source:
                found = self.read.layers.get(layer.blob.start)
                if found is not None:
                    layer.stored = found[0]
                    layer.surveyed = Survey(**{**found[1].__dict__, "members": list(found[1].members)})


@dataclass(frozen=True)
class _Candidate:
    """One image of several: what it is called, and its descriptor or entry."""

    names: tuple[str, ...]
    entry: dict[str, Any]

    def fits(self, choice: str) -> bool:
        return any(choice in (name, name.rpartition("/")[2], name.rpartition(":")[2]) for name in self.names)


def _chosen(candidates: list[_Candidate], choice: str | None, where: str, usual: Callable[[_Candidate], bool]) -> Any:
    """The one that `choice` names; without a choice the only one, or the only `usual` one."""
    fitting = [item for item in candidates if item.fits(choice)] if choice else candidates
    if len(fitting) > 1:
        fitting = [item for item in fitting if usual(item)] or fitting
    if len(fitting) == 1:
        return fitting[0].entry
    names = [item.names[0] for item in (fitting or candidates) if item.names]
    listed = ", ".join(names[:8]) + (", .." if len(names) > 8 else "")
    why = f"{choice!r} is none of them" if choice and not fitting else f"{len(fitting)} fit" if choice else "which one?"
    raise QdcError(
        "image.index",
        f"{where} holds {len(candidates)} images ({listed or 'without names'}): {why}",
        hint=f"name one behind a #, for example {where}#{names[0]}" if names else None,
        exit_code=4,
    )


def choose(manifests: Any, where: str, choice: str | None) -> dict[str, Any]:
    """The entry of an index that is meant: by `choice`, else the only image, else linux/amd64. Raises `image.index`."""
    if not isinstance(manifests, list) or not all(isinstance(item, dict) for item in manifests):
        raise _bad("index", f"{where}: the index lists no manifests")
    if len(manifests) > MAX_IMAGES:
        raise _bad("index", f"{where}: the index lists {len(manifests)} manifests, of which none is read")
    found = []
    for item in manifests:
        notes, platform = item.get("annotations"), item.get("platform")
        notes = notes if isinstance(notes, dict) else {}
        platform = platform if isinstance(platform, dict) else {}
        if platform.get("os") == "unknown" or "vnd.docker.reference.type" in notes:
            continue  # An attestation about another entry.
        names = [notes.get(_FULL_NAME), notes.get(_REF)]
        if platform:
            names.append("/".join(str(platform[key]) for key in ("os", "architecture", "variant") if platform.get(key)))
        found.append(_Candidate((*(str(n) for n in names if isinstance(n, str)), str(item.get("digest"))), item))
    if not found:
        raise _bad("index", f"{where}: the index lists no image")
    entry: dict[str, Any] = _chosen(found, choice, where, lambda item: "linux/amd64" in item.names)
    return entry


def _from_layout(store: _Folder | _Archive, where: str, choice: str | None = None) -> Image:
    layout = _document(store, "oci-layout", where)
    if layout.get("imageLayoutVersion") != "1.0.0":
        raise _bad("layout", f"{where}: not an OCI layout of version 1.0.0")
    return from_manifest(store, _document(store, "index.json", where), "index.json", where, choice)


def from_manifest(
    store: Blobs,
    manifest: dict[str, Any],
    said_in: str,
    where: str,
    choice: str | None = None,
    make: type[Image] = Image,
) -> Image:
    """The image of a manifest, or of an index whose blobs `store` has. Raises QdcError `image.*`."""
    declared: list[Declared] = []
    tags: list[str] = []
    depth = 0
    while "manifests" in manifest:
        if (depth := depth + 1) > 4:
            raise _bad("index", f"{where}: indexes inside indexes")
        several = isinstance(manifest["manifests"], list) and len(manifest["manifests"]) > 1
        chosen = choose(manifest["manifests"], where, choice if several else None)
        notes = chosen.get("annotations")
        tag = notes.get(_REF) if isinstance(notes, dict) else None
        tags += [tag] if isinstance(tag, str) else []
        declared.append(_declared(store, "manifest", said_in, chosen, where))
        manifest = as_object(_load(declared[-1].blob, "manifest", where), f"{where}: manifest")
        said_in = declared[-1].digest
    declared_config = _declared(store, "configuration", said_in, manifest.get("config"), where)
    declared.append(declared_config)
    config = declared_config.blob
    listed = manifest.get("layers")
    if not isinstance(listed, list):
        raise _bad("manifest", f"{where}: the image manifest lists no layers")
    layers: list[tuple[RangeReader, str | None]] = []
    for number, layer in enumerate(listed[: MAX_LAYERS + 1]):
        declared.append(_declared(store, f"layer {number}", said_in, layer, where))
        layers.append((declared[-1].blob, declared[-1].digest))
    return make(
        where,
        _small(config, "configuration", where),
        layers,
        commands=tuple(store.command(f"blobs/sha256/{str(digest)[7:]}") for _, digest in layers),
        config_command=store.command(f"blobs/sha256/{declared_config.digest[7:]}"),
        tags=tuple(tags),
        declared=tuple(declared),
    )


def _from_archive(store: _Archive, where: str, choice: str | None = None) -> Image:
    described = _described(store, where, choice)
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
    layers = [blob(f"layer {number}", name) for number, name in enumerate(names[: MAX_LAYERS + 1])]
    config_bytes = _small(config, "configuration", where)
    if "index.json" in store.files and "oci-layout" in store.files:
        declared += _same_in_index(store, where, config_bytes, [digest for _, digest in layers])
    return Image(
        where,
        config_bytes,
        layers,
        commands=tuple(store.command(name) for name in names),
        config_command=store.command(config_name),
        tags=tuple(tag for tag in tags if isinstance(tag, str)),
        declared=tuple(declared),
        allowance=store.allowance,
    )


def _described(store: _Archive, where: str, choice: str | None) -> dict[str, Any]:
    """The entry of manifest.json for the image that is meant."""
    listed = parse_json(_small(_blob(store, "manifest.json", where), "manifest.json", where), "manifest.json")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_IMAGES:
        raise _bad("archive", f"{where}: manifest.json describes no image, or more than {MAX_IMAGES}")
    found = []
    for item in listed:
        entry = as_object(item, f"{where}: manifest.json")
        tags, config = entry.get("RepoTags"), str(entry.get("Config"))
        names = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        id_ = config.rpartition("/")[2].removesuffix(".json")
        found.append(_Candidate((*names, f"sha256:{id_}", id_), entry))
    chosen: dict[str, Any] = _chosen(found, choice if len(found) > 1 else None, where, lambda item: False)
    return chosen


def _same_in_index(store: _Archive, where: str, config: bytes, digests: list[str | None]) -> tuple[Declared, ...]:
    """What the archive's index declares of the same image. Raises QdcError `image.two-images` if it has another."""
    index = _document(store, "index.json", where)
    listed = index.get("manifests")
    for item in listed[:MAX_IMAGES] if isinstance(listed, list) else ():
        try:
            other = from_manifest(store, {"manifests": [item]}, "index.json", where)
        except QdcError:
            if len(listed or ()) == 1:
                raise
            continue
        if other.config_bytes == config and [layer.digest for layer in other.layers] == digests:
            return other.declared
    raise _bad("two-images", f"{where}: manifest.json and index.json describe different images")


def _declared(store: Blobs, what: str, said_in: str, descriptor: Any, where: str) -> Declared:
    descriptor = as_object(descriptor, f"{where}: descriptor of the {what}")
    digest, size = descriptor.get("digest"), descriptor.get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise _bad("digest", f"{where}: the {what} has no sha256 digest")
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise _bad("size", f"{where}: the {what} has no size")
    return Declared(what, said_in, digest, size, _blob(store, f"blobs/sha256/{digest[7:]}", where, size))


def _blob(store: Blobs, name: str, where: str, size: int | None = None) -> RangeReader:
    found = store.get(name, size)
    if found is None:
        raise _bad("missing", f"{where}: {name[:200]} is missing")
    return found


def _document(store: Blobs, name: str, where: str) -> dict[str, Any]:
    return as_object(_load(_blob(store, name, where), name, where), f"{where}: {name}")


def _load(blob: RangeReader, what: str, where: str) -> Any:
    return parse_json(_small(blob, what, where), f"{where}: {what}")


def _small(blob: RangeReader, what: str, where: str) -> bytes:
    if blob.size > MAX_JSON:
        raise _bad("too-large", f"{where}: {what} has {blob.size} bytes")
    return blob.read(0, blob.size)


def _bad(id: str, message: str) -> QdcError:
    return QdcError(f"image.{id}", message, exit_code=4)
