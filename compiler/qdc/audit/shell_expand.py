"""Words to values: variables, defaults, quotes, field splitting, patterns for texts and for files, sums.

Follows POSIX and bash where both agree on what is known; whatever rests on something unknown is unknown, with the
line that computes it. `Expander` is the part of the interpreter that reads; commands are in `shell`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qdc.audit.shell_parameters import Parameters
from qdc.audit.shell_patterns import pattern
from qdc.audit.shell_pieces import BREAK, Piece, Undecidable, join
from qdc.audit.shell_state import Array, Place, Value, Var, unknown
from qdc.audit.shell_sums import NotSimple, calculate
from qdc.audit.shell_tree import Output, Param, Sum, Text, Word

if TYPE_CHECKING:
    from qdc.audit.shell_files import Files

MAX_TEXT, MAX_WORDS, MAX_NAMES, MAX_LOOKUPS = 1 << 20, 10_000, 2_000, 50


class Expander(Parameters):
    """Reads words in `self.state`."""

    image: Files
    tolerant: bool = False
    lookups: int = 0
    captured: Callable[[Output, int], Value]

    def here(self, line: int) -> Place:
        return Place("file", self.file, line)

    def lost(self, line: int, why: str) -> Undecidable:
        return Undecidable(unknown(self.here(line), why))

    # ---- words

    def fields(self, words: Iterable[Word]) -> list[Value]:
        """The words of a command after all expansions."""
        found: list[Value] = []
        for word in words:
            found += self.word_fields(word)
        return found

    def word_fields(self, word: Word) -> list[Value]:
        if self.dialect != "dash" and _braces(word):
            if self.dialect == "sh":
                return [unknown(self.here(word.line), "a brace list, which shells read differently", many=True)]
            return [unknown(self.here(word.line), "a brace list", many=True)]
        return self._split(self.pieces(word.parts, word.line, tilde=True), word.line)

    def assigned(self, word: Word) -> Value:
        """The value of an assignment, where `~` stands for a home after each colon too."""
        if any(isinstance(part, Text) and not part.quoted and ":~" in part.text for part in word.parts):
            return unknown(self.here(word.line), "a home after a colon")
        return self.one(word)

    def one(self, word: Word, *, tilde: bool = True) -> Value:
        """A word where no splitting happens: a value to assign, a file's name, the subject of a case."""
        return self._whole(self.pieces(word.parts, word.line, tilde=tilde), word.line)

    def _whole(self, pieces: list[Piece], line: int) -> Value:
        values = [Value(" ", piece.value.place) if piece is BREAK else piece.value for piece in pieces]
        return join(values, self.here(line))

    def pieces(self, parts: Iterable[Any], line: int, *, tilde: bool = False) -> list[Piece]:
        found: list[Piece] = []
        for number, part in enumerate(parts):
            if isinstance(part, Text):
                text = part.text
                if tilde and number == 0 and not part.quoted and text.startswith("~"):
                    home, text = self._home(text, line, alone=len(tuple(parts)) == 1)
                    found.append(Piece("quoted", home))
                    if not text:
                        continue
                value = Value(text, self.here(line))
                found.append(Piece("quoted" if part.quoted else "literal", value))
            elif isinstance(part, Param):
                found += self._param(part, line)
            elif isinstance(part, Sum):
                found.append(Piece("quoted" if part.quoted else "spread", self.sum(part.parts, line)))
            elif isinstance(part, Output):
                found.append(Piece("quoted" if part.quoted else "spread", self.captured(part, line)))
        return found

    def _home(self, text: str, line: int, alone: bool) -> tuple[Value, str]:
        if not (text.startswith("~/") or (text == "~" and alone)):
            return unknown(self.here(line), f"the home of {text}"), ""
        home = self.get("HOME", line)
        return (home or unknown(self.here(line), "HOME is not set")), text[1:]

    def _split(self, pieces: list[Piece], line: int) -> list[Value]:
        """Fields: spread pieces are split at blanks, then patterns are looked up."""
        separators = self._separators()
        found: list[Value] = []
        current: list[Piece] = []
        present = False

        def close() -> None:
            nonlocal current, present
            if present or any(piece.value.text != "" for piece in current):
                found.extend(self._field(current, line))
            current, present = [], False

        for piece in pieces:
            if piece is BREAK:
                close()
                continue
            text = piece.value.text
            if piece.kind != "spread":
                present = present or piece.kind == "quoted" or bool(text)
                current.append(piece)
            elif text is None:
                current.append(Piece("spread", replace(piece.value, many=True)))
                present = True
            elif separators is None:
                if text:
                    current.append(Piece("spread", unknown(self.here(line), "IFS was changed", many=True)))
                    present = True
            else:
                words = [word for word in re.split(f"[{separators}]+", text) if word]
                if text and text[0] in " \t\n":
                    close()
                for number, word in enumerate(words):
                    if number:
                        close()
                    whole = word == text
                    value = piece.value if whole else replace(piece.value, text=word)
                    current.append(Piece("spread", value))
                    present = True
                if text and text[-1] in " \t\n" and words:
                    close()
        close()
        if len(found) > MAX_WORDS:
            raise self.lost(line, f"more than {MAX_WORDS} words")
        return found

    def _separators(self) -> str | None:
        ifs = self.state.variables.get("IFS")
        if ifs is None:
            return " \t\n"
        if isinstance(ifs.value, Value) and ifs.value.text in (" \t\n", "\n\t ", " \n\t"):
            return " \t\n"
        return None

    def _field(self, pieces: list[Piece], line: int) -> list[Value]:
        value = join([piece.value for piece in pieces], self.here(line))
        loose = "".join(piece.value.text or "" for piece in pieces if piece.kind != "quoted")
        if not value.known or "noglob" in self.state.options or not re.search(r"[*?\[]", loose):
            return [value]
        if all(piece.kind != "literal" for piece in pieces) and "[" in loose and not re.search(r"[*?]|\[.*\]", loose):
            return [value]
        return self._files(pieces, value, line)

    def _files(self, pieces: list[Piece], value: Value, line: int) -> list[Value]:
        """A pattern for files: itself if nothing matches, the one match, or unknown."""
        nothing = unknown(self.here(line), f"the files that match {value.text}", many=True)
        if "pathname" in self.state.options or self.state.lost or self.state.cwd.text is None or self._ordered(pieces):
            return [nothing]
        self.lookups += 1
        if self.lookups > MAX_LOOKUPS:
            return [nothing]
        pattern = [(piece.value.text or "", piece.kind == "quoted") for piece in pieces]
        found = self.image.match(pattern, self.state.cwd.text, self.state.files)
        if found is None or len(found) > 1:
            return [nothing]
        return [replace(value, text=found[0], place=self.here(line))] if found else [value]

    # ---- patterns and sums

    def pattern(self, pieces: list[Piece]) -> re.Pattern[str] | None:
        """A shell pattern; None where it is not known."""
        if any(piece.value.text is None for piece in pieces) or self._ordered(pieces):
            return None
        return pattern([(piece.value.text or "", piece.kind == "quoted") for piece in pieces])

    def _ordered(self, pieces: list[Piece]) -> bool:
        """Whether a range of letters may be ordered by a locale other than C."""
        loose = "".join(piece.value.text or "" for piece in pieces if piece.kind != "quoted")
        if not re.search(r"\[[^\]]*[A-Za-z]-[A-Za-z]", loose):
            return False
        values = [self.state.variables.get(name) for name in ("LC_ALL", "LC_COLLATE", "LANG")]
        texts = [var.value.text for var in values if var is not None and isinstance(var.value, Value)]
        return any(text not in ("", "C", "POSIX", "C.UTF-8", "C.utf8") for text in texts)

    def sum(self, parts: Iterable[Any], line: int) -> Value:
        """The value of an arithmetic expression on whole numbers.

        Raises Undecidable for what may be an error or assigns.
        """
        pieces = self.pieces(parts, line)
        source = join([piece.value for piece in pieces], self.here(line))
        if source.text is None:
            self._perhaps_wrong([piece.value for piece in pieces], line)
            return unknown(source.place, f"a sum of what is not known: {source.why}"[:200], number=True)
        used: list[Value] = []
        missing: list[Value] = []

        def look(name: str) -> str:
            value = self.get(name, line)
            if value is None and "nounset" in self.state.options:
                raise NotSimple(f"{name} is not set")
            if value is not None and not value.known:
                missing.append(value)
                raise NotSimple(f"{name} is not known: {value.why}")
            used.extend([value] if value else [])
            return value.text or "0" if value else "0"

        try:
            return Value(str(calculate(source.text, look)), self.here(line), parts=tuple(used))
        except NotSimple as error:
            lost = unknown(self.here(line), f"the sum {source.text.strip()[:60]}: {error}", number=True)
            if self.tolerant:
                return lost
            if not missing:
                raise Undecidable(lost) from error
            self._perhaps_wrong(missing, line)
            return lost

    def _perhaps_wrong(self, values: list[Value], line: int) -> None:
        """A sum over what may be no number: then dash ends, and bash gives up more than this command."""
        doubtful = next((value for value in values if not value.known and not value.number), None)
        if doubtful is None or self.tolerant:
            return
        if self.dialect != "dash":
            raise Undecidable(unknown(self.here(line), f"a sum over what may be no number: {doubtful.why}"[:200]))
        self.may_leave()

    # ---- assignment

    def set(self, name: str, value: Value | Array, line: int, *, export: bool = False) -> None:
        """Assign; a value remembers the one that it replaces."""
        if f"unset {name}" in self.state.options:
            raise self.lost(line, f"{name} was unset under set -a and is set again, which shells export differently")
        old = self.state.variables.get(name)
        if isinstance(value, Value) and value.known and len(value.text or "") > MAX_TEXT:
            raise self.lost(line, "a text of more than a megabyte")
        if (isinstance(value, tuple) and len(value) > MAX_WORDS) or len(self.state.variables) > MAX_NAMES:
            raise self.lost(line, "a large array or many variables")
        if isinstance(value, Value) and old is not None and isinstance(old.value, Value):
            value = value.over(old.value)
        before = old.exported if old is not None else False
        exported = True if export or "allexport" in self.state.options else before
        self.state.variables[name] = Var(value, exported)


def _braces(word: Word) -> bool:
    """Whether bash would see a brace list (`{a,b}`, `{1..3}`) in it."""
    shape = "".join(
        ("".join(c if c in "{},." else "x" for c in part.text) if not part.quoted else "x")
        if isinstance(part, Text)
        else "x"
        for part in word.parts
    )
    return re.search(r"\{.*(,|\.\.).*\}", shape) is not None
