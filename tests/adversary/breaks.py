"""Ways to break the engine, each as a change that stands while a history is told: proof that the oracle can fail."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adversary.driver import replaced
from adversary.trial import FRESH, STALE

from qdc.graph.instances import Instance
from qdc.recipe.reading import _Reader
from qdc.store.memo import StatMemo
from qdc.store.store import Store
from qdc.store.trees import Tree


@dataclass(frozen=True)
class Break:
    """`kind`: what the engine then is. `change`: within it, the engine is broken. `shown`: steps that show it."""

    kind: str
    change: Callable[[], contextlib.AbstractContextManager[None]]
    shown: tuple[str, ...]


BREAKS: dict[str, Break] = {}


def breaks(name: str, kind: str, *shown: str) -> Callable[[Callable[[], Iterator[None]]], None]:
    def keep(function: Callable[[], Iterator[None]]) -> None:
        BREAKS[name] = Break(kind, contextlib.contextmanager(function), shown)

    return keep


@contextlib.contextmanager
def method(owner: type, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Within, a method is what `made` makes of it."""
    real = getattr(owner, name)
    setattr(owner, name, made(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def components(change: Callable[[dict[str, Any]], Any]) -> contextlib.AbstractContextManager[None]:
    """Keys are made of other components."""

    def made(real: Any) -> Any:
        def call(self: Instance, digests: dict[str, str]) -> dict[str, Any]:
            value: dict[str, Any] = real(self, digests)
            return {**value, **change(value)}

        return call

    return method(Instance, "components", made)


@breaks("inputs are sorted", FRESH, "swap the roles of two inputs")
def _sorted() -> Iterator[None]:
    with components(
        lambda value: {"inputs": dict(zip(value["inputs"], sorted(value["inputs"].values()), strict=True))}
    ):
        yield


@breaks("no code in the key", FRESH, "constant of a stage")
def _no_code() -> Iterator[None]:
    with components(lambda value: {"code": ""}):
        yield


@breaks("packages are ignored", FRESH, "version of a package that matters")
def _packages() -> Iterator[None]:
    with components(lambda value: {"packages": {}}):
        yield


@breaks("parameters are rounded", FRESH, "value of a parameter")
def _rounded() -> Iterator[None]:
    with components(lambda value: {"params": {name: round(number, 3) for name, number in value["params"].items()}}):
        yield


@breaks("mtime is in the key", STALE, "touch", "chmod +x")
def _mtime() -> Iterator[None]:
    def made(real: Any) -> Any:
        def call(self: Store, folder: Path) -> Tree:
            tree: Tree = real(self, folder)
            times = [path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()]
            (entry, *rest) = tree.entries
            named = type(entry)(f"{sum(times)}/{entry.path}", entry.size, entry.mode, entry.sha256)
            changed = Tree(tuple(sorted([named, *rest], key=lambda item: item.path)))
            self.add_tree(changed)
            return changed

        return call

    with method(Store, "ingest", made):
        yield


@breaks("helpers are not followed", FRESH, "constant of a helper")
def _helpers() -> Iterator[None]:
    with replaced([("qdc.graph.code", "_imports", lambda tree, path, package: set())]):
        yield


@breaks("data files are not covered", FRESH, "template, engine row or launcher")
def _data() -> Iterator[None]:
    with replaced([("qdc.graph.code", "_data_files", lambda pattern, package: [])]):
        yield


@breaks("comments are covered", STALE, "comment, docstring or formatting")
def _comments() -> Iterator[None]:
    import qdc.graph.code as code

    parse = code._parse

    def parsed(path: Path, package: Path) -> Any:
        return hashlib.sha256(path.read_bytes()).hexdigest(), parse(path, package)[1]

    with replaced([("qdc.graph.code", "_parse", parsed)]):
        yield


@breaks("docstrings are covered", STALE, "comment, docstring or formatting")
def _docstrings() -> Iterator[None]:
    with replaced([("qdc.graph.code", "_is_docstring", lambda statement: False)]):
        yield


@breaks("no racy rule", FRESH, "input or recipe edited again within one tick")
def _racy() -> Iterator[None]:
    with replaced([("qdc.store.memo", "TICK_NS", -(10**12))]):
        yield


@breaks("ctime is not looked at", FRESH, "same size and restored mtime")
def _ctime() -> Iterator[None]:
    import qdc.store.memo as memo

    signature = memo.signature
    changed = lambda status: [*signature(status)[:4], 0]  # noqa: E731
    with replaced([("qdc.store.memo", "signature", changed), ("qdc.store.intake", "signature", changed)]):
        yield


@breaks("a record without its output counts", FRESH, "object gone or of another size")
def _outputs() -> Iterator[None]:
    with method(Store, "has_tree", lambda real: lambda self, digest: True):
        yield


@breaks("sizes of objects are not looked at", FRESH, "object gone or of another size")
def _sizes() -> Iterator[None]:
    def made(real: Any) -> Any:
        return lambda self, sha256, size: self.object_path(sha256).is_file()

    with method(Store, "has", made):
        yield


@breaks("times of objects are not looked at", FRESH, "object with a flipped bit")
def _seals() -> Iterator[None]:
    with replaced([("qdc.store.store", "sealed", lambda status: True)]):
        yield


@breaks("objects are not checked where they are used", FRESH, "object with a flipped bit")
def _use() -> Iterator[None]:
    def made(real: Any) -> Any:
        def call(self: StatMemo, path: Path) -> str:
            return path.name if len(path.name) == 64 else str(real(self, path))

        return call

    trusted = [("qdc.store.store", "sha256_file", lambda path: path.name)]
    with method(StatMemo, "digest", made), replaced(trusted):
        yield


@breaks("a worker does not look at its code", FRESH, "code edited before a stage is loaded")
def _unchecked() -> Iterator[None]:
    with replaced([("qdc.run.worker", "check_code", lambda job: None)]):
        yield


@breaks("which record counts is not kept", FRESH, "sampled stage that differs on rerun", "choose among reruns")
def _choice() -> Iterator[None]:
    with method(Store, "select", lambda real: lambda self, key, number, because: None):
        yield


@breaks("numbers keep their spelling", STALE, "another spelling of the same number")
def _spelling() -> Iterator[None]:
    texts: dict[float, str] = {}

    def made(real: Any) -> Any:
        def call(self: Any, node: Any, path: Any) -> Any:
            value = real(self, node, path)
            if isinstance(value, float):
                texts[value] = node.value
            return value

        return call

    written = components(
        lambda value: {"params": {name: texts.get(number, number) for name, number in value["params"].items()}}
    )
    with method(_Reader, "scalar", made), written:
        yield


@breaks("modes are not kept", FRESH, "chmod +x")
def _modes() -> Iterator[None]:
    import qdc.store.trees as trees

    plain = lambda entry: [entry.path, entry.size, 0o644, entry.sha256]  # noqa: E731
    with method(trees.Tree, "as_json", lambda real: lambda self: [plain(entry) for entry in self.entries]):
        yield


@breaks("builders do not lock keys", STALE, "two builders at once")
def _locks() -> Iterator[None]:
    def made(real: Any) -> Any:
        @contextlib.contextmanager
        def call(self: Store, name: str, *, wait: bool = True) -> Iterator[int | None]:
            with real(self, f"{name}-{threading.get_ident()}" if len(name) == 64 else name, wait=wait) as held:
                yield held

        return call

    with method(Store, "lock", made):
        yield
