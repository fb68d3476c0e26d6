"""Shell patterns as regular expressions."""

from __future__ import annotations

import re
from itertools import pairwise

_CLASSES = {"alpha": "A-Za-z", "digit": "0-9", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z",
            "space": r" \t\n\r\f\v", "blank": r" \t", "xdigit": "0-9A-Fa-f"}  # fmt: skip


def pattern(pieces: list[tuple[str, bool]]) -> re.Pattern[str] | None:
    """(text, quoted) pieces of a shell pattern as a regular expression; None for what is not simple."""
    text = "".join(f"\\{c}" if quoted and not c.isalnum() else c for part, quoted in pieces for c in part)
    out: list[str] = []
    stars: list[int] = []
    i = 0
    while i < len(text):
        c = text[i]
        i += 1
        if c == "\\" and i < len(text):
            out.append(re.escape(text[i]))
            i += 1
        elif c == "*":
            stars.append(len(out))
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
        return re.compile(_linear(out, stars), re.DOTALL)
    except re.error:
        return None


def _linear(parts: list[str], stars: list[int]) -> str:
    """`parts` with a `*` before each index in `stars`: each middle piece takes its first place, never another."""
    cuts = [0, *stars, len(parts)]
    pieces = ["".join(parts[a:b]) for a, b in pairwise(cuts)]
    if not stars:
        return pieces[0]
    first, *middle, last = pieces
    return first + "".join(f"(?>.*?{piece})" for piece in middle if piece) + f".*{last}"
