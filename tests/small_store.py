"""Stores made by hand: two stages a build, a few bytes a file, and a clock that can be turned forward."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.store.store import Store

DAY = 86400.0
IMAGE = "sha256:" + "0" * 64


def publish(store: Store, files: dict[str, bytes]) -> str:
    """The digest of a published tree."""
    with store.staging() as work:
        for name, data in files.items():
            path = work / "out" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return store.publish(work / "out").digest


def stage(store: Store, name: str, value: Any, inputs: dict[str, str], files: dict[str, bytes]) -> dict[str, Any]:
    """Publish a stage's output with its record and its log; returns its row of a build record."""
    components = {
        "scheme": 1,
        "stage": name,
        "params": {"value": value},
        "inputs": inputs,
        "code": "0" * 64,
        "packages": {},
        "determinism": "exact",
    }
    key, output = canonical.digest(components), publish(store, files)
    row = {"instance": name, "stage": name, "determinism": "exact", "components": components, "output": output}
    store.add_record(key, {**row, "seconds": 0.5, "finished": "2026-01-01T00:00:00Z", "threads": 1, "hardware": {}})
    store.log_path(key).write_text("said\n")
    more = {"code": "0" * 64, "packages": {}, "determinism": "exact"}
    return {"name": name, "ran": True, "seconds": 0.5, "output": output, "key": key, "inputs": inputs, **more}


def stages(store: Store, value: Any, source: str | None = None) -> list[dict[str, Any]]:
    """Two stages: `weights` (a file of its own and one that all have) and `image`, made from it."""
    data = str(value).encode()
    first = stage(
        store,
        "weights",
        value,
        {"source": source} if source else {},
        {"w/model": b"weights " + data, "w/shared": b"the same everywhere"},
    )
    return [first, stage(store, "image", value, {"weights": first["output"]}, {"image.json": b"image " + data})]


def build(store: Store, recipe: str, value: Any, id: str, source: str | None = None) -> dict[str, Any]:
    """A build of the two stages, with its log."""
    rows = stages(store, value, source)
    image = {"name": "x", "id": IMAGE, "artifact": rows[-1]["output"]}
    made = {
        "build": id,
        "recipe_name": Path(recipe).stem,
        "recipe_file": recipe,
        "recipe_digest": canonical.digest(recipe),
        "recipe": {"value": value},
        "stages": rows,
        "image": image,
        "started": "2026-01-01T00:00:00Z",
        "measurements": [],
    }
    store.add_build(made)
    (store.root / "log").mkdir(exist_ok=True)
    (store.root / "log" / f"{id}.json").write_bytes(canonical.dumps({"log": id, "build": id}))
    return made


def spoil(path: Path, data: bytes) -> None:
    """Write to a file of the store without a trace in its mtime: only reading it can tell."""
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def pass_days(root: Path, days: float) -> None:
    """Make every file and folder so much older."""
    for place, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            before = os.lstat(path).st_mtime
            os.utime(path, (before - days * DAY, before - days * DAY))


def listing(root: Path) -> dict[str, int]:
    """Every file that counts, with its size: no locks, no memos of stat, no empty folders."""
    skipped = {"locks", "staging"}
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in skipped and "stat" not in path.parts
    }
