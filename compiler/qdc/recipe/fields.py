"""What all parts of a recipe's schema are made of: strict base class, number ranges, names, and sources.

A source says where bytes come from and what pins them. This module does not fetch anything.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetJsonSchemaHandler, StrictInt, StrictStr, Tag
from pydantic_core import CoreSchema

Positive = Annotated[StrictInt, Field(gt=0)]
NonNegative = Annotated[StrictInt, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0)]
Name = Annotated[StrictStr, Field(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$", max_length=48)]
Word = Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=48)]
Revision = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{40}$")]
"""A commit: 40 lower-case hex digits. Branches and tags move."""
Sha256 = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
HubName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Fields(BaseModel):
    """The base of all: extra fields forbidden, strict types, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema with the text under each field as its description: read here, because only the schema needs it."""
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for parent in reversed(cls.__mro__):
            if isinstance(parent, type) and issubclass(parent, Fields) and parent is not Fields:
                for name, text in _texts(parent).items():
                    properties[cls.model_fields[name].alias or name]["description"] = text
        return made


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the string under it in the class's source."""
    import ast
    import inspect

    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


class HubSource(Fields):
    """Files of a model repository on a Hugging Face hub at one commit."""

    hf: HubName
    """Repository, `owner/name`."""
    revision: Revision
    """Commit, 40 hex digits: what `qdc lock` resolves to file digests."""


class PathSource(Fields):
    """A folder of the user's own, pinned by the digest of its content."""

    path: StrictStr
    """Folder with a Hugging Face checkpoint, relative to the recipe file; pinned by its content digest."""


class UrlSource(Fields):
    """One file (a tar archive of a checkpoint) at a URL."""

    url: Annotated[StrictStr, Field(pattern=r"^https?://[^\s@]+$")]
    """Where the file is. Nothing about its bytes follows from it."""
    sha256: Sha256
    """SHA-256 of the file, 64 hex digits."""


class WheelSource(Fields):
    """Files inside a Python wheel of a package index."""

    wheel: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+$")]
    """Package and version, `name==version`."""
    file: StrictStr
    """Folder in the wheel that holds the checkpoint."""
    sha256: Sha256
    """SHA-256 of the wheel, 64 hex digits."""


def tagged(*tags: str) -> Any:
    """A discriminator that names a source by the first of `tags` that is one of its keys; the first if none is."""

    def tag(value: Any) -> str:
        keys = value if isinstance(value, dict) else value.model_fields_set if isinstance(value, BaseModel) else ()
        return next((name for name in tags if name in keys), tags[0])

    return Discriminator(tag)


Checkpoint = Annotated[
    Annotated[HubSource, Tag("hf")]
    | Annotated[PathSource, Tag("path")]
    | Annotated[UrlSource, Tag("url")]
    | Annotated[WheelSource, Tag("wheel")],
    tagged("hf", "path", "url", "wheel"),
]
"""A published checkpoint: a Hugging Face folder with safetensors."""


class Scheme(Fields):
    """How a weight is stored. What an engine's kernels run is for the rules to say."""

    bits: Literal[4, 8]
    """Bits a weight."""
    group_size: Literal[-1, 32, 64, 128]
    """Input columns that share a scale (quantization group); -1 is one group a row."""
    symmetric: bool
    """Codes around zero, without zero points."""


class Muon(Fields):
    """Muon on matrices (update matched to AdamW's RMS), AdamW on all else."""

    kind: Literal["muon"]
    lr: PositiveReal
    """Learning rate at the peak of the schedule."""
    momentum: Ratio
    """Decay of the momentum buffer."""
    betas: Annotated[list[Ratio], Field(min_length=2, max_length=2)]
    """Decay of AdamW's first and second moment, for what Muon does not take."""
    weight_decay: Annotated[float, Field(ge=0.0)]
    """Decoupled weight decay, times the learning rate."""


class AdamW(Fields):
    """AdamW; `adamw-8bit` keeps its moments in 8 bits."""

    kind: Literal["adamw", "adamw-8bit"]
    lr: PositiveReal
    """Learning rate at the peak of the schedule."""
    betas: Annotated[list[Ratio], Field(min_length=2, max_length=2)]
    """Decay of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)]
    """Decoupled weight decay, times the learning rate."""


Optimizer = Annotated[Muon | AdamW, Field(discriminator="kind")]
