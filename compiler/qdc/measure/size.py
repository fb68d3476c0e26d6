"""How large the image will be: weights exactly, from shapes; what is not made of weights from the last build, or
from a stated assumption.

The engine's packages and the base are most of a small image and part of a large one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.formats.safetensors import BITS
from qdc.image.tar import Entry, arranged, tar_size
from qdc.measure.figures import Figure, Term, total
from qdc.measure.past import Past
from qdc.measure.sizes import Json, Tensors, base_model, drafter, served_target, whole

_RANK = {"BOOL": 0, "U8": 1, "I8": 2, "I16": 3, "U16": 4, "F16": 5, "BF16": 6, "I32": 7, "U32": 8, "F32": 9, "F64": 10,
         "I64": 11, "U64": 12}  # fmt: skip
_LIBRARY = {"format": "pt"}

DEBIAN = (160e6, "Debian bookworm with Python 3.11 and its libraries, as built in 2026")
PACKAGES = (1.52e9, "vLLM's CPU build and what it needs, as built in 2026")
OFFICIAL = (28.6e9, 12e9, "the official vLLM image of late 2025: 12 GB compressed, 28.6 GB unpacked")
UNPACKED = (2.4, "a base's compressed layers unpack to 2.4 times their size, as the official vLLM image's do")
CODE = (90e3, "launcher, middleware and patches")
CONFIGURATION = (40e3, "configurations, serve.json and manifest.json")
TOKENIZER_ENTRY = (75, "75 bytes an entry of the tokenizer")
COMPRESSED = (0.4, "packages compress to 0.4 of their size")


@dataclass(frozen=True)
class ImageSize:
    """`layers` first to last; `unknown`: layers whose size nothing here tells; `compressed`: what gzip leaves, where
    the limit is on that; `fits`: None where there is no limit, or where `unknown` decides."""

    layers: tuple[Term, ...]
    unknown: tuple[str, ...]
    compressed: Figure | None
    limit: float | None
    limit_of: str | None

    @property
    def total(self) -> Figure:
        return total(self.layers)

    @property
    def weighed(self) -> Figure:
        return self.compressed or self.total

    @property
    def fits(self) -> bool | None:
        if self.limit is None:
            return None
        over = self.weighed.value > self.limit
        return None if self.unknown and not over else not over

    def as_json(self) -> dict[str, Any]:
        return {
            "layers": [term.as_json() for term in self.layers],
            "unknown": list(self.unknown),
            "total": self.total.as_json(),
            "compressed": self.compressed.as_json() if self.compressed else None,
            "limit": None if self.limit is None else {"bytes": self.limit, "of": self.limit_of, "fits": self.fits},
        }


def file_size(tensors: Tensors) -> int:
    """Bytes of the safetensors file that the safetensors library writes of `tensors`: its header and their bytes."""
    at = 0
    table: dict[str, Any] = {"__metadata__": _LIBRARY}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-_RANK.get(item[1][0], 0), item[0])):
        end = at + math.prod(shape) * BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = len(json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + header + -header % 8 + at


def layer_size(prefix: str, tensors: Tensors) -> int:
    """Bytes of the tar of a model folder's weights."""
    return tar_size(arranged([Entry(f"{prefix}/model.safetensors", "file", 0o644, file_size(tensors))]))


def image_size(
    recipe: Json, facts: Mapping[str, ModelFacts], past: Past, fresh: set[str], base_bytes: int | None = None
) -> ImageSize:
    """Predict it; `fresh`: stages whose output is in the store already; `base_bytes`: of a given base as it is stored.
    Raises Lacking."""
    model = served_target(recipe, facts)
    every = model.text | model.mtp | model.others
    proposer = drafter(recipe, facts, base_model(facts))
    weights = [_exact("target weights", layer_size("opt/models/target", every))]
    if proposer is not None and recipe["drafter"]["architecture"]["kind"] != "mtp" and proposer.tensors:
        weights.append(_exact("drafter weights", layer_size("opt/models/drafter", proposer.tensors)))
    base, packed_base = _base(recipe["image"]["base"], past, fresh, base_bytes)
    rest = [
        *base,
        *_packages(recipe["image"]["base"], past, fresh),
        _known("serving code", past, CODE),
        *weights,
        _known("model files", past, (TOKENIZER_ENTRY[0] * _entries(facts), TOKENIZER_ENTRY[1])),
        _known("configuration", past, CONFIGURATION),
    ]
    limit = recipe["deploy"]["size_limit"]
    compressed = None
    if limit is not None and limit["of"] == "docker-save-gzip":
        compressed = _compressed(rest, packed_base)
    unknown = () if base else ("base",)
    return ImageSize(tuple(rest), unknown, compressed, limit and limit["bytes"], limit and limit["of"])


def _exact(what: str, value: int) -> Term:
    return Term(what, Figure(value, "bytes", False, "names, dtypes and shapes of the tensors"))


def _known(what: str, past: Past, assumed: tuple[float, str], exact: bool = False) -> Term:
    """The layer's size in the last build of the same base and engine, else `assumed`."""
    if what in past.layers:
        source = f"the same layer in build {past.layers_of}"
        return Term(what, Figure(past.layers[what], "bytes", not exact, source))
    return Term(what, Figure(round(assumed[0]), "bytes", True, assumed[1]))


def _base(base: Json, past: Past, fresh: set[str], stored: int | None) -> tuple[list[Term], float | None]:
    """(the term, none where nothing tells its size; its compressed size where that is known apart)."""
    if "scratch" in base:
        return [Term("base", Figure(0, "bytes", False, "no base"))], None
    if "base" in past.layers:
        return [_known("base", past, DEBIAN, "base-image" in fresh)], stored
    if "debian" in base:
        return [_known("base", past, DEBIAN)], None
    if stored is not None and "archive" in base:
        return [Term("base", Figure(stored, "bytes", True, "the layers of an archive, if they are raw"))], None
    if stored is not None:
        source = f"{UNPACKED[1]}; they have {stored} bytes"
        return [Term("base", Figure(round(stored * UNPACKED[0]), "bytes", True, source))], stored
    if "vllm/vllm-openai" in base.get("ref", ""):
        return [Term("base", Figure(round(OFFICIAL[0]), "bytes", True, OFFICIAL[2]))], OFFICIAL[1]
    return [], None


def _packages(base: Json, past: Past, fresh: set[str]) -> list[Term]:
    if "debian" not in base:
        return []
    return [_known("runtime packages", past, PACKAGES, "runtime" in fresh)]


def _entries(facts: Mapping[str, ModelFacts]) -> int:
    found = facts["target.base"]
    return found.tokenizer.size if found.tokenizer else whole(found.text_config, "vocab_size")


def _compressed(terms: list[Term], base: float | None) -> Figure:
    """Quantized weights do not compress; packages and code do."""
    value = 0.0
    for term in terms:
        if term.what == "base" and base is not None:
            value += base
        else:
            value += term.figure.value * (1.0 if term.what.endswith("weights") else COMPRESSED[0])
    return Figure(round(value), "bytes", True, f"{COMPRESSED[1]}, weights not at all")
