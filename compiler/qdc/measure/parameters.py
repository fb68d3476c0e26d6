"""How many parameters are served, and how many the original has: a contract may bound the sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.measure.figures import Figure
from qdc.measure.sizes import Json, base_model, count, drafter


@dataclass(frozen=True)
class Parameters:
    """`target`: the text model; `original`: every tensor of the base's checkpoint; `within`: target and drafter
    together are no more than the original."""

    target: Figure
    drafter: Figure | None
    original: Figure

    @property
    def served(self) -> Figure:
        value = self.target.value + (self.drafter.value if self.drafter else 0)
        return Figure(value, "parameters", False, "target and drafter")

    @property
    def within(self) -> bool:
        return self.served.value <= self.original.value

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target.as_json(),
            "drafter": self.drafter.as_json() if self.drafter else None,
            "served": self.served.as_json(),
            "original": self.original.as_json(),
            "within_original": self.within,
        }


def parameters(recipe: Json, facts: Mapping[str, ModelFacts]) -> Parameters:
    """Counts from headers and from the drafter's sizes. Raises Lacking."""
    model = base_model(facts)
    found = drafter(recipe, facts, model)
    every = count(model.text) + count(model.mtp) + count(model.others)
    source = "shapes of the base's tensors"
    return Parameters(
        Figure(count(model.text), "parameters", False, source),
        Figure(found.parameters, "parameters", False, "shapes of the drafter's tensors") if found else None,
        Figure(every, "parameters", False, source),
    )
