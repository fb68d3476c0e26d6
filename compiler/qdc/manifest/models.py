"""The shapes of content manifest and build record as pydantic models, and the JSON Schemas made from them.

For editors, programs and tests; what makes and reads the documents does not import this module.
Run as a program it writes the schema files: `python -m qdc.manifest.models schema/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from qdc.core import canonical

Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ImageId = Annotated[str, StringConstraints(pattern=r"^(sha256:)?[0-9a-f]{64}$")]


class Closed(BaseModel):
    """No field beyond those named."""

    model_config = ConfigDict(extra="forbid")


class Open(BaseModel):
    """More fields may follow."""

    model_config = ConfigDict(extra="allow")


class Scheme(Open):
    bits: int
    group_size: int | None = Field(description="codes along the input dimension that share a scale")
    symmetric: bool


class Target(Open):
    census: Any = Field(description="which modules are quantized and which are not")
    scheme: Scheme
    proof: Any = Field(description="the checks made when the target was packed, each with its figure")
    trainable: Any = Field(description="which tensors training could change")


class Drafter(Open):
    architecture: dict[str, Any] | None = None
    taps: list[int] | None = Field(default=None, description="target layers, output of layer i, from 0")
    training: Any = Field(default=None, description="the chain of training stages")
    ptq: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = Field(default=None, description="as it really was")


class Engine(Open):
    name: str
    version: str
    platform: str | None = None


class Weights(Closed):
    path: str
    size: int
    sha256: Hex


class Serving(Open):
    engine: Engine
    arguments: list[str]
    environment: dict[str, str] = {}
    weights: list[Weights]
    patches: list[dict[str, Any]] = []
    template: Hex
    tokenizer: Hex
    packages: Hex


class ContentManifest(Closed):
    """What an image holds (`/opt/qdc/manifest.json`)."""

    schema_: Literal[1] = Field(alias="schema")
    name: str
    recipe: dict[str, Any] = Field(description="resolved product fields")
    recipe_digest: Hex
    lock: dict[str, Any]
    artifacts: dict[str, Hex]
    target: Target
    drafter: Drafter | None
    serving: Serving
    files: dict[str, Hex]
    accepted: list[dict[str, Any]]
    licences: list[Any]


class Stage(Open):
    name: str
    ran: bool = Field(description="false: its output was in the store")
    seconds: float
    output: Hex
    key: Hex
    inputs: dict[str, Hex]
    code: Any
    packages: Any
    determinism: Literal["exact", "seeded", "sampled", "imported"]


class Image(Open):
    name: str
    id: ImageId


class Measurement(Open):
    image: ImageId
    metric: str
    value: Any


class BuildRecord(Closed):
    """How an image came to be (`builds/<id>.json`)."""

    schema_: Literal[1] = Field(alias="schema")
    build: str | None = None
    recipe_name: str
    recipe_file: str
    recipe_digest: Hex
    recipe: dict[str, Any]
    origins: dict[str, Any]
    accepted: list[dict[str, Any]]
    stages: list[Stage]
    image: Image
    measurements: list[Measurement]
    tests: list[dict[str, Any]]
    started: str
    seconds: float
    hardware: dict[str, Any]
    python: str


SCHEMAS: dict[str, type[BaseModel]] = {
    "manifest.schema.json": ContentManifest,
    "record.schema.json": BuildRecord,
}


def schema_bytes(name: str) -> bytes:
    """The bytes of one schema file of `SCHEMAS`."""
    return canonical.pretty(SCHEMAS[name].model_json_schema())


if __name__ == "__main__":
    for name in SCHEMAS:
        (Path(sys.argv[1]) / name).write_bytes(schema_bytes(name))
