"""What a rule is, and how a file of rules lists its own.

A rule is one function over a loaded recipe that yields what it found, under a page for `qdc explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qdc.recipe.findings import Finding
from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_

Severity = Literal["error", "warning"]


class Found(NamedTuple):
    """A place where a rule fires; `severity` where it is not the rule's own; `key`: it speaks of the field's name."""

    path: Path_
    message: str
    hint: str
    severity: Severity | None = None
    key: bool = False
    also: tuple[Path_, str] | None = None


Check = Callable[[Loaded], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """`finding`: its id, severity and page; `check`: where it fires."""

    finding: Finding
    check: Check


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
    ) -> Callable[[Check], Check]:
        """Register the decorated function under its page; `final`: why a recipe cannot accept it."""
        finding = Finding(id, severity, summary, why, fix, evidence, failing, passing, final)

        def register(check: Check) -> Check:
            self.rules.append(Rule(finding, check))
            return check

        return register
