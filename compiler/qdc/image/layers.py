"""Virtual layers and virtual images: what a tar or an image will hold, without its bytes.

A layer is either entries whose contents are found by SHA-256, or one real file found by its own SHA-256: a tar (that
digest is then its `diff_id`), or a gzip of one, which a layer of a given base stays. This module does not know where
those files are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qdc.core import canonical, files
from qdc.core.errors import COULD_NOT, QdcError
from qdc.image.tar import END, Entry, EntryType, Resolve, arranged, file_chunks, header, layer_chunks, padded

SCHEMA = 1


@dataclass(frozen=True)
class Gzip:
    """The stored form of a layer that is kept compressed: its SHA-256 (64 hex) and its bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Layer:
    """`diff_id`: SHA-256 of the tar (64 hex, without "sha256:"); `size`: its bytes; `role`: for people.

    Either `entries` (arranged) or `tar` (the name that its file had in its stage's output) is given; `gzip` where that
    file is not the tar itself.
    """

    role: str
    diff_id: str
    size: int
    entries: tuple[Entry, ...] | None = None
    tar: str | None = None
    gzip: Gzip | None = None

    @property
    def stored(self) -> tuple[str, int]:
        """SHA-256 and bytes of the layer as manifests name it: what is exported."""
        return (self.diff_id, self.size) if self.gzip is None else (self.gzip.sha256, self.gzip.size)

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"role": self.role, "diff_id": f"sha256:{self.diff_id}", "size": self.size}
        if self.gzip is not None:
            value["gzip"] = {"digest": f"sha256:{self.gzip.sha256}", "size": self.gzip.size}
        if self.entries is None:
            value["tar"] = self.tar
        else:
            value["entries"] = [entry_json(entry) for entry in self.entries]
        return value


def entry_json(entry: Entry) -> dict[str, Any]:
    value: dict[str, Any] = {"path": entry.path, "type": entry.type, "mode": entry.mode}
    if entry.type == "file":
        value |= {"size": entry.size, "sha256": entry.sha256}
    elif entry.link is not None:
        value["link"] = entry.link
    return value


