"""Words to values: variables, defaults, quotes, field splitting, patterns for texts and for files, sums.

Follows POSIX and bash where both agree on what is known; whatever rests on something unknown is unknown, with the
line that computes it. `Expander` is the part of the interpreter that reads; commands are in `shell`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qdc.audit.shell_state import Array, Place, State, Value, Var, unknown
from qdc.audit.shell_words import Output, Param, Sum, Text, Word

if TYPE_CHECKING:
    from qdc.audit.shell_files import Files

BASH_ONLY = {"/", "//", "^", "^^", ",", ",,", ":", "@"}
MACHINE = {
    "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "PPID", "UID", "EUID", "GROUPS", "HOSTNAME",
    "LINENO", "BASHPID", "BASH_VERSION", "BASH_VERSINFO", "BASH", "SHLVL", "_", "OSTYPE", "HOSTTYPE", "MACHTYPE",
    "PIPESTATUS", "REPLY", "SHELLOPTS", "BASHOPTS", "BASH_COMMAND", "BASH_SUBSHELL", "OPTARG", "COMP_WORDBREAKS",
    "FUNCNAME", "BASH_LINENO", "BASH_REMATCH", "DIRSTACK", "BASH_ARGV0", "BASH_ARGV", "BASH_ARGC", "OLDPWD", "PS4",
    "COLUMNS", "LINES", "OPTIND", "TERM", "MAPFILE", "HISTCMD", "PS1", "PS2",
}  # fmt: skip
NUMBERS = {"RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "PPID", "UID", "EUID", "LINENO", "BASHPID", "SHLVL"}
SPECIAL = "@*#?$!-0123456789"
MAX_TEXT = 1 << 20
_CLASSES = {"alpha": "A-Za-z", "digit": "0-9", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z",
            "space": r" \t\n\r\f\v", "blank": r" \t", "xdigit": "0-9A-Fa-f"}  # fmt: skip


class Undecidable(Exception):
    """From here on nothing about the script is known: `value` says where and why."""

    def __init__(self, value: Value) -> None:
        super().__init__(value.why)
        self.value = value


class Dead(Exception):
    """This path through the script has ended; its state is kept where it went."""


@dataclass
class Piece:
    """A part of a word after expansion. `kind`: `literal` (as written), `quoted`, `spread` (to be split)."""

    kind: str
    value: Value


BREAK = Piece("break", Value("", Place("shell")))


class Expander:
    """Reads words in `self.state`; `self.file` is the script that is read, `self.bash` its dialect.

    `dialect`: `bash`, `dash`, or `sh` where it is not known which shell /bin/sh is.
    """

    state: State
    file: str
    dialect: str
    image: Files
    leave: Callable[[int], None]
    may_leave: Callable[[], None]
    redirecting: bool = False
    tolerant: bool = False
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
                    home, rest = self._home(text, line)
                    found.append(Piece("quoted", home))
                    text = rest
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

    def _home(self, text: str, line: int) -> tuple[Value, str]:
        match = re.match(r"~(?=/|$)", text)
        if not match:
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
        pattern = [(piece.value.text or "", piece.kind == "quoted") for piece in pieces]
        found = self.image.match(pattern, self.state.cwd.text, self.state.files)
        if found is None or len(found) > 1:
            return [nothing]
        return [replace(value, text=found[0], place=self.here(line))] if found else [value]

    # ---- parameters

    def get(self, name: str, line: int) -> Value | None:
        """The value of a variable, None if it is unset."""
        if name in MACHINE and name not in self.state.variables:
            why = f"${name} depends on the machine or the shell"
            return unknown(self.here(line), why, number=name in NUMBERS)
        if name == "PWD" and "PWD" not in self.state.variables:
            return self.state.cwd
        if name == "BASH_SOURCE" and self.dialect == "bash":
            return Value(self.file, Place("shell"))
        var = self.state.variables.get(name)
        if var is None or var.value is None:
            return None
        if isinstance(var.value, tuple):
            return self._element(var.value, 0, line)
        return var.value

    def _element(self, items: Array, index: int, line: int) -> Value | None:
        for number, item in enumerate(items):
            if item.many:
                return unknown(item.place, item.why, many=True)
            if number == index:
                return item
        return None

    def _param(self, part: Param, line: int) -> list[Piece]:
        kind = "quoted" if part.quoted else "spread"
        if self.dialect != "bash" and (part.index or part.indirect or part.op in BASH_ONLY):
            raise self.lost(line, f"${{{part.name}..}} is not in every sh")
        if part.indirect:
            pointer = self.get(part.name, line)
            if pointer is None or pointer.text is None or not re.fullmatch(r"[A-Za-z_]\w*", pointer.text, re.ASCII):
                return [Piece(kind, unknown(self.here(line), f"${{!{part.name}}}", many=not part.quoted))]
            part = replace(part, name=pointer.text, indirect=False)
        if part.name in "@*" or part.index in ("@", "*"):
            return self._all(part, kind, line)
        if part.length:
            return [Piece(kind, self._length(part, line))]
        value = self._scalar(part, line)
        if part.op == "":
            return [Piece(kind, self._checked(value, part.name, line))]
        if part.op in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
            return self._default(part, value, kind, line)
        value = self._checked(value, part.name, line)
        return [Piece(kind, self._changed(part, value, line))]

    def _scalar(self, part: Param, line: int) -> Value | None:
        state, name = self.state, part.name
        if name == "#":
            count = len(state.positional)
            many = next((item for item in state.positional if item.many), None)
            return many and replace(many, many=False, number=True) if many else Value(str(count), self.here(line))
        if name == "?":
            if state.status is None:
                return unknown(self.here(line), "$? of a command that was not run", number=True)
            return Value(str(state.status), self.here(line))
        if name in "$!-":
            return unknown(self.here(line), f"${name}", number=name == "$")
        if name == "0":
            return state.zero or unknown(self.here(line), "$0")
        if name.isdigit():
            return self._element(state.positional, int(name) - 1, line)
        if part.index is not None:
            return self._indexed(part, line)
        return self.get(name, line)

    def _indexed(self, part: Param, line: int) -> Value | None:
        var = self.state.variables.get(part.name)
        index = self.sum((Text(str(part.index), False),), line).text
        if index is None or index.startswith("-"):
            return unknown(self.here(line), f"the index {part.index} is not known")
        if var is None or var.value is None:
            return None
        items = var.value if isinstance(var.value, tuple) else (var.value,)
        return self._element(items, int(index), line)

    def _checked(self, value: Value | None, name: str, line: int) -> Value:
        if value is not None and not (value.many and "nounset" in self.state.options):
            return value
        if "nounset" in self.state.options:
            self.unset(name, value is not None, line)
        return value or Value("", self.here(line))

    def unset(self, name: str, perhaps: bool, line: int) -> None:
        """`set -u` or `${X?}` with a variable that is not set: the shell ends."""
        if self.redirecting:
            raise self.lost(line, f"${name}, which is not set, in a redirection")
        if perhaps:
            self.may_leave()
        else:
            self.leave(line)

    def _length(self, part: Param, line: int) -> Value:
        value = self._checked(self._scalar(part, line), part.name, line)
        if value.text is None or not value.text.isascii():
            return unknown(self.here(line), f"the length of ${part.name}") if value.known else value
        return Value(str(len(value.text)), self.here(line), parts=(value,))

    def _all(self, part: Param, kind: str, line: int) -> list[Piece]:
        """`$@`, `$*`, `${X[@]}` and what follows them in braces."""
        if part.index:
            var = self.state.variables.get(part.name)
            held = () if var is None or var.value is None else var.value
            items: Array = held if isinstance(held, tuple) else (held,)
            star = part.index == "*"
            if not items and "nounset" in self.state.options and part.op == "" and (var is None or var.value is None):
                return [Piece(kind, unknown(self.here(line), "an array that is not set", many=True))]
        else:
            items, star = self.state.positional, part.name == "*"
        many = next((item for item in items if item.many), None)
        if part.length:
            return [Piece(kind, replace(many, many=False) if many else Value(str(len(items)), self.here(line)))]
        if part.op in (":+", "+", ":-", "-") and not many:
            joined = join(list(items), self.here(line))
            if not joined.known:
                return [Piece(kind, joined)]
            there = bool(items) and (":" not in part.op or len(items) > 1 or joined.text != "")
            if len(items) == 1 and joined.text == "" and ":" in part.op:
                there = False
            if there == ("+" in part.op):
                return self._inner(part, self.pieces(part.arg, line), line)
            if not there:
                return [Piece("quoted", Value("", self.here(line)))] if part.quoted and star else []
        elif part.op == ":" and not many:
            items = self._slice(items, part, line)
        elif part.op:
            return [Piece(kind, unknown(self.here(line), f"${{{part.name}{part.op}..}} over several words", many=True))]
        if star and part.quoted:
            if self._separators() is None:
                return [Piece("quoted", unknown(self.here(line), "IFS was changed"))]
            spaced = [value for item in items for value in (Value(" ", item.place), item)][1:]
            return [Piece("quoted", join(spaced, self.here(line)))]
        found: list[Piece] = []
        for number, item in enumerate(items):
            if number:
                found.append(BREAK)
            found.append(Piece(kind, item))
        return found

    def _slice(self, items: Array, part: Param, line: int) -> Array:
        bounds = [self.sum(piece, line).text for piece in _colons(part.arg)]
        if not bounds or any(bound is None or bound.startswith("-") for bound in bounds):
            return (unknown(self.here(line), "a slice that is not known", many=True),)
        numbers = [int(str(bound)) for bound in bounds]
        if not part.index:
            items = (self.state.zero or unknown(self.here(line), "$0"), *items)
        return items[numbers[0] :][: numbers[1] if len(numbers) > 1 else None]

    def _default(self, part: Param, value: Value | None, kind: str, line: int) -> list[Piece]:
        """`-`, `=`, `?`, `+` with and without the colon."""
        colon, op = part.op.startswith(":"), part.op[-1]
        if value is not None and not value.known and (colon or value.many):
            losing = self._silent(part.arg, line)
            lost = replace(value, many=value.many or not part.quoted)
            if op == "=":
                self.set(part.name, lost, line)
            if op == "?":
                self.unset(part.name, True, line)
            return [Piece(kind, lost.over(losing) if losing else lost)]
        there = value is not None and not (colon and value.text == "")
        if op == "+" and not there:
            return [Piece(kind, Value("", self.here(line)))]
        if op == "+":
            return self._inner(part, self.pieces(part.arg, line, tilde=not part.quoted), line)
        if there and value is not None:
            losing = self._silent(part.arg, line) if op in "-=" else None
            return [Piece(kind, value.over(losing) if losing and losing.known else value)]
        if op == "?":
            self.unset(part.name, False, line)
        if op == "=" and self.redirecting:
            raise self.lost(line, "an assignment in a redirection")
        found = self.pieces(part.arg, line, tilde=not part.quoted)
        if value is not None:
            found = [Piece(piece.kind, piece.value.over(value)) for piece in found]
        if op == "=":
            whole = self._whole(found, line)
            self.set(part.name, whole, line)
            return [Piece(kind, whole)]
        return self._inner(part, found, line)

    def _inner(self, part: Param, found: list[Piece], line: int) -> list[Piece]:
        """What stood inside braces: its plain text is split as well."""
        if part.quoted and not found:
            return [Piece("quoted", Value("", self.here(line)))]
        return [Piece("spread" if piece.kind == "literal" else piece.kind, piece.value) for piece in found]

    def _silent(self, parts: tuple[Any, ...], line: int) -> Value | None:
        """A default that is not taken, where reading it has no effect."""
        if all(isinstance(part, Text) for part in parts):
            return Value("".join(part.text for part in parts), self.here(line))
        return None

    def _changed(self, part: Param, value: Value, line: int) -> Value:
        """`%`, `#`, `/`, `^`, `,`, `:` on a known text."""
        if value.text is None:
            return replace(value, many=value.many or not part.quoted)
        text, op = value.text, part.op
        if op in ("%", "%%", "#", "##"):
            pattern = self.pattern(self.pieces(part.arg, line))
            result = None if pattern is None else _trim(text, pattern, op)
        elif op in ("/", "//"):
            result = self._replaced(part, text, line)
        elif op == ":":
            result = self._substring(part, text, line)
        elif op in ("^^", "^", ",,", ",") and not part.arg and text.isascii():
            change: Callable[[str], str] = str.upper if "^" in op else str.lower
            result = change(text) if len(op) == 2 else change(text[:1]) + text[1:]
        else:
            result = None
        if result is None:
            return unknown(self.here(line), f"${{{part.name}{op}..}} is not computed", many=not part.quoted)
        return Value(result, self.here(line), parts=(value,))

    def _replaced(self, part: Param, text: str, line: int) -> str | None:
        arg = part.arg
        if not all(isinstance(item, Text) for item in arg):
            return None
        whole = "".join(item.text for item in arg)
        pattern, _, new = whole.partition("/")
        if re.search(r"[*?\[\\&]", whole) or not pattern or pattern[0] in "#%":
            return None
        return text.replace(pattern, new) if part.op == "//" else text.replace(pattern, new, 1)

    def _substring(self, part: Param, text: str, line: int) -> str | None:
        bounds = [self.sum(piece, line).text for piece in _colons(part.arg)]
        if not text.isascii() or any(bound is None for bound in bounds) or not 1 <= len(bounds) <= 2:
            return None
        start, *more = [int(str(bound)) for bound in bounds]
        start = max(start + len(text), 0) if start < 0 else start
        if more and more[0] < 0:
            return text[start : len(text) + more[0]] if len(text) + more[0] >= start else None
        return text[start : start + more[0]] if more else text[start:]

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
        from qdc.audit.shell_sums import NotSimple, calculate

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
        if isinstance(value, Value) and old is not None and isinstance(old.value, Value):
            value = value.over(old.value)
        before = old.exported if old is not None else False
        exported = True if export or "allexport" in self.state.options else before
        self.state.variables[name] = Var(value, exported)


def join(values: list[Value], place: Place) -> Value:
    """Texts put together; one alone (beside empty ones) stays itself, with where it came from."""
    lost = [value for value in values if not value.known]
    if lost:
        head = "".join(value.text or "" for value in values[: values.index(lost[0])])
        many = any(value.many for value in lost)
        number = len([value for value in values if value.text != ""]) == 1 and lost[0].number
        return replace(lost[0], many=many, beat=(), prefix=head + lost[0].prefix, number=number)
    full = [value for value in values if value.text]
    if len(full) == 1:
        return full[0]
    if len(values) == 1:
        return values[0]
    text = "".join(value.text or "" for value in full)
    used = tuple(value for value in full if value.place != place)
    return Value(text, place, parts=used[:20])


def pattern(pieces: list[tuple[str, bool]]) -> re.Pattern[str] | None:
    """(text, quoted) pieces of a shell pattern as a regular expression; None for what is not simple."""
    text = "".join(f"\\{c}" if quoted and not c.isalnum() else c for part, quoted in pieces for c in part)
    out, i = [], 0
    while i < len(text):
        c = text[i]
        i += 1
        if c == "\\" and i < len(text):
            out.append(re.escape(text[i]))
            i += 1
        elif c == "*":
            out.append(".*")
        elif c == "?":
            out.append(".")
        elif c == "[":
            match = re.compile(r"([!^]?)(\]?(?:\[:[a-z]+:\]|[^\]\\\[])*)\]").match(text, i)
            if not match or not match[2] or not match[2].isascii():
                if "]" in text[i:]:
                    return None
                out.append(re.escape(c))
                continue
            inner = match[2]
            inner = re.sub(r"\[:([a-z]+):\]", lambda m: _CLASSES.get(m[1], "\0"), inner)
            if "\0" in inner:
                return None
            inner = inner.replace("]", r"\]").replace("&", r"\&").replace("|", r"\|").replace("~", r"\~")
            out.append(f"[{'^' if match[1] else ''}{inner}]")
            i = match.end()
        elif c in "+@!" and text[i : i + 1] == "(":
            return None
        else:
            out.append(re.escape(c))
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error:
        return None


def _trim(text: str, found: re.Pattern[str], op: str) -> str:
    lengths = range(len(text) + 1) if len(op) == 1 else range(len(text), -1, -1)
    for length in lengths:
        if op[0] == "#" and found.fullmatch(text[:length]):
            return text[length:]
        if op[0] == "%" and found.fullmatch(text[len(text) - length :]):
            return text[: len(text) - length]
    return text


def _braces(word: Word) -> bool:
    """Whether bash would see a brace list (`{a,b}`, `{1..3}`) in it."""
    shape = "".join(
        ("".join(c if c in "{},." else "x" for c in part.text) if not part.quoted else "x")
        if isinstance(part, Text)
        else "x"
        for part in word.parts
    )
    return re.search(r"\{.*(,|\.\.).*\}", shape) is not None


def _colons(parts: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The parts of `offset:length`."""
    groups: list[list[Any]] = [[]]
    for part in parts:
        if isinstance(part, Text):
            first, *rest = part.text.split(":")
            groups[-1].append(Text(first, part.quoted))
            groups += [[Text(text, part.quoted)] for text in rest]
        else:
            groups[-1].append(part)
    return [tuple(group) for group in groups]


def plain(values: Iterable[Value]) -> list[str] | None:
    """The texts of values that are all known."""
    texts = [value.text for value in values]
    return None if None in texts else [text for text in texts if text is not None]


__all__ = ["SPECIAL", "Dead", "Expander", "Undecidable", "join", "pattern", "plain"]
