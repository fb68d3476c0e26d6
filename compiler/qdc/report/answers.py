"""The shape of every verb's `--json` answer, as pydantic models, and the JSON Schemas made from them.

For programs that read answers, and for tests; the verbs themselves do not import this module.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from qdc.report.predictions import Predictions

Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ImageId = Annotated[str, StringConstraints(pattern=r"^(sha256:)?[0-9a-f]{64}$")]
State = Literal["fresh", "stale", "waiting"]


class Closed(BaseModel):
    """No field beyond those named."""

    model_config = ConfigDict(extra="forbid")


class Answer(Closed):
    schema_: Literal[1] = Field(alias="schema", description="version of all answers' shapes")


class Diagnostic(Closed):
    rule: str = Field(description="id; `qdc explain ID` prints its page")
    severity: Literal["error", "warning", "note", "accepted"]
    file: str | None
    line: int | None = Field(description="from 1")
    column: int | None = Field(description="from 1, of the token it speaks of")
    message: str
    hint: str | None = Field(description="what to type")


class Deferred(Closed):
    rule: str
    needs: str = Field(description="the facts that are not at hand")


class Validate(Answer):
    ok: bool
    diagnostics: list[Diagnostic]
    deferred: list[Deferred]


class Reason(Closed):
    kind: str
    what: str
    was: Any
    now: Any
    path: str | None = Field(default=None, description="the recipe's value that a parameter comes from")
    where: str | None = Field(default=None, description="file and line that gave it")


class PlannedStage(Closed):
    name: str
    state: State
    reasons: list[Reason]
    key: Hex | None = Field(description="null while waiting: an input is not known yet")


class PlannedImage(Closed):
    name: str | None = None
    id: ImageId | None = None


class Plan(Answer):
    recipe: str
    stages: list[PlannedStage]
    image: PlannedImage
    predictions: Predictions


class BuiltStage(Closed):
    name: str
    ran: bool = Field(description="false: its output was in the store, or was fetched")
    seconds: float
    output: Hex
    fetched: bool = Field(description="its output came from the remote")


class BuiltImage(Closed):
    name: str
    id: ImageId


class Build(Answer):
    build: str | None = Field(description="id; null with --until")
    stages: list[BuiltStage]
    image: BuiltImage | None


class ErrorBody(Closed):
    id: str
    message: str
    file: str | None
    line: int | None
    column: int | None
    hint: str | None = Field(description="what to type")


class SweepVariant(Closed):
    number: int = Field(description="from 1; the last path's values change fastest")
    set: dict[str, str] = Field(description="recipe path -> value, as given, of every path that has several")
    error: ErrorBody | None = Field(description="why it has no build; the others went on")
    build: str | None = Field(description="id")
    image: BuiltImage | None
    bytes: int | None = Field(description="of all layers of the image")
    stages: list[BuiltStage] = Field(description="of those that variants share, the first says that they ran")
    predictions: Predictions | None = Field(description="made before anything ran; null: the variant is invalid")
    measurements: list[dict[str, Any]] = Field(description="rows as in the build record")


class Sweep(Answer):
    recipe: str
    varied: list[str] = Field(description="recipe paths that have several values")
    stages: int = Field(description="different ones of all variants")
    ran: int
    variants: list[SweepVariant]


class Why(Answer):
    stage: PlannedStage | None = Field(description="null for a past build: see `log`")
    inputs: dict[str, str]
    record: dict[str, Any] | None
    log: dict[str, Any] | None = Field(description="the stage in the log of a past build")
    lines: list[str] = Field(description="the answer in words, fewer than twelve lines")


class Change(Closed):
    subject: str
    path: str
    from_: Any = Field(alias="from")
    to: Any
    text: str = Field(description="in domain words")


class Diff(Answer):
    same: bool = Field(description="nothing differs, as far as could be read")
    changes: list[Change] = Field(description="domain words first; `from` equals `to` where a model is unchanged")
    unread: dict[str, str] = Field(description="recipe path -> why it could not be compared")


class Evidence(Closed):
    layer: str | None
    path: str | None
    offset: int | None
    length: int | None
    text: str
    command: str | None = Field(description="shows the same bytes in a shell")


class Verdict(Closed):
    claim: str = Field(description="recipe path, or a name of an image's own part")
    verdict: Literal["proved", "refuted", "recorded", "unread"]
    value: Any
    evidence: list[Evidence]


class Transfer(Closed):
    bytes: int = Field(description="fetched over a network; 0 where the image is at hand")
    requests: int
    unverified: list[str] = Field(description="what the answer rests on without having checked it")


class Audit(Answer):
    """Of several images, one such object a line, in the order of the command; see `Error` for one that could not be
    read."""

    reference: str = Field(description="the image as the command line named it")
    image: ImageId | None = Field(description="null for a model folder")
    where: str
    tags: list[str]
    anchored: bool = Field(description="--expect or a build record named the image ID")
    verdicts: list[Verdict]
    counts: dict[str, int]
    transfer: Transfer


class Check(Closed):
    id: str
    outcome: Literal["pass", "fail", "undecided", "not-run"]
    figure: Any
    why: str | None


class Gate(Answer):
    image: ImageId | None = Field(description="null where it is no image")
    artifact: str = Field(description="what was gated, as it was named")
    contract: str
    checks: list[Check]


class Pushed(Closed):
    reference: str = Field(description="name and tag that point at the image")
    digest: ImageId = Field(description="of the image's manifest in the registry")
    blobs: int = Field(description="that the registry lacked, and that were sent")
    sent: int = Field(description="bytes of all that was sent")


class Compressed(Closed):
    bytes: int = Field(description="of the file that was written")
    predicted: int = Field(description="before it was written")
    margin: int = Field(description="two standard errors of the prediction")
    method: str = Field(description="how it was predicted")


class Weighed(Closed):
    bytes: int
    of: Literal["docker-save", "docker-save-gzip"]
    limit: float
    fits: bool


class Export(Answer):
    image: BuiltImage
    destination: str
    compressed: Compressed | None = Field(description="null unless the archive is compressed")
    weighed: Weighed | None = Field(description="against the size limit, where an archive of that form was written")
    pushed: Pushed | None = Field(description="null unless the destination is a registry")


class Keep(Answer):
    kept: list[str] = Field(description="stages whose earlier output stands under the present key, in order")


class Import(Answer):
    stage: str
    key: Hex
    output: Hex


class Holder(Closed):
    key: Hex
    n: int = Field(description="number of the record under the key")
    instance: str | None = Field(description="stage instance")


class Damage(Closed):
    kind: Literal["object", "tree", "record", "build"]
    name: str = Field(description="digest, `key/n`, or build id")
    problem: str
    removed: bool = Field(description="false: it stays, and says what to make anew; or it could not be removed")
    trees: dict[str, list[str]] = Field(description="tree -> paths in it that hold the object")
    stages: list[Holder] = Field(description="records whose output it is in")
    builds: list[str] = Field(description="builds that name it")


class Verified(Closed):
    found: list[Damage]


class ForgottenBuild(Closed):
    build: str
    recipe_file: str


class Swept(Closed):
    removed: bool = Field(description="false: this is what `--yes` would do")
    builds: list[ForgottenBuild]
    records: int
    trees: int
    objects: int
    rest: int = Field(description="logs, partial works, memos and unfinished files")
    bytes: int = Field(description="of all that goes")
    stays: int = Field(description="bytes of objects and partial works that stay")
    unreached: int = Field(description="bytes over --max-size that no policy lets go")


class Transferred(Closed):
    remote: str = Field(description="its address, without credentials")
    objects: int
    there: int = Field(description="objects that needed no moving")
    bytes: int
    trees: int
    records: int
    builds: list[str]
    refused: list[str] = Field(description="what the remote has and is not what it is called")
    stages: dict[str, Hex] = Field(description="pull RECIPE: stages that came, and their outputs")


class Store(Answer):
    verify: Verified | None = None
    gc: Swept | None = None
    push: Transferred | None = None
    pull: Transferred | None = None


class Explain(Answer):
    rule: dict[str, Any] | None = None
    rules: list[dict[str, Any]] | None = None


class ListedBuild(Closed):
    build: str
    recipe: str
    image: str
    id: ImageId
    started: str


class ListedLog(Closed):
    log: str
    recipe: str
    result: Literal["done", "failed", "interrupted"]
    build: str | None = Field(description="the build that it made")
    ran: list[str]


class Origin(Closed):
    path: str
    value: Any
    origin: str = Field(description="`file:line`, `--set` or `default`")


class Show(Answer):
    builds: list[ListedBuild] | None = None
    recipe: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    origins: list[Origin] | None = None
    logs: list[ListedLog] | None = None


class LockedSource(Closed):
    path: str = Field(description="recipe path")
    tree: Hex = Field(description="digest of the folder of its files")
    files: int
    bytes: int
    fetched: int = Field(description="bytes that came over the network")
    missing: list[str] = Field(description="files that the store lacks")
    licence: str | None


class Lock(Answer):
    lock: str = Field(description="the lock file")
    ok: bool = Field(description="false: `--check` found faults")
    written: bool = Field(description="whether the lock file has changed")
    sources: list[LockedSource]
    faults: list[str]


class Error(Answer):
    error: ErrorBody
    reference: str | None = Field(default=None, description="the one of several images that it is about")


ANSWERS: dict[str, type[Answer]] = {
    "audit": Audit,
    "build": Build,
    "diff": Diff,
    "error": Error,
    "explain": Explain,
    "export": Export,
    "gate": Gate,
    "lock": Lock,
    "import": Import,
    "keep": Keep,
    "plan": Plan,
    "show": Show,
    "store": Store,
    "sweep": Sweep,
    "validate": Validate,
    "why": Why,
}


def checked(verb: str, answer: Any) -> Answer:
    """`answer` (a JSON value) as its model. Raises pydantic's ValidationError where its shape is another."""
    return ANSWERS[verb].model_validate(answer)


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> JSON Schema of each verb's answer, and of the error that a failing one gives."""
    return {f"answer-{verb}.schema.json": model.model_json_schema() for verb, model in ANSWERS.items()}
