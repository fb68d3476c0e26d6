"""Removes what `gc` decided, in an order in which a kill at any instant leaves no record without its output.

Builds are forgotten first, then records go, then trees, then objects. Builds and trees are moved to `forgotten/` and
removed last: they say what was doomed, so that the next run ends what an interrupted one began.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from qdc.core.files import fsync_folder
from qdc.store import gc
from qdc.store.gc import Decision, Policy
from qdc.store.store import Store
from qdc.store.use import alone


def sweep(store: Store, policy: Policy, now: float) -> Decision:
    """Decide and remove, while nobody uses the store. Raises QdcError where somebody does, and OSError."""
    with alone(store.root):
        store.sweep_staging()
        made = gc.decide(gc.holdings(store.root), policy, now)
        _remove(store.root, made)
        return made


def _remove(root: Path, made: Decision) -> None:
    forgotten = root / "forgotten"
    _move(made.build_files, forgotten / "builds")
    _unlink(made.records)
    for folder in {path.parent for path in made.records}:
        if not any(path.stem.isdecimal() for path in folder.glob("*.json")):
            shutil.rmtree(folder)
    _sync(root / "records")
    _move(made.trees, forgotten / "trees")
    _unlink(made.objects)
    for path in made.rest:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if forgotten.is_dir():
        shutil.rmtree(forgotten)


def _move(paths: list[Path], folder: Path) -> None:
    """Move files into a folder of what is forgotten, and see to it that the disk has them there."""
    moved = [path for path in paths if path.parent != folder]
    if moved:
        folder.mkdir(parents=True, exist_ok=True)
        for path in moved:
            os.replace(path, folder / path.name)
        _sync(folder, *{path.parent for path in moved})


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    _sync(*{path.parent for path in paths})


def _sync(*folders: Path) -> None:
    for folder in folders:
        with suppress(FileNotFoundError):
            fsync_folder(folder)
