"""QAD: what it takes a checkpoint by."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.recipe.serving import QualityTasks
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_CHECKPOINTS = ("target", "qad", "checkpoints")


@TOPIC.rule(
    "QAD03",
    "error",
    summary="QAD has no checkpoint but the last, or several and nothing that chooses one.",
    why="Of several checkpoints one is packed, and which one must not be left to the reader.",
    fix="Lower `checkpoints.every` to at most `schedule.steps`, and write `checkpoints.select`.",
    evidence="A public recipe names the chosen step but has no script that chose it: "
    "https://github.com/nota-github/adaptfm-quant-dflash",
    failing="target: {qad: {checkpoints: {every: 7}}}",
    passing="target: {qad: {checkpoints: {every: 6}}}",
)
def a_checkpoint_is_chosen(loaded: Loaded) -> Iterator[Found]:
    qad = loaded.model.target.qad
    if qad is None:
        return
    steps, every = qad.schedule.steps, qad.checkpoints.every
    also = ("target", "qad", "schedule", "steps"), "steps"
    if every > steps:
        message = f"a checkpoint every {every} steps, but QAD has {steps} steps"
        yield Found((*_CHECKPOINTS, "every"), message, f"write `every: {steps}` or less", also=also)
    elif steps // every >= 2 and qad.checkpoints.select is None:
        message = f"{steps // every} checkpoints and nothing that chooses one"
        hint = "add `select: {metric: heldout-kl}`, `{metric: mean-accuracy, tasks: [...]}` or `{step: ...}`"
        yield Found(_CHECKPOINTS, message, hint, key=True, also=also)


@TOPIC.rule(
    "QAD04",
    "warning",
    summary="The checkpoint is chosen by a task that also measures it.",
    why="A checkpoint that is chosen by a task does better on it than on others, so its score says too much.",
    fix="Choose by other tasks than those of `evaluate.quality`.",
    evidence="Follows from what a choice by a score is.",
    failing="target: {qad: {checkpoints: {select: {metric: mean-accuracy, tasks: [sciq, ifeval]}}}}",
    passing="target: {qad: {checkpoints: {select: {metric: mean-accuracy, tasks: [sciq, boolq]}}}}",
)
def the_choice_is_no_measure(loaded: Loaded) -> Iterator[Found]:
    qad, quality = loaded.model.target.qad, loaded.model.evaluate.quality
    chosen = qad.checkpoints.select.tasks if qad and qad.checkpoints.select else None
    measured = quality.tasks if isinstance(quality, QualityTasks) else {}
    for index, task in enumerate(chosen or []):
        if task in measured:
            others = [name for name in chosen or [] if name not in measured]
            message = f"`{task}` chooses the checkpoint and measures it"
            hint = f"write `tasks: [{', '.join(others)}]`" if others else "choose by a task that measures nothing"
            where = ("evaluate", "quality", "tasks", task), "measured here"
            yield Found((*_CHECKPOINTS, "select", "tasks", index), message, hint, also=where)
