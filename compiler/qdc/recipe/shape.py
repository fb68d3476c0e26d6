"""What pydantic says about a recipe's shape, as findings at the token, with what to type.

Knows the models only through their annotations, so that a new field needs nothing here.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag

from qdc.core.spelling import nearest
from qdc.recipe.diagnostics import Diagnostic
from qdc.recipe.model import Recipe
from qdc.recipe.reading import Document, Path_

_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of fields",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
}
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")


class _Own(NamedTuple):
    """A rule for one kind of error of some fields: `fields` are recipe paths (fnmatch); `kind` is pydantic's, or
    `missing` (nothing given, too), or `number` (where text is due)."""

    rule: str
    fields: str
    kind: str
    message: str
    hint: str


_COMMIT = "write the commit, 40 hex digits in lower case: its repository's history shows it"
_DIGEST = "write the SHA-256 of the file, 64 hex digits in lower case: `sha256sum FILE` prints it"
_IMAGE = "write `base: {{ref: NAME@sha256:<64 hex digits>}}`; `skopeo inspect docker://NAME` prints the digest"
_OWN = [
    _Own("SRC01", "*.revision", "missing", "`{name}` is missing, and a branch may name other bytes tomorrow", _COMMIT),
    _Own("SRC01", "*.revision", "string_pattern_mismatch", "{given} may name other bytes tomorrow", _COMMIT),
    _Own("SRC02", "image.base.ref", "string_pattern_mismatch", "{given} may name another image tomorrow", _IMAGE),
    _Own("SRC02", "image.base", "model_type", "{given} is no base that stays the same", _IMAGE),
    _Own("SRC03", "*.sha256", "missing", "`{name}` is missing, and a URL promises nothing about its bytes", _DIGEST),
    _Own("SRC03", "*.sha256", "string_pattern_mismatch", "{given} is not a SHA-256", _DIGEST),
    _Own("YML06", "serve.engine.vllm", "number", "`{name}` must be text: {text} is a number", 'quote it: "{text}"'),
    _Own("YML06", "deploy.driver.cuda", "number", "`{name}` must be text: {text} is a number", 'quote it: "{text}"'),
    _Own("YML07", "*.revision", "number", "this hash was read as a number", 'quote it: "{text}"'),
    _Own("YML07", "*.sha256", "number", "this hash was read as a number", 'quote it: "{text}"'),
    _Own(
        "QAD01",
        "target.qad.trainable",
        "missing",
        "`{name}` is missing: the paper trains the quantized weights only, its code all but the scales",
        "add `trainable: quantized-weights` (the paper) or `trainable: all` (the code)",
    ),
    _Own(
        "DAT01",
        "data.*.truncated",
        "missing",
        "`{name}` is missing: whether answers cut by `max_tokens` stay changes the corpus",
        "add `truncated: keep` or `truncated: drop`",
    ),
    _Own(
        "DEP01",
        "deploy.hardware",
        "missing",
        "`{name}` is missing, and the card is never guessed",
        "add `hardware: a10g`, another row of the hardware table, or `cpu`",
    ),
]


def schema_finding(document: Document, error: Any) -> Diagnostic | None:
    """A pydantic error as a finding; None where it only follows from a fault of the text."""
    location, kind = error["loc"], error["type"]
    key = bool(location) and location[-1] == "[key]"
    path = _path_in(location[:-1] if key else location)
    if any(path[: len(bad)] == bad for bad in document.bad if bad):
        return None
    context, given = error.get("ctx", {}), error["input"]
    repaired = bool(document.faults) and isinstance(given, str) and "\ufffd" in given
    if repaired or (kind == "missing" and path[:-1] in document.partial):
        return None
    name = ".".join(str(part) for part in path) or "the recipe"
    if (own := _own(document, path, name, kind, given)) is not None:
        return own
    if kind == "extra_forbidden":
        help_ = _unknown(str(path[-1]), location)
        message = f"unknown field `{path[-1]}`"
        return document.diagnose("YML03", "error", path, message, help_, key=True)
    if kind == "missing":
        wanted = _describe(_annotation(location))
        return document.diagnose("SCH01", "error", path, f"`{name}` is missing", f"add `{path[-1]}: ...`, {wanted}")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        field_name = str(context.get("discriminator", "")).strip("'")
        path, name = (*path, field_name), f"{name}.{field_name}"
        options = _quoted(context.get("expected_tags") or _tags(location))
        if kind == "union_tag_not_found":
            add = f"add `{field_name}: {options[0]}`" + "".join(f" or `{field_name}: {o}`" for o in options[1:])
            return document.diagnose("SCH01", "error", path, f"`{name}` is missing", add)
        return _choice(document, path, name, options, context.get("tag"))
    if kind == "literal_error":
        return _choice(document, path, name, _quoted(context["expected"]), given)
    if kind in _WANTED:
        return _wrong_type(document, path, name, kind, given)
    said = error["msg"][0].lower() + error["msg"][1:]
    hint = "schema/recipe.schema.json says what it takes"
    if kind == "string_pattern_mismatch":
        dashes = "-" in context["pattern"]
        said = f"`{given}` is not a name of the allowed form"
        hint = f"use lower-case letters, digits and {'`.`, `_` or `-` between them' if dashes else '`_`'}" + (
            "" if dashes else ", a letter first"
        )
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        limit = next(iter(context.values()))
        words = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than"}
        said, hint = f"{given} is out of range", f"write a value of {words.get(kind, 'at most')} {limit}"
    elif kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        least = "least" if "short" in kind else "most"
        unit = "letters" if kind.startswith("string") else "entries"
        count = context.get("min_length", context.get("max_length"))
        said, hint = f"it is too {kind.split('_')[-1]}", f"give it at {least} {count} {unit}"
    elif kind == "finite_number":
        hint = "write a finite number"
    return document.diagnose("SCH04", "error", path, f"`{name}`: {said}", hint, key=key)


def _own(document: Document, path: Path_, name: str, kind: str, given: Any) -> Diagnostic | None:
    """The finding of a rule that is about this kind of error of this field."""
    if kind == "string_type" and isinstance(given, int | float) and not isinstance(given, bool):
        kind = "number"
    elif given is None:
        kind = "missing"
    elif kind == "model_type" and not isinstance(given, str):
        return None
    for own in _OWN:
        if own.kind == kind and fnmatchcase(name, own.fields):
            token = document.diagnose(own.rule, "error", path, "").mark
            text = token.text[token.column - 1 : token.end - 1] if token else str(given)
            words = {"name": name, "given": _shown(given), "text": text}
            return document.diagnose(own.rule, "error", path, own.message.format(**words), own.hint.format(**words))
    return None


def _unknown(word: str, location: tuple[Any, ...]) -> str:
    """Help: a field of the same mapping, or where else a field of this name belongs."""
    fields = _fields(_annotation(location[:-1]))
    near = nearest(word, fields)
    if near is not None:
        return f"did you mean `{near}`?"
    places = _everywhere(word)
    if places:
        return f"`{word}` belongs to {' or '.join(places[:3])}"
    return f"remove it; fields here: {', '.join(fields)}"


def _choice(document: Document, path: Path_, name: str, options: list[str], given: Any) -> Diagnostic:
    listed = _either(f"`{option}`" for option in options)
    near = nearest(str(given), options) if isinstance(given, str) else None
    hint = f"did you mean `{near}`?" if near else f"write {listed}"
    return document.diagnose("SCH03", "error", path, f"`{name}`: expected {listed}, got {_shown(given)}", hint)


def _wrong_type(document: Document, path: Path_, name: str, kind: str, given: Any) -> Diagnostic:
    message = f"`{name}` must be {_WANTED[kind]}, not {_shown(given)}"
    if kind in ("int_type", "float_type") and isinstance(given, str) and _NUMBER.match(given):
        message = f"`{name}` must be {_WANTED[kind]}, not the text `{given}`"
        return document.diagnose("YML01", "error", path, message, f"write {given} without quotes")
    if kind == "string_type" and isinstance(given, int | float) and not isinstance(given, bool):
        return document.diagnose("SCH02", "error", path, message, f'quote it: "{given}"')
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return document.diagnose("SCH02", "error", path, message, f"write {int(given)}")
    if kind == "list_type" and not isinstance(given, dict | list) and given is not None:
        return document.diagnose("SCH02", "error", path, message, f"write [{given}]")
    return document.diagnose("SCH02", "error", path, message, f"write {_WANTED[kind]}")


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    text = str(value)
    return "nothing" if value is None else f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def _quoted(expected: Any) -> list[str]:
    """The alternatives in pydantic's words: `'a', 'b' or 3`."""
    if isinstance(expected, list):
        return expected
    words = [part.strip() for part in re.split(r", | or ", str(expected))]
    plain = [word.strip("'") for word in words if word]
    return [word.lower() if word in ("True", "False") else word for word in plain]


