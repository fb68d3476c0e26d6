"""Digests: the enclosing documents against the blobs, the configuration against the layers, one pass a layer.

What is found here are verdicts of their own (`image.*`), and the SHA-256 of the files that others ask about.
It proves consistency; only an image ID from elsewhere (`expect`) proves identity.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from qdc.audit.evidence import PROVED, RECORDED, REFUTED, UNREAD, Look, reason
from qdc.core.errors import QdcError
from qdc.formats import ranges
from qdc.formats.oci import Image

Verdict = dict[str, Any]
NO_ANCHOR = "no anchor given: this audit proves that the image agrees with itself, not that it is the one you mean"


def verdict(claim: str, word: str, value: Any, evidence: list[dict[str, Any]]) -> Verdict:
    """One row of the report."""
    return {"claim": claim, "verdict": word, "value": value, "evidence": evidence}


def identity(image: Image, look: Look, expect: str | None) -> list[Verdict]:
    """`image.id` against `expect` (64 hex, with or without `sha256:`), and the digits in the tag."""
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


def blobs(image: Image, known: Mapping[Hashable, str]) -> list[Verdict]:
    """Each stored blob against the digest and size by which other documents name it.

    `known`: SHA-256 (hex) of blobs that were read already, by `ranges.place`.
    """
    rows: dict[str, Verdict] = {}
    digests = dict(known)
    for item in image.declared:
        place, size = ranges.place(item.blob), item.blob.size
        if place not in digests:
            digests[place] = ranges.sha256(item.blob)
        found = digests[place]
        same = f"sha256:{found}" == item.digest and item.size in (None, size)
        text = f"{item.where} names {item.digest}" + ("" if item.size is None else f", {item.size} bytes")
        evidence = {
            "layer": item.digest if item.what.startswith("layer") else None,
            "path": f"({item.what})",
            "offset": 0,
            "length": size,
            "text": text if same else f"{text}; the bytes are sha256:{found}, {size} bytes",
            "command": None,
        }
        name = item.what.replace("layer ", "layers[") + ("]" if item.what.startswith("layer") else "")
        row = rows.setdefault(f"image.{name}.digest", verdict(f"image.{name}.digest", PROVED, item.digest, []))
        row["evidence"].append(evidence)
        if not same:
            row["verdict"] = REFUTED
    return list(rows.values())


def layers(
    image: Image, look: Look, wanted: set[str], *, files: bool = True
) -> tuple[list[Verdict], dict[str, str], dict[Hashable, str]]:
    """Each layer's uncompressed bytes against its diff_id; path -> SHA-256 (hex) of the `wanted` files; and

    `ranges.place` -> SHA-256 of what was read whole. `files` is False where the image's files cannot be listed;
    then only layers are judged.
    """
    rows: list[Verdict] = []
    hashed: dict[str, str] = {}
    whole: dict[Hashable, str] = {}
    if len(image.diff_ids) != len(image.layers):
        text = f"the configuration names {len(image.diff_ids)} layers, the image has {len(image.layers)}"
        rows.append(verdict("image.layers.count", REFUTED, len(image.layers), [look.configuration(text)]))
    places = {path: entry for path in sorted(wanted) if files and (entry := image.find(path)) is not None}
    for layer in image.layers:
        parts = {path: (entry.offset, entry.size) for path, entry in places.items() if entry.layer == layer.number}
        claim = f"image.layers[{layer.number}].diff_id"
        try:
            found, digests = ranges.digests(layer.content, parts)
        except QdcError as error:
            rows.append(verdict(claim, UNREAD, layer.diff_id, [look.configuration(reason(error))]))
            continue
        hashed |= digests
        whole[ranges.place(layer.content)] = found
        same = layer.diff_id == f"sha256:{found}"
        text = "the layer's bytes have the digest in the configuration"
        evidence = {
            "layer": layer.name,
            "path": f"(layer {layer.number})",
            "offset": 0,
            "length": layer.content.size,
            "text": text if same else f"the layer's bytes are sha256:{found}",
            "command": f"{look.command(layer.number)} | sha256sum",
        }
        rows.append(verdict(claim, PROVED if same else REFUTED, layer.diff_id, [evidence]))
    return rows, hashed, whole
