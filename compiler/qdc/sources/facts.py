"""What is known of the checkpoints that a recipe names, without reading a weight.

From the recipe itself (a model it trains), from a folder's headers, or from the lock. Knows no rule.
"""

from __future__ import annotations

from dataclasses import replace

from qdc.formats.checkpoint import ModelFacts, read_folder
from qdc.formats.qwen35 import scratch_facts
from qdc.recipe.load import Loaded


def attach(loaded: Loaded) -> Loaded:
    """`loaded` with the facts at hand. Raises QdcError where a file of a given folder is no JSON."""
    facts: dict[str, ModelFacts] = {}
    base = loaded.data["target"]["base"]
    if "scratch" in base:
        facts["target.base"] = scratch_facts(base["scratch"])
    for place, folder in loaded.folders.items():
        if not place.startswith("data."):
            facts[place] = read_folder(folder)
    return replace(loaded, facts=facts)
