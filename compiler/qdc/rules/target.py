"""The target's quantization and QAD, and patterns of ignored modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.registry import Found, Topic

TOPIC = Topic()


def undivided(path: Path_, group: int, widths: Mapping[str, int]) -> Iterator[Found]:
    """A finding if `group` does not divide each of the input widths."""
    bad = [f"{name} = {width}" for name, width in widths.items() if width % group]
    if bad:
        fits = [size for size in (32, 64, 128) if not any(width % size for width in widths.values())]
        hint = f"write `group_size: {fits[-1]}`" if fits else "change the layer's width to a multiple of 32"
        yield Found(path, f"group size {group} does not divide {', '.join(bad)}", hint)


@TOPIC.rule(
    "TGT06",
    "error",
    summary="The target's group size does not divide the input width of a quantized layer.",
    why="A group of input columns shares one scale; a group cut short has none in the packed format.",
    fix="Take a group size that divides every width, or change the width.",
    evidence="Packing a matrix with a width that the group does not divide fails or loads wrongly: "
    "https://github.com/vllm-project/compressed-tensors/issues/447 "
    "https://github.com/sgl-project/sglang/issues/3571",
    failing="target: {base: {scratch: {architecture: {intermediate_size: 400}}}}",
    passing="target: {base: {scratch: {architecture: {intermediate_size: 416}}}}",
    final="nothing can be built from it",
)
def target_groups_divide(loaded: Loaded) -> Iterator[Found]:
    target = loaded.model.target
    if not hasattr(target.base, "scratch"):
        return
    shape = target.base.scratch.architecture
    linear = shape.linear_attention
    widths = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "attention heads x head_dim": shape.attention.heads * shape.attention.head_dim,
        "linear_attention value_heads x head_dim": linear.value_heads * linear.head_dim,
    }
    yield from undivided(
        ("target", "quantization", "scheme", "group_size"), target.quantization.scheme.group_size, widths
    )


@TOPIC.rule(
    "TGT16",
    "error",
    summary="An `re:` entry of an ignore list is not a regular expression.",
    why="It would match no module, so what it should spare would be quantized.",
    fix="Correct the expression; it is matched from the start of a module's name.",
    evidence="Follows from the definition of the field.",
    failing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab$"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab]$"]}}',
    final="nothing can be built from it",
)
def patterns_compile(loaded: Loaded) -> Iterator[Found]:
    places: list[tuple[Path_, list[str]]] = [
        (("target", "quantization", "ignore"), loaded.model.target.quantization.ignore)
    ]
    if loaded.model.drafter and loaded.model.drafter.ptq:
        places.append((("drafter", "ptq", "ignore"), loaded.model.drafter.ptq.ignore))
    for path, patterns in places:
        for index, pattern in enumerate(patterns):
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    where = f" at letter {error.pos + 1} of the pattern" if error.pos is not None else ""
                    message = f"`{pattern}` is not a pattern: {error.msg}{where}"
                    yield Found((*path, index), message, "correct it, or write the module's exact name without `re:`")


@TOPIC.rule(
    "QAD03",
    "error",
    summary="QAD has fewer steps than there are between two checkpoints.",
    why="Only the last step would be kept, so that there is nothing to select from.",
    fix="Lower `checkpoints.every` to at most `schedule.steps`.",
    evidence="Follows by arithmetic.",
    failing="target: {qad: {checkpoints: {every: 7}}}",
    passing="target: {qad: {checkpoints: {every: 6}}}",
)
def a_checkpoint_is_made(loaded: Loaded) -> Iterator[Found]:
    qad = loaded.model.target.qad
    if qad is not None and qad.checkpoints.every > qad.schedule.steps:
        steps = qad.schedule.steps
        message = f"a checkpoint every {qad.checkpoints.every} steps, but QAD has {steps} steps"
        path = ("target", "qad", "checkpoints", "every")
        yield Found(
            path, message, f"write `every: {steps}` or less", also=(("target", "qad", "schedule", "steps"), "steps")
        )
