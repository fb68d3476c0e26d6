"""The lines of a YAML file, repaired where a fault would hide the faults behind it, and its nodes.

Bytes that are no text, marks of merge conflicts, tabs, sections that are no YAML: each is reported once and read past.
This module knows text and PyYAML's nodes; it does not know values.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple

import yaml
from yaml.reader import Reader as YamlReader

from qdc.recipe.diagnostics import Diagnostic
from qdc.recipe.snippet import Mark

LIMIT_BYTES = 1 << 20
LIMIT_BAD_BYTES = 8
LIMIT_SECTIONS = 16

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


class Span(NamedTuple):
    """A token of the text: lines and columns from 1, `end_column` after its last letter.

    `block`: a mapping or list written over lines, which is better shown by its key.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    block: bool = False


def mark_of(lines: list[str], span: Span) -> Mark:
    """The part of `span` that is in its first line."""
    text = lines[span.line - 1] if span.line <= len(lines) else ""
    end = span.end_column if span.end_line == span.line else len(text.rstrip()) + 1
    return Mark(span.line, span.column, max(end, span.column + 1), text)


class Text:
    """The lines of a file, repaired where a fault would hide the faults behind it."""

    def __init__(self, raw: bytes, name: str, shown: tuple[str, str]) -> None:
        self.name = name
        self.shown = shown
        self.faults: list[Diagnostic] = []
        self.fatal = False
        self.skipped = False
        self.last = "", 0
        self.tabs: set[int] = set()
        self.lines: list[str] = [""]
        self.given: list[str] = self.lines
        if len(raw) > LIMIT_BYTES:
            self.fatal = True
            message = f"the file has {len(raw)} bytes; a recipe has at most {LIMIT_BYTES}"
            self.fault("YML14", 1, 1, 1, message, "is it a recipe? see recipes/tiny.yaml")
            return
        text, foreign = _decoded(raw)
        self.lines = _BREAK.split(text)
        self.given = list(self.lines)
        if text.startswith("\ufeff"):
            self.lines[0] = self.lines[0][1:]
            self.given[0] = self.lines[0]
            foreign = [(position - 1, what) for position, what in foreign]
            self.fault("YML08", 1, 1, 1, "the file starts with a byte order mark", "save it as UTF-8 without BOM")
            text = text[1:]
        foreign += [(m.start(), f"the character {m.group()!a} is not allowed in YAML") for m in _unprintable(text)]
        for position, what in sorted(foreign)[: LIMIT_BAD_BYTES + 1]:
            before = _BREAK.split(text[:position])
            line, column = len(before), len(before[-1]) + 1
            self.fault("YML08", line, column, column + 1, what, "save the file as UTF-8 text")
        if len(foreign) > LIMIT_BAD_BYTES:
            self.fatal = True
            return
        for match in _unprintable(text):
            before = _BREAK.split(text[: match.start()])
            self.lines[len(before) - 1] = YamlReader.NON_PRINTABLE.sub("\ufffd", self.lines[len(before) - 1])
        self._conflicts()
        self._tabs()

    def shown_lines(self) -> list[str]:
        """The lines as findings show them."""
        old, new = self.shown
        return [new + self.given[0].removeprefix(old), *self.given[1:]]

    def fault(
        self,
        rule: str,
        line: int,
        column: int,
        end: int,
        message: str,
        hint: str | None = None,
        also: tuple[Span, str] | None = None,
    ) -> None:
        lines = self.shown_lines()
        shift = self.shift if line == 1 else 0
        column = max(column, len(self.shown[0]) + 1) if line == 1 else column  # Of the text as it was given.
        mark = mark_of(lines, Span(line, column + shift, line, max(end, column + 1) + shift))
        second = (mark_of(lines, also[0]), also[1]) if also else None
        self.faults.append(Diagnostic(rule, "error", message, self.name, line, column + shift, hint, mark, second))

    @property
    def shift(self) -> int:
        return len(self.shown[1]) - len(self.shown[0])

    def _conflicts(self) -> None:
        """Report conflict markers, and read on with the first side of each."""
        ours = theirs = False
        for index, line in enumerate(self.given):
            mark = line.startswith(("<<<<<<< ", ">>>>>>> ", "||||||| ")) or line == "======="
            if line.startswith("<<<<<<< "):
                hint = "keep one side, and delete the lines with <<<<<<<, ======= and >>>>>>>"
                self.fault("YML13", index + 1, 1, len(line) + 1, "a merge conflict marker", hint)
                ours = True
            elif mark and not ours and not theirs:
                self.fault("YML13", index + 1, 1, len(line) + 1, "a merge conflict marker", "delete the line")
            elif line == "=======" or line.startswith("||||||| "):
                ours, theirs = False, True
            if mark or theirs:
                self.lines[index] = ""
            if line.startswith(">>>>>>> "):
                theirs = False

    def _tabs(self) -> None:
        for index, line in enumerate(self.lines):
            indent = line[: len(line) - len(line.lstrip(" \t"))]
            if "\t" in indent:
                column = indent.index("\t") + 1
                end = column + len(indent[column - 1 :]) - len(indent[column - 1 :].lstrip("\t"))
                self.fault("YML12", index + 1, column, end, "a tab in the indentation", "indent with spaces")
                self.lines[index] = line.replace("\t", "  ", indent.count("\t")) if line.strip() else ""
                self.tabs.add(index + 1)

    def compose(self) -> list[Any]:
        """The documents' nodes; where the text is no YAML, without the sections in which it is not.

        libyaml reads it, if it is there; what it refuses is read again by PyYAML, whose messages these are. About tabs
        the two disagree, so that PyYAML alone reads those.
        """
        fast = getattr(yaml, "CSafeLoader", None)
        if fast is not None and not self.fatal and not any("\t" in line for line in self.lines):
            with contextlib.suppress(yaml.YAMLError, RecursionError):
                return list(yaml.compose_all("\n".join(self.lines), Loader=fast))
        while not self.fatal:
            try:
                return list(yaml.compose_all("\n".join(self.lines), Loader=yaml.SafeLoader))
            except yaml.MarkedYAMLError as error:
                if not self._skip(error) or len(self.faults) > LIMIT_SECTIONS:
                    break
            except yaml.YAMLError as error:
                self.fault("YML10", 1, 1, 1, f"not YAML: {str(error).splitlines()[0]}")
                break
            except RecursionError:
                self.fault("YML14", 1, 1, 1, "too many values inside values")
                break
        return []

    def _skip(self, error: yaml.MarkedYAMLError) -> bool:
        """Report a syntax error and blank its section (a key at the margin and what is under it)."""
        problem, context = error.problem_mark or error.context_mark, error.context_mark
        opened = context if context and re.search("flow|quoted|block scalar", error.context or "") else None
        if context and ("simple key" in (error.context or "") or "end of stream" in (error.problem or "")):
            problem = context
        if opened is not None and _ended(error):
            problem = opened
        line = problem.line + 1 if problem else 1
        first = opened.line + 1 if opened else line
        start = first
        while start > 1 and not re.match(r"[^\s#\]}-]", self.lines[min(start, len(self.lines)) - 1]):
            start -= 1
        end = first
        while end < len(self.lines) and not re.match(r"[^\s#\]}-]", self.lines[end]):
            end += 1
        what = (error.problem or error.context or "").replace("could not found", "could not find")
        follows = (self.skipped and "alias" in what) or (what, start) == self.last
        self.last = what, end + 1
        if not follows and not any(start <= tab <= end for tab in self.tabs):
            column = problem.column + 1 if problem else 1
            word = re.match(r"[^\s]*", self.lines[line - 1][column - 1 :]) if problem is context else None
            hint, also = _syntax_help(error, opened, self.lines, self.shift)
            last = column + len(word.group() if word and not opened else "") + (problem is opened is not None)
            self.fault("YML10", line, column, last, f"not YAML: {what}", hint, also)
        blank = range(start - 1, min(end, len(self.lines)))
        progress = any(self.lines[index] for index in blank)
        for index in blank:
            self.lines[index] = ""
        self.skipped = True
        return progress


