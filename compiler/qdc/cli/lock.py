"""`qdc lock RECIPE`: resolve every source to file digests in the lock beside the recipe, and fetch its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdc.cli.common import answer, note, open_store, parser
from qdc.cli.progress import listener
from qdc.recipe.load import Loaded, load
from qdc.rules.check import require_lock
from qdc.sources.facts import attach
from qdc.sources.lock import Locked, lock_path, lockable, read_lock, state, write_lock
from qdc.sources.locking import Changed, lock, missing
from qdc.store.store import Store
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("lock", __doc__ or "", sets=True)
    options.add_argument("recipe", type=Path)
    options.add_argument(
        "--headers-only", action="store_true", help="leave weights and data on the hub; take the digests that it gives"
    )
    options.add_argument(
        "--check", action="store_true", help="only say whether lock, recipe and store agree; exit 1 if not"
    )
    given = options.parse_args(arguments)
    store = open_store(given.store, given.recipe)
    loaded = load(given.recipe, given.sets)
    if given.check:
        return _check(loaded, given.recipe, store, given.headers_only, given.json)
    shown = listener(given.quiet)
    try:
        with in_use(store.root, lambda: note("waiting for `qdc store gc` to end")):
            made = lock(loaded, store, read_lock(given.recipe) or {}, shown, headers_only=given.headers_only)
    except Changed as changed:
        require_lock(attach(loaded), changed.state)
        raise
    finally:
        shown.close()
    path = lock_path(given.recipe)
    written = bool(made.entries or path.is_file()) and write_lock(given.recipe, made.entries)
    rows = [_row(store, place, entry, made.fetched.get(place, 0)) for place, entry in made.entries.items()]
    if given.json:
        answer({"lock": str(path), "ok": True, "written": written, "sources": rows, "faults": []})
    else:
        _print(given.recipe, path, rows, written)
    return 0


def _row(store: Store, place: str, entry: Locked, fetched: int) -> dict[str, Any]:
    return {
        "path": place,
        "tree": entry.tree.digest,
        "files": len(entry.files),
        "bytes": entry.tree.size,
        "fetched": fetched,
        "missing": missing(store, entry),
        "licence": entry.licence,
    }


def _print(recipe: Path, path: Path, rows: list[dict[str, Any]], written: bool) -> None:
    if not rows:
        print(f"{recipe} names no source that a lock must pin")
        return
    width = max(len(row["path"]) for row in rows)
    for row in rows:
        came = f"fetched {size_text(row['fetched'])}" if row["fetched"] else "nothing to fetch"
        left = f", {len(row['missing'])} left where they are" if row["missing"] else ""
        print(f"{row['path'].ljust(width)}  {row['files']} files, {size_text(row['bytes'])}: {came}{left}")
    print(f"wrote {path}" if written else f"{path} is up to date")


def size_text(size: int) -> str:
    """Bytes for a person."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def _check(loaded: Loaded, recipe: Path, store: Store, headers_only: bool, as_json: bool) -> int:
    wanted, locked = lockable(loaded.model), read_lock(recipe) or {}
    faults = [f"{place} is not locked: {why}" for place, why in state(loaded).lacking.items()]
    faults += [f"{place} is locked, and the recipe does not name it" for place in locked if place not in wanted]
    if not headers_only:
        for place, entry in locked.items():
            if place in wanted and (lacking := missing(store, entry)):
                faults.append(f"{place}: the store lacks {len(lacking)} of {len(entry.files)} files: {lacking[0]}")
    if as_json:
        rows = [_row(store, place, entry, 0) for place, entry in locked.items() if place in wanted]
        path = str(lock_path(recipe))
        answer({"lock": path, "ok": not faults, "written": False, "sources": rows, "faults": faults})
    else:
        for fault in faults:
            print(fault)
        print(f"{lock_path(recipe)}: type `qdc lock {recipe}`" if faults else f"{recipe} and its lock agree")
    return 1 if faults else 0