def _path_in(location: tuple[str | int, ...]) -> Path_:
    """Pydantic's location without the tags of unions, which are not in the data."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        _, members = _plain(_annotation(location[:index]))
        if not members:
            path.append(part)
    return tuple(path)


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """The annotation without `Annotated` and `| None`: itself, and the members where it is a union."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _plain(members[0]) if len(members) == 1 else (annotation, members)
    return annotation, []


def _annotation(location: tuple[Any, ...]) -> Any:
    """The annotation at a pydantic location, union tags included; None where it cannot be told."""
    annotation: Any = Recipe
    for part in location:
        annotation, members = _plain(annotation)
        origin = get_origin(annotation)
        if members:
            annotation = next((member for member in members if part in _tags_of(member)), None)
        elif origin is list:
            annotation = get_args(annotation)[0]
        elif origin is dict:
            annotation = get_args(annotation)[1]
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            known = {field.alias or name: field for name, field in annotation.model_fields.items()}
            annotation = known[part].annotation if part in known else None
        else:
            return None
    return annotation


def _tags_of(member: Any) -> list[str]:
    """How pydantic names a member of a union in a location."""
    tags = [item.tag for item in getattr(member, "__metadata__", ()) if isinstance(item, Tag)]
    model, _ = _plain(member)
    if tags or not (isinstance(model, type) and issubclass(model, BaseModel)):
        return tags
    literals = [field.annotation for field in model.model_fields.values() if get_origin(field.annotation) is Literal]
    return [value for literal in literals for value in get_args(literal) if isinstance(value, str)]


