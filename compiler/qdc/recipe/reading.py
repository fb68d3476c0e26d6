"""YAML text to plain data with the place of every key and value.

Scalars resolve by the YAML 1.2 core schema (`2e-6` is a number, `no` is not a boolean: it is refused, because
half of all readers think otherwise). Reading goes on after a fault where the rest can still be understood, so that
one run names all faults. This module does not know which fields a recipe has.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.reader import Reader as YamlReader

from qdc.core.files import sha256_bytes
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid, Severity
from qdc.recipe.snippet import Mark

Path_ = tuple[str | int, ...]
LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 64
LIMIT_VALUES = 100_000
LIMIT_DIGITS = 4000
LIMIT_BAD_BYTES = 8
LIMIT_SECTIONS = 16

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")
_HASH = re.compile(r"(?=[0-9]+(e[0-9]+)?\Z)(.{40}|.{64})\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_AMBIGUOUS = {"yes": "true", "no": "false", "on": "true", "off": "false", "y": "true", "n": "false"}
HALF = "an escape gives half of a surrogate pair, which is no text"


class Span(NamedTuple):
    """A token of the text: lines and columns from 1, `end_column` after its last letter.

    `block`: a mapping or list written over lines, which is better shown by its key.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    block: bool = False


@dataclass
class Document:
    """`data`: plain values. `keys` and `values`: path -> span. `sha256`: of the bytes read.

    `sets`: path -> the `--set`, or the extended recipe, that gave the value there, as a document of its own.
    `faults`: what reading found; `bad`: paths whose value is not what was meant; `partial`: mappings whose fields
    are not all known.
    """

    data: Any
    file: str
    sha256: str
    lines: list[str] = field(default_factory=list)
    keys: dict[Path_, Span] = field(default_factory=dict)
    values: dict[Path_, Span] = field(default_factory=dict)
    sets: dict[Path_, Document] = field(default_factory=dict)
    faults: list[Diagnostic] = field(default_factory=list)
    bad: set[Path_] = field(default_factory=set)
    partial: set[Path_] = field(default_factory=set)

    def graft(self, path: Path_, given: Document) -> None:
        """Replace what is known of `path` by `given`, whose value there is under `value`."""
        for table in (self.keys, self.values):
            for known in [known for known in table if known[: len(path)] == path and known != path]:
                del table[known]
        self.sets = {known: value for known, value in self.sets.items() if known[: len(path)] != path}
        self.sets[path] = given
        end = given.lines[0].index("=") + 1
        self.keys[path] = Span(1, end - len(str(path[-1])), 1, end)
        for source, table in ((given.keys, self.keys), (given.values, self.values)):
            table.update({path + known[1:]: span for known, span in source.items() if known != ("value",)})
        self.values[path] = given.values[("value",)]
        self.bad = {known for known in self.bad if known[: len(path)] != path}

    def diagnose(
        self,
        rule: str,
        severity: Severity,
        path: Path_,
        message: str,
        hint: str | None = None,
        *,
        key: bool = False,
        also: tuple[Path_, str] | None = None,
    ) -> Diagnostic:
        """A finding at the value at `path` (or at its key), or at the nearest parent that the file has."""
        document, mark, column = self._mark(path, key)
        second = None
        if also is not None:
            other, other_mark, _ = self._mark(also[0], False)
            second = (other_mark, also[1]) if other is document else None
        return Diagnostic(rule, severity, message, document.file, mark.line, column, hint, mark, second)

    def _mark(self, path: Path_, key: bool) -> tuple[Document, Mark, int]:
        span, found = Span(1, 1, 1, 1), tuple[str | int, ...]()
        for length in range(len(path), -1, -1):
            part = path[:length]
            value = self.values.get(part)
            if value is None:
                continue
            name = self.keys.get(part)
            if name is not None and ((key and length == len(path)) or value.block):
                span = name
            elif value.block:
                span = next((s for p, s in self.keys.items() if len(p) > length and p[:length] == part), value)
            else:
                span = value
            found = part
            break
        source = self.source(found)
        mark = mark_of(source.lines, span)
        return source, mark, mark.column

    def source(self, path: Path_) -> Document:
        """The document in which the value at `path` was written."""
        places = [known for known in self.sets if path[: len(known)] == known]
        return self.sets[max(places, key=len)] if places else self


