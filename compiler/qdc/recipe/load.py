"""A recipe file to a checked `Loaded` recipe, with all faults of its shape in one run.

Rules that compare fields are in `qdc.rules`; this module checks the shape and the files that a recipe names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
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

    def diagnose(
        self, rule: str, path: Path_, message: str, hint: str | None = None, severity: Any = "error"
    ) -> Diagnostic:
        """A diagnostic at the place of the value at `path`."""
        line, column = self.document.place(path) or (1, 1)
        return Diagnostic(rule, severity, message, self.document.file, line, column, hint)


def load(path: Path, sets: list[str] | None = None) -> Loaded:
    """Read and check `path` with `--set field.path=value` changes applied.

    Raises RecipeInvalid with every fault of the file's shape.
    """
    document = read_document(path)
    origins = {place: f"{path.name}:{line}" for place, (line, _) in document.values.items() if place}
    for assignment in sets or []:
        changed = _assign(document, assignment)
        origins = {place: origin for place, origin in origins.items() if place[: len(changed)] != changed}
        origins[changed] = "--set"
    try:
        model = Recipe.model_validate(document.data)
    except ValidationError as error:
        raise RecipeInvalid([_diagnostic(document, item) for item in error.errors()]) from None
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

    def missing(path: Path_, message: str, hint: str) -> None:
        line, column = document.place(path) or (1, 1)
        faults.append(Diagnostic("file", "error", message, document.file, line, column, hint))

    name = model.serve.chat_template
    template = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        missing(
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
            ("serve", "chat_template"),
            f"cannot read `{name}`: {reason}",
            f"paths are relative to the recipe's folder, {folder}",
        )
    source = getattr(model.target.base, "path", None)
    if source is not None:
        place = folder / source
        if not (place / "config.json").is_file():
            missing(
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
    value = parse_document(f"value: {text}\n".encode(errors="surrogateescape"), f"--set {name}").data["value"]
    node = document.data
    parts: list[str | int] = [int(part) if part.isdecimal() else part for part in name.split(".")]
    for part in parts[:-1]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            raise QdcError(
                "set.path",
                f"`--set {name}`: the recipe has no `{part}` there",
                hint="name a field as it stands in the recipe, e.g. serve.k",
            ) from None
    try:
        node[parts[-1]] = value
    except (TypeError, IndexError):
        raise QdcError("set.path", f"`--set {name}`: `{parts[-1]}` cannot be set there") from None
    return tuple(parts)


def _diagnostic(document: Document, error: Any) -> Diagnostic:
    """A pydantic error as a finding at the token that it is about."""
    path = _path_in(document.data, error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    field_name = ".".join(str(part) for part in path)
    place = document.place(path)
    hint: str | None = None
    if kind == "extra_forbidden":
        place = document.keys.get(path, place)
        message, hint = f"unknown field `{path[-1]}`", "remove it, or see schema/recipe.schema.json for the fields"
    elif kind == "missing":
        message, hint = f"`{field_name}` is missing", "add it; see recipes/tiny.yaml"
    elif kind in {
        "string_type",
        "int_type",
        "float_type",
        "bool_type",
        "list_type",
        "dict_type",
        "model_type",
        "model_attributes_type",
    }:
        given = error["input"]
        wanted = {
            "string_type": "text",
            "int_type": "a whole number",
            "float_type": "a number",
            "bool_type": "true or false",
            "list_type": "a list",
        }.get(kind, "a mapping of fields")
        message = f"`{field_name}` must be {wanted}, not {_shown(given)}"
        hint = f'quote it: "{given}"' if kind == "string_type" and isinstance(given, int | float) else None
    else:
        expected = context.get("expected") or context.get("expected_tags")
        message = f"`{field_name}`: " + (
            f"expected {expected}, got {_shown(error['input'])}"
            if expected
            else error["msg"][0].lower() + error["msg"][1:]
        )
        hint = None
    line, column = place or (1, 1)
    return Diagnostic("schema", "error", message, document.file, line, column, hint)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else f"`{value}`"


def _path_in(data: Any, location: tuple[str | int, ...]) -> Path_:
    """Pydantic's location without the union tags that are not in the data."""
    path: list[str | int] = []
    node = data
    for index, part in enumerate(location):
        inside = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if inside:
            node = node[part]
            path.append(part)
        elif index == len(location) - 1 and not (isinstance(node, dict) and part == node.get("kind")):
            path.append(part)
    return tuple(path)
