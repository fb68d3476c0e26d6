"""What a recipe may say: every field, its type, unit and range.

Unknown fields are errors, numbers are strict, nothing that changes the product has a silent default.
Rules over several fields live in `qdc.rules`; this module does not know them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictStr

from qdc.recipe.data import Data
from qdc.recipe.drafter import Drafter
from qdc.recipe.fields import Fields, Name, Word
from qdc.recipe.serving import Deploy, Evaluate, Image, Serve
from qdc.recipe.target import Target


class Accept(Fields):
    """One rule that may stand, with the reason."""

    rule: StrictStr
    """Id of the rule."""
    because: Annotated[StrictStr, Field(min_length=8)]
    """Why; kept in the manifest of the image."""


class Recipe(Fields):
    """One served image, from nothing to its name."""

    version: Literal[1]
    """Of this schema."""
    name: Name
    """First part of the image's name."""
    target: Target
    """The served model."""
    data: dict[Word, Data]
    """Prompt sets and corpora, by name."""
    drafter: Drafter | None = None
    """The draft model; null serves without speculation."""
    serve: Serve
    """How the engine runs it."""
    deploy: Deploy
    """Where it runs, and what it must answer to."""
    image: Image
    """What it is packed in."""
    evaluate: Evaluate
    """How it is measured."""
    accept: list[Accept] = Field(default=[])
    """Rules that may stand."""
