"""Shell arithmetic on whole numbers: `+ - * / %`, comparisons, `! && || ?:`, brackets, names; 64 bits, as in C."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!()?:~&^|=,]))", re.ASCII
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
MAX_TOKENS = 200


class NotSimple(Exception):
    """What cannot be calculated here, in words."""


def calculate(text: str, look: Callable[[str], str]) -> int:
    """The value of `text`; `look` gives a name's text. Raises NotSimple."""
    tokens: list[str] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match or len(tokens) > MAX_TOKENS:
            raise NotSimple("it is not simple")
        tokens.append(match[0].strip())
        position = match.end()
    if not tokens:
        return 0
    value, rest = _choice(tokens, look)
    if rest:
        raise NotSimple("it is not simple")
    return value


def _choice(tokens: list[str], look: Callable[[str], str]) -> tuple[int, list[str]]:
    value, rest = _binary(tokens, 0, look)
    if rest[:1] != ["?"]:
        return value, rest
    yes, rest = _choice(rest[1:], look)
    if rest[:1] != [":"]:
        raise NotSimple("it is not simple")
    no, rest = _choice(rest[1:], look)
    return (yes if value else no), rest


def _binary(tokens: list[str], level: int, look: Callable[[str], str]) -> tuple[int, list[str]]:
    if level == len(_LEVELS):
        return _unary(tokens, look)
    value, rest = _binary(tokens, level + 1, look)
    while rest and rest[0] in _LEVELS[level]:
        operator = rest[0]
        other, rest = _binary(rest[1:], level + 1, look)
        value = _apply(operator, value, other)
    return value, rest


def _unary(tokens: list[str], look: Callable[[str], str]) -> tuple[int, list[str]]:
    if not tokens:
        raise NotSimple("it is not simple")
    token, rest = tokens[0], tokens[1:]
    if token in ("-", "+", "!", "~"):
        if rest[:1] == [token] and token in "-+":
            raise NotSimple("it changes a variable")
        value, rest = _unary(rest, look)
        return _wrap({"-": -value, "+": value, "!": int(not value), "~": ~value}[token]), rest
    if token == "(":
        value, rest = _choice(rest, look)
        if rest[:1] != [")"]:
            raise NotSimple("it is not simple")
        return value, rest[1:]
    if re.fullmatch(r"[A-Za-z_]\w*", token, re.ASCII):
        if rest[:1] == ["="] or rest[:2] in (["+", "+"], ["-", "-"]) or rest[1:2] == ["="]:
            raise NotSimple("it changes a variable")
        text = look(token).strip()
        if not re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)", text):
            raise NotSimple(f"{token} is no number")
        sign = -1 if text[0] == "-" else 1
        return sign * _number(text.lstrip("+-")), rest
    return _number(token), rest


def _number(text: str) -> int:
    if not text[:1].isdigit():
        raise NotSimple("it is not simple")
    if text[:2].lower() == "0x":
        return _wrap(int(text, 16))
    if len(text) > 1 and text[0] == "0":
        if re.search("[89]", text):
            raise NotSimple(f"{text} is no octal number")
        return _wrap(int(text, 8))
    value = int(text) if len(text) < 25 else 1 << 70
    if value != _wrap(value):
        raise NotSimple("a number of more than 64 bits")
    return value


def _apply(operator: str, a: int, b: int) -> int:
    if operator in "/%":
        if b == 0:
            raise NotSimple("division by zero")
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return _wrap(quotient if operator == "/" else a - b * quotient)
    if operator in ("<<", ">>"):
        if not 0 <= b < 63:
            raise NotSimple("a wide shift")
        return _wrap(a << b if operator == "<<" else a >> b)
    table: dict[str, Callable[[], int]] = {
        "||": lambda: int(bool(a or b)), "&&": lambda: int(bool(a and b)), "|": lambda: a | b, "^": lambda: a ^ b,
        "&": lambda: a & b, "==": lambda: int(a == b), "!=": lambda: int(a != b), "<": lambda: int(a < b),
        "<=": lambda: int(a <= b), ">": lambda: int(a > b), ">=": lambda: int(a >= b), "+": lambda: a + b,
        "-": lambda: a - b, "*": lambda: a * b,
    }  # fmt: skip
    return _wrap(table[operator]())


def _wrap(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
