"""The image that a product stands on: its layers, and what its configuration hands down.

One that is given (an OCI layout, or an archive of `docker save`'s or of both forms) is checked against its own digests
and described; its layers stay the bytes that they are, gzip included, so that a registry that has them is sent none.
This module does not know where a given image came from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import sha256_bytes
from qdc.formats import oci, ranges
from qdc.formats.packed import ZSTD, PackedRange
from qdc.formats.ranges import FileRange, RangeReader
from qdc.image.debian import installed
from qdc.image.layers import Gzip, Layer, layer_from_json, read_layer

ROLE = "base"
PLATFORM = ("linux", "amd64")
INTERPRETER = "usr/bin/python3"
OURS = ("opt/qdc", "opt/models")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0\n]*")
_DPKG = "var/lib/dpkg/status"
_DISTRIBUTION = re.compile(r"(?:.*/)?([A-Za-z0-9_.]+)-([^/-]+)\.dist-info/METADATA")
Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Base:
    """`layers`, lowest first; `environment`: `NAME=value` lines, and `user`, that an image on it inherits."""

    layers: tuple[Layer, ...]
    environment: tuple[str, ...] = ()
    user: str = ""

    def as_json(self) -> dict[str, Any]:
        layers = [layer.as_json() for layer in self.layers]
        return {"layers": layers, "environment": list(self.environment), "user": self.user}


def read_base(folder: Path) -> Base:
    """What a `base-image` or `given-base` stage left in `folder`."""
    if not (folder / "base.json").is_file():
        return Base((read_layer(folder, ROLE),))
    value = json.loads((folder / "base.json").read_bytes())
    layers = tuple(layer_from_json(layer) for layer in value["layers"])
    return Base(layers, tuple(value["environment"]), value["user"])


@dataclass(frozen=True)
class Given:
    """A given image, checked. `packages`: {name, version, ..} of what dpkg and Python have installed in it;
    `blobs`: SHA-256 -> the stored bytes of its layers."""

    base: Base
    packages: list[dict[str, str]]
    blobs: dict[str, RangeReader] = field(repr=False)


def open_given(source: Path) -> oci.Image:
    """The image in a folder that holds an OCI layout, or one archive file. Raises QdcError."""
    files = [path for path in source.iterdir() if path.is_file()]
    if not (source / "oci-layout").is_file() and len(files) == 1:
        return oci.open_image(files[0], shown="the base")
    return oci.open_image(source, shown="the base", links=True)


def read_given(image: oci.Image, report: Report) -> Given:
    """Check a given image and describe it. Raises QdcError `base.*` (exit 4), or what its readers raise."""
    check_platform(image.config)
    _check_documents(image)
    layers, blobs = [], {}
    for layer in image.layers:
        report(layer.number, len(image.layers), "check the base's layers")
        described = _described(layer)
        layers.append(described)
        blobs[described.stored[0]] = layer.blob
    _check_files(image)
    report(len(image.layers), len(image.layers), "checked")
    settings = image.settings
    base = Base(tuple(layers), _environment(settings.get("Env")), _user(settings.get("User")))
    return Given(base, _packages(image), blobs)


def check_platform(config: dict[str, Any]) -> None:
    """Raises QdcError `base.platform` where an image's configuration is for another platform than ours."""
    found = (config.get("os"), config.get("architecture"))
    if found != PLATFORM:
        raise _bad(
            "platform",
            f"it is for {'/'.join(str(part)[:32] for part in found)}, and images are made for {'/'.join(PLATFORM)}",
            "name an image that is built for this platform, by its own digest",
        )


def _check_documents(image: oci.Image) -> None:
    """What manifest and index say of the documents must be so; layers are read once, later."""
    for said in image.declared:
        if said.size is not None and said.size != said.blob.size:
            raise _moved(said.what, f"{said.size} bytes", f"{said.blob.size} bytes")
        if said.blob.size <= oci.MAX_JSON and not said.what.startswith("layer"):
            found = sha256_bytes(said.blob.read(0, said.blob.size))
            if said.digest != f"sha256:{found}":
                raise _moved(said.what, said.digest, f"sha256:{found}")
    if len(image.diff_ids) != len(image.layers) or not image.layers:
        raise _bad("layers", f"its configuration names {len(image.diff_ids)} layers, and it has {len(image.layers)}")


