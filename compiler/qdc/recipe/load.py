"""A recipe file to a checked `Loaded` recipe, with all faults of its text and shape in one run.

Rules that compare fields are in `qdc.rules`; this module checks the shape and the files that a recipe names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.core.spelling import nearest, suggestion
from qdc.formats.checkpoint import ModelFacts
from qdc.recipe.data import Corpus, FilePrompts
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid
from qdc.recipe.extends import read_extended
from qdc.recipe.fields import HubSource, PathSource, UrlSource, WheelSource
from qdc.recipe.model import Recipe
from qdc.recipe.reading import Document, Path_, parse_document
from qdc.recipe.serving import ArchiveBase, OciBase
from qdc.recipe.snippet import Mark


@dataclass(frozen=True)
class LockState:
    """How the lock fits the recipe. `lacking`: recipe path of a source -> why the lock does not pin it.

    `changed`: recipe path -> (file, SHA-256 in the lock, SHA-256 of what the source serves now).
    """

    lacking: dict[str, str] = field(default_factory=dict)
    changed: dict[str, tuple[str, str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """`data`: every field with defaults resolved (JSON values); `folders`: recipe path of a source -> absolute path.

    `templates`: recipe path of a corpus -> text of its own chat template.
    `read`: absolute path -> SHA-256 of each file as it was read: the recipe and the files that it names.
    `origins`: recipe path -> `file:line`, or `--set`, of each value that was given.
    `facts`: recipe path of a checkpoint -> what its headers say, where they are at hand (`qdc.sources` fills it).
    `training_bytes`: memory that the training device has free, where the user's settings say so.
    `lock`: how the lock fits, once that counts: a recipe without its lock is valid, and cannot be built.
    """

    data: dict[str, Any]
    model: Recipe
    document: Document
    folder: Path
    chat_template: str
    templates: dict[str, str] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    facts: dict[str, ModelFacts] = field(default_factory=dict)
    lock: LockState | None = None
    training_bytes: float | None = None


def load(path: Path, sets: list[str] | None = None) -> Loaded:
    """Read and check `path` with `--set field.path=value` changes applied.

    Raises RecipeInvalid with every fault of the file's text and shape.
    """
    document, files = read_extended(path)
    origins = {place: f"{_name(document, place)}:{span.line}" for place, span in document.values.items() if place}
    for assignment in sets or []:
        changed = _assign(document, assignment)
        origins = {place: origin for place, origin in origins.items() if place[: len(changed)] != changed}
        origins[changed] = "--set"
    faults = list(document.faults)
    try:
        model = Recipe.model_validate(document.data)
    except ValidationError as error:
        from qdc.recipe.shape import schema_finding

        found = [schema_finding(document, item) for item in error.errors()]
        raise RecipeInvalid(faults + [item for item in found if item is not None]) from None
    if faults:
        raise RecipeInvalid(faults)
    data = model.model_dump(mode="json", by_alias=True)
    named = _Named(document, path.resolve().parent)
    template = named.text(("serve", "chat_template"), model.serve.chat_template)
    own = {
        f"data.{name}": named.text(("data", name, "chat_template"), entry.chat_template)
        for name, entry in model.data.items()
        if isinstance(entry, Corpus) and entry.chat_template is not None
    }
    for place, source in sources(model).items():
        if isinstance(source, PathSource):
            named.checkpoint(place, source.path)
    for name, entry in model.data.items():
        if isinstance(entry, FilePrompts):
            named.file(("data", name), "path", entry.path, "a JSON Lines file")
    if isinstance(model.image.base, ArchiveBase):
        named.file(("image", "base"), "archive", model.image.base.archive, "an archive of an image")
    elif isinstance(model.image.base, OciBase):
        named.layout(("image", "base"), model.image.base.oci)
    if faults or named.faults:
        raise RecipeInvalid(faults + named.faults)
    named.read.update(files)
    given = {".".join(map(str, place)): origin for place, origin in origins.items()}
    return Loaded(data, model, document, named.folder, template, own, named.folders, named.read, given)


def _name(document: Document, place: Path_) -> str:
    return Path(document.source(place).file).name


def sources(model: Recipe) -> dict[Path_, HubSource | PathSource | UrlSource | WheelSource]:
    """Every checkpoint that a recipe names: recipe path -> source."""
    found: dict[Path_, Any] = {("target", "base"): model.target.base}
    found["target", "quantization", "grid"] = model.target.quantization.grid
    if model.drafter is not None:
        found["drafter", "checkpoint"] = model.drafter.checkpoint
        for index, training in enumerate(model.drafter.trainings):
            found["drafter", "training", index, "init"] = training.init
    kinds = (HubSource, PathSource, UrlSource, WheelSource)
    return {place: source for place, source in found.items() if isinstance(source, kinds)}


class _Named:
    """The files and folders that a recipe names, read and checked."""

    def __init__(self, document: Document, folder: Path) -> None:
        self.document, self.folder = document, folder
        self.faults: list[Diagnostic] = []
        self.folders: dict[str, Path] = {}
        self.read: dict[str, str] = {}

    def missing(self, rule: str, path: Path_, message: str, hint: str) -> None:
        self.faults.append(self.document.diagnose(rule, "error", path, message, hint))

    def text(self, path: Path_, name: str) -> str:
        """A text file's content with `\n` as its line ends; "" where it cannot be had."""
        place = self.folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            hint = "the image's manifest names this path: copy the file beside the recipe"
            self.missing("SRC12", path, f"`{name}` is not below the recipe's folder", hint)
        try:
            raw = place.read_bytes()
            text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            hint = f"paths are relative to the recipe's folder, {self.folder}"
            self.missing("SRC12", path, f"cannot read `{name}`: {reason}", hint)
            return ""
        self.read[str(place)] = sha256_bytes(raw)
        return text

    def checkpoint(self, path: Path_, name: str) -> None:
        if not (self.folder / name / "config.json").is_file():
            hint = f"give a folder with a Hugging Face checkpoint, relative to {self.folder}"
            there = (self.folder / name).is_dir()
            message = f"`{name}` holds no config.json" if there else f"`{name}` does not exist"
            self.missing("SRC08", (*path, "path"), message, hint if there else self.near(name) or hint)
        self.folders[".".join(map(str, path))] = self.folder / name

    def layout(self, path: Path_, name: str) -> None:
        if not (self.folder / name / "oci-layout").is_file():
            hint = f"give a folder with an OCI layout, relative to {self.folder}"
            there = (self.folder / name).is_dir()
            message = f"`{name}` holds no oci-layout" if there else f"`{name}` does not exist"
            self.missing("SRC08", (*path, "oci"), message, hint if there else self.near(name) or hint)
        self.folders[".".join(map(str, path))] = self.folder / name

    def file(self, path: Path_, field: str, name: str, what: str) -> None:
        if not (self.folder / name).is_file():
            hint = f"give {what}, relative to {self.folder}"
            self.missing("SRC08", (*path, field), f"`{name}` does not exist", self.near(name) or hint)
        self.folders[".".join(map(str, path))] = self.folder / name

    def near(self, name: str) -> str | None:
        """Help: the file or folder beside it that `name` was most likely meant to be."""
        try:
            names = [str(place.relative_to(self.folder)) for place in (self.folder / name).parent.iterdir()]
        except (OSError, ValueError):
            return None
        near = nearest(name, sorted(names))
        return f"did you mean `{near}`?" if near else None


