"""`qdc show [WHAT]`: the builds of the store, or a recipe with its defaults, or what a build holds.

WHAT is a build id, `@1`, a recipe path, or nothing; `--manifest`, `--record` and `--recipe` choose the document.
`--origins` prints every value of a recipe with the file and line that gave it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qdc.cli.common import answer, open_store, parser
from qdc.report.text import measurement_table, table
from qdc.run.build import artifact_json
from qdc.run.log import logs, read_log
from qdc.run.references import refer
from qdc.store.store import Store


def main(arguments: list[str]) -> int:
    options = parser("show", __doc__ or "", sets=True)
    options.add_argument("what", nargs="?", help="a build id, @1, or a recipe path; nothing lists the builds")
    document = options.add_mutually_exclusive_group()
    document.add_argument("--manifest", action="store_true", help="the content manifest of the image")
    document.add_argument("--record", action="store_true", help="the build record")
    document.add_argument("--recipe", action="store_true", help="the resolved recipe")
    document.add_argument("--origins", action="store_true", help="each value of a recipe, and where it is written")
    document.add_argument("--logs", action="store_true", help="the log of every build, also of those that failed")
    given = options.parse_args(arguments)
    near = Path(given.what) if given.what and given.what.endswith((".yaml", ".yml")) else None
    store = open_store(given.store, near)
    if given.logs:
        return _logs(store, given.json)
    if given.what is None:
        return _list(store, given.json)
    if near is not None and not (given.manifest or given.record):
        from qdc.recipe.load import load

        loaded = load(near, given.sets)
        if given.origins:
            return _origins(loaded.data, loaded.origins, given.json)
        return _document("recipe", loaded.data, given.json)
    build = refer(given.what, store).build
    if build is None:
        from qdc.core.errors import QdcError

        raise QdcError("show.what", f"`{given.what}` is not in the store", hint="`qdc audit` reads images outside it")
    if given.manifest:
        return _document("manifest", artifact_json(store, build["image"]["artifact"], "manifest.json"), given.json)
    if given.recipe:
        return _document("recipe", build["recipe"], given.json)
    if given.origins:
        return _origins(build["recipe"], build["origins"], given.json)
    if given.record or given.json:
        return _document("record", build, given.json)
    return _summary(build)


def _document(name: str, value: Any, as_json: bool) -> int:
    if as_json:
        answer({name: value})
    else:
        print(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True))
    return 0


def _origins(recipe: Any, origins: dict[str, str], as_json: bool) -> int:
    """Every leaf of the resolved recipe: path, value, and `file:line`, `--set` or `default`."""
    rows = [(path, value, origins.get(path, "default")) for path, value in _leaves(recipe, "")]
    if as_json:
        answer({"origins": [{"path": path, "value": value, "origin": origin} for path, value, origin in rows]})
        return 0
    shown = [[path, origin, json.dumps(value, ensure_ascii=False)] for path, value, origin in rows]
    print(table(["field", "from", "value"], shown))
    return 0


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of everything that is no mapping and no list of mappings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def _logs(store: Store, as_json: bool) -> int:
    found = [log for id in reversed(logs(store)) if (log := read_log(store, id)) is not None]
    rows = [
        {
            "log": log["log"],
            "recipe": log["recipe_name"],
            "result": log["result"],
            "build": log["build"],
            "ran": [name for name, stage in log["stages"].items() if stage["state"] == "ran"],
        }
        for log in found
    ]
    if as_json:
        answer({"logs": rows})
    elif not rows:
        print(f"no builds are in the log of {store.root}")
    else:
        cells = [
            [row["log"], row["recipe"], row["result"], row["build"] or "-", f"{len(row['ran'])} ran"] for row in rows
        ]
        print(table(["log", "recipe", "result", "build", "stages"], cells))
    return 0


def _list(store: Store, as_json: bool) -> int:
    builds = [build for id in reversed(store.builds()) if (build := store.build(id)) is not None]
    if as_json:
        answer(
            {
                "builds": [
                    {
                        "build": item["build"],
                        "recipe": item["recipe_name"],
                        "image": item["image"]["name"],
                        "id": item["image"]["id"],
                        "started": item["started"],
                    }
                    for item in builds
                ]
            }
        )
    elif not builds:
        print(f"no builds in {store.root}; `qdc build RECIPE` makes one")
    else:
        rows = [
            [f"@{number}", item["build"], item["recipe_name"], item["image"]["name"]]
            for number, item in enumerate(builds, 1)
        ]
        print(table(["", "build", "recipe", "image"], rows))
    return 0


def _summary(build: dict[str, Any]) -> int:
    print(f"build {build['build']} of {build['recipe_name']}, {build['started']}, {build['seconds']:.1f} s")
    print(f"image {build['image']['name']}\n  image ID {build['image']['id']}\n")
    rows = [
        [
            stage["name"],
            "ran" if stage["ran"] else "fetched" if stage.get("fetched") else "fresh",
            f"{stage['built_seconds'] or 0:.1f}",
            stage["determinism"] + (" (kept)" if stage.get("kept") else ""),
            stage["key"][:12],
            stage["output"][:12],
        ]
        for stage in build["stages"]
    ]
    print(table(["stage", "state", "seconds", "class", "key", "output"], rows))
    for stage in build["stages"]:
        answered = stage.get("kept") or stage.get("imported")
        if answered:
            print(f"  {stage['name']}: {'kept' if stage.get('kept') else 'imported'}: {answered['because']}")
    if build["measurements"]:
        print()
        print(measurement_table(build["measurements"]))
    return 0
