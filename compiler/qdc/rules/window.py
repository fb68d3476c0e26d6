"""The drafter's sliding window."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.rules.registry import Found, Topic

TOPIC = Topic()


@TOPIC.rule(
    "SWA03",
    "error",
    summary="The window is smaller than the draft block.",
    why="A query would not see the whole draft block that it is a part of.",
    fix="Write a window of at least the draft block, or no `swa` for full attention.",
    evidence="An engine's check of the same condition: https://github.com/sgl-project/sglang/pull/23553",
    failing="drafter: {swa: {window: 7}}",
    passing="drafter: {swa: {window: 8}}",
    final="the drafter would not see its own draft block",
)
def window_holds_the_block(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter and drafter.swa and drafter.block and drafter.swa.window < drafter.block.draft_block_size:
        size = drafter.block.draft_block_size
        message = f"window {drafter.swa.window} hides part of the draft block ({size})"
        block = ("drafter", "architecture", "draft_block_size")
        hint = f"write at least `window: {size}`, or `swa: null` for full attention"
        yield Found(("drafter", "swa", "window"), message, hint, also=(block, "the draft block"))
