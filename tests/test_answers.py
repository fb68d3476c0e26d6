"""Answers in JSON: their schemas are generated, and every verb's answer has its shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from micro import Micro, qdc
from pydantic import ValidationError

from qdc.cli import VERBS
from qdc.core import canonical
from qdc.report.answers import ANSWERS, checked, schemas


def test_the_schema_files_are_what_the_models_say(root: Path) -> None:
    made = {name: canonical.pretty(schema) for name, schema in schemas().items()}
    there = {path.name: path.read_bytes() for path in (root / "schema").glob("answer-*.json")}
    assert there == made


def test_every_verb_has_an_answer() -> None:
    assert set(ANSWERS) == {*VERBS, "error"}


def test_a_field_too_many_or_too_few_is_another_shape() -> None:
    good = {"schema": 1, "same": True, "changes": [], "unread": {}}
    checked("diff", good)
    for bad in ({**good, "more": 1}, {"schema": 1, "same": True}, {**good, "schema": 2}):
        with pytest.raises(ValidationError):
            checked("diff", bad)


def test_answers_of_a_real_build_have_their_shapes(micro: Micro, tmp_path: Path) -> None:
    store = ("--store", str(micro.store))
    for arguments in (
        ("validate", str(micro.recipe)),
        ("validate", str(micro.recipe), "--set", "serve.k=5"),
        ("plan", str(micro.recipe), *store),
        ("why", "distill", str(micro.recipe), *store),
        ("show", *store),
        ("show", "@1", "--manifest", *store),
        ("show", str(micro.recipe), "--origins", *store),
        ("explain",),
        ("explain", "DRF01"),
        ("diff", "@1", str(tmp_path / "no.yaml"), *store),
        ("store", "verify", *store),
        ("build", str(micro.recipe), "--until", "pack-target", *store),
    ):
        assert json.loads(qdc(*arguments, "--json").stdout)["schema"] == 1, arguments
