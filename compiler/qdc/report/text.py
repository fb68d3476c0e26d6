"""Plain text for people: aligned tables, measurement rows, reasons. Knows no verb and no store."""

from __future__ import annotations

from typing import Any


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned by their widest cell; figures (cells that start with a digit) to the right."""
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    right = [all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows) for index in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if flag else cell.ljust(width)
            for cell, width, flag in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def measurement_table(rows: list[dict[str, Any]]) -> str:
    """Rows of evaluations and gates: what, value, 95 % interval, n, how."""
    cells = []
    for row in rows:
        low, high = row.get("low"), row.get("high")
        between = f"{figure(low)} to {figure(high)}" if low is not None and high is not None else "-"
        cells.append(
            [
                str(row["what"]),
                str(row["subject"]),
                str(row["metric"]),
                figure(row["value"]),
                between,
                str(row["n"]),
                str(row.get("against") or "-"),
            ]
        )
    return table(["measured", "of", "metric", "value", "95 % interval", "n", "against"], cells)


def test_lines(tests: list[dict[str, Any]]) -> list[str]:
    """Statistical tests of an evaluation, one line each."""
    lines = []
    for test in tests:
        head = f"{test['subject']} against {test['against']}, {test['metric']} (n {test['n']})"
        if "p" in test:
            counts = ", ".join(
                f"{key.replace('_', ' ')} {value}" for key, value in sorted(test.items()) if key.endswith("_changed")
            )
            lines.append(f"{head}: {counts}; {test['method']}: p = {test['p']:.2g}")
        else:
            lines.append(
                f"{head}: {test['value']:+.3f}, {figure(test['low'])} to {figure(test['high'])}; {test['method']}"
            )
    return lines


def figure(value: Any) -> str:
    """A number with as many digits as mean something."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.5f}"


def reason_text(reason: dict[str, Any]) -> str:
    """One reason of a plan in words."""
    kind, what, was, now = reason["kind"], reason["what"], reason["was"], reason["now"]
    if kind == "parameter":
        where = f" ({reason['where']})" if reason.get("where") else ""
        return f"{reason.get('path', what)}: {short(was)} -> {short(now)}{where}"
    if kind == "input":
        return f"input {what} changed: {short(was)} -> {short(now)}"
    if kind == "package":
        return f"package {what}: {short(was)} -> {short(now)}"
    if kind == "upstream":
        return f"waits for {what}, which is {now}"
    if kind == "lock":
        return f"waits for the lock of {what}: `qdc lock`"
    if kind == "file":
        return f"the code changed: {what}"
    if kind == "code":
        return "the stage's code changed"
    return str(what)


def short(value: Any) -> str:
    """A value for one line of text."""
    text = "none" if value is None else str(value)
    if len(text) == 64 and all(letter in "0123456789abcdef" for letter in text):
        return text[:12]
    return text if len(text) <= 60 else f"{text[:57]}..."