_AS_IT_STANDS = "name a field as it stands in the recipe, e.g. serve.k"


def _unset(assignment: str, parts: list[str | int], part: str | int, message: str, hint: str) -> RecipeInvalid:
    """A `--set` whose path names nothing, shown at the part of it that does."""
    name = assignment.partition("=")[0]
    column = 1 + sum(len(str(before)) + 1 for before in parts[: parts.index(part)])
    mark = Mark(1, column, column + len(str(part)), assignment)
    return RecipeInvalid([Diagnostic("YML03", "error", message, f"--set {name}", 1, column, hint, mark)])


def _assign(document: Document, assignment: str) -> Path_:
    """Apply one `--set a.b.c=value` and return its path; the value is read as YAML.

    Only fields whose parent exists can be set.
    """
    name, mark, text = assignment.partition("=")
    if not mark or not name:
        raise QdcError("set.form", f"`--set {assignment}` has no `=`", hint="write --set serve.k=5")
    raw = f"value: {text}\n".encode(errors="surrogateescape")
    given = parse_document(raw, f"--set {name}", ("value: ", f"{name}="))
    node = document.data
    parts: list[str | int] = [int(part) if part.isdecimal() else part for part in name.split(".")]
    for part in parts[:-1]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            known = [key for key in node if isinstance(key, str)] if isinstance(node, dict) else []
            hint = suggestion(str(part), known, "fields there") if known else _AS_IT_STANDS
            raise _unset(assignment, parts, part, f"the recipe has no `{part}` there", hint) from None
    try:
        node[parts[-1]] = given.data["value"]
    except (TypeError, IndexError):
        raise _unset(assignment, parts, parts[-1], f"`{parts[-1]}` cannot be set there", _AS_IT_STANDS) from None
    document.graft(tuple(parts), given)
    return tuple(parts)
