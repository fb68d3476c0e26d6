"""A recipe's `data`: prompt sets, and corpora that a model writes from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, StrictStr, Tag

from qdc.recipe.fields import Fields, HubName, NonNegative, Positive, Revision, Word


class Synthetic(Fields):
    kind: Literal["arithmetic-chat"]
    """Which text: word problems with sums, and lists to be reversed."""
    count: Positive
    """Rows kept after removing duplicates and excluded prompts."""
    seed: NonNegative
    """Of the draw."""


class PromptSet(Fields):
    """Prompts without duplicates."""

    exclude: list[Word] = Field(default=[])
    """Prompt sets whose prompts must not occur here: by normalised text, or by row id where both have one scheme."""
    id: Literal["text", "uuid"] = "text"
    """What names a row: the hash of its normalised text, or the dataset's own uuid."""


class SyntheticPrompts(PromptSet):
    synthetic: Synthetic
    """Text made by rule."""


class DatasetPrompts(PromptSet):
    hf_dataset: HubName
    """Dataset repository, `owner/name`."""
    revision: Revision
    """Commit, 40 hex digits."""
    splits: Annotated[list[StrictStr], Field(min_length=1)]
    """Splits that are read."""
    count: Positive
    """Rows kept after removing duplicates and excluded prompts."""
    seed: NonNegative
    """Of the draw."""


class FilePrompts(PromptSet):
    path: StrictStr
    """JSON Lines file (`messages` a row), relative to the recipe file; pinned by its content digest."""


class Sampling(Fields):
    temperature: Annotated[float, Field(ge=0.0)]
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    """Nucleus: the smallest set of tokens with this probability."""
    top_k: NonNegative
    """0 is no limit."""
    max_tokens: Positive
    """Longest answer, in tokens."""
    seed: NonNegative | None
    """null: not seeded, so that a rerun gives other answers (determinism class `sampled`)."""


class Corpus(Fields):
    """Answers of a model to the prompts of a set."""

    prompts: Word
    """Name of a prompt set."""
    by: Literal["teacher", "target"]
    """Which model writes the answers."""
    sampling: Sampling
    """How tokens are chosen."""
    thinking: bool | None = None
    """Value of the chat template's thinking switch; null leaves the template's default."""
    chat_template: StrictStr | None = None
    """Jinja file that renders prompts and answers, relative to the recipe; null is `serve.chat_template`."""
    truncated: Literal["keep", "drop"]
    """What happens to an answer cut by `max_tokens`."""
    unclosed_think: Literal["trace"] | None = None
    """A cut answer without a closing think tag stays inside its think block; null renders it as the template does."""


def _data_tag(value: object) -> str:
    keys = value if isinstance(value, dict) else value.model_fields_set if isinstance(value, BaseModel) else ()
    if "by" in keys or "prompts" in keys:
        return "corpus"
    return next((name for name in ("hf_dataset", "path") if name in keys), "synthetic")


Data = Annotated[
    Annotated[SyntheticPrompts, Tag("synthetic")]
    | Annotated[DatasetPrompts, Tag("hf_dataset")]
    | Annotated[FilePrompts, Tag("path")]
    | Annotated[Corpus, Tag("corpus")],
    Discriminator(_data_tag),
]
