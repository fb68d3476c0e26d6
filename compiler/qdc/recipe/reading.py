"""YAML text to plain data with the place of every key and value.

Scalars resolve by the YAML 1.2 core schema (`2e-6` is a number, `no` is not a boolean: it is refused, because
half of all readers think otherwise). This module does not know which fields a recipe has.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qdc.core.files import sha256_bytes
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid

Path_ = tuple[str | int, ...]
Place = tuple[int, int]
LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 64
LIMIT_VALUES = 100_000
LIMIT_DIGITS = 4000

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_AMBIGUOUS = {"yes", "no", "on", "off", "y", "n"}
HALF = "an escape gives half of a surrogate pair, which is no text"


@dataclass
class Document:
    """`data`: plain values. `keys` and `values`: path -> (line, column), both from 1. `sha256`: of the bytes read."""

    data: Any
    file: str
    sha256: str
    keys: dict[Path_, Place] = field(default_factory=dict)
    values: dict[Path_, Place] = field(default_factory=dict)

    def place(self, path: Path_) -> Place | None:
        """The place of the value at `path`, or of the nearest parent that the file has."""
        for length in range(len(path), -1, -1):
            if (found := self.values.get(path[:length])) is not None:
                return found
        return None


def read_document(path: Path) -> Document:
    """Read a recipe file. Raises RecipeInvalid with the place of each fault found."""
    name = str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecipeInvalid(
            [
                Diagnostic(
                    "file",
                    "error",
                    f"cannot read the recipe: {error.strerror}",
                    file=name,
                    hint="give the path of an existing YAML file, e.g. `qdc build recipes/tiny.yaml`",
                )
            ]
        ) from None
    return parse_document(raw, name)


def parse_document(raw: bytes, name: str) -> Document:
    """As `read_document`, from bytes; `name` is what errors call the file."""

    def fail(message: str, line: int = 1, column: int = 1, hint: str | None = None) -> RecipeInvalid:
        return RecipeInvalid([Diagnostic("yaml", "error", message, name, line, column, hint)])

    if len(raw) > LIMIT_BYTES:
        raise fail(f"the file has {len(raw)} bytes; a recipe has at most {LIMIT_BYTES}")
    if raw.startswith(b"\xef\xbb\xbf"):
        raise fail("the file starts with a byte order mark", hint="save it as UTF-8 without BOM")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise fail(f"byte 0x{raw[error.start]:02x} is not UTF-8", line, column, "save the file as UTF-8") from None
    for number, line_text in enumerate(text.splitlines(), 1):
        if line_text.startswith(("<<<<<<< ", ">>>>>>> ")) or line_text == "=======":
            raise fail("a merge conflict marker", number, 1, "resolve the conflict first")
        indent = line_text[: len(line_text) - len(line_text.lstrip())]
        if "\t" in indent:
            raise fail("a tab in the indentation", number, indent.index("\t") + 1, "indent with spaces")
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise fail(f"not YAML: {error.problem or error.context}", line, column) from None
    except yaml.YAMLError as error:
        raise fail(f"not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise fail("too many values inside values") from None
    if len(nodes) != 1 or nodes[0] is None:
        where = nodes[1].start_mark if len(nodes) > 1 and nodes[1] else None
        what = "a second document" if len(nodes) > 1 else "the file is empty"
        raise fail(what, where.line + 1 if where else 1, 1, "one recipe a file")
    reader = _Reader(name)
    document = Document(None, name, sha256_bytes(raw), reader.keys, reader.values)
    document.data = reader.value(nodes[0], (), ())
    if reader.faults:
        raise RecipeInvalid(reader.faults)
    if not isinstance(document.data, dict):
        raise fail("a recipe is a mapping of fields", hint="see recipes/tiny.yaml")
    return document


class _Reader:
    """Walks the node tree once, collecting data, places and faults."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: dict[Path_, Place] = {}
        self.values: dict[Path_, Place] = {}
        self.faults: list[Diagnostic] = []
        self.full = False

    def fault(self, node: yaml.Node, message: str, hint: str | None = None) -> None:
        mark = node.start_mark
        self.faults.append(Diagnostic("yaml", "error", message, self.name, mark.line + 1, mark.column + 1, hint))

    def value(self, node: yaml.Node, path: Path_, parents: tuple[int, ...]) -> Any:
        if len(self.values) >= LIMIT_VALUES:
            if not self.full:
                self.full = True
                self.fault(node, f"more than {LIMIT_VALUES} values; an alias counts as all that it stands for")
            return None
        self.values[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if id(node) in parents:
            self.fault(node, "the value contains itself")
            return None
        if len(parents) > LIMIT_DEPTH:
            self.fault(node, "too many values inside values")
            return None
        inside = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index), inside) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, path: Path_, parents: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self.fault(key_node, "a key must be a plain word")
                continue
            if not _is_text(key):
                self.fault(key_node, HALF)
                continue
            if key == "<<":
                self.fault(key_node, "a merge key (`<<`)", "write the fields out")
                continue
            here = (*path, key)
            if key in result:
                line, _ = self.keys[here]
                self.fault(key_node, f"`{key}` is given twice, first at line {line}", "keep one of them")
                continue
            self.keys[here] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            result[key] = self.value(value_node, here, parents)
        return result

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if not _is_text(text):
            self.fault(node, HALF)
            return ""
        if node.tag.startswith("!") or (node.style is not None):
            return text
        if text in _NULLS:
            return None
        if text in _BOOLS:
            return _BOOLS[text]
        if text.lower() in _AMBIGUOUS:
            self.fault(
                node,
                f"`{text}` is a boolean to some YAML readers and a word to others",
                f'write true or false, or quote it: "{text}"',
            )
            return text
        if _LEADING_ZERO.match(text):
            self.fault(node, f"`{text}` has a leading zero", "drop the zero, or quote it if it is text")
            return text
        if _INT.match(text) and len(text) <= LIMIT_DIGITS:
            return int(text)
        if _HEX.match(text):
            return int(text, 16)
        if _FLOAT.match(text):
            number = float(text)
            if math.isinf(number):
                self.fault(node, f"`{text}` is too large for a number")
            return number
        return text


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: an escape in YAML can name half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)
