"""The one exception that a user may see.

Every failure that has a cause in the user's world (recipe, file, stage, network, disk) is raised as
`QdcError`; the command line prints it without a traceback. This module does not know how it is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WRONG_USE = 2
UNDECIDED = 3
COULD_NOT = 4


class QdcError(Exception):
    """What went wrong, where, why, and what to type.

    `id` is a short stable name such as "recipe.unknown-key"; `line` and `column` count from 1;
    `exit_code` is one of architecture's exit codes (2 wrong use or invalid recipe, 3 undecided, 4 could not).
    """

    def __init__(
        self,
        id: str,
        message: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        column: int | None = None,
        hint: str | None = None,
        exit_code: int = WRONG_USE,
    ) -> None:
        super().__init__(message)
        self.id = id
        self.message = message
        self.file = str(file) if file is not None else None
        self.line = line
        self.column = column
        self.hint = hint
        self.exit_code = exit_code

    def as_json(self) -> dict[str, Any]:
        """The `error` object of a failing command's `--json` answer."""
        return {
            "id": self.id,
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        text = f"{where}: {self.message}" if where else self.message
        return f"{text}\n  {self.hint}" if self.hint else text
