"""Findings about a recipe, each with the place it speaks of. This module does not know any rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qdc.core.errors import WRONG_USE, QdcError
from qdc.recipe.snippet import Mark, drawn, printable

Severity = Literal["error", "warning", "note", "accepted"]


@dataclass(frozen=True)
class Diagnostic:
    """One finding; `line` and `column` count from 1 and point at the token it speaks of.

    `mark`: that token in its source line; `also`: a second token it speaks of, with what that one is.
    `because`: why the recipe accepts it.
    """

    rule: str
    severity: Severity
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    hint: str | None = None
    mark: Mark | None = None
    also: tuple[Mark, str] | None = None
    because: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The form in `validate --json` (architecture, "Command line")."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "message": self.message,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        lines = [printable(f"{where}: {self.severity}[{self.rule}]: {self.message}")]
        if self.because is not None:
            return printable(f"{lines[0]}; because: {self.because}")
        if self.mark is not None:
            lines += drawn(self.mark, self.also)
        if self.hint:
            lines.append(printable(f"help: {self.hint}"))
        return "\n".join(lines)


class RecipeInvalid(QdcError):
    """A recipe with at least one error; `diagnostics` holds all findings of the run, in file order."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = in_order(diagnostics)
        errors = [item for item in self.diagnostics if item.severity == "error"]
        first = errors[0]
        super().__init__(
            f"recipe.{first.rule}" if "." not in first.rule else first.rule,
            first.message,
            file=first.file,
            line=first.line,
            column=first.column,
            hint=first.hint,
            exit_code=WRONG_USE,
        )

    def __str__(self) -> str:
        return "\n\n".join(str(item) for item in self.diagnostics)


def in_order(findings: list[Diagnostic]) -> list[Diagnostic]:
    """Findings in the order of the file."""
    return sorted(findings, key=lambda item: (item.line or 0, item.column or 0, item.rule))