def mark_of(lines: list[str], span: Span) -> Mark:
    """The part of `span` that is in its first line."""
    text = lines[span.line - 1] if span.line <= len(lines) else ""
    end = span.end_column if span.end_line == span.line else len(text.rstrip()) + 1
    return Mark(span.line, span.column, max(end, span.column + 1), text)


def read_document(path: Path) -> Document:
    """Read a recipe file; its faults are in the document. Raises RecipeInvalid where nothing can be read."""
    name = str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        message = f"cannot read the recipe: {error.strerror}"
        hint = "give the path of an existing YAML file, e.g. `qdc build recipes/tiny.yaml`"
        raise RecipeInvalid([Diagnostic("YML08", "error", message, file=name, hint=hint)]) from None
    return scan_document(raw, name)


def parse_document(raw: bytes, name: str, shown: tuple[str, str] = ("", "")) -> Document:
    """A document without a fault, from bytes; raises RecipeInvalid with every fault otherwise."""
    document = scan_document(raw, name, shown)
    if document.faults:
        raise RecipeInvalid(document.faults)
    return document


def scan_document(raw: bytes, name: str, shown: tuple[str, str] = ("", "")) -> Document:
    """Read `raw`; `name` is what findings call the file.

    `shown`: how the text begins, and what findings show in place of that (for text that was not given so).
    Raises RecipeInvalid where the text cannot be read at all.
    """
    text = _Text(raw, name, shown)
    nodes = text.compose()
    if text.fatal or not nodes or nodes[0] is None:
        if not text.faults:
            text.fault("YML08", 1, 1, 1, "the file is empty", "one recipe a file; see recipes/tiny.yaml")
        raise RecipeInvalid(text.faults)
    if len(nodes) > 1:
        mark = nodes[1].start_mark if nodes[1] is not None else None
        line = mark.line + 1 if mark else 1
        text.fault("YML08", line, 1, 1, "a second document", "one recipe a file: remove it and its `---`")
    reader = _Reader(text)
    document = Document(None, name, sha256_bytes(raw), text.shown_lines(), reader.keys, reader.values)
    document.data = reader.value(nodes[0], (), ())
    document.faults = text.faults
    document.bad, document.partial = reader.bad, reader.partial
    if text.skipped or len(nodes) > 1:
        document.partial.add(())
    if not isinstance(document.data, dict):
        if not text.faults:
            text.fault("YML08", 1, 1, 1, "a recipe is a mapping of fields", "see recipes/tiny.yaml")
        raise RecipeInvalid(text.faults)
    return document


class _Text:
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
        mark = mark_of(lines, Span(line, column + shift, line, max(end, column + 1) + shift))
        second = (mark_of(lines, also[0]), also[1]) if also else None
        self.faults.append(Diagnostic(rule, "error", message, self.name, line, column + shift, hint, mark, second))

    @property
    def shift(self) -> int:
        return len(self.shown[1]) - len(self.shown[0])

    def _conflicts(self) -> None:
        """Report conflict markers, and read on with the first side of each."""
        theirs = False
        for index, line in enumerate(self.given):
            mark = line.startswith(("<<<<<<< ", ">>>>>>> ", "||||||| ")) or line == "======="
            if line.startswith("<<<<<<< "):
                hint = "keep one side, and delete the lines with <<<<<<<, ======= and >>>>>>>"
                self.fault("YML13", index + 1, 1, len(line) + 1, "a merge conflict marker", hint)
            elif mark and not theirs and line.startswith(">>>>>>> "):
                self.fault("YML13", index + 1, 1, len(line) + 1, "a merge conflict marker", "delete the line")
            if line == "=======" or line.startswith("||||||| "):
                theirs = True
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
        """The documents' nodes; where the text is no YAML, without the sections in which it is not."""
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
            hint, also = _syntax_help(error, opened, self.lines)
            last = column + len(word.group() if word and not opened else "")
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


def _syntax_help(
    error: yaml.MarkedYAMLError, opened: Any, lines: list[str]
) -> tuple[str | None, tuple[Span, str] | None]:
    """What to type where PyYAML's words do not say it, and where the open bracket or quote is."""
    problem = error.problem or ""
    if opened is not None and opened.line < len(lines):
        own = "end of stream" in problem
        letter = lines[opened.line][opened.column : opened.column + 1]
        closing = {"[": "]", "{": "}"}.get(letter, letter)
        place = Span(opened.line + 1, opened.column + 1, opened.line + 1, opened.column + 2)
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


