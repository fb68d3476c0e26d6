"""Claims: what the manifest, the labels, the tag, a recipe and `--require` say, under one set of ids.

An id is a recipe path (`serve.k`, `drafter.swa.window`). Words are only collected here; bytes judge them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from qdc.audit.evidence import Claim, Look
from qdc.core.errors import QdcError
from qdc.manifest.content import LOCAL_SOURCES
from qdc.manifest.diff import PRODUCT, drafter_kind
from qdc.manifest.flat import flatten

MANIFEST = "opt/qdc/manifest.json"
_SCHEME_LABEL = re.compile(r"w(\d+) group (\d+) (a?symmetric)")
_TAG_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"w(\d+)g(\d+)", ("target.quantization.scheme.bits", "target.quantization.scheme.group_size")),
    (r"(dflash|ngram|suffix|mtp|eagle3)(\d*)(?:k(\d+))?",
     ("drafter.kind", "drafter.architecture.draft_block_size", "serve.k")),
    (r"(gptq|rtn|awq)(\d+)", ("drafter.ptq.method", "drafter.ptq.scheme.group_size")),
    (r"swa(\d+)", ("drafter.swa.window",)),
)  # fmt: skip


SECTIONS = {
    "target.quantization": "target.quantization.scheme.bits",
    "drafter.ptq": "drafter.ptq.scheme.bits",
    "drafter.swa": "drafter.swa.window",
}
"""Section -> the leaf that shows whether there is any."""


def leaves(told: Iterable[Claim], known: Container[str]) -> Iterator[Claim]:
    """Claims of single values: a section that is not `known` as one value is taken apart."""
    for claim in told:
        if claim.id in known or not isinstance(claim.value, Mapping) or not claim.value:
            yield claim
            continue
        for path, value in flatten(claim.value, claim.id).items():
            if not path.endswith("[]"):
                yield Claim(path, value, claim.source, claim.evidence)


def product_claims(product: Mapping[str, Any], source: str, evidence: tuple[dict[str, Any], ...] = ()) -> list[Claim]:
    """One claim for each leaf of the product fields; `null` sections claim that the thing is absent."""
    kept = {key: product[key] for key in PRODUCT if key in product}
    if isinstance(target := kept.get("target"), Mapping):
        kept["target"] = {key: value for key, value in target.items() if key != "base"}
    claims = []
    drafter = kept.get("drafter")
    if "drafter" in kept:
        claims.append(Claim("drafter.kind", drafter_kind(drafter), source, evidence))
        if isinstance(drafter, Mapping) and drafter.get("swa", 0) is None:
            claims.append(Claim("drafter.swa.window", None, source, evidence))
        if not isinstance(drafter, Mapping):
            kept.pop("drafter")
    for path, value in flatten(kept).items():
        if path in ("drafter.kind", "drafter.architecture.kind", "drafter.swa") or path.endswith("[]"):
            continue
        if value is None and path.rpartition(".")[2] not in ("ptq", "qad"):
            continue  # an absent field and a null one are the same recipe
        named = path == "serve.chat_template" and not str(value).startswith("sha256:")
        if named or (value is True and path.rpartition(".")[2] in LOCAL_SOURCES):
            continue  # a file's name on the builder's disk says nothing about bytes
        claims.append(Claim(path, value, source, evidence))
    return claims


def label_claims(look: Look) -> Iterator[Claim]:
    """Claims in the labels `io.qdc.*` (digests of documents are judged elsewhere)."""
    labels = look.image.labels
    for name, path in (("io.qdc.k", "serve.k"), ("io.qdc.window", "drafter.swa.window")):
        if name in labels:
            yield _worded(look, path, number(labels[name]), f"label {name}", labels[name])
    engine = labels.get("io.qdc.engine", "")
    if engine.startswith("vllm "):
        yield _worded(look, "serve.engine.vllm", engine[5:], "label io.qdc.engine", engine)
    for name, path in (
        ("io.qdc.target.scheme", "target.quantization.scheme"),
        ("io.qdc.drafter.scheme", "drafter.ptq.scheme"),
    ):
        match = _SCHEME_LABEL.fullmatch(labels.get(name, ""))
        if match:
            values = (int(match[1]), int(match[2]), match[3] == "symmetric")
            for field, value in zip(("bits", "group_size", "symmetric"), values, strict=True):
                yield _worded(look, f"{path}.{field}", value, f"label {name}", match[0])


def tag_claims(look: Look) -> Iterator[Claim]:
    """Claims that a tag spells (`w4g32-dflash16k15-gptq128-swa1024`)."""
    for tag in look.image.tags:
        for part in re.split(r"[-_.]", tag.rpartition(":")[2]):
            for pattern, ids in _TAG_PARTS:
                match = re.fullmatch(pattern, part)
                if match:
                    for id, text in zip(ids, match.groups(), strict=True):
                        if text:
                            yield _worded(look, id, number(text), "tag", tag)


def requirement(text: str) -> Claim:
    """`path=value`; the value is JSON where it is JSON, else text. Raises QdcError `audit.require`."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise QdcError("audit.require", f"{text!r} is not path=value", hint="for example serve.k=15")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    path = {"drafter.architecture.kind": "drafter.kind"}.get(path.strip(), path.strip())
    if path == "drafter" and parsed is None:
        path, parsed = "drafter.kind", "none"
    return Claim(path, parsed, "require")


def number(text: str) -> Any:
    """`text` as a whole number if it is one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def by_id(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """Claims grouped by id, sorted by id."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.id, []).append(claim)
    return dict(sorted(groups.items()))


def _worded(look: Look, id: str, value: Any, source: str, text: str) -> Claim:
    return Claim(id, value, source, (look.configuration(f"{source}: {text}"),))
