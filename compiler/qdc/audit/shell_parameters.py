"""Parameters: the value of `$x`, `$1`, `"$@"`, `${x:-y}`, `${x%y}` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from qdc.audit.shell_pieces import BREAK, Piece, Undecidable, join
from qdc.audit.shell_state import Array, Place, State, Value, unknown
from qdc.audit.shell_tree import Param, Text

BASH_ONLY = {"/", "//", "^", "^^", ",", ",,", ":", "@"}


MACHINE = {
    "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "PPID", "UID", "EUID", "GROUPS", "HOSTNAME",
    "LINENO", "BASHPID", "BASH_VERSION", "BASH_VERSINFO", "BASH", "SHLVL", "_", "OSTYPE", "HOSTTYPE", "MACHTYPE",
    "PIPESTATUS", "REPLY", "SHELLOPTS", "BASHOPTS", "BASH_COMMAND", "BASH_SUBSHELL", "OPTARG", "COMP_WORDBREAKS",
    "FUNCNAME", "BASH_LINENO", "BASH_REMATCH", "DIRSTACK", "BASH_ARGV0", "BASH_ARGV", "BASH_ARGC", "OLDPWD", "PS4",
    "COLUMNS", "LINES", "OPTIND", "TERM", "MAPFILE", "HISTCMD", "PS1", "PS2",
}  # fmt: skip


NUMBERS = {"RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "PPID", "UID", "EUID", "LINENO", "BASHPID", "SHLVL"}
MAX_TRIMMED = 10_000


class Parameters:
    """Needs `pieces`, `sum`, `pattern` and `set` from `shell_expand.Expander`.

    `dialect`: `bash`, `dash`, or `sh` where it is not known which shell /bin/sh is. `file`: the script that is read.
    """

    state: State
    file: str
    dialect: str
    leave: Callable[[int], None]
    may_leave: Callable[[], None]
    fork: Callable[[list[Callable[[], None]], Value], None]
    redirecting: bool = False
    here: Callable[[int], Place]
    lost: Callable[[int, str], Undecidable]
    pieces: Callable[..., list[Piece]]
    sum: Callable[[Iterable[Any], int], Value]
    pattern: Callable[[list[Piece]], re.Pattern[str] | None]
    set: Callable[..., None]
    _separators: Callable[[], str | None]
    _whole: Callable[[list[Piece], int], Value]

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
            if losing is None:  # what stands in the braces is perhaps read, and may assign or end the shell
                self.fork([lambda: self._consider(part.arg, line), lambda: None], value)
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

    def _consider(self, parts: tuple[Any, ...], line: int) -> None:
        self.pieces(parts, line)

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
            result = None if pattern is None or len(text) > MAX_TRIMMED else _trim(text, pattern, op)
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
        start = start + len(text) if start < 0 else start
        if start < 0:
            return ""
        if more and more[0] < 0:
            return text[start : len(text) + more[0]] if len(text) + more[0] >= start else None
        return text[start : start + more[0]] if more else text[start:]


def _trim(text: str, found: re.Pattern[str], op: str) -> str:
    lengths = range(len(text) + 1) if len(op) == 1 else range(len(text), -1, -1)
    for length in lengths:
        if op[0] == "#" and found.fullmatch(text[:length]):
            return text[length:]
        if op[0] == "%" and found.fullmatch(text[len(text) - length :]):
            return text[: len(text) - length]
    return text


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
