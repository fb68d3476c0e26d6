"""What code a stage's key covers: its module and all that it imports from `methods`, `formats` and the rooms
of the image, without comments, docstrings and formatting.

`core`, logging, progress and execution are outside: changing them reruns nothing. This module reads source
files; it does not import them.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.core.files import sha256_bytes
from qdc.core.resources import resource
from qdc.graph.table import KINDS, Kind

PACKAGE = Path(__file__).resolve().parent.parent
OUTSIDE = ("qdc", "core")


def code_files(package: Path = PACKAGE, only: str | None = None) -> dict[str, dict[str, str]]:
    """Kind (or the one named) -> file of this package -> SHA-256 of what it means; of data files, of their bytes."""
    parsed: dict[Path, tuple[str, list[Path]]] = {}
    kinds = KINDS if only is None else {only: KINDS[only]}
    return {name: _kind_files(kind, package, parsed) for name, kind in kinds.items()}


def code_digest(files: dict[str, str]) -> str:
    """The digest of a kind's code, as keys have it."""
    return canonical.digest(files)


def code_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Kind -> SHA-256 of the code that it runs."""
    return {kind: code_digest(files) for kind, files in code_files(package).items()}


def _kind_files(kind: Kind, package: Path, parsed: dict[Path, tuple[str, list[Path]]]) -> dict[str, str]:
    start = package / "stages" / f"{kind.module}.py"
    front, files = [start], {start}
    while front:
        path = front.pop()
        if path not in parsed:
            parsed[path] = _parse(path, package)
        for other in parsed[path][1]:
            if other not in files:
                files.add(other)
                front.append(other)
    content = {path.relative_to(package).as_posix(): parsed[path][0] for path in files if parsed[path][0] != NOTHING}
    for pattern in kind.data:
        for name, path in _data_files(pattern, package):
            content[name] = sha256_bytes(path.read_bytes())
    return content


def _data_files(pattern: str, package: Path) -> list[tuple[str, Path]]:
    if pattern.startswith("@"):
        return [(pattern, resource(pattern[1:]))]
    found = [path for path in package.glob(pattern) if path.is_file() and "__pycache__" not in path.parts]
    return sorted((path.relative_to(package).as_posix() + "#data", path) for path in found)


def _parse(path: Path, package: Path) -> tuple[str, list[Path]]:
    """Digest of a module's meaning, and the files that it imports from this package."""
    imports: list[ast.Import | ast.ImportFrom] = []
    meaning = hashlib.sha256(canonical.dumps(_plain(ast.parse(path.read_bytes(), str(path)), imports))).hexdigest()
    return meaning, sorted(_imports(imports, path, package))


def _is_docstring(statement: ast.stmt) -> bool:
    """A string that stands alone: below a definition, or below the attribute or constant that it explains."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
UNSAID = frozenset({"type_comment", "ctx", "kind"})


def _plain(node: Any, imports: list[ast.Import | ast.ImportFrom]) -> Any:
    """A syntax tree as nested lists, without docstrings and without empty fields, so that new Python versions add
    nothing. Adds the import statements on the way to `imports`: a tree is walked once, since a store's first plan
    waits for all of them."""
    if isinstance(node, ast.AST):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, DEFINITIONS):
            node.body = [statement for statement in node.body if not _is_docstring(statement)]
        said = []
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name not in UNSAID:
                said.append([name, _plain(value, imports)])
        return [type(node).__name__, said]
    if isinstance(node, list):
        return [_plain(item, imports) for item in node]
    if isinstance(node, bool | str) or node is None:
        return node
    return [type(node).__name__, repr(node)]


NOTHING = hashlib.sha256(canonical.dumps(_plain(ast.parse(""), []))).hexdigest()
"""What a module without statements means: it is as good as absent."""


def _imports(statements: list[ast.Import | ast.ImportFrom], path: Path, package: Path) -> set[Path]:
    """Files of this package that run when the module at `path` is imported: with each module, its packages."""
    here = ["qdc", *path.relative_to(package).with_suffix("").parts]
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            base = here[: -node.level] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    files: set[Path] = set()
    for name in names:
        parts = tuple(name.split("."))
        if parts[0] == "qdc" and parts[:2] != OUTSIDE:
            for length in range(2, len(parts) + 1):
                stem = package.joinpath(*parts[1:length])
                found = (stem.parent / f"{stem.name}.py", stem / "__init__.py")
                files.update(file for file in found if file.is_file() and file.stat().st_size)
    return files
