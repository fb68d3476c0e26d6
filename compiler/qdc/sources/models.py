"""The shape of a lock file as pydantic models, and the JSON Schema made from them.

For editors, programs and tests; what makes and reads locks does not import this module.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from qdc.core import canonical

Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Closed(BaseModel):
    """No field beyond those named."""

    model_config = ConfigDict(extra="forbid")


class LockedFile(Closed):
    size: Annotated[int, Field(ge=0, description="in bytes")]
    sha256: Hex


class LockedSource(Closed):
    identity: dict[str, Any] = Field(description="the recipe's fields that name the source")
    files: dict[str, LockedFile] = Field(description="path below the source's folder -> file")
    facts: dict[str, Any] | None = Field(description="what a checkpoint's headers say: tensors as [file, dtype, shape]")
    licence: str | None = Field(description="the identifier that its README gives, lower case")


class LockFile(Closed):
    version: Literal[1]
    sources: dict[str, LockedSource] = Field(description="recipe path -> source")


def schema_bytes() -> bytes:
    """The bytes of schema/lock.schema.json."""
    return canonical.pretty(LockFile.model_json_schema())
