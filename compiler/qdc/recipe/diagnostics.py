"""Findings about a recipe, each with the place it speaks of. This module does not know any rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qdc.core.errors import WRONG_USE, QdcError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Diagnostic:
    """One finding; `line` and `column` count from 1 and point at the token it speaks of."""

    rule: str
    severity: Severity
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    hint: str | None = None

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
        text = f"{where}: {self.severity}[{self.rule}]: {self.message}"
        return f"{text}\n  {self.hint}" if self.hint else text


class RecipeInvalid(QdcError):
    """A recipe with at least one error; `diagnostics` holds all findings of the run, in file order."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = sorted(diagnostics, key=lambda item: (item.line or 0, item.column or 0, item.rule))
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
        return "\n".join(str(item) for item in self.diagnostics)
