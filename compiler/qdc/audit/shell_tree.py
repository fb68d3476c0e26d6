"""The commands of a shell script as trees. It knows no text and runs nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DECLARING = ("export", "readonly", "local", "declare", "typeset")


class Outside(Exception):
    """A construct that is not in the grammar: its line, and what it is."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line, self.what = line, what


@dataclass(frozen=True)
class Text:
    text: str
    quoted: bool


@dataclass(frozen=True)
class Param:
    """`$name`, `${name op arg}`; `index`: inside brackets, or None; `length`, `indirect`: `${#..}`, `${!..}`."""

    name: str
    quoted: bool
    op: str = ""
    arg: tuple[Any, ...] = ()
    index: str | None = None
    length: bool = False
    indirect: bool = False


@dataclass(frozen=True)
class Output:
    """`$(..)`, or `<(..)` and `>(..)` with `process`."""

    body: Seq
    quoted: bool
    process: bool = False


@dataclass(frozen=True)
class Sum:
    """`$(( .. ))`."""

    parts: tuple[Any, ...]
    quoted: bool


@dataclass(frozen=True)
class Word:
    parts: tuple[Any, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """Its text where nothing in it is quoted or expanded."""
        texts = [part.text for part in self.parts if isinstance(part, Text) and not part.quoted]
        return "".join(texts) if len(texts) == len(self.parts) else None


@dataclass
class Redirect:
    """`fd op target`; for `<<` and `<<<` the text is in `body`."""

    fd: int | None
    op: str
    target: Word
    body: Word | None = None


@dataclass(frozen=True)
class Assign:
    """`value`: a word, or words for an array."""

    name: str
    value: Word | tuple[Word, ...]
    line: int
    append: bool = False
    index: str | None = None


@dataclass
class Simple:
    line: int
    assigns: list[Assign] = field(default_factory=list)
    words: list[Word | Assign] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Seq:
    """Commands one after another: (command, runs in the background)."""

    items: list[tuple[Any, bool]]
    line: int = 0


@dataclass
class AndOr:
    first: Any
    rest: list[tuple[str, Any]]


@dataclass
class Pipe:
    stages: list[Any]
    negated: bool
    line: int


@dataclass
class If:
    clauses: list[tuple[Seq, Seq]]
    otherwise: Seq | None
    line: int


@dataclass
class Loop:
    condition: Seq
    body: Seq
    until: bool
    line: int


@dataclass
class For:
    name: str
    words: list[Word] | None
    body: Seq
    line: int


@dataclass
class Case:
    word: Word
    arms: list[tuple[list[Word], Seq, str]]
    line: int


@dataclass
class Block:
    """`{ ..; }`, or a subshell."""

    body: Seq
    subshell: bool
    line: int


@dataclass
class Function:
    name: str
    body: Any
    line: int


@dataclass
class Test:
    """`[[ .. ]]` as a tree: ("and"|"or", a, b), ("not", a), ("unary", op, word), ("binary", op, a, b), ("word", w)."""

    tree: tuple[Any, ...]
    line: int


@dataclass
class Arithmetic:
    """`(( .. ))`."""

    parts: tuple[Any, ...]
    line: int


@dataclass
class Redirected:
    body: Any
    redirects: list[Redirect]
