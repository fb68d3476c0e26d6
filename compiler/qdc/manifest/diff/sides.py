"""Two sides of a comparison that are no two documents: locks, measurements, a document against facts from bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdc.core import canonical
from qdc.manifest.diff.words import Change, change, said, short
from qdc.manifest.flat import ABSENT, flatten


def lock_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    """Sources of two locks, recipe path -> `{identity, files, licence, facts}`, or -> the digest of all its files.

    What headers say of a checkpoint (`facts`) is told only where no file differs.
    """
    for place in sorted(a.keys() | b.keys()):
        was, now = a.get(place), b.get(place)
        if was is None or now is None or not (isinstance(was, Mapping) and isinstance(now, Mapping)):
            if canonical.dumps(was) != canonical.dumps(now):
                sides = ["none" if side is None else _whole(side) for side in (was, now)]
                yield change("lock", f"lock.{place}", was, now, f"lock of {place}: {sides[0]} -> {sides[1]}")
            continue
        yield from _source_changes(place, was, now)


def measurement_changes(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Measurements of two builds, by what, subject, metric and comparison; with intervals, and whether they overlap."""
    was, now = ({_name(row): row for row in rows} for rows in (a, b))
    for name in sorted(was.keys() | now.keys()):
        left, right = (_figures(rows.get(name)) for rows in (was, now))
        if left == right:
            continue
        text = f"measured {name}: {_said(left)} -> {_said(right)}{_overlap(left, right)}"
        yield change("measurement", f"measurements[{name}]", left, right, text)


def _source_changes(place: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    left, right = flatten(dict(was)), flatten(dict(now))
    differing = sorted(
        path
        for path in left.keys() | right.keys()
        if canonical.dumps(left.get(path)) != canonical.dumps(right.get(path)) or (path in left) != (path in right)
    )
    files = {*(was.get("files") or {}), *(now.get("files") or {})}
    for path in sorted(files):
        pair = [(side.get("files") or {}).get(path) for side in (was, now)]
        if canonical.dumps(pair[0]) != canonical.dumps(pair[1]):
            sides = ["none" if entry is None else short(entry.get("sha256")) for entry in pair]
            text = f"lock of {place}: {path} {sides[0]} -> {sides[1]}"
            yield change("lock", f"lock.{place}.files[{path}]", pair[0], pair[1], text)
    moved = any(path.startswith("files") for path in differing)
    for path in differing:
        if path.startswith("files") or (moved and path.startswith("facts")):
            continue
        values = (left.get(path, ABSENT), right.get(path, ABSENT))
        name = path.removeprefix("identity.")
        text = f"lock of {place}: {name} {said(values[0])} -> {said(values[1])}"
        yield change("lock", f"lock.{place}.{path}", *values, text)


def _whole(side: Any) -> str:
    return f"{len(side.get('files') or {})} files" if isinstance(side, Mapping) else short(side)


def _name(row: Mapping[str, Any]) -> str:
    against = f" against {row['against']}" if row.get("against") else ""
    return f"{row.get('what')} of {row.get('subject')}, {row.get('metric')}{against}"


def _figures(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {key: row.get(key) for key in ("value", "low", "high", "n")}


def _said(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "none"
    text = _number(figures["value"])
    if figures["low"] is not None and figures["high"] is not None:
        text += f" ({_number(figures['low'])} to {_number(figures['high'])})"
    return text


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else said(value)


def _overlap(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> str:
    """Whether both 95 % intervals share a value; nothing where one of them is not known."""
    if left is None or right is None or any(side[key] is None for side in (left, right) for key in ("low", "high")):
        return ""
    apart = left["high"] < right["low"] or right["high"] < left["low"]
    return "; the intervals do not overlap" if apart else "; the intervals overlap"
