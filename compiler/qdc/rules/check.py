"""Rules over several fields of a recipe, decidable before anything runs.

This module runs them and applies `accept`; the rules are one file a topic beside it.
"""

from __future__ import annotations

from dataclasses import replace

from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid, in_order
from qdc.recipe.findings import FINDINGS, Finding
from qdc.recipe.load import Loaded, LockState
from qdc.rules import (
    accept,
    checkpoint,
    corpora,
    data,
    drafter,
    engine,
    evaluate,
    grid,
    hardware,
    lock,
    memory,
    ptq,
    published,
    qad,
    serve,
    source,
    speculation,
    target,
    training,
    window,
)
from qdc.rules.registry import LOCK, Found, Rule, Topic

TOPICS: dict[str, Topic] = {
    "data": data.TOPIC,
    "corpora": corpora.TOPIC,
    "source": source.TOPIC,
    "target": target.TOPIC,
    "grid": grid.TOPIC,
    "checkpoint": checkpoint.TOPIC,
    "qad": qad.TOPIC,
    "drafter": drafter.TOPIC,
    "training": training.TOPIC,
    "published": published.TOPIC,
    "ptq": ptq.TOPIC,
    "window": window.TOPIC,
    "engine": engine.TOPIC,
    "speculation": speculation.TOPIC,
    "serve": serve.TOPIC,
    "hardware": hardware.TOPIC,
    "evaluate": evaluate.TOPIC,
    "lock": lock.TOPIC,
    "memory": memory.TOPIC,
}
_OF_THE_LOCK = {rule.finding.id for rule in lock.TOPIC.rules}
RULES: list[Rule] = [rule for topic in TOPICS.values() for rule in topic.rules]
PAGES: dict[str, Finding] = {
    page.id: page
    for page in sorted([*FINDINGS, *accept.FINDINGS, *(rule.finding for rule in RULES)], key=lambda page: page.id)
}


def check(loaded: Loaded) -> list[Diagnostic]:
    """All findings in the order of the file: errors, warnings, and what the recipe accepts."""
    waiting = {id for id, _ in deferred(loaded)}
    decided = [rule for rule in RULES if not rule.lacks(loaded)]
    findings = [_diagnosed(loaded, rule.finding, found) for rule in decided for found in rule.check(loaded)]
    unused = accept.unused(loaded, PAGES, {item.rule for item in findings} | waiting)
    final = [_diagnosed(loaded, PAGES[id], found) for id, found in unused]
    acceptable = [item for item in findings if PAGES[item.rule].final is None]
    others = [item for item in findings if PAGES[item.rule].final is not None]
    return in_order([*accept.accepted(loaded, acceptable), *others, *final])


def deferred(loaded: Loaded) -> list[tuple[str, str]]:
    """(rule id, what it needs) of the rules that cannot be decided yet."""
    lacking = [(rule.finding.id, rule.lacks(loaded)) for rule in RULES]
    return [(id, _need(places)) for id, places in lacking if places]


def _need(places: list[str]) -> str:
    if places == [LOCK]:
        return "a lock that pins every source: `qdc lock`"
    return f"the headers of {', '.join(places)}: `qdc lock`"


def require(loaded: Loaded) -> list[Diagnostic]:
    """The warnings and acceptances of a recipe without errors; raises RecipeInvalid otherwise."""
    findings = check(loaded)
    if any(item.severity == "error" for item in findings):
        raise RecipeInvalid(findings)
    return findings


def require_lock(loaded: Loaded, state: LockState) -> None:
    """Raises RecipeInvalid where the lock does not fit the recipe as a build needs it."""
    if findings := [item for item in check(replace(loaded, lock=state)) if item.rule in _OF_THE_LOCK]:
        raise RecipeInvalid(findings)


def _diagnosed(loaded: Loaded, finding: Finding, found: Found) -> Diagnostic:
    return loaded.document.diagnose(
        finding.id,
        found.severity or finding.severity,
        found.path,
        found.message,
        found.hint,
        key=found.key,
        also=found.also,
    )
