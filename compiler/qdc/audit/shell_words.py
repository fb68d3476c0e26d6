"""The words of shell scripts: quotes, expansions and what stands in them, from text to parts.

`Words` reads characters; `shell_grammar` puts words together to commands. It knows no variable and runs nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from qdc.audit.shell_tree import NAME, Output, Outside, Param, Redirect, Seq, Sum, Text, Word

_BLANK = " \t"


META = set(" \t\n;&|<>()")


_OPERATORS = (":-", ":=", ":?", ":+", "-", "=", "?", "+", "%%", "%", "##", "#", "//", "/", "^^", "^", ",,", ",", "@",
              ":")  # fmt: skip


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b",
            "f": "\f", "v": "\v"}  # fmt: skip


MAX_DEPTH = 60


class Words:
    """Reads the words of `text`. `body` and `all`, which read commands inside of words, come from the grammar."""

    body: Callable[..., Seq]
    all: Callable[[], Seq]
    heredoc: Callable[[Redirect, str, bool, bool], None]

    def __init__(self, text: str, first_line: int = 1, bash: bool = True) -> None:
        self.s, self.i, self.depth, self.first, self.bash = text, 0, 0, first_line, bash
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.pending: list[tuple[Redirect, str, bool, bool]] = []

    @property
    def line(self) -> int:
        return self.first - 1 + bisect_right(self.starts, self.i)

    def at(self, text: str) -> bool:
        return self.s.startswith(text, self.i)

    @property
    def c(self) -> str:
        return self.s[self.i] if self.i < len(self.s) else ""

    def bad(self, what: str) -> Outside:
        return Outside(self.line, what)

    def only_bash(self, what: str) -> None:
        if not self.bash:
            raise self.bad(f"{what}, which not every sh has")

    def blanks(self) -> None:
        while True:
            if self.c and self.c in _BLANK:
                self.i += 1
            elif self.at("\\\n"):
                self.i += 2
            elif self.c == "#":
                end = self.s.find("\n", self.i)
                self.i = len(self.s) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        """Past a line's end, taking the heredocs that it announced."""
        self.i += 1
        pending, self.pending = self.pending, []
        for redirect, end, literal, strip in pending:
            self.heredoc(redirect, end, literal, strip)

    def newlines(self) -> None:
        self.blanks()
        while self.c == "\n":
            self.newline()
            self.blanks()

    def peek(self) -> str:
        """The next word if it is plain, or the next operator; nothing is consumed."""
        self.blanks()
        for operator in (";;&", ";;", ";&", "((", "&&", "||"):
            if self.at(operator):
                return operator
        if self.c in ";&|()<>\n":
            return self.c
        match = re.compile(r"[^\s;&|<>()'\"\\$`]+").match(self.s, self.i)
        if not match:
            return ""
        after = self.s[match.end() : match.end() + 1]
        return match[0] if not after or after in META else ""

    def take(self, text: str) -> None:
        if self.peek() != text:
            raise self.bad(f"`{text}` is missing")
        self.i += len(text)

    def word(self) -> Word:
        line, start = self.line, self.i
        parts: list[Any] = []
        while self.c and self.c not in META:
            if self.c in "?*+@!" and self.s[self.i + 1 : self.i + 2] == "(":
                raise self.bad("an extended pattern")
            self._part(parts)
        if self.c in ("<", ">") and not parts and self.s[self.i + 1 : self.i + 2] == "(":
            self.only_bash("`<(`")
            self.i += 2
            body = self.body(")")
            self.take(")")
            return Word((Output(body, False, True),), line)
        if self.i == start and not (self.c and self.c in META):
            raise self.bad("a word is missing")
        return Word(_joined(parts), line)

    def _part(self, parts: list[Any]) -> None:
        """One part of an unquoted word."""
        c = self.c
        if c == "\\":
            if not self.at("\\\n"):
                parts.append(Text(self.s[self.i + 1 : self.i + 2], True))
            self.i += 2
        elif c == "'":
            parts.append(Text(self._until("'"), True))
        elif c == '"':
            self.i += 1
            self._double(parts)
        elif c == "$":
            parts.append(self._dollar(False))
        elif c == "`":
            parts.append(self._backquote(False))
        else:
            parts.append(Text(c, False))
            self.i += 1

    def _until(self, quote: str) -> str:
        end = self.s.find(quote, self.i + 1)
        if end < 0:
            raise self.bad("a quote is not closed")
        text = self.s[self.i + 1 : end]
        self.i = end + 1
        return text

    def _double(self, parts: list[Any]) -> None:
        """Up to the closing double quote."""
        before = len(parts)
        while self.c != '"':
            if not self.c:
                raise self.bad("a double quote is not closed")
            self._quoted_part(parts, '$`"\\')
        self.i += 1
        if len(parts) == before:
            parts.append(Text("", True))

    def _quoted_part(self, parts: list[Any], escapes: str) -> None:
        c = self.c
        if c == "\\":
            following = self.s[self.i + 1 : self.i + 2]
            self.i += 2
            if following != "\n":
                parts.append(Text(following if following and following in escapes else f"\\{following}", True))
        elif c == "$":
            parts.append(self._dollar(True))
        elif c == "`":
            parts.append(self._backquote(True))
        else:
            parts.append(Text(c, True))
            self.i += 1

    def heredoc_parts(self) -> tuple[Any, ...]:
        parts: list[Any] = []
        while self.c:
            self._quoted_part(parts, "$`\\")
        return _joined(parts)

    def _backquote(self, quoted: bool) -> Output:
        line = self.line
        match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.s, self.i)
        if not match:
            raise self.bad("a backquote is not closed")
        self.i = match.end()
        inner = type(self)(re.sub(r"\\([$`\\])", r"\1", match[1]), line, self.bash)
        inner.depth = self.depth + 1
        return Output(inner.all(), quoted)

    def _dollar(self, quoted: bool) -> Any:
        if self.at("$(("):
            mark = self.i
            try:
                self.i += 3
                return Sum(self._sum(), quoted)
            except Outside:
                self.i = mark
        if self.at("$("):
            self.i += 2
            body = self.body(")", empty=True)
            self.take(")")
            return Output(body, quoted)
        if self.at("${"):
            self.i += 2
            return self._braced(quoted)
        if not quoted and self.at("$'"):
            self.only_bash("`$'`")
            self.i += 1
            return Text(self._ansi(), True)
        if not quoted and self.at('$"'):
            raise self.bad("a translated string")
        match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])", re.ASCII).match(self.s, self.i)
        if match:
            self.i = match.end()
            return Param(match[1], quoted)
        self.i += 1
        return Text("$", quoted)

    def _ansi(self) -> str:
        match = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.s, self.i)
        if not match:
            raise self.bad("a quote is not closed")
        out = []
        for escape, plain in re.findall(r"\\(.)|([^\\]+)", match[1], re.DOTALL):
            if escape and escape not in _ESCAPES:
                raise self.bad(f"the escape \\{escape}")
            out.append(_ESCAPES[escape] if escape else plain)
        self.i = match.end()
        return "".join(out)

    def _sum(self) -> tuple[Any, ...]:
        """An arithmetic expression, up to its `))`."""
        parts: list[Any] = []
        depth = 0
        while True:
            if not self.c:
                raise self.bad("`))` is missing")
            if self.c == "(":
                depth += 1
            elif self.c == ")":
                if depth == 0:
                    if not self.at("))"):
                        raise self.bad("`))` is missing")
                    self.i += 2
                    return _joined(parts)
                depth -= 1
            if self.c == '"':
                self.i += 1
            else:
                self._quoted_part(parts, '$`"\\')

    def _braced(self, quoted: bool) -> Param:
        length = indirect = False
        if self.c == "#" and self.s[self.i + 1 : self.i + 2] not in ("}", "-", ":", "%", "#", "=", "+", "?"):
            length = True
            self.i += 1
        elif self.c == "!" and NAME.match(self.s, self.i + 1):
            indirect = True
            self.i += 1
        match = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII).match(self.s, self.i)
        if not match:
            raise self.bad("a bad substitution")
        name, index = match[0], None
        self.i = match.end()
        if self.c == "[":
            inner = re.compile(r"\[([^\]\"'`]+)\]").match(self.s, self.i)
            if not inner:
                raise self.bad("an index that is computed")
            index = inner[1]
            self.i = inner.end()
        op = next((operator for operator in _OPERATORS if self.at(operator)), "")
        self.i += len(op)
        if (not op and self.c != "}") or ((length or indirect) and op):
            raise self.bad("a bad substitution")
        parts: list[Any] = []
        literal = quoted and op in (":-", ":=", ":?", ":+", "-", "=", "?", "+")
        while self.c != "}":
            if not self.c:
                raise self.bad("`}` is missing")
            if literal and self.c == '"':
                self.i += 1
                self._double(parts)
            elif literal:
                self._quoted_part(parts, '$`"\\}')
            else:
                self._part(parts)
        self.i += 1
        return Param(name, quoted, op, _joined(parts), index, length, indirect)


def _joined(parts: list[Any]) -> tuple[Any, ...]:
    """Neighbouring texts of one kind as one."""
    result: list[Any] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Text) and isinstance(last, Text) and part.quoted == last.quoted:
            result[-1] = Text(last.text + part.text, part.quoted)
        else:
            result.append(part)
    return tuple(result)