def layer_from_json(value: Mapping[str, Any], role: str = "") -> Layer:
    """A `layer.json` or one layer of an `image.json`. Raises QdcError `image.layer` when it is neither."""
    try:
        entries, packed = value.get("entries"), value.get("gzip")
        return Layer(
            role=str(value.get("role", role)),
            diff_id=str(value["diff_id"]).removeprefix("sha256:"),
            size=int(value["size"]),
            entries=None if entries is None else tuple(map(_entry, entries)),
            tar=None if entries is not None else str(value["tar"]),
            gzip=None if packed is None else Gzip(packed["digest"].removeprefix("sha256:"), int(packed["size"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QdcError("image.layer", f"this is no layer description: {error!r}", exit_code=COULD_NOT) from error


def _entry(value: Mapping[str, Any]) -> Entry:
    return Entry(
        path=value["path"],
        type=cast(EntryType, value["type"]),
        mode=int(value["mode"]),
        size=int(value.get("size", 0)),
        sha256=value.get("sha256"),
        link=value.get("link"),
    )


def read_layer(folder: Path, role: str) -> Layer:
    """The layer that a `layer`, `base-image` or `runtime` stage left in `folder`."""
    layer = layer_from_json(json.loads((folder / "layer.json").read_bytes()))
    return Layer(role, layer.diff_id, layer.size, layer.entries, layer.tar)


def write_layer_json(folder: Path, layer: Layer) -> None:
    files.write_json(folder / "layer.json", layer.as_json())


def digested(files_by_path: Mapping[str, Path], role: str) -> Layer:
    """A virtual layer of real files (in-layer path -> file), each read once: both digests in one pass.

    Modes become 755 where the owner may execute the file, else 644. Links are followed.
    """
    state, size = hashlib.sha256(), 0
    done: list[Entry] = []

    def take(data: bytes) -> None:
        nonlocal size
        state.update(data)
        size += len(data)

    planned = []
    for path, source in files_by_path.items():
        status = source.stat()
        planned.append(Entry(path, "file", 0o755 if status.st_mode & 0o100 else 0o644, status.st_size))
    for entry in arranged(planned):
        take(header(entry))
        if entry.type == "file":
            content = hashlib.sha256()
            for chunk in file_chunks(files_by_path[entry.path], entry.size):
                content.update(chunk)
                take(chunk)
            take(bytes(-entry.size % 512))
            entry = Entry(entry.path, "file", entry.mode, entry.size, content.hexdigest())
        done.append(entry)
    take(END)
    return Layer(role, state.hexdigest(), size, tuple(done))


def small_layer(contents: Mapping[str, bytes], role: str, folder: Path, name: str) -> Layer:
    """Write the tar of in-memory files (mode 644) to `folder/name` and describe it."""
    entries = arranged(Entry(path, "file", 0o644, len(data)) for path, data in contents.items())
    blocks = [header(entry) + padded(contents.get(entry.path, b"")) for entry in entries]
    data = b"".join(blocks) + END
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return Layer(role, files.sha256_bytes(data), len(data), None, name)


@dataclass(frozen=True)
class VirtualImage:
    """`id`: SHA-256 of `config`, the exact OCI config bytes (64 hex). `layers` from base to last.

    `folder`: where its small tars are, or None when everything is found by digest.
    """

    name: str
    id: str
    config: bytes
    layers: tuple[Layer, ...]
    folder: Path | None = None

    @property
    def size(self) -> int:
        """Bytes of all layer tars, uncompressed: what an engine reports as the image's size."""
        return sum(layer.size for layer in self.layers)

    def chunks(self, layer: Layer, resolve: Resolve) -> Iterator[bytes]:
        """One of its layers as it is stored, checked against its digest at the end (QdcError `image.content`)."""
        state, size = hashlib.sha256(), 0
        for chunk in self._raw_chunks(layer, resolve):
            state.update(chunk)
            size += len(chunk)
            yield chunk
        if (state.hexdigest(), size) != layer.stored:
            raise QdcError(
                "image.content",
                f"the {layer.role} layer is not the one that was built: its bytes give "
                f"{state.hexdigest()[:12]}, expected {layer.stored[0][:12]}" + self._culprit(layer, resolve),
                hint="run `qdc store verify`",
                exit_code=COULD_NOT,
            )

    def _raw_chunks(self, layer: Layer, resolve: Resolve) -> Iterator[bytes]:
        if layer.entries is not None:
            return layer_chunks(layer.entries, resolve)
        return file_chunks(self.file(layer, resolve), layer.stored[1])

    def file(self, layer: Layer, resolve: Resolve) -> Path:
        """Where a layer without entries is: a small tar in its folder, else by its digest."""
        own = self.folder / layer.tar if self.folder is not None and layer.tar and layer.tar != "layer.tar" else None
        return own if own is not None and own.is_file() else resolve(layer.stored[0])

    @staticmethod
    def _culprit(layer: Layer, resolve: Resolve) -> str:
        for entry in layer.entries or ():
            if entry.sha256 and files.sha256_file(resolve(entry.sha256)) != entry.sha256:
                return f" ({entry.path} is damaged)"
        return ""


def image_json(name: str, config: bytes, layers: Iterable[Layer]) -> dict[str, Any]:
    """The text of `image.json`."""
    return {
        "schema": SCHEMA,
        "name": name,
        "id": f"sha256:{files.sha256_bytes(config)}",
        "config": config.decode(),
        "layers": [layer.as_json() for layer in layers],
    }


def read_image(folder: Path) -> VirtualImage:
    """The image in the output `folder` of an `image` stage. Raises QdcError `image.image` when it is none."""
    try:
        value = json.loads((folder / "image.json").read_bytes())
        config = str(value["config"]).encode()
        image = VirtualImage(
            name=value["name"],
            id=files.sha256_bytes(config),
            config=config,
            layers=tuple(layer_from_json(layer) for layer in value["layers"]),
            folder=folder,
        )
        diff_ids = [f"sha256:{layer.diff_id}" for layer in image.layers]
        if f"sha256:{image.id}" != value["id"] or json.loads(config)["rootfs"]["diff_ids"] != diff_ids:
            raise ValueError("its digests do not agree with each other")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QdcError("image.image", f"no image is here: {error}", file=folder, exit_code=COULD_NOT) from error
    return image


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """The exact bytes of an OCI config; their SHA-256 is the image ID."""
    return canonical.dumps(config)
