"""The JSON Schema of a recipe file, for editors: what the models say, and the same with gaps for `extends`.

A recipe that extends another may leave out any field and may null any (null deletes); this module turns the models'
schema into that second form. It does not check recipes: `load` does, and says more.
"""

from __future__ import annotations

from typing import Any

from qdc.recipe.model import Recipe

Json = dict[str, Any]
REF = "#/$defs/"
EXTENDS: Json = {
    "type": "string",
    "description": "File name of a recipe in the same folder that this one changes: mappings merge, lists and values "
    "replace, null deletes.",
}


def recipe_schema() -> Json:
    """JSON Schema (draft 2020-12) of one recipe file."""
    whole = Recipe.model_json_schema()
    definitions: dict[str, Json] = whole.pop("$defs")
    definitions["Recipe"] = whole
    partial = {f"{name}Change": _partial(schema) for name, schema in definitions.items()}
    partial["RecipeChange"]["properties"]["extends"] = EXTENDS
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe",
        "description": whole.get("description", ""),
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": f"{REF}RecipeChange"},
        "else": {"$ref": f"{REF}Recipe"},
        "$defs": dict(sorted({**definitions, **partial}.items())),
    }


def _partial(value: Any) -> Any:
    """A schema whose fields may be missing or null; a null may also delete a field of another kind."""
    if isinstance(value, list):
        return [_partial(item) for item in value]
    if not isinstance(value, dict):
        return value
    made: Json = {}
    for key, inner in value.items():
        if key == "required" and isinstance(inner, list):
            continue
        if key == "$ref" and isinstance(inner, str):
            made[key] = f"{inner}Change"
        elif key == "mapping" and isinstance(inner, dict):
            made[key] = {tag: f"{place}Change" for tag, place in inner.items()}
        elif key == "additionalProperties" and inner is False:
            made[key] = {"type": "null"}
        elif key == "properties" and isinstance(inner, dict):
            made[key] = {name: _nullable(_partial(schema)) for name, schema in inner.items()}
        else:
            made[key] = _partial(inner)
    return made


def _nullable(schema: Json) -> Json:
    about: Json = {name: schema[name] for name in ("title", "description") if name in schema}
    return {"anyOf": [schema, {"type": "null"}], **about}
