"""`qdc audit` as a person and a program meet it: many images, one object a line, exit codes, errors, the text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import build, tampered
from micro import ROOT, qdc

from qdc.audit.audit import audit
from qdc.audit.images import open_image
from qdc.audit.text import render_text
from qdc.report.answers import checked

GOLDEN = Path(__file__).parent / "golden"
SHOWN = ("sixth-place-env-believed", "qdc-weights-byte", "qdc-untouched", "folder-awq-group")


@pytest.fixture
def made(tmp_path: Path) -> dict[str, str]:
    """Reference of a few fixtures by id."""
    places = {}
    for id in ("layered", "k-computed", "qdc-untouched"):
        (tmp_path / id).mkdir()
        places[id] = build.write(id, tmp_path / id)
    return places


def lines(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and the objects of `qdc audit --json`, each of which has its shape."""
    done = subprocess.run(
        [sys.executable, "-m", "qdc", "audit", *arguments, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")},
    )
    assert "Traceback" not in done.stderr, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        checked("error" if "error" in row else "audit", row)
    return done.returncode, rows


def test_many_images_are_one_object_a_line_in_order(made: dict[str, str]) -> None:
    places = [made["layered"], made["qdc-untouched"]]
    code, rows = lines(*places, "--require", "drafter.kind=dflash", "--require", "drafter.swa.semantics=causal")
    assert [row["reference"] for row in rows] == places
    found = [{item["claim"]: item["verdict"] for item in row["verdicts"]} for row in rows]
    assert [row["drafter.kind"] for row in found] == ["proved", "proved"]
    assert [row["drafter.swa.semantics"] for row in found] == ["refuted", "refuted"]
    assert code == 1


def test_an_image_that_cannot_be_opened_does_not_stop_the_others(made: dict[str, str], tmp_path: Path) -> None:
    code, rows = lines("archive:none.tar", made["layered"], "nothing", made["qdc-untouched"])
    assert ["error" in row for row in rows] == [True, False, True, False]
    assert [row["reference"] for row in rows] == ["archive:none.tar", made["layered"], "nothing", made["qdc-untouched"]]
    assert code == 4
    text = qdc("audit", "archive:none.tar", made["qdc-untouched"])
    assert text.returncode == 4 and "none.tar" in text.stderr and "image     sha256:" in text.stdout


@pytest.mark.parametrize(
    ("ids", "k", "code"),
    [
        (["qdc-untouched"], 7, 0),
        (["qdc-untouched", "k-computed"], 7, 3),
        (["none", "qdc-untouched", "k-computed"], 7, 4),
        (["none", "k-computed", "qdc-untouched"], 16, 1),
    ],
)
def test_the_exit_code_is_the_worst(ids: list[str], k: int, code: int, made: dict[str, str]) -> None:
    places = [made.get(id, "archive:none.tar") for id in ids]
    assert lines(*places, "--require", f"serve.k={k}")[0] == code


def test_image_ids_are_expected_of_each_image_in_order(made: dict[str, str]) -> None:
    id, other = tampered.original_id(), "sha256:" + "0" * 64
    code, rows = lines(made["qdc-untouched"], made["qdc-untouched"], "--expect", id, "--expect", other)
    found = [{item["claim"]: item["verdict"] for item in row["verdicts"]}["image.id"] for row in rows]
    assert found == ["proved", "refuted"] and code == 1 and all(row["anchored"] for row in rows)
    wrong = qdc("audit", made["qdc-untouched"], made["layered"], "--expect", id)
    assert wrong.returncode == 2 and "once for each image" in wrong.stderr


def test_wrong_use_is_said_before_any_image_is_opened(made: dict[str, str], tmp_path: Path) -> None:
    for arguments, words in (
        (["archive:none.tar", "--require", "serve.k"], "is not path=value"),
        (["archive:none.tar", "archive:none.tar", "--recipe", str(tmp_path / "no.yaml")], "no.yaml"),
        ([], "IMAGE"),
    ):
        done = qdc("audit", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stdout == "", done.stderr


@pytest.mark.parametrize("id", SHOWN)
def test_what_a_person_reads(id: str, tmp_path: Path) -> None:
    """The whole text, as tests/golden/audit-*.txt has it: AUDIT_GOLDEN=1 writes it anew."""
    row = next(row for row in build.expectations() if row["id"] == id)
    place, _, name = build.write(id, tmp_path).partition(":")
    with open_image(place, name, shown="IMAGE", prints="IMAGE") as reader:
        report = audit(reader, require=row.get("require", ()))
    text = render_text(report).replace(str(tmp_path), "DIR") + "\n"
    text = re.sub(r"[0-9a-f]{14,}", "DIGEST", text)  # Most change with the serving code in the image.
    golden = GOLDEN / f"audit-{id}.txt"
    if os.environ.get("AUDIT_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    refuted, proved = text.find("REFUTED"), text.find("\nproved\n")
    assert proved < 0 or refuted < proved
    shown = [line for line in text.splitlines() if line.startswith("    $ ")]
    assert bool(shown) == (refuted >= 0 or "UNREAD" in text)
