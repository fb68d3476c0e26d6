"""Parts of a loaded recipe that several rules look at, each None where the recipe has no such part."""

from __future__ import annotations

from qdc.recipe.drafter import BlockDrafter
from qdc.recipe.load import Loaded


def drafted_block(loaded: Loaded) -> BlockDrafter | None:
    """The recipe's drafter where it drafts blocks from taps."""
    return loaded.model.drafter.block if loaded.model.drafter else None
