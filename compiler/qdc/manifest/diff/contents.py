"""What two images hold, compared: how they start, packages, files, layers. Bytes are read only where sizes agree.

Takes images as `formats.oci` reads them. A file that both images have from the same bytes of a shared layer is not
read. It knows no document of qdc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.formats import ranges
from qdc.formats.image import Image
from qdc.formats.overlay import Entry
from qdc.manifest.diff.words import Change, change, said, short, size

_DIST = re.compile(r"(?:.*/)?([^/]+?)-([^/-]+)\.dist-info/METADATA")
_DPKG = "var/lib/dpkg/status"
_PACKAGE = re.compile(rb"^(Package|Version): *(\S+)", re.MULTILINE)
_OWN_LABEL = "io.qdc."


def start_changes(a: Image, b: Image) -> Iterator[Change]:
    """ENTRYPOINT, CMD, environment, user, folder, ports and labels (qdc's own labels repeat the manifest)."""
    was, now = _settings(a), _settings(b)
    for path in sorted(was.keys() | now.keys()):
        left, right = was.get(path), now.get(path)
        if left != right:
            name = path.removeprefix("image.config.")
            yield change("image", path, left, right, f"{name}: {said(left)} -> {said(right)}")


def package_changes(a: Image, b: Image) -> Iterator[Change]:
    """Installed packages by name: Python distributions, and Debian's."""
    was, now = packages(a), packages(b)
    for name in sorted(was.keys() | now.keys()):
        left, right = was.get(name), now.get(name)
        if left != right:
            kind, _, plain = name.partition(":")
            words = f"{left or 'none'} -> {right or 'none'}"
            yield change("package", f"packages.{name}", left, right, f"package {plain} {words} ({kind})")


def packages(image: Image) -> dict[str, str]:
    """`python:NAME` or `debian:NAME` -> version; of a package that is installed twice, all versions."""
    found: dict[str, set[str]] = {}
    for path in image.files():
        match = _DIST.fullmatch(path)
        if match:
            found.setdefault(f"python:{_plain(match[1])}", set()).add(match[2])
    if image.find(_DPKG) is not None:
        for paragraph in image.read(_DPKG).split(b"\n\n"):
            fields = dict(_PACKAGE.findall(paragraph))
            if b"Package" in fields and b"Version" in fields:
                name = fields[b"Package"].decode("utf-8", "replace")
                found.setdefault(f"debian:{name}", set()).add(fields[b"Version"].decode("utf-8", "replace"))
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def file_changes(a: Image, b: Image, told: set[str]) -> Iterator[Change]:
    """Files and links that were added, removed or changed, each with its layer, but not `told` ones and not those

    of packages whose version changed.
    """
    was, now = _shown(a), _shown(b)
    owned = _owned(a, b)
    for path in sorted(was.keys() | now.keys()):
        left, right = was.get(path), now.get(path)
        if path in told or path in owned or _same(a, left, b, right):
            continue
        before = None if left is None else _file(a, left)
        after = None if right is None else _file(b, right)
        layers = [entry.layer for image, entry in ((a, left), (b, right)) if entry is not None and image.layers]
        where = f", layer {' -> '.join(map(str, dict.fromkeys(layers)))}" if layers else ""
        yield change("file", f"files[/{path}]", before, after, f"file /{path} {_how(left, right)}{where}")


def layer_changes(a: Image, b: Image) -> Iterator[Change]:
    """One row: how many layers both have, and the sizes of the others."""
    sides: list[list[dict[str, Any]]] = [
        [{"diff_id": layer.name, "size": layer.content.size} for layer in image.layers] for image in (a, b)
    ]
    if sides[0] == sides[1]:
        return
    names = [{layer["diff_id"] for layer in side} for side in sides]
    shared = sum(layer["size"] for layer in sides[0] if layer["diff_id"] in names[1])
    texts = []
    for side, others in zip(sides, (names[1], names[0]), strict=True):
        own = [layer for layer in side if layer["diff_id"] not in others]
        texts.append(", ".join(f"{short(layer['diff_id'])} {size(layer['size'])}" for layer in own) or "none")
    count = len(names[0] & names[1])
    text = f"layers: {count} shared ({size(shared)}); others {texts[0]} -> {texts[1]}"
    yield change("layer", "image.layers", sides[0], sides[1], text)


def _settings(image: Image) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in image.settings.items():
        if name == "Env" and isinstance(value, list):
            for item in value:
                key, _, text = str(item).partition("=")
                found[f"image.config.Env[{key}]"] = text
        elif name in ("Labels", "ExposedPorts", "Volumes") and isinstance(value, dict):
            for key, inner in value.items():
                if not key.startswith(_OWN_LABEL):
                    found[f"image.config.{name}[{key}]"] = inner if isinstance(inner, str) else True
        elif value not in (None, "", [], {}, False):
            found[f"image.config.{name}"] = value
    return {path: value for path, value in found.items() if canonical.dumps(value)}


def _plain(name: str) -> str:
    """A distribution's name as the package index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _shown(image: Image) -> dict[str, Entry]:
    return {path: entry for path, entry in image.overlay.entries.items() if entry.type in ("file", "symlink")}


def _same(a: Image, left: Entry | None, b: Image, right: Entry | None) -> bool:
    if left is None or right is None or (left.type, left.size, left.mode) != (right.type, right.size, right.mode):
        return False
    if left.type == "symlink":
        return left.link == right.link
    if left.offset == right.offset and a.origin(left) == b.origin(right) is not None:
        return True
    return _digest(a, left) == _digest(b, right)


def _digest(image: Image, entry: Entry) -> str:
    return image.known_digest(entry) or ranges.sha256(image.content(entry))


def _file(image: Image, entry: Entry) -> dict[str, Any]:
    """A file for programs: `{size, mode, layer}`, of a link `{link, layer}`; `layer` is the digest of its tar."""
    layer = image.origin(entry)
    if entry.type == "symlink":
        return {"link": entry.link, "layer": layer}
    return {"size": entry.size, "mode": f"{entry.mode & 0o7777:o}", "layer": layer}


def _how(left: Entry | None, right: Entry | None) -> str:
    if left is None or right is None:
        entry = left or right
        return ("added, " if left is None else "removed, ") + (_kind(entry) if entry is not None else "")
    if left.type == right.type == "file":
        text = f"changed, {size(left.size)} -> {size(right.size)}"
        modes = [f"{entry.mode & 0o7777:o}" for entry in (left, right)]
        return text if modes[0] == modes[1] else f"{text}, mode {modes[0]} -> {modes[1]}"
    return f"changed, {_kind(left)} -> {_kind(right)}"


def _kind(entry: Entry) -> str:
    return f"link to {entry.link}" if entry.type == "symlink" else f"{size(entry.size)}, mode {entry.mode & 0o7777:o}"


def _owned(a: Image, b: Image) -> set[str]:
    """Files of Python packages whose version differs: the package's row tells them. As each RECORD lists them."""
    versions = (packages(a), packages(b))
    owned: set[str] = set()
    for image in (a, b):
        for path in image.files():
            match = _DIST.fullmatch(path)
            if match and versions[0].get(name := f"python:{_plain(match[1])}") != versions[1].get(name):
                owned |= _recorded(image, path.rpartition("/")[0])
    return owned


def _recorded(image: Image, folder: str) -> set[str]:
    """The paths in the RECORD of the dist-info `folder`, that stay in the image."""
    root = folder.rpartition("/")[0]
    own = {path for path in image.files() if path.startswith(f"{folder}/")}
    try:
        lines = image.read(f"{folder}/RECORD").decode("utf-8", "replace").splitlines()
    except QdcError:
        return own
    names = {line.split(",")[0].strip('"') for line in lines}
    return own | {f"{root}/{name}".lstrip("/") for name in names if name and not name.startswith(("/", ".."))}