def _decoded(raw: bytes) -> tuple[str, list[tuple[int, str]]]:
    """The text, with one replacement for each byte that is not UTF-8, and where those are."""
    parts: list[str] = []
    bad: list[tuple[int, str]] = []
    length = start = 0
    while True:
        try:
            parts.append(raw[start:].decode("utf-8"))
            return "".join(parts), bad
        except UnicodeDecodeError as error:
            good = raw[start : start + error.start].decode("utf-8")
            length += len(good)
            bad.append((length, f"byte 0x{raw[start + error.start]:02x} is not UTF-8"))
            parts += [good, "\ufffd"]
            length += 1
            start += error.start + 1
            if len(bad) > LIMIT_BAD_BYTES:
                return "".join(parts), bad


def _unprintable(text: str) -> list[re.Match[str]]:
    found: list[re.Match[str]] = list(YamlReader.NON_PRINTABLE.finditer(text))
    return found


def _ended(error: yaml.MarkedYAMLError) -> bool:
    """Whether the text ended where something was still open."""
    return any(words in (error.problem or "") for words in ("end of stream", "stream end"))


def _syntax_help(
    error: yaml.MarkedYAMLError, opened: Any, lines: list[str], shift: int
) -> tuple[str | None, tuple[Span, str] | None]:
    """What to type where PyYAML's words do not say it, and where the open bracket or quote is."""
    problem = error.problem or ""
    if opened is not None and opened.line < len(lines):
        own = _ended(error)
        letter = lines[opened.line][opened.column : opened.column + 1]
        closing = {"[": "]", "{": "}"}.get(letter, letter)
        column = opened.column + 1 + (shift if opened.line == 0 else 0)
        place = Span(opened.line + 1, column, opened.line + 1, column + 1)
        if letter in "[{'\"" and letter:
            return (
                f"close the `{letter}` of line {place.line}, column {place.column}, with `{closing}`",
                None
                if own
                else (
                    place,
                    "opened here",
                ),
            )
    if "mapping values are not allowed" in problem:
        return "indent it as its neighbours are, or put the text with `:` in quotes", None
    if "cannot start any token" in problem and "\\t" in problem:
        return "write a space in place of the tab", None
    if "cannot start any token" in problem:
        return "put the text in quotes", None
    if "undefined alias" in problem:
        return "define it before with `&`, or write the value out", None
    if "block end" in problem or "expected ':'" in problem or "simple key" in problem or "':'" in problem:
        return "write `key: value` with a space after `:`, indented as its neighbours are", None
    return "see recipes/tiny.yaml for how a recipe is written", None
