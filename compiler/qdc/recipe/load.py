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
from qdc.core.spelling import suggestion
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid
from qdc.recipe.model import Recipe
from qdc.recipe.reading import Document, Path_, parse_document, read_document


@dataclass(frozen=True)
class Loaded:
    """`data`: every field with defaults resolved (JSON values); `folders`: recipe-relative name -> absolute path.

    `read`: absolute path -> SHA-256 of each file as it was read: the recipe and the files that it names.
    `origins`: recipe path -> `file:line`, or `--set`, of each value that was given.
    """

    data: dict[str, Any]
    model: Recipe
    document: Document
    folder: Path
    chat_template: str
    folders: dict[str, Path] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def load(path: Path, sets: list[str] | None = None) -> Loaded:
    """Read and check `path` with `--set field.path=value` changes applied.

    Raises RecipeInvalid with every fault of the file's text and shape.
    """
    document = read_document(path)
    origins = {place: f"{path.name}:{span.line}" for place, span in document.values.items() if place}
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
    folder = path.resolve().parent
    template, folders, read = _files(model, document, folder)
    read[str(path.resolve())] = document.sha256
    named = {".".join(map(str, place)): origin for place, origin in origins.items()}
    return Loaded(data, model, document, folder, template, folders, read, named)


def _files(model: Recipe, document: Document, folder: Path) -> tuple[str, dict[str, Path], dict[str, str]]:
    """Check that what the recipe names is there; return the chat template's text, the folders, the files' digests."""
    faults: list[Diagnostic] = []
    folders: dict[str, Path] = {}
    read: dict[str, str] = {}
    text = ""

    def missing(rule: str, path: Path_, message: str, hint: str) -> None:
        faults.append(document.diagnose(rule, "error", path, message, hint))

    name = model.serve.chat_template
    template = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        missing(
            "SRC12",
            ("serve", "chat_template"),
            f"`{name}` is not below the recipe's folder",
            "the image's manifest names this path: copy the file beside the recipe",
        )
    try:
        raw = template.read_bytes()
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        read[str(template)] = sha256_bytes(raw)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        missing(
            "SRC12",
            ("serve", "chat_template"),
            f"cannot read `{name}`: {reason}",
            f"paths are relative to the recipe's folder, {folder}",
        )
    source = getattr(model.target.base, "path", None)
    if source is not None:
        place = folder / source
        if not (place / "config.json").is_file():
            missing(
                "SRC08",
                ("target", "base", "path"),
                f"`{source}` holds no config.json",
                f"give a folder with a Hugging Face checkpoint, relative to {folder}",
            )
        folders[source] = place
    if faults:
        raise RecipeInvalid(faults)
    return text, folders, read


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
            raise QdcError(
                "set.path",
                f"`--set {name}`: the recipe has no `{part}` there",
                hint=suggestion(str(part), known, "fields there")
                if known
                else "name a field as it stands in the recipe, e.g. serve.k",
            ) from None
    try:
        node[parts[-1]] = given.data["value"]
    except (TypeError, IndexError):
        raise QdcError("set.path", f"`--set {name}`: `{parts[-1]}` cannot be set there") from None
    document.graft(tuple(parts), given)
    return tuple(parts)
