"""A source line with its token underlined, as plain text of a bounded width.

Columns are counted as a terminal shows them: wide letters take two, combining marks none, a tab four. This module
knows neither YAML nor findings.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple

WIDTH = 100
TAB = 4
CUT = "…"


class Mark(NamedTuple):
    """A token in its line: `column` counts from 1, `end` is the column after its last letter."""

    line: int
    column: int
    end: int
    text: str


def drawn(mark: Mark, also: tuple[Mark, str] | None = None) -> list[str]:
    """The lines that show `mark` underlined with carets and, before or after it, `also` underlined and labelled."""
    shown = [(mark, "^", "")]
    if also is not None and also[0].line != mark.line:
        shown.append((also[0], "-", f" {also[1]}"))
    shown.sort(key=lambda item: item[0].line)
    gutter = len(str(shown[-1][0].line))
    lines = [f"{' ' * gutter} |"]
    for index, (token, letter, label) in enumerate(shown):
        if index and token.line > shown[index - 1][0].line + 1:
            lines.append(f"{'.' * gutter} |" if gutter > 2 else f"{' ' * gutter} :")
        text, before, width = _window(token)
        lines.append(f"{str(token.line).rjust(gutter)} | {text}".rstrip())
        lines.append(f"{' ' * gutter} | {' ' * before}{letter * width}{label}")
    return lines


def printable(text: str) -> str:
    """`text` without letters that would move a terminal's cursor or change its state."""
    return "".join(_visible(letter) for letter in text)


def _window(mark: Mark) -> tuple[str, int, int]:
    """The part of the line around the token, the columns before the token in it, and the token's width."""
    cells = [" " * TAB if letter == "\t" else _visible(letter) for letter in mark.text]
    widths = [_width(cell) for cell in cells]
    start = min(mark.column - 1, len(cells))
    end = max(start + 1, min(mark.end - 1, len(cells)))
    first, last = 0, len(cells)
    if sum(widths) > WIDTH:
        room = WIDTH - 2
        token = min(sum(widths[start:end]), room * 2 // 3)
        lead = min(sum(widths[:start]), max((room - token) // 2, room - token - sum(widths[end:])))
        first = start
        while first > 0 and sum(widths[first - 1 : start]) <= lead:
            first -= 1
        last = first
        used = 0
        while last < len(cells) and used + widths[last] <= room:
            used += widths[last]
            last += 1
    left, right = CUT if first > 0 else "", CUT if last < len(cells) else ""
    text = left + "".join(cells[first:last]) + right
    before = len(left) + sum(widths[first:start])
    return text, before, max(1, sum(widths[start : min(end, last)]))


def _visible(letter: str) -> str:
    if letter.isascii():
        return letter if " " <= letter <= "~" else repr(letter)[1:-1]
    if unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} and letter != "\u200d":
        return ascii(letter)[1:-1]
    return letter


def _width(cell: str) -> int:
    if cell.isascii():
        return len(cell)
    return sum(
        0
        if unicodedata.category(letter) in {"Mn", "Me", "Cf"}
        else 2
        if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in cell
    )
