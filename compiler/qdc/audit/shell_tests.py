"""Conditions: `test` and `[`, `[[ .. ]]`, `(( .. ))`. An answer is True, False, None (not known), or 2 (an error)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from qdc.audit.shell_expand import Expander
from qdc.audit.shell_state import Place, Value, unknown
from qdc.audit.shell_tree import Arithmetic, Test, Word

Answer = bool | int | None
ERROR = 2
_NUMBER = re.compile(r"[ \t]*([-+]?\d{1,18})[ \t]*", re.ASCII)
_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_UNARY = set("abcdefghknoprstuvwxzGLNORS")
_SIMPLE_EXPRESSION = re.compile(r"[A-Za-z0-9_^$.+*?\[\]()|/:, -]*")


class Tests(Expander, ABC):
    """The conditions of a shell. `unsure` holds why the last answer was None."""

    unsure: Value

    @abstractmethod
    def look(self, path: Value, line: int) -> tuple[str, str]:
        """(kind, real path) of what a path names; kind `unknown` where that is not known."""

    def doubt(self, value: Value) -> Answer:
        """Not known, because of `value`."""
        self.unsure = value
        return None

    def test(self, args: list[Value], line: int) -> Answer:
        """`test ARGS` by the number of arguments, as POSIX has it."""
        many = next((arg for arg in args if arg.many), None)
        if many is not None:
            return self.doubt(many)
        count = len(args)
        texts = [arg.text for arg in args]
        if count == 0:
            return False
        if count == 1:
            return self._filled(args[0])
        if count == 2:
            if texts[0] is None:
                return self.doubt(args[0])
            if texts[0] == "!":
                return _not(self._filled(args[1]))
            return self._unary(texts[0], args[1], line)
        if count == 3:
            if texts[1] is None:
                return self.doubt(args[1])
            if texts[1] in _COMPARE or texts[1] in ("=", "==", "!=", "<", ">", "-nt", "-ot", "-ef"):
                return self._binary(texts[1], args[0], args[2], line)
            if texts[1] in ("-a", "-o"):
                return _both(texts[1] == "-a", self._filled(args[0]), self._filled(args[2]))
            if texts[0] == "!":
                return _not(self.test(args[1:], line))
            if texts[0] == "(" and texts[2] == ")":
                return self._filled(args[1])
            return ERROR if None not in texts else self.doubt(next(arg for arg in args if not arg.known))
        if count == 4 and texts[0] == "!":
            return _not(self.test(args[1:], line))
        for operator in ("-o", "-a"):
            places = [number for number, text in enumerate(texts) if text == operator]
            if "(" not in texts and "!" not in texts and None not in texts and places and places[0] not in (0, count):
                cut = places[0]
                left, right = self.test(args[:cut], line), self.test(args[cut + 1 :], line)
                return _both(operator == "-a", left, right)
        return self.doubt(unknown(self.here(line), "a long test"))

    def _filled(self, value: Value) -> Answer:
        return self.doubt(value) if value.text is None else value.text != ""

    def _unary(self, op: str, value: Value, line: int) -> Answer:
        if not (len(op) == 2 and op[0] == "-" and op[1] in _UNARY):
            return ERROR
        if op in ("-n", "-z"):
            filled = self._filled(value)
            return filled if op == "-n" else _not(filled)
        if op == "-v" and self.dialect == "bash":
            if value.text is None or not re.fullmatch(r"[A-Za-z_]\w*", value.text, re.ASCII):
                return self.doubt(unknown(self.here(line), "-v"))
            held = self.get(value.text, line)
            return self.doubt(held) if held is not None and not held.known else held is not None
        if value.text == "":
            return False
        kind, path = self.look(value, line)
        if op in ("-e", "-a", "-f", "-d", "-s", "-x", "-r", "-w", "-L", "-h") and kind == "gone" and op not in "-L-h":
            return False
        if kind == "unknown" or op not in ("-e", "-f", "-d", "-s", "-x", "-r", "-w", "-L", "-h"):
            why = value if not value.known else unknown(self.here(line), f"{op} {value.text}")
            return self.doubt(why)
        return self._file(op, kind, path, value, line)

    def _file(self, op: str, kind: str, path: str, value: Value, line: int) -> Answer:
        written = self.state.files.get(path)
        if op == "-e":
            return True
        if op in ("-f", "-d"):
            return kind == {"-f": "file", "-d": "dir"}[op]
        if op in ("-L", "-h"):
            return False if written else self.image.link(str(value.text))
        if op in ("-r", "-w") and self.root:
            return True
        if written is not None:
            if op == "-s" and written.text.text is not None:
                return written.text.text != ""
            return self.doubt(unknown(self.here(line), f"{op} {value.text}, which the script wrote"))
        if op == "-s":
            return kind == "dir" or self.image.size(path) > 0
        if op == "-x" and self.root:
            return kind == "dir" or bool(self.image.mode(path) & 0o111)
        return self.doubt(unknown(self.here(line), f"{op} {value.text} for a user who is not root"))

    root: bool = True

    def _binary(self, op: str, a: Value, b: Value, line: int) -> Answer:
        if op == "==" and self.dialect == "dash":
            return ERROR
        if op == "==" and self.dialect == "sh":
            return self.doubt(unknown(self.here(line), "`==` in test, which not every sh has"))
        if op in _COMPARE:
            return self._compare(op, a, b)
        if op in ("<", ">", "-nt", "-ot", "-ef"):
            return self.doubt(unknown(self.here(line), f"`{op}` in test"))
        if a.text is None or b.text is None:
            return self.doubt(b if a.known else a)
        return (a.text == b.text) == (op != "!=")

    def _compare(self, op: str, a: Value, b: Value) -> Answer:
        numbers = []
        for value in (a, b):
            if value.text is None:
                return self.doubt(value)
            match = _NUMBER.fullmatch(value.text)
            if not match:
                return ERROR if not re.fullmatch(r"[-+\d \t]*", value.text) else self.doubt(value)
            numbers.append(int(match[1]))
        x, y = numbers
        return {"==": x == y, "!=": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y}[_COMPARE[op]]

    # ---- [[ .. ]] and (( .. ))

    def double(self, node: Test) -> Answer:
        if self.dialect == "bash":
            return self._tree(node.tree, node.line)
        if self.dialect == "dash" and node.tree[0] in ("unary", "binary", "word") and node.tree[1] not in ("<", ">"):
            return 127
        raise self.lost(node.line, "`[[` is not in every sh")

    def _tree(self, tree: tuple[Any, ...], line: int) -> Answer:
        kind = tree[0]
        if kind == "not":
            return _not(self._tree(tree[1], line))
        if kind in ("and", "or"):
            left = self._tree(tree[1], line)
            if left in (True, False) and bool(left) == (kind == "or"):
                return left
            right = self._tree(tree[2], line)
            return _both(kind == "and", left, right)
        if kind == "word":
            return self._filled(self.one(tree[1]))
        if kind == "unary":
            return self._unary(tree[1], self.one(tree[2]), line)
        return self._double_binary(tree[1], tree[2], tree[3], line)

    def _double_binary(self, op: str, left: Word, right: Word, line: int) -> Answer:
        a = self.one(left)
        if op in ("==", "=", "!="):
            pieces = self.pieces(right.parts, line, tilde=True)
            found = self.pattern(pieces)
            if a.text is None or found is None:
                return self.doubt(a if not a.known else unknown(self.here(line), "a pattern that is not known"))
            return bool(found.fullmatch(a.text)) == (op != "!=")
        b = self.one(right)
        if op in _COMPARE:
            sums = [self.sum(word.parts, line) for word in (left, right)]
            return self._compare(op, sums[0], sums[1])
        if op == "=~" and a.text is not None and b.text is not None and _simple(b.text, a.text):
            try:
                return bool(re.search(b.text, a.text)) and not a.text.endswith("\n")
            except re.error:
                pass
        return self.doubt(a if not a.known else unknown(self.here(line), f"`{op}` in [[ ]]"))

    def arithmetic(self, node: Arithmetic) -> Answer:
        self.tolerant = True
        try:
            value = self.sum(node.parts, node.line)
        finally:
            self.tolerant = False
        if value.text is not None:
            return value.text != "0"
        source = "".join(getattr(part, "text", getattr(part, "name", "")) for part in node.parts)
        for name in set(re.findall(r"[A-Za-z_]\w*", source)):
            if re.search(rf"\b{name}\s*([-+*/%&|^]|<<|>>)?=(?!=)|(\+\+|--)\s*{name}\b|\b{name}\s*(\+\+|--)", source):
                self.set(name, unknown(Place("file", self.file, node.line), f"(( {source.strip()[:40]} ))"), node.line)
        return self.doubt(value)


def _not(answer: Answer) -> Answer:
    if answer is None or (answer not in (True, False)):
        return answer
    return not answer


def _both(every: bool, left: Answer, right: Answer) -> Answer:
    """`-a` or `-o` of two answers; an error stays one."""
    for answer in (left, right):
        if answer is not None and answer not in (True, False):
            return answer
    if every:
        return False if left is False or right is False else None if None in (left, right) else True
    return True if left is True or right is True else None if None in (left, right) else False


def _simple(expression: str, text: str) -> bool:
    """Whether a regular expression means the same here as in a shell, and is quickly decided."""
    repeats = len(re.findall(r"[*+]", expression))
    return bool(
        _SIMPLE_EXPRESSION.fullmatch(expression) and not re.search(r"\)[*+?]|[*+?]{2}", expression)
        and repeats <= 2 and len(text) <= 1000 and text.isascii()
    )  # fmt: skip
