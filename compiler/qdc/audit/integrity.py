"""Digests: the enclosing documents against the blobs, the configuration against the layers, one pass a layer.

What is found here are verdicts of their own (`image.*`), and the SHA-256 of the files that others ask about.
It proves consistency; only an image ID from elsewhere (`expect`) proves identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from qdc.audit.evidence import PROVED, RECORDED, REFUTED, UNREAD, Look, reason
from qdc.core.errors import QdcError
from qdc.formats import ranges
from qdc.formats.image import Image, Layer
from qdc.formats.overlay import Entry

Verdict = dict[str, Any]
SMALL = 1 << 16
"""Bytes of a layer that is read whole even where layers are only looked into."""
NOT_WHOLE = "not read whole, so its digest is not known (--digests reads all)"
EMPTY = {"layer": None, "path": None, "offset": None, "length": None, "command": None}
_OF_ALL_FILES = ("files.unnamed",)
NO_ANCHOR = "no anchor given: this audit proves that the image agrees with itself, not that it is the one you mean"


def verdict(claim: str, word: str, value: Any, evidence: list[dict[str, Any]]) -> Verdict:
    """One row of the report."""
    return {"claim": claim, "verdict": word, "value": value, "evidence": evidence}


def identity(image: Image, look: Look, expect: str | None) -> list[Verdict]:
    """`image.id` against `expect` (64 hex, with or without `sha256:`), and the digits in the tag."""
    if not image.image_id:
        text = "a folder has no image ID; its files are what they are"
        return [] if expect is None else [verdict("image.id", UNREAD, None, [{**EMPTY, "text": text}])]
    if expect is None:
        rows = [verdict("image.id", RECORDED, image.image_id, [look.configuration(NO_ANCHOR)])]
    else:
        wanted = f"sha256:{expect.removeprefix('sha256:').lower()}"
        same = wanted == image.image_id
        text = "is the expected image ID" if same else f"expected {wanted}"
        rows = [verdict("image.id", PROVED if same else REFUTED, image.image_id, [look.configuration(text)])]
    for tag in image.tags:
        digits = tag.rpartition("-")[2]
        if len(digits) == 12 and not digits.strip("0123456789abcdef"):
            same = image.image_id[7:].startswith(digits)
            text = f"the tag {tag} names the image ID {digits}.."
            rows.append(verdict("image.tag", PROVED if same else REFUTED, tag, [look.configuration(text)]))
    return rows


def blobs(image: Image, known: Mapping[Hashable, str], whole: bool = True) -> list[Verdict]:
    """Each stored blob against the digest and size by which other documents name it.

    `known`: SHA-256 (hex) of blobs that were read already, by `ranges.place`. `whole`: as in `layers`.
    """
    rows: dict[str, Verdict] = {}
    digests = dict(known)
    for item in image.declared:
        place, size, found = ranges.place(item.blob), item.blob.size, None
        text = f"{item.where} names {item.digest}" + ("" if item.size is None else f", {item.size} bytes")
        evidence = {
            "layer": item.digest if item.what.startswith("layer") else None,
            "path": f"({item.what})",
            "offset": 0,
            "length": size,
            "command": None,
        }
        try:
            if place not in digests and (whole or size <= SMALL or not item.what.startswith("layer")):
                digests[place] = ranges.sha256(item.blob)
            found = digests.get(place)
        except QdcError as error:
            text += f"; {reason(error)}"
        same = f"sha256:{found}" == item.digest and item.size in (None, size)
        if found is None:
            text += "" if whole else f"; {NOT_WHOLE}"
        elif not same:
            text += f"; the bytes are sha256:{found}, {size} bytes"
        name = item.what.replace("layer ", "layers[") + ("]" if item.what.startswith("layer") else "")
        row = rows.setdefault(f"image.{name}.digest", verdict(f"image.{name}.digest", PROVED, item.digest, []))
        row["evidence"].append({**evidence, "text": text})
        if (found is not None and not same) or item.size not in (None, size):
            row["verdict"] = REFUTED
        elif found is None and row["verdict"] == PROVED:
            row["verdict"] = UNREAD
    return list(rows.values())


def layers(
    image: Image, look: Look, wanted: Iterable[str], whole: bool = True
) -> tuple[list[Verdict], dict[str, str], dict[Hashable, str]]:
    """Each layer's uncompressed bytes against its diff_id; path -> SHA-256 (hex) of the `wanted` files; and

    `ranges.place` -> SHA-256 of what was read whole. `whole` is False where layers are only looked into: then the
    digests of all but small layers and files stay unread.
    """
    rows: list[Verdict] = []
    hashed: dict[str, str] = {}
    read: dict[Hashable, str] = {}
    if len(image.diff_ids) != len(image.layers):
        text = f"the configuration names {len(image.diff_ids)} layers, the image has {len(image.layers)}"
        rows.append(verdict("image.layers.count", REFUTED, len(image.layers), [look.configuration(text)]))
    places: dict[int, dict[str, Entry]] = {}
    for path in sorted(wanted):
        entry = image.find(path)
        if entry is not None:
            places.setdefault(entry.layer, {})[path] = entry
    for layer in image.layers:
        mine = places.get(layer.number, {})
        claim = f"image.layers[{layer.number}].diff_id"
        try:
            found, digests = _layer(image, layer, mine, whole)
        except QdcError as error:
            rows.append(verdict(claim, UNREAD, layer.diff_id, [look.configuration(reason(error))]))
            continue
        hashed |= digests
        if layer.stored is not None:
            read[ranges.place(layer.blob)] = layer.stored
        if found is None:
            rows.append(verdict(claim, UNREAD, layer.diff_id, [look.configuration(NOT_WHOLE)]))
            continue
        read[ranges.place(layer.content)] = found
        same = layer.diff_id == f"sha256:{found}"
        text = "the layer's bytes have the digest in the configuration"
        evidence = {
            "layer": layer.name,
            "path": f"(layer {layer.number})",
            "offset": 0,
            "length": layer.size,
            "text": text if same else f"the layer's bytes are sha256:{found}",
            "command": f"{look.command(layer.number)} | sha256sum",
        }
        rows.append(verdict(claim, PROVED if same else REFUTED, layer.diff_id, [evidence]))
    if not image.layers:
        hashed = _files(image, places.get(0, {}), whole)
    return rows, hashed, read


def _layer(image: Image, layer: Layer, files: Mapping[str, Entry], whole: bool) -> tuple[str | None, dict[str, str]]:
    """SHA-256 of a layer's uncompressed bytes, None if it is not read whole, and of some of its files."""
    if layer.surveyed is not None:
        if layer.surveyed.size is None and layer.surveyed.error is not None:
            raise layer.surveyed.error
        return layer.surveyed.digest, _files(image, files, whole=True)
    packed = layer.content is not layer.blob
    if not whole and (packed or layer.blob.size > SMALL):
        return None, _files(image, files, whole)
    return ranges.digests(layer.content, {path: (entry.offset, entry.size) for path, entry in files.items()})