def _described(layer: oci.Layer) -> Layer:
    """A layer by the digests of its bytes, which must be those that the image says."""
    stored = ranges.sha256(layer.blob)
    if layer.digest is not None and layer.digest != f"sha256:{stored}":
        raise _moved(f"layer {layer.number}", layer.digest, f"sha256:{stored}")
    if isinstance(layer.content, PackedRange) and layer.content.kind == ZSTD:
        raise _bad(
            "zstd",
            f"layer {layer.number} is compressed by zstd, which engines before Docker 23 cannot load from an archive",
            "copy it with gzip layers: skopeo copy --dest-compress-format gzip docker://NAME oci:DIR",
        )
    packed = None
    raw, size = stored, layer.blob.size
    if layer.content is not layer.blob:
        packed = Gzip(stored, layer.blob.size)
        state, size = hashlib.sha256(), 0
        for chunk in ranges.chunks(layer.content):
            state.update(chunk)
            size += len(chunk)
        raw = state.hexdigest()
    if layer.diff_id != f"sha256:{raw}":
        raise _moved(f"the tar of layer {layer.number}", str(layer.diff_id), f"sha256:{raw}")
    return Layer(ROLE, raw, size, None, stored, packed)


def _check_files(image: oci.Image) -> None:
    """The base must start the launcher, and leave its places to the product."""
    image.require_whole()
    entries = image.overlay.entries
    taken = sorted(path for path in entries if path.startswith(tuple(f"{place}/" for place in OURS)))
    if taken:
        raise _bad(
            "taken",
            f"it holds /{taken[0]}: it is an image of qdc itself, and its files would be served on",
            "name the image that it stands on",
        )
    python = image.overlay.resolve(INTERPRETER)
    if python is None or python.type != "file" or not python.mode & 0o111:
        raise _bad(
            "python",
            f"it has no program /{INTERPRETER}, which starts the launcher",
            "name an image with Python 3 there, as vLLM's own has, or `image: {base: {debian: bookworm}}`",
        )


def _environment(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(line, str) and _VARIABLE.fullmatch(line) for line in given):
        raise _bad("environment", "its configuration has variables that are no `NAME=value`")
    return tuple(given)


def _user(given: Any) -> str:
    text = "" if given is None else given
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9_.:-]*", text):
        raise _bad("user", "its configuration names a user that is none")
    return text


def _packages(image: oci.Image) -> list[dict[str, str]]:
    """By dpkg's own record and by the metadata folders of Python's packages, sorted by name."""
    found = installed(image.read(_DPKG).decode("utf-8", "replace")) if image.find(_DPKG) else []
    for path in image.overlay.entries:
        if match := _DISTRIBUTION.fullmatch(path):
            found.append({"name": canonical_name(match[1]), "version": match[2]})
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def canonical_name(name: str) -> str:
    """A Python package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _moved(what: str, wanted: str, found: str) -> QdcError:
    message = f"{what} has other bytes than the image says: expected {wanted}, got {found}"
    return _bad("digest", message, "copy or fetch the image again; if it stays so, do not use it")


def _bad(id: str, message: str, hint: str = "copy or fetch the image again, or name another one") -> QdcError:
    return QdcError(f"base.{id}", f"image.base: {message}", hint=hint, exit_code=COULD_NOT)


def layout(manifest: bytes, media_type: str) -> dict[str, bytes]:
    """The two documents that make a folder of blobs with this manifest an OCI layout: path -> bytes."""
    descriptor = {"mediaType": media_type, "digest": f"sha256:{sha256_bytes(manifest)}", "size": len(manifest)}
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [descriptor]}
    return {"oci-layout": canonical.dumps({"imageLayoutVersion": "1.0.0"}), "index.json": canonical.dumps(index)}


def is_stored(blob: RangeReader) -> Path | None:
    """The file that is this blob and nothing else, if there is one."""
    return blob.path if isinstance(blob, FileRange) else None
