"""What is known of the checkpoints that a recipe names, without reading a weight.

From the recipe itself (a model it trains), from a folder's headers, or from the lock. Knows no rule.
"""

from __future__ import annotations

from dataclasses import replace

from qdc.core.errors import QdcError
from qdc.formats.checkpoint import ModelFacts, read_folder
from qdc.formats.qwen35 import scratch_facts
from qdc.recipe.load import Loaded, LockState
from qdc.sources.lock import fitting, lockable, read_lock, recipe_path


def attach(loaded: Loaded) -> Loaded:
    """`loaded` with the facts at hand. Raises QdcError where a file of a given folder is no JSON.

    `.lock` is filled where the lock pins every source. Where it does not, that is no fault of the recipe: the facts
    of what it lacks are missing, and whether a build may begin is decided by whoever builds.
    """
    facts: dict[str, ModelFacts] = {}
    base = loaded.data["target"]["base"]
    if "scratch" in base:
        facts["target.base"] = scratch_facts(base["scratch"])
    for place, folder in loaded.folders.items():
        if not place.startswith(("data.", "image.")):
            facts[place] = read_folder(folder)
    wanted = lockable(loaded.model)
    if not wanted:
        return replace(loaded, facts=facts, lock=LockState())
    try:
        entries = fitting(loaded, read_lock(recipe_path(loaded)))
        facts |= {place: ModelFacts.from_json(entry.facts) for place, entry in entries.items() if entry.facts}
    except (QdcError, KeyError, TypeError, ValueError):
        return replace(loaded, facts=facts)
    return replace(loaded, facts=facts, lock=LockState() if len(entries) == len(wanted) else None)
