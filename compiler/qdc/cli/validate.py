"""`qdc validate RECIPE...`: every finding of the recipes, without running anything."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from qdc.cli.common import answer, painted, parser
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid


def main(arguments: list[str]) -> int:
    options = parser("validate", __doc__ or "", sets=True)
    options.add_argument("recipes", type=Path, nargs="+", metavar="RECIPE")
    given = options.parse_args(arguments)
    gc.disable()  # Importing makes many objects and no garbage.
    checked = [_checked(recipe, given.sets) for recipe in given.recipes]
    gc.enable()
    findings = [item for found, _ in checked for item in found]
    waiting = dict.fromkeys(pair for _, waits in checked for pair in waits)
    ok = not any(item.severity == "error" for item in findings)
    if given.json:
        waits = [{"rule": id, "needs": needs} for id, needs in waiting]
        answer({"ok": ok, "diagnostics": [item.as_json() for item in findings], "deferred": waits})
    else:
        for recipe, (found, lacking) in zip(given.recipes, checked, strict=True):
            _print(recipe, found, lacking, given.verbose)
    return 0 if ok else 2


def _checked(recipe: Path, sets: list[str]) -> tuple[list[Diagnostic], list[tuple[str, str]]]:
    """Findings of one recipe, and (rule, what it needs) of what cannot be decided yet."""
    from dataclasses import replace

    from qdc.recipe.load import load
    from qdc.rules.check import check, deferred
    from qdc.run.settings import training_bytes
    from qdc.sources.facts import attach

    try:
        loaded = replace(attach(load(recipe, sets)), training_bytes=training_bytes())
        return check(loaded), deferred(loaded)
    except RecipeInvalid as invalid:
        return invalid.diagnostics, []


def _print(recipe: Path, findings: list[Diagnostic], waiting: list[tuple[str, str]], verbose: bool) -> None:
    for item in findings:
        print(painted(f"{item}\n", sys.stdout))
    if verbose:
        for needs in dict.fromkeys(needs for _, needs in waiting):
            ids = dict.fromkeys(id for id, other in waiting if other == needs)
            print(f"deferred: {', '.join(ids)}\n  need {needs}\n")
    elif waiting:
        rules = len({id for id, _ in waiting})
        print(f"{recipe}: {rules} rules wait for headers of its sources: `qdc lock {recipe}` (--verbose lists them)")
    print(f"{recipe}: {_counted(findings)}")


def _counted(findings: list[Diagnostic]) -> str:
    parts = []
    plurals = {"error": "errors", "warning": "warnings", "note": "notes", "accepted": "accepted"}
    for severity, many in plurals.items():
        count = sum(item.severity == severity for item in findings)
        if count:
            parts.append(f"{count} {severity if count == 1 else many}")
    return ", ".join(parts) or "valid"
