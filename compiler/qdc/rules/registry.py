"""What a rule is, and how a file of rules lists its own.

A rule is one function over a loaded recipe that yields what it found, under a page for `qdc explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from qdc.recipe.findings import Finding
from qdc.recipe.load import Loaded, sources
from qdc.recipe.reading import Path_

Severity = Literal["error", "warning", "note"]
LOCK = "lock"
"""What a rule needs that judges the lock. It is deferred until the lock pins every source, or a build asks for it."""


class Found(NamedTuple):
    """A place where a rule fires; `severity` where it is not the rule's own; `key`: it speaks of the field's name."""

    path: Path_
    message: str
    hint: str
    severity: Severity | None = None
    key: bool = False
    also: tuple[Path_, str] | None = None


Check = Callable[[Loaded], Iterator[Found]]
About = Callable[[Loaded], object]


@dataclass(frozen=True)
class Rule:
    """`finding`: its id, severity and page; `check`: where it fires; `needs`: recipe paths of checkpoints whose
    facts it reads (`drafter.training.*.init` for any training). It is deferred while one that the recipe names has
    none, and silent where the recipe names no such checkpoint. `about`: whether it can fire on a recipe at all,
    whatever the facts: where it cannot, it waits for none."""

    finding: Finding
    check: Check
    needs: tuple[str, ...] = ()
    about: About | None = None

    def lacks(self, loaded: Loaded) -> list[str]:
        """Recipe paths of checkpoints that the recipe names, this rule reads, and nothing is known of; or `lock`."""
        if self.about is not None and not self.about(loaded):
            return []
        if LOCK in self.needs:
            return [LOCK] if loaded.lock is None else []
        named = [".".join(map(str, place)) for place in sources(loaded.model)]
        wanted = [place for place in named for need in self.needs if fnmatchcase(place, need)]
        return [place for place in wanted if place not in loaded.facts]


class Topic:
    """The rules of one file, in order."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def rule(
        self,
        id: str,
        severity: Severity,
        *,
        summary: str,
        why: str,
        fix: str,
        evidence: str,
        failing: str,
        passing: str,
        final: str | None = None,
        needs: tuple[str, ...] = (),
        about: About | None = None,
    ) -> Callable[[Check], Check]:
        """Register the decorated function under its page; `final`: why a recipe cannot accept it."""
        finding = Finding(id, severity, summary, why, fix, evidence, failing, passing, final)

        def register(check: Check) -> Check:
            self.rules.append(Rule(finding, check, needs, about))
            return check

        return register

    def more(self, id: str, *, needs: tuple[str, ...], about: About | None = None) -> Callable[[Check], Check]:
        """Register another check under the page of a rule above, for what can be told only with more facts."""
        (finding,) = {rule.finding for rule in self.rules if rule.finding.id == id}

        def register(check: Check) -> Check:
            self.rules.append(Rule(finding, check, needs, about))
            return check

        return register
