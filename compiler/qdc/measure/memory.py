"""How much memory training and serving take, part by part.

Serving is a sum that an engine must hold: weights, recurrent states, KV cache, graphs. Training counts what an
implementation cannot do without and leaves out activations: a lower estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.measure.figures import Figure, Term, total
from qdc.measure.roofline import kv_width, state_bytes
from qdc.measure.sizes import Json, base_model, count, drafter, served_target, size, whole
from qdc.tables.hardware import Card

GRAPHS = (0.4e9, "CUDA graphs and the engine's work space")
OPTIMIZER_BYTES = {"adamw": 8, "adamw-8bit": 2, "muon": 4}
"""Bytes of optimizer state a trained parameter: two FP32 moments, two 8-bit ones, one FP32 momentum."""
LOGITS_COPIES = 4
"""FP32 tensors of the vocabulary's width that a KL holds: both models' logits, and two for their gradient."""


@dataclass(frozen=True)
class Serving:
    """`fixed`: weights and graphs; `request`: state and KV cache of one request of full length; `room`: bytes that
    the engine may use, None where the card's memory or the engine's part of it is not known; `per_token`: bytes."""

    fixed: tuple[Term, ...]
    request: tuple[Term, ...]
    requests: int
    room: Figure | None
    per_token: int

    @property
    def one(self) -> float:
        return total(self.fixed).value + total(self.request).value

    @property
    def all(self) -> float:
        return total(self.fixed).value + self.requests * total(self.request).value

    @property
    def fits_one(self) -> bool | None:
        return None if self.room is None else self.one <= self.room.value

    @property
    def fits_all(self) -> bool | None:
        return None if self.room is None else self.all <= self.room.value

    @property
    def runs(self) -> int | None:
        """Requests of full length that fit at a time."""
        if self.room is None:
            return None
        left = self.room.value - total(self.fixed).value
        return max(0, min(self.requests, int(left // max(1, total(self.request).value))))

    @property
    def longest(self) -> int | None:
        """Tokens of the longest single request that fits."""
        if self.room is None:
            return None
        state = next((term.figure.value for term in self.request if term.what == "recurrent states"), 0)
        left = self.room.value - total(self.fixed).value - state
        return max(0, int(left // max(1, self.per_token)))

    def as_json(self) -> dict[str, Any]:
        guessed = any(term.figure.assumed for term in (*self.fixed, *self.request))
        return {
            "fixed": [term.as_json() for term in self.fixed],
            "request": [term.as_json() for term in self.request],
            "requests": self.requests,
            "one": Figure(self.one, "bytes", guessed, "fixed and one request of full length").as_json(),
            "all": Figure(self.all, "bytes", guessed, "fixed and all requests of full length").as_json(),
            "room": self.room.as_json() if self.room else None,
            "fits_one": self.fits_one,
            "fits_all": self.fits_all,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class Training:
    """Memory of one training stage on one device; `room`: bytes free there (a user setting), or None."""

    stage: str
    terms: tuple[Term, ...]
    room: float | None

    @property
    def total(self) -> Figure:
        return total(self.terms)

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.total.value <= self.room

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "terms": [term.as_json() for term in self.terms],
            "total": self.total.as_json(),
            "room": self.room,
            "fits": self.fits,
        }


def serving(recipe: Json, facts: Mapping[str, ModelFacts], card: Card | None) -> Serving:
    """What the engine holds. Raises Lacking."""
    serve, base = recipe["serve"], base_model(facts)
    stored, proposer = served_target(recipe, facts), drafter(recipe, facts, base)
    dtype, tokens = serve["dtype"], serve["max_model_len"]
    copies = ((serve["k"] or 0) if proposer else 0) + 2
    shapes = "shapes of the tensors"
    fixed = [Term("target weights", Figure(size(stored.text | stored.others, dtype), "bytes", False, shapes))]
    if proposer is not None and proposer.tensors:
        fixed.append(Term("drafter weights", Figure(size(proposer.tensors, dtype), "bytes", False, shapes)))
    if serve["engine"]["platform"] == "cuda" and not serve["eager"]:
        fixed.append(Term("graphs", Figure(GRAPHS[0], "bytes", True, GRAPHS[1])))
    width = kv_width(recipe)
    token = base.kv_elements * width + (proposer.kv_elements * width if proposer else 0)
    state = copies * state_bytes(recipe, base)
    request = [Term("KV cache", Figure(token * tokens, "bytes", False, f"{tokens} tokens of {token} bytes"))]
    if state:
        request.append(Term("recurrent states", Figure(state, "bytes", False, f"{copies} states")))
    return Serving(tuple(fixed), tuple(request), serve["max_num_seqs"], _room(serve, card), token)


def _room(serve: Json, card: Card | None) -> Figure | None:
    part = serve["gpu_memory_utilization"]
    if card is None or card.memory_gb.value is None or part is None:
        return None
    return Figure(part * card.memory_gb.value * 1e9, "bytes", card.memory_gb.assumed, card.memory_gb.source)


def qad(recipe: Json, facts: Mapping[str, ModelFacts], room: float | None) -> Training | None:
    """Memory of `distill`, None without it. Raises Lacking."""
    section = recipe["target"]["qad"]
    if section is None:
        return None
    base = base_model(facts)
    trained = base.linear_parameters if section["trainable"] == "quantized-weights" else count(base.text)
    tokens = section["kl_chunk_tokens"] or section["batch"]["sequence_length"]
    terms = [
        Term("teacher", Figure(2 * count(base.text), "bytes", False, "BF16")),
        *_trained(trained, section["optimizer"]["kind"]),
        Term("logits", _logits(LOGITS_COPIES, tokens, base.config)),
    ]
    return Training("distill", tuple(terms), room)


def fitting_chunk(recipe: Json, facts: Mapping[str, ModelFacts], room: float) -> int | None:
    """The largest power of two of `kl_chunk_tokens` with which QAD fits in `room` bytes, None if none does."""
    section = recipe["target"]["qad"]
    chunk = 1 << (int(section["batch"]["sequence_length"]).bit_length() - 1)
    while chunk:
        changed = {**recipe, "target": {**recipe["target"], "qad": {**section, "kl_chunk_tokens": chunk}}}
        found = qad(changed, facts, room)
        if found is not None and found.fits:
            return chunk
        chunk //= 2
    return None


def drafting(recipe: Json, facts: Mapping[str, ModelFacts], room: float | None) -> list[Training]:
    """Memory of each drafter training, one conversation at a time. Raises Lacking."""
    section = recipe["drafter"]
    if section is None or not section["training"]:
        return []
    base = base_model(facts)
    proposer = drafter(recipe, facts, base)
    made = []
    for entry in section["training"]:
        slots = entry["anchors"] * section["architecture"]["draft_block_size"]
        terms = [
            Term("target", Figure(2 * count(base.text), "bytes", True, "BF16, dense, held beside the drafter")),
            *_trained(proposer.parameters if proposer else 0, entry["optimizer"]["kind"]),
            Term("logits", _logits(2, slots, base.config)),
        ]
        made.append(Training(f"draft-train:{entry['name']}", tuple(terms), room))
    return made


def _trained(parameters: int, kind: str) -> list[Term]:
    state = OPTIMIZER_BYTES[kind]
    return [
        Term("trained weights", Figure(4 * parameters, "bytes", True, "FP32 latents")),
        Term("gradients", Figure(4 * parameters, "bytes", True, "FP32")),
        Term("optimizer", Figure(state * parameters, "bytes", True, f"{kind}: {state} bytes a parameter")),
    ]


def _logits(copies: int, tokens: int, config: Mapping[str, Any]) -> Figure:
    vocabulary = whole(config, "vocab_size")
    return Figure(copies * tokens * vocabulary * 4, "bytes", True, f"{copies} x {tokens} tokens x {vocabulary} x 4")