def _files(image: Image, files: Mapping[str, Entry], whole: bool) -> dict[str, str]:
    """SHA-256 of files, each read by itself; those that are too large to be read, or cannot be, are left out."""
    hashed: dict[str, str] = {}
    for path, entry in files.items():
        with contextlib.suppress(QdcError):
            known = image.known_digest(entry)
            if known is not None or whole or entry.size <= image.small:
                hashed[path] = known or ranges.sha256(image.content(entry))
    return hashed


def cuts(image: Image) -> list[Verdict]:
    """`image.files`: unread while a layer may hold members that are not known."""
    image.files()
    if not image.cuts:
        return []
    evidence = [
        {
            "layer": image.layers[cut.layer].name if image.layers else None,
            "path": f"(layer {cut.layer})" if image.layers else "(folder)",
            "offset": None,
            "length": None,
            "text": cut.why[:400],
            "command": None,
        }
        for cut in image.cuts[:10]
    ]
    return [verdict("image.files", UNREAD, None, evidence)]


def soften(image: Image, rows: list[Verdict]) -> None:
    """Make unread what a layer that is not known to its end could change: what it shows, what layers below it show,

    and what is not there.
    """
    if not image.cuts or not image.layers:
        return
    last = max(cut.layer for cut in image.cuts)
    doubtful = {layer.name for layer in image.layers[: last + 1]}
    why = next(cut.why for cut in image.cuts if cut.layer == last)
    for row in rows:
        shown = [item for item in row["evidence"] if item["layer"] in doubtful or _absent(item)]
        if row["claim"].startswith("image.") or row["verdict"] not in (PROVED, REFUTED):
            continue
        if shown or row["claim"] in _OF_ALL_FILES:
            row["verdict"] = UNREAD
            text = f"layer {last} is not known to its end and could change this: {why}"
            row["evidence"].append({**EMPTY, "text": text[:400]})


def _absent(item: Mapping[str, Any]) -> bool:
    """Whether evidence says that something is not there."""
    return item["layer"] is None and item["length"] is None and str(item["path"] or "").startswith("/")


def unverified(image: Image, rows: Iterable[Verdict]) -> list[str]:
    """What an answer rests on without having checked it, in words."""
    told = [f"layer {cut.layer}: {cut.why[:300]}" if image.layers else cut.why[:300] for cut in image.cuts]
    told += [f"layer {number}: that nothing follows what was read, its gzip trailer says" for number in image.trusted]
    told += [
        f"{row['claim']}: {row['evidence'][0]['text'][:300]}"
        for row in rows
        if row["verdict"] == UNREAD and row["claim"].endswith("diff_id")
    ]
    return told
