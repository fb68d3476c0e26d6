"""The grammar of entrypoint scripts: text of a POSIX sh or bash script to commands, one complete command at a time.

`commands(text)` yields trees lazily, as a shell reads: what stands after an `exec` is never looked at. It knows no
variable and runs nothing. What is outside of the grammar raises `Outside` with its line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\s$\"'`]*\])?(\+?=)")
_BLANK = " \t"
_META = set(" \t\n;&|<>()")
_OPENING = {"if", "while", "until", "for", "case", "{", "(", "[[", "function", "((", "select", "coproc", "time", "!"}
_CLOSING = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"}
_OPERATORS = (":-", ":=", ":?", ":+", "-", "=", "?", "+", "%%", "%", "##", "#", "//", "/", "^^", "^", ",,", ",", "@",
              ":")  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b",
            "f": "\f", "v": "\v"}  # fmt: skip
MAX_DEPTH = 60


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


def commands(text: str, first_line: int = 1, *, bash: bool = True) -> Iterator[Seq]:
    """Each complete command of a script. `bash`: with what only bash has.

    Raises Outside where the text leaves the grammar.
    """
    reader = _Reader(text, first_line, bash)
    while True:
        reader.newlines()
        if reader.i >= len(text):
            return
        yield reader.line_of_commands()


class _Reader:
    def __init__(self, text: str, first_line: int = 1, bash: bool = True) -> None:
        self.s, self.i, self.depth, self.first, self.bash = text, 0, 0, first_line, bash
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.pending: list[tuple[Redirect, str, bool, bool]] = []

    # ---- characters

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
            self._heredoc(redirect, end, literal, strip)

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
        return match[0] if not after or after in _META else ""

    def take(self, text: str) -> None:
        if self.peek() != text:
            raise self.bad(f"`{text}` is missing")
        self.i += len(text)

    # ---- commands

    def line_of_commands(self) -> Seq:
        items: list[tuple[Any, bool]] = []
        line = self.line
        while True:
            node = self.and_or()
            word = self.peek()
            items.append((node, word == "&"))
            if word in ("&", ";"):
                self.i += 1
                if self.peek() in ("\n", "") and (self.i >= len(self.s) or self.c == "\n"):
                    break
                continue
            break
        self.blanks()
        if self.c == "\n":
            self.newline()
        elif self.i < len(self.s):
            raise self.bad(f"`{self.s[self.i : self.i + 10]}` cannot stand here")
        elif self.pending:
            self.newline()
        return Seq(items, line)

    def body(self, *ends: str) -> Seq:
        """Commands up to one of `ends`, which stays."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.bad("commands inside commands, too deep")
        items: list[tuple[Any, bool]] = []
        line = self.line
        while True:
            self.newlines()
            word = self.peek()
            if word in ends:
                break
            if self.i >= len(self.s) or word in _CLOSING:
                raise self.bad(f"`{ends[0]}` is missing")
            node = self.and_or()
            word = self.peek()
            items.append((node, word == "&"))
            if word in ("&", ";"):
                self.i += 1
            elif word not in ends and self.c != "\n":
                raise self.bad(f"`{ends[0]}` is missing")
        self.depth -= 1
        return Seq(items, line)

    def and_or(self) -> Any:
        first, rest = self.pipeline(), []
        while self.peek() in ("&&", "||"):
            operator = self.peek()
            self.i += 2
            self.newlines()
            rest.append((operator, self.pipeline()))
        return AndOr(first, rest) if rest else first

    def pipeline(self) -> Any:
        negated, line = False, self.line
        while self.peek() in ("!", "time"):
            negated ^= self.peek() == "!"
            self.i += len(self.peek())
        stages = [self.command()]
        while self.peek() == "|" and not self.at("||"):
            self.i += 1
            if self.c == "&":
                self.only_bash("`|&`")
                self.i += 1
            self.newlines()
            stages.append(self.command())
        return Pipe(stages, negated, line) if negated or len(stages) > 1 else stages[0]

    def command(self) -> Any:
        word, line = self.peek(), self.line
        if word in _CLOSING or word in ("&&", "||", "|", ";", "&", "\n") or (not word and self.i >= len(self.s)):
            raise self.bad(f"`{word.strip() or 'the end'}` cannot stand here")
        if word in _OPENING:
            node = self.compound(word, line)
        elif NAME.fullmatch(word) and re.compile(r"[ \t]*\([ \t]*\)").match(self.s, self.i + len(word)):
            self.i = self.s.index(")", self.i) + 1
            self.newlines()
            return Function(word, self.command(), line)
        else:
            return self.simple()
        redirects = []
        while redirect := self.redirect():
            redirects.append(redirect)
        return Redirected(node, redirects) if redirects else node

    def compound(self, word: str, line: int) -> Any:
        if word in ("select", "coproc"):
            raise self.bad(f"`{word}`")
        self.i += len(word)
        if word == "if":
            return self._if(line)
        if word in ("while", "until"):
            condition = self.body("do")
            self.take("do")
            body = self.body("done")
            self.take("done")
            return Loop(condition, body, word == "until", line)
        if word == "for":
            return self._for(line)
        if word == "case":
            return self._case(line)
        if word in ("{", "("):
            end = "}" if word == "{" else ")"
            body = self.body(end)
            self.take(end)
            return Block(body, word == "(", line)
        if word == "[[":
            tree = self._either()
            self.take("]]")
            return Test(tree, line)
        if word == "((":
            self.only_bash("`((`")
            return Arithmetic(self._sum(), line)
        self.only_bash("`function`")
        name = self.peek()
        if not NAME.fullmatch(name):
            raise self.bad("a function's name")
        self.i += len(name)
        if self.peek() == "(":
            self.i += 1
            self.take(")")
        self.newlines()
        return Function(name, self.command(), line)

    def _if(self, line: int) -> If:
        clauses, otherwise, end = [], None, "elif"
        while end == "elif":
            condition = self.body("then")
            self.take("then")
            clauses.append((condition, self.body("elif", "else", "fi")))
            end = self.peek()
            self.i += len(end)
        if end == "else":
            otherwise = self.body("fi")
            self.take("fi")
        return If(clauses, otherwise, line)

    def _for(self, line: int) -> For:
        name = self.peek()
        if not NAME.fullmatch(name):
            raise self.bad("`for` with an expression")
        self.i += len(name)
        words: list[Word] | None = None
        self.newlines()
        if self.peek() == "in":
            self.i += 2
            words = []
            self.blanks()
            while self.c not in (";", "\n", ""):
                words.append(self.word())
                self.blanks()
        if self.peek() == ";":
            self.i += 1
        self.newlines()
        self.take("do")
        body = self.body("done")
        self.take("done")
        return For(name, words, body, line)

    def _case(self, line: int) -> Case:
        self.blanks()
        word = self.word()
        self.newlines()
        self.take("in")
        arms: list[tuple[list[Word], Seq, str]] = []
        while True:
            self.newlines()
            if self.peek() == "esac":
                self.i += 4
                return Case(word, arms, line)
            if self.peek() == "(":
                self.i += 1
            patterns = []
            while True:
                self.blanks()
                patterns.append(self.word())
                if self.peek() != "|":
                    break
                self.i += 1
            self.take(")")
            body = self.body(";;", ";&", ";;&", "esac")
            end = self.peek()
            if end != "esac":
                self.i += len(end)
            arms.append((patterns, body, end))

    def simple(self) -> Simple:
        node = Simple(self.line)
        while True:
            self.blanks()
            if redirect := self.redirect():
                node.redirects.append(redirect)
                continue
            if not self.c or self.c in "\n;&|()":
                if self.c == "(":
                    raise self.bad("`(` cannot stand here")
                return node
            match = _ASSIGN.match(self.s, self.i)
            declares = node.words and isinstance(first := node.words[0], Word) and first.plain in DECLARING
            if match and (not node.words or declares):
                assign = self._assign(match)
                if node.words:
                    node.words.append(assign)
                else:
                    node.assigns.append(assign)
            else:
                node.words.append(self.word())

    def _assign(self, match: re.Match[str]) -> Assign:
        line = self.line
        self.i = match.end()
        index, append = match[2] and match[2][1:-1], match[3] == "+="
        if append or index or self.c == "(":
            self.only_bash("an array or `+=`")
        if self.c != "(":
            return Assign(match[1], self.word(), line, append, index)
        self.i += 1
        values = []
        self.newlines()
        while self.c != ")":
            if not self.c or (self.c == "[" and re.compile(r"\[[^\]]*\]=").match(self.s, self.i)):
                raise self.bad("an array with indices")
            values.append(self.word())
            self.newlines()
        self.i += 1
        return Assign(match[1], tuple(values), line, append, index)

    def redirect(self) -> Redirect | None:
        self.blanks()
        match = re.compile(r"(\d*)(<<-|<<<|<<|<>|<&|>>|>&|>\||&>>|&>|<|>)").match(self.s, self.i)
        if not match or (match[2] in ("<", ">") and self.s[match.end() : match.end() + 1] == "("):
            return None
        if match[1] and self.i and self.s[self.i - 1] not in _META:
            return None
        self.i = match.end()
        self.blanks()
        op, fd = match[2], int(match[1]) if match[1] else None
        if op in ("<<<", "&>", "&>>"):
            self.only_bash(f"`{op}`")
        target = self.word()
        result = Redirect(fd, op, target)
        if op in ("<<", "<<-"):
            quoted = any(not isinstance(part, Text) or part.quoted for part in target.parts)
            end = "".join(part.text for part in target.parts if isinstance(part, Text))
            self.pending.append((result, end, quoted, op == "<<-"))
        elif op == "<<<":
            result.body = target
        return result

    def _heredoc(self, redirect: Redirect, end: str, literal: bool, strip: bool) -> None:
        line, lines = self.line, []
        while self.i < len(self.s):
            stop = self.s.find("\n", self.i)
            stop = len(self.s) if stop < 0 else stop
            text = self.s[self.i : stop]
            self.i = min(stop + 1, len(self.s))
            text = text.lstrip("\t") if strip else text
            if text == end:
                break
            lines.append(text)
        body = "".join(f"{text}\n" for text in lines)
        parts = (Text(body, True),) if literal else _Reader(body, line, self.bash).heredoc_parts()
        redirect.body = Word(parts, line)

    # ---- [[ .. ]]

    def _either(self) -> tuple[Any, ...]:
        left = self._both()
        while self.peek_test() == "||":
            self.i += 2
            left = ("or", left, self._both())
        return left

    def _both(self) -> tuple[Any, ...]:
        left = self._not()
        while self.peek_test() == "&&":
            self.i += 2
            left = ("and", left, self._not())
        return left

    def peek_test(self) -> str:
        self.newlines()
        return self.peek()

    def _not(self) -> tuple[Any, ...]:
        word = self.peek_test()
        if word == "!":
            self.i += 1
            return ("not", self._not())
        if word == "(":
            self.i += 1
            inner = self._either()
            self.newlines()
            self.take(")")
            return inner
        if re.fullmatch(r"-[a-zA-Z]", word):
            self.i += 2
            self.newlines()
            if self.peek() in ("]]", "&&", "||", ")", "==", "=", "!=", "=~"):
                self.i -= len(word)
                raise self.bad("an unusual [[ .. ]]")
            return ("unary", word, self.word())
        left = self.word()
        operator = self.peek_test()
        if operator in ("==", "=", "!=", "=~", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"):
            self.i += len(operator)
            self.blanks()
            return ("binary", operator, left, self._expression() if operator == "=~" else self.word())
        return ("word", left)

    def _expression(self) -> Word:
        """The right side of `=~`: everything up to a blank."""
        match = re.compile(r"[^\s'\"\\$`]+(\$(?=[\s)|]))?").match(self.s, self.i)
        if not match or self.s[match.end() : match.end() + 1] not in (" ", "\t", "\n"):
            raise self.bad("a regular expression with quotes or expansions")
        line = self.line
        self.i = match.end()
        return Word((Text(match[0], False),), line)

    # ---- words

    def word(self) -> Word:
        line, start = self.line, self.i
        parts: list[Any] = []
        while self.c and self.c not in _META:
            if self.c in "?*+@!" and self.s[self.i + 1 : self.i + 2] == "(":
                raise self.bad("an extended pattern")
            self._part(parts)
        if self.c in ("<", ">") and not parts and self.s[self.i + 1 : self.i + 2] == "(":
            self.only_bash("`<(`")
            self.i += 2
            body = self.body(")")
            self.take(")")
            return Word((Output(body, False, True),), line)
        if self.i == start and not (self.c and self.c in _META):
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
        inner = _Reader(re.sub(r"\\([$`\\])", r"\1", match[1]), line, self.bash)
        inner.depth = self.depth + 1
        return Output(inner._all(), quoted)

    def _all(self) -> Seq:
        items: list[tuple[Any, bool]] = []
        if self.depth > MAX_DEPTH:
            raise self.bad("commands inside commands, too deep")
        while True:
            self.newlines()
            if self.i >= len(self.s):
                return Seq(items, self.line)
            items += self.line_of_commands().items

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
            body = self.body(")")
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


DECLARING = ("export", "readonly", "local", "declare", "typeset")


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
