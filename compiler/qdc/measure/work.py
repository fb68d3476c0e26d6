"""How long the stages that are to run will take: scaled from their last run here, else from operations.

A stage's work is counted in its own unit (tokens, conversations, rows); seconds of an earlier run are scaled by it. A
stage that never ran here takes its operations at the card's rate times a stated part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.measure.figures import Figure, Lacking
from qdc.measure.past import Past
from qdc.measure.sizes import Json, base_model, count, drafter
from qdc.tables.hardware import Card

TRAINING_EFFICIENCY = 0.4
"""Part of a card's BF16 rate that training reaches; assumed."""
GENERATION_EFFICIENCY = 0.1
"""Part of a card's BF16 rate that writing a corpus reaches; assumed."""


@dataclass(frozen=True)
class StageTime:
    """`hours`: None where nothing tells; `build`: that it was timed in; `at_most`: each answer was counted as long as
    it may be; `why`: of None."""

    stage: str
    hours: Figure | None
    build: str = ""
    at_most: bool = False
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        hours = self.hours.as_json() if self.hours else None
        return {"stage": self.stage, "hours": hours, "at_most": self.at_most, "why": self.why or None}


def times(
    recipe: Json, facts: Mapping[str, ModelFacts], card: Card | None, past: Past, stages: Sequence[str]
) -> list[StageTime]:
    """A line for each of `stages` (names of instances that are to run) of which something can be said."""
    made = []
    for stage in stages:
        if stage in past.timed:
            made.append(_scaled(recipe, past, stage))
            continue
        try:
            estimate = _estimate(recipe, facts, card, stage)
        except Lacking as lacking:
            why = lacking.why or f"needs the headers of {', '.join(lacking.needs)}"
            estimate = StageTime(stage, None, why=why)
        if estimate is not None:
            made.append(estimate)
    return made


def _scaled(recipe: Json, past: Past, stage: str) -> StageTime:
    seconds, before, build = past.timed[stage]
    was, now = units(before, stage), units(recipe, stage)
    source = f"{seconds:.1f} s in build {build}"
    if was and now:
        scaled = seconds * now / was
        text = source if was == now else f"{source}, scaled by work {was:g} -> {now:g}"
        return StageTime(stage, Figure(scaled / 3600, "hours", was != now, text), build)
    return StageTime(stage, Figure(seconds / 3600, "hours", False, source), build)


def units(recipe: Json, stage: str) -> float | None:
    """Work of a stage in its own unit, None for one whose time does not follow the recipe's numbers."""
    kind, _, name = stage.partition(":")
    target, data = recipe["target"], recipe["data"]
    if kind == "base" and "scratch" in target["base"]:
        training = target["base"]["scratch"]["training"]
        return float(training["steps"] * training["batch"]["sequences"] * training["batch"]["sequence_length"])
    if kind == "prompts" and name in data:
        return _count(data[name])
    if kind == "pack" and name in data:
        return _rows(data, name)
    if kind == "evaluate":
        part = recipe["evaluate"]["quality" if name == "target" else "acceptance"] or {}
        return _times(part.get("prompts"), part.get("max_tokens") or 1)
    if kind == "corpus" and name in data:
        return _times(_rows(data, name), data[name]["sampling"]["max_tokens"])
    if kind in ("distill", "select") and target["qad"]:
        qad = target["qad"]
        if kind == "select":
            return float(qad["schedule"]["steps"] // qad["checkpoints"]["every"] or 1)
        return float(qad["schedule"]["steps"] * qad["batch"]["effective"] * qad["batch"]["sequence_length"])
    if kind == "draft-train":
        entry = _training(recipe, name)
        return _times(conversations(recipe, entry), entry["anchors"]) if entry else None
    if kind in ("calibrate", "draft-quantize") and recipe["drafter"] and recipe["drafter"]["ptq"]:
        calibration = recipe["drafter"]["ptq"]["calibration"]
        return float(calibration["conversations"] * calibration["anchors"])
    return None


def _times(one: float | None, other: float) -> float | None:
    return None if one is None else one * other


def _count(entry: Json) -> float | None:
    """Rows of a prompt set, None for a file's."""
    given = entry.get("count") or (entry.get("synthetic") or {}).get("count")
    return float(given) if given else None


def _rows(data: Json, name: str) -> float | None:
    """Rows of a corpus: as many as its prompts."""
    prompts = data.get(str((data.get(name) or {}).get("prompts")))
    return _count(prompts) if prompts else None


def _training(recipe: Json, name: str) -> Json | None:
    entries = (recipe["drafter"] or {}).get("training") or []
    return next((entry for entry in entries if entry["name"] == name), None)


def conversations(recipe: Json, entry: Json) -> float | None:
    """Conversations that a drafter training sees, each pass counted."""
    if entry["steps"] is not None:
        return float(entry["steps"] * entry["batch"]["conversations"])
    return _times(_rows(recipe["data"], entry["data"]), entry["epochs"] or 1)


def _estimate(recipe: Json, facts: Mapping[str, ModelFacts], card: Card | None, stage: str) -> StageTime | None:
    """From operations; None for a stage that does no model's work. Raises Lacking."""
    kind, _, name = stage.partition(":")
    if kind not in ("base", "corpus", "distill", "draft-train") or (
        kind == "base" and "scratch" not in recipe["target"]["base"]
    ):
        return None
    operations, efficiency = _operations(recipe, facts, kind, name)
    if operations is None:
        return StageTime(stage, None, why="the number of its rows is not known")
    if card is None or card.bf16_tflops.value is None:
        return StageTime(stage, None, why=f"it never ran here, and {recipe['deploy']['hardware']} has no rate")
    rate = card.bf16_tflops.value * 1e12 * efficiency
    source = f"{operations:.2g} operations at {efficiency:.0%} of {card.bf16_tflops.value:g} TFLOP/s, one {card.name}"
    return StageTime(stage, Figure(operations / rate / 3600, "hours", True, source), at_most=kind == "corpus")


def _operations(recipe: Json, facts: Mapping[str, ModelFacts], kind: str, name: str) -> tuple[float | None, float]:
    """(floating-point operations, part of the card's rate): 2 a weight and token forward, 4 more backward."""
    model = base_model(facts)
    weights = float(model.linear_parameters + count(model.read_head))
    amount = units(recipe, f"{kind}:{name}" if name else kind)
    if kind == "corpus":
        return _times(amount, 2 * weights), GENERATION_EFFICIENCY
    if kind == "base":
        return _times(amount, 6 * weights), TRAINING_EFFICIENCY
    if kind == "distill":
        return _times(amount, (2 + 6) * weights), TRAINING_EFFICIENCY
    entry, proposer = _training(recipe, name), drafter(recipe, facts, model)
    if entry is None or proposer is None:
        return None, TRAINING_EFFICIENCY
    slots = entry["anchors"] * recipe["drafter"]["architecture"]["draft_block_size"]
    head = count(model.read_head) * proposer.head_rows / model.vocabulary
    each = 2.0 * weights * entry["max_length"] + slots * (6.0 * proposer.parameters + 4.0 * head)
    return _times(conversations(recipe, entry), each), TRAINING_EFFICIENCY
