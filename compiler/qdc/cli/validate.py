"""`qdc validate RECIPE`: every finding of the recipe, without running anything."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from qdc.cli.common import answer, painted, parser
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid


def main(arguments: list[str]) -> int:
    options = parser("validate", __doc__ or "", sets=True)
    options.add_argument("recipe", type=Path)
    given = options.parse_args(arguments)
    gc.disable()  # Importing makes many objects and no garbage.
    from qdc.recipe.load import load
    from qdc.rules.check import check, deferred
    from qdc.sources.facts import attach

    gc.enable()
    waiting: list[tuple[str, str]] = []
    try:
        loaded = attach(load(given.recipe, given.sets))
        waiting = deferred(loaded)
        findings: list[Diagnostic] = check(loaded)
    except RecipeInvalid as invalid:
        findings = invalid.diagnostics
    errors = [item for item in findings if item.severity == "error"]
    waits = [{"rule": id, "needs": needs} for id, needs in waiting]
    if given.json:
        answer({"ok": not errors, "diagnostics": [item.as_json() for item in findings], "deferred": waits})
    else:
        for item in findings:
            print(painted(f"{item}\n", sys.stdout))
        for needs in dict.fromkeys(needs for _, needs in waiting):
            ids = ", ".join(id for id, other in waiting if other == needs)
            print(f"deferred: {ids}\n  need {needs}\n")
        print(f"{given.recipe}: {_counted(findings)}")
    return 2 if errors else 0


def _counted(findings: list[Diagnostic]) -> str:
    parts = []
    plurals = {"error": "errors", "warning": "warnings", "note": "notes", "accepted": "accepted"}
    for severity, many in plurals.items():
        count = sum(item.severity == severity for item in findings)
        if count:
            parts.append(f"{count} {severity if count == 1 else many}")
    return ", ".join(parts) or "valid"