class _Reader:
    """Walks the node tree once, collecting data, places and faults."""

    def __init__(self, text: _Text) -> None:
        self.text = text
        self.keys: dict[Path_, Span] = {}
        self.values: dict[Path_, Span] = {}
        self.bad: set[Path_] = set()
        self.partial: set[Path_] = set()
        self.full = False

    def span(self, node: yaml.Node) -> Span:
        start, end = node.start_mark, node.end_mark
        block = isinstance(node, yaml.CollectionNode) and not node.flow_style
        first, last = (self.text.shift if mark.line == 0 else 0 for mark in (start, end))
        return Span(start.line + 1, start.column + 1 + first, end.line + 1, end.column + 1 + last, block)

    def fault(
        self,
        rule: str,
        node: yaml.Node,
        path: Path_,
        message: str,
        hint: str | None = None,
        also: tuple[Span, str] | None = None,
    ) -> None:
        start, end = node.start_mark, node.end_mark
        last = end.column + 1 if end.line == start.line else len(self.text.given[start.line]) + 1
        self.text.fault(rule, start.line + 1, start.column + 1, last, message, hint, also)
        self.bad.add(path)

    def value(self, node: yaml.Node, path: Path_, parents: tuple[int, ...]) -> Any:
        if len(self.values) >= LIMIT_VALUES:
            if not self.full:
                self.full = True
                message = f"more than {LIMIT_VALUES} values; an alias counts as all that it stands for"
                self.fault("YML14", node, (), message)
            return None
        self.values[path] = self.span(node)
        if id(node) in parents:
            self.fault("YML14", node, path, "the value contains itself", "write the value out")
            return None
        if len(parents) > LIMIT_DEPTH:
            self.fault("YML14", node, path, "too many values inside values")
            return None
        inside = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index), inside) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: Path_, parents: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or not _is_text(key) or key == "<<":
                self.partial.add(path)
                self.odd_key(key_node, key, path)
                continue
            here = (*path, key)
            if key in result:
                first = self.keys[here]
                message = f"`{key}` is given twice, first at line {first.line}"
                second = _Reader(self.text)
                self.fault("YML02", key_node, here, message, "keep one of them", (first, "first here"))
                second.value(value_node, here, parents)
                continue
            self.keys[here] = self.span(key_node)
            if key_node.style is None and key.lower() in _AMBIGUOUS:
                message = f"the key `{key}` is a boolean to some YAML readers and a word to others"
                self.fault("YML04", key_node, here, message, f'quote it: "{key}"')
            result[key] = self.value(value_node, here, parents)
        return result

    def odd_key(self, node: yaml.Node, key: str | None, path: Path_) -> None:
        here = (*path, key or "?")
        if key is None:
            self.fault("YML10", node, here, "a key must be a plain word", "write `name: value`")
        elif key == "<<":
            self.fault("YML05", node, here, "a merge key (`<<`)", "write the fields out")
        else:
            self.fault("YML14", node, here, HALF, "write the letter itself")

    def scalar(self, node: yaml.ScalarNode, path: Path_) -> Any:
        text: str = node.value
        if not _is_text(text):
            self.fault("YML14", node, path, HALF, "write the letter itself")
            return ""
        if node.tag.startswith("!") or (node.style is not None):
            return text
        if text in _NULLS:
            return None
        if text in _BOOLS:
            return _BOOLS[text]
        if (meant := _AMBIGUOUS.get(text.lower())) is not None:
            message = f"`{text}` is a boolean to some YAML readers and a word to others"
            self.fault("YML04", node, path, message, f'write {meant}, or quote the word: "{text}"')
            return text
        if _HASH.match(text):
            message = "this hash is a number to YAML, and its digits would be lost"
            self.fault("YML07", node, path, message, f'quote it: "{text}"')
            return text
        if _LEADING_ZERO.match(text):
            plain = text.lstrip("+-").lstrip("0") or "0"
            message = f"`{text}` has a leading zero, and some YAML readers take it as octal"
            self.fault("YML11", node, path, message, f'write {plain}, or quote the text: "{text}"')
            return text
        if _INT.match(text) and len(text) <= LIMIT_DIGITS:
            return int(text)
        if _HEX.match(text):
            return int(text, 16)
        if _FLOAT.match(text):
            number = float(text)
            if math.isinf(number):
                shown = text if len(text) <= 40 else f"{text[:20]}…{text[-4:]}"
                self.fault("YML14", node, path, f"`{shown}` is too large for a number", "write a smaller number")
            return number
        return text


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: an escape in YAML can name half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)
