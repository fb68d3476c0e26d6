"""What is measured exists."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.recipe.serving import QualityEvaluation
from qdc.rules.registry import Found, Topic

TOPIC = Topic()


@TOPIC.rule(
    "EVA01",
    "error",
    summary="Quality is to be measured on a prompt set, but the recipe has no QAD.",
    why="That measurement compares the target before and after QAD. By tasks any target can be measured.",
    fix="Remove `evaluate.quality`, add `target.qad`, or measure by `tasks`.",
    evidence="Follows from the definition of the measurement.",
    failing="target: {qad: null}",
    passing="target: {qad: null}\nevaluate: {quality: null}",
    final="there is nothing to measure",
)
def quality_has_a_subject(loaded: Loaded) -> Iterator[Found]:
    if isinstance(loaded.model.evaluate.quality, QualityEvaluation) and loaded.model.target.qad is None:
        message = "quality on a prompt set compares PTQ and QAD, but there is no `qad`"
        yield Found(("evaluate", "quality"), message, "remove it, add `target.qad`, or measure by `tasks`", key=True)


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
