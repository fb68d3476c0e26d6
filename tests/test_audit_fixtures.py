"""Every image and folder of audit_fixtures is judged as expected.yaml says, through the command line's own path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import build

from qdc.audit.audit import audit, exit_code
from qdc.audit.images import open_image
from qdc.core import canonical

ROWS = build.expectations()


def report_of(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    place, _, name = build.write(row["id"], folder).partition(":")
    expect = build.original() if row.get("expect") == "original" else None
    with open_image(place, name) as reader:
        return audit(reader, require=row.get("require", ()), expect=expect, run=row.get("run"))


def differences(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """What of the report is not as expected, in words."""
    found = {verdict["claim"]: verdict for verdict in report["verdicts"]}
    wrong = []
    for claim, expected in row["expected"].items():
        word, value = (expected, ...) if isinstance(expected, str) else next(iter(expected.items()))
        verdict = found.get(claim)
        if verdict is None:
            wrong.append(f"{claim}: no verdict, expected {word}")
        elif verdict["verdict"] != word:
            wrong.append(f"{claim}: {verdict['verdict']} {verdict['value']!r}, expected {word}")
        elif value is not ... and canonical.dumps(verdict["value"]) != canonical.dumps(value):
            wrong.append(f"{claim}: {word} {verdict['value']!r}, expected {value!r}")
    code = exit_code(report)
    if row.get("exit", code) != code:
        refuted = [f"{claim} ({verdict['verdict']})" for claim, verdict in found.items()
                   if verdict["verdict"] in ("refuted", "unread")]  # fmt: skip
        wrong.append(f"exit {code}, expected {row['exit']}; {', '.join(refuted)}")
    return wrong


def test_there_are_enough_and_each_is_made_and_expected_once() -> None:
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids)) >= 40
    assert set(ids) == set(build.MAKERS)
    for row in ROWS:
        assert row["fault"] and row["expected"], row["id"]
        assert set(row) <= {"id", "fault", "require", "run", "expect", "expected", "exit"}


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_the_verdicts_are_those_that_were_written_down_first(row: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(row, tmp_path)
    assert differences(row, report) == []
    for verdict in report["verdicts"]:
        if verdict["verdict"] == "refuted":
            assert verdict["evidence"] and all(item["text"] for item in verdict["evidence"]), verdict["claim"]
