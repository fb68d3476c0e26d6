"""What is measured exists."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.rules.registry import Found, Topic

TOPIC = Topic()


@TOPIC.rule(
    "EVA01",
    "error",
    summary="Quality is to be measured, but the recipe has no QAD.",
    why="The measurement compares the target before and after QAD.",
    fix="Remove `evaluate.quality`, or add `target.qad`.",
    evidence="Follows from the definition of the measurement.",
    failing="target: {qad: null}",
    passing="target: {qad: null}\nevaluate: {quality: null}",
    final="there is nothing to measure",
)
def quality_has_a_subject(loaded: Loaded) -> Iterator[Found]:
    if loaded.model.evaluate.quality and loaded.model.target.qad is None:
        message = "quality compares PTQ and QAD, but there is no `qad`"
        yield Found(("evaluate", "quality"), message, "remove it, or add `target.qad`", key=True)


@TOPIC.rule(
    "EVA02",
    "error",
    summary="Acceptance is to be measured, but the recipe has no drafter.",
    why="Only a drafter's tokens are accepted or refused.",
    fix="Remove `evaluate.acceptance`, or add `drafter`.",
    evidence="Follows from the definition of the measurement.",
    failing="drafter: null\nserve: {k: null}",
    passing="drafter: null\nserve: {k: null}\nevaluate: {acceptance: null}",
    final="there is nothing to measure",
)
def acceptance_has_a_subject(loaded: Loaded) -> Iterator[Found]:
    if loaded.model.evaluate.acceptance and loaded.model.drafter is None:
        message = "acceptance is a drafter's, but there is none"
        yield Found(("evaluate", "acceptance"), message, "remove it, or add `drafter`", key=True)
