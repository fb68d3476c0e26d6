"""The grammar of entrypoint scripts: text of a POSIX sh or bash script to commands, one complete command at a time.

`commands(text)` yields trees lazily, as a shell reads: what stands after an `exec` is never looked at. It knows no
variable and runs nothing. What is outside of the grammar raises `Outside` with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdc.audit.shell_tree import (
    DECLARING,
    NAME,
    AndOr,
    Arithmetic,
    Assign,
    Block,
    Case,
    For,
    Function,
    If,
    Loop,
    Pipe,
    Redirect,
    Redirected,
    Seq,
    Simple,
    Test,
    Text,
    Word,
)
from qdc.audit.shell_words import MAX_DEPTH, META, Words

_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\s$\"'`]*\])?(\+?=)")
_OPENING = {"if", "while", "until", "for", "case", "{", "(", "[[", "function", "((", "select", "coproc", "!"}
_CLOSING = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"}


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


class _Reader(Words):
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

    def body(self, *ends: str, empty: bool = False) -> Seq:
        """Commands up to one of `ends`, which stays. `empty`: there may be none."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.bad("commands inside commands, too deep")
        items: list[tuple[Any, bool]] = []
        line = self.line
        while True:
            self.newlines()
            word = self.peek()
            if word in ends:
                if not items and not empty:
                    raise self.bad("commands are missing")
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
        negated, line, seen = False, self.line, 0
        while (word := self.peek()) == "!" or (word == "time" and self.bash):
            seen += word == "!"
            negated ^= word == "!"
            self.i += len(word)
        if seen > 1:
            self.only_bash("`! !`")
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
            body = self.body(";;", ";&", ";;&", "esac", empty=True)
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
        if match[1] and self.i and self.s[self.i - 1] not in META:
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

    def heredoc(self, redirect: Redirect, end: str, literal: bool, strip: bool) -> None:
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

    def all(self) -> Seq:
        items: list[tuple[Any, bool]] = []
        if self.depth > MAX_DEPTH:
            raise self.bad("commands inside commands, too deep")
        while True:
            self.newlines()
            if self.i >= len(self.s):
                return Seq(items, self.line)
            items += self.line_of_commands().items
