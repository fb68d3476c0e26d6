"""The table of a sweep: a line a variant with what differs, sizes, what was predicted and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qdc.measure.figures import Figure
from qdc.measure.predict import Predictions
from qdc.report.plan import amount, duration
from qdc.report.text import figure, table

_ASSUMED = "~"


@dataclass(frozen=True)
class Row:
    """`set`: recipe path -> value of what differs; `bytes`: of the image; `measured`: rows of its build record."""

    number: int
    set: dict[str, str]
    build: str | None
    bytes: int | None
    measured: list[dict[str, Any]]
    predicted: Predictions | None
    error: str | None = None


def sweep_lines(rows: Sequence[Row]) -> list[str]:
    """The table, then why variants failed, and how to compare two. A column in which nothing stands is left out."""
    columns: list[tuple[str, Callable[[Row], str]]] = [("", lambda row: str(row.number))]
    columns += [(path, lambda row, path=path: row.set[path]) for path in rows[0].set]  # type: ignore[misc]
    columns += [
        ("predicted size", lambda row: _size(row)),
        ("predicted time", lambda row: _time(row)),
        ("predicted speed-up", lambda row: _speedup(row)),
        ("size", lambda row: "-" if row.bytes is None else _plain(amount(row.bytes))),
    ]
    metrics = dict.fromkeys(str(item["metric"]) for row in rows for item in row.measured)
    columns += [(metric, lambda row, metric=metric: _last(row, metric)) for metric in metrics]  # type: ignore[misc]
    columns.append(("build", lambda row: row.build or ("failed" if row.predicted is not None else "invalid")))
    cells = [[cell(row) for row in rows] for _, cell in columns]
    kept = [index for index, column in enumerate(cells) if any(text != "-" for text in column)]
    lines = table(
        [columns[index][0] for index in kept], [[cells[index][at] for index in kept] for at in range(len(rows))]
    ).split("\n")
    if metrics:
        lines += ["", "measured: of what is served, where it was measured in that form; `qdc show BUILD` has every row"]
    if any(_ASSUMED in cell for column in cells for cell in column):
        lines.append(f"{_ASSUMED} rests on an assumption; --json gives the source of every figure")
    for row in rows:
        if row.error is not None:
            lines.append(f"variant {row.number}: {row.error}")
    done = [row.build for row in rows if row.build is not None]
    if len(set(done)) > 1:
        lines.append(f"`qdc diff {done[0]} {done[-1]}` compares two of them")
    return lines


def _plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def _mark(found: Figure) -> str:
    return _ASSUMED if found.assumed else ""


def _size(row: Row) -> str:
    image = row.predicted.image if row.predicted else None
    return _plain(f"{_mark(image.total)}{amount(image.total.value)}") if image else "-"


def _time(row: Row) -> str:
    """Of the stages that were to run for it, on one device."""
    hours = [item.hours for item in row.predicted.times if item.hours is not None] if row.predicted else []
    guessed = any(item.assumed for item in hours)
    return _plain(f"{_ASSUMED if guessed else ''}{duration(sum(item.value for item in hours))}") if hours else "-"


def _speedup(row: Row) -> str:
    found = row.predicted.roofline if row.predicted else None
    return f"{_ASSUMED if found.assumed else ''}{found.speedup(found.regimes):.2f}x" if found else "-"


def _last(row: Row, metric: str) -> str:
    """The last row of a metric: evaluations go from the first form of a model to the one that is served."""
    found = [item["value"] for item in row.measured if item["metric"] == metric]
    return figure(found[-1]) if found else "-"
