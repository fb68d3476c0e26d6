"""Entries of `accept:`: each lets one finding stand, with a reason that the manifest keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from qdc.core.spelling import suggestion
from qdc.recipe.diagnostics import Diagnostic
from qdc.recipe.findings import Finding
from qdc.recipe.load import Loaded
from qdc.rules.registry import Found


def accepted(loaded: Loaded, findings: list[Diagnostic]) -> list[Diagnostic]:
    """`findings`, those of accepted rules with severity `accepted` and the reason."""
    reasons = {entry.rule: entry.because for entry in loaded.model.accept}
    return [
        replace(item, severity="accepted", because=reasons[item.rule]) if item.rule in reasons else item
        for item in findings
    ]


def unused(loaded: Loaded, pages: Mapping[str, Finding], fired: set[str]) -> Iterator[tuple[str, Found]]:
    """Entries that name no rule, one that cannot be accepted, or one that does not fire: rule id and finding.

    `fired`: ids of the rules that fire, and of those that may once their facts are there.
    """
    first: dict[str, int] = {}
    for index, entry in enumerate(loaded.model.accept):
        path = ("accept", index, "rule")
        if entry.rule not in pages:
            allowed = [id for id, page in pages.items() if page.final is None]
            yield "ACC02", Found(path, f"there is no rule `{entry.rule}`", suggestion(entry.rule, allowed, "rules"))
        elif (final := pages[entry.rule].final) is not None:
            message = f"`{entry.rule}` cannot be accepted: {final}"
            yield "ACC03", Found(path, message, f"remove the entry; `qdc explain {entry.rule}` says how to fix it")
        elif entry.rule in first:
            also = (("accept", first[entry.rule], "rule"), "first here")
            yield "ACC01", Found(path, f"`{entry.rule}` is accepted twice", "remove one of the entries", also=also)
        elif entry.rule not in fired:
            yield "ACC01", Found(path, f"`{entry.rule}` does not fire on this recipe", "remove the entry")
        first.setdefault(entry.rule, index)


_EVIDENCE = "Follows from what an acceptance is for."
_FINAL = "it is about `accept` itself"
_PASSING = "serve: {k: 5}\naccept: [{rule: DRF02, because: measured on the held-out set}]"

FINDINGS = [
    Finding(
        "ACC01",
        "error",
        "An entry of `accept` has a rule that does not fire, or that is accepted already.",
        "An entry that outlives its reason would hide the next fault of the same kind.",
        "Remove the entry.",
        _EVIDENCE,
        "accept: [{rule: DRF02, because: measured on the held-out set}]",
        _PASSING,
        _FINAL,
    ),
    Finding(
        "ACC02",
        "error",
        "An entry of `accept` has no rule's id.",
        "It would accept nothing, and nobody would see it.",
        "Write an id that `qdc explain` lists.",
        _EVIDENCE,
        "accept: [{rule: DRF2, because: measured on the held-out set}]",
        _PASSING,
        _FINAL,
    ),
    Finding(
        "ACC03",
        "error",
        "An entry of `accept` has a rule that cannot be accepted.",
        "A text that is read in two ways, a build that must fail, a published secret and a served text that is not the "
        "model's are no matter of taste.",
        "Remove the entry and fix what the rule finds.",
        _EVIDENCE,
        "serve: {k: 8}\naccept: [{rule: DRF01, because: measured on the held-out set}]",
        _PASSING,
        _FINAL,
    ),
]
