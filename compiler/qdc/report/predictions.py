"""The shape of a plan's predictions in `--json`, as pydantic models. For schemas and tests alone."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Closed(BaseModel):
    """No field beyond those named."""

    model_config = ConfigDict(extra="forbid")


class Figure(Closed):
    """One predicted number."""

    value: int | float
    unit: Literal["parameters", "bytes", "s", "hours", "tokens", "x", "GB/s", "TFLOP/s"]
    assumed: bool = Field(description="a part of it was neither measured nor computed from what is known")
    source: str = Field(description="which data it is from")


class Term(Figure):
    what: str


class Parameters(Closed):
    target: Figure = Field(description="text model")
    drafter: Figure | None
    served: Figure
    original: Figure = Field(description="every tensor of the base's checkpoint")
    within_original: bool


class Limit(Closed):
    bytes: float
    of: Literal["docker-save", "docker-save-gzip"]
    fits: bool | None = Field(description="null: a layer of unknown size decides")


class Image(Closed):
    layers: list[Term] = Field(description="first to last")
    unknown: list[str] = Field(description="layers that are not counted")
    total: Figure
    compressed: Figure | None = Field(description="where the limit is on the compressed archive")
    limit: Limit | None


class Serving(Closed):
    fixed: list[Term] = Field(description="weights and graphs")
    request: list[Term] = Field(description="of one request of full length")
    requests: int
    one: Figure
    all: Figure
    room: Figure | None = Field(description="what the engine may use of the card; null: not known")
    fits_one: bool | None
    fits_all: bool | None
    runs: int | None = Field(description="requests of full length that fit at a time")


class Training(Closed):
    stage: str
    terms: list[Term] = Field(description="activations are not among them")
    total: Figure
    room: float | None = Field(description="bytes free on the training device, a user setting")
    fits: bool | None


class Usual(Closed):
    bandwidth: float
    bf16_rate: float
    assumed: Literal[True]


class Largest(Closed):
    what: str
    share: float = Field(description="part of the step")


class Regime(Closed):
    regime: str = Field(description="prompt / answer tokens")
    prefill: Figure
    step: Figure
    terms: dict[str, Figure] = Field(description="what a step is made of")
    largest: Largest
    latency: Figure = Field(description="bound")
    usual_latency: Figure = Field(description="the bound at the usual parts of the card's rates")
    teacher: Figure = Field(description="bound of the BF16 base")
    baseline: Figure = Field(description="what the speed-up is against")
    speedup: Figure


class Roofline(Closed):
    card: str
    bandwidth: Figure
    bf16_rate: Figure
    tokens_a_step: Figure
    usual: Usual = Field(description="parts of the card's rates that good kernels reach")
    regimes: list[Regime]
    speedup: Figure = Field(description="mean of ratios")
    usual_speedup: Figure


class StageTime(Closed):
    stage: str
    hours: Figure | None = Field(description="of one device; null: nothing tells")
    at_most: bool = Field(description="each answer was counted as long as it may be")
    why: str | None


class Absent(Closed):
    what: str
    needs: list[str] = Field(description="recipe paths of checkpoints whose headers are not at hand")
    why: str | None


class Missing(Closed):
    path: str
    what: str = Field(description="what no stage makes yet")


class Predictions(Closed):
    """What a recipe will cost and give. A part that cannot be predicted is null and listed under `absent`."""

    parameters: Parameters | None
    image: Image | None
    serving: Serving | None
    training: list[Training]
    roofline: Roofline | None
    times: list[StageTime]
    absent: list[Absent]
    missing: list[Missing]