def _tags(location: tuple[Any, ...]) -> list[str]:
    _, members = _plain(_annotation(location))
    return [tag for member in members for tag in _tags_of(member)[:1]]


def _fields(annotation: Any) -> list[str]:
    model, members = _plain(annotation)
    if members:
        return [name for member in members for name in _fields(member)]
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    return []


def _everywhere(word: str) -> list[str]:
    """The sections at the recipe's margin and one below them that have a field `word`."""
    found: list[str] = []
    if word in _fields(Recipe):
        found.append("the top level")
    for section in _fields(Recipe):
        inner = _annotation((section,))
        if word in _fields(inner):
            found.append(f"`{section}`")
        for name in _fields(inner):
            if word in _fields(_annotation((section, name))):
                found.append(f"`{section}.{name}`")
    return found


def _describe(annotation: Any) -> str:
    """In words, what a field of this annotation takes."""
    plain, members = _plain(annotation)
    if get_origin(plain) is Literal:
        return _either(f"`{str(v).lower() if isinstance(v, bool) else v}`" for v in get_args(plain))
    if get_origin(plain) is list:
        return "a list"
    fields = _fields(plain)
    if fields:
        return f"a mapping with {', '.join(dict.fromkeys(fields))}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return "a mapping" if members or get_origin(plain) is dict else words.get(plain, "see recipes/tiny.yaml")
