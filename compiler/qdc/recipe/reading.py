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
from typing import Any

import yaml

from qdc.core.files import sha256_bytes
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid, Severity
from qdc.recipe.snippet import Mark
from qdc.recipe.text import Span, Text, mark_of

Path_ = tuple[str | int, ...]
LIMIT_DEPTH = 64
LIMIT_VALUES = 100_000
LIMIT_DIGITS = 4000

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")
_HASH = re.compile(r"(?=[0-9]+(e[0-9]+)?\Z)(.{40}|.{64})\Z")
_TAG = re.compile(r"(?:&\S+\s+)?(?P<tag>![^\s,\]}]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,3500}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_AMBIGUOUS = {"yes": "true", "no": "false", "on": "true", "off": "false", "y": "true", "n": "false"}
HALF = "an escape gives half of a surrogate pair, which is no text"


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
    text = Text(raw, name, shown)
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
    if reader.full:
        raise RecipeInvalid(text.faults)
    document.faults = text.faults
    document.bad, document.partial = reader.bad, reader.partial
    if text.skipped or len(nodes) > 1:
        document.partial.add(())
    if not isinstance(document.data, dict):
        if not text.faults:
            text.fault("YML08", 1, 1, 1, "a recipe is a mapping of fields", "see recipes/tiny.yaml")
        raise RecipeInvalid(text.faults)
    return document


class _Reader:
    """Walks the node tree once, collecting data, places and faults."""

    def __init__(self, text: Text) -> None:
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
        if (tag := self.tag(node)) is not None:
            hint = "write the value alone: quotes make it text, none leave it what it looks like"
            self.fault("YML15", node, path, f"an explicit tag (`{tag}`)", hint)
            return node.value if isinstance(node, yaml.ScalarNode) else None
        inside = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index), inside) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self.scalar(node, path)

    def tag(self, node: yaml.Node) -> str | None:
        """The tag that is written before a value."""
        mark = node.start_mark
        match = _TAG.match(self.text.given[mark.line][mark.column :]) if mark.line < len(self.text.given) else None
        return match["tag"] if match else None

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
            if not key_node.style and key.lower() in _AMBIGUOUS:
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
        if node.style:
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
