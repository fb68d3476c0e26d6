"""What a user of `qdc plan` reads, and what a program gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hub_facts
import pytest

from qdc.cli import main
from qdc.measure.past import Past
from qdc.measure.predict import predict
from qdc.recipe.load import load
from qdc.report.answers import checked
from qdc.report.plan import WIDTH, prediction_lines
from qdc.report.predictions import Predictions

GOLDEN = Path(__file__).parent / "golden"
HEAVY = {"torch", "huggingface_hub", "requests", "http.client", "jinja2", "rich", "docker", "numpy"}


def golden(name: str, shown: str) -> None:
    file = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        file.write_text(shown)
    assert shown == file.read_text()
    assert all(len(line) <= WIDTH for line in shown.splitlines())


def test_what_a_user_reads_of_tiny(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(root / "recipes/tiny.yaml"), "--store", str(tmp_path)]) == 1
    golden("plan-tiny.txt", capsys.readouterr().out)


def test_what_a_user_reads_of_a_published_entry(root: Path) -> None:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml")
    stages = ["prompts:prompts_a", "corpus:teacher_corpus", "distill", "draft-train:pretrain", "image"]
    missing = [("target.quantization.grid", "taking over a published grid")]
    made = predict(
        loaded.data,
        hub_facts.facts_for(loaded),
        Past(),
        fresh=set(),
        stale=stages,
        missing=missing,
        training_bytes=80e9,
    )
    Predictions.model_validate_json(json.dumps(made.as_json()), strict=True)
    golden("plan-nota.txt", "\n".join(prediction_lines(made)) + "\n")


def test_what_a_user_reads_without_facts(root: Path) -> None:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml")
    made = predict(loaded.data, {}, Past(), fresh=set(), stale=["distill"])
    Predictions.model_validate_json(json.dumps(made.as_json()), strict=True)
    golden("plan-nota-unlocked.txt", "\n".join(prediction_lines(made)) + "\n")


@pytest.mark.parametrize("name", ["micro", "tiny"])
def test_a_program_gets_the_same_from_a_warm_memo(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def planned() -> Any:
        main(["plan", str(root / f"recipes/{name}.yaml"), "--store", str(tmp_path), "--json"])
        return json.loads(capsys.readouterr().out)

    cold = planned()
    checked("plan", cold)
    assert planned() == cold
    made = cold["predictions"]
    assert made["absent"] == [] and made["missing"] == []
    assert made["parameters"]["target"]["value"] > made["parameters"]["drafter"]["value"] > 0
    for figure in _figures(made):
        assert figure["source"] and isinstance(figure["assumed"], bool)


def _figures(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [figure for inner in value for figure in _figures(inner)]
    if not isinstance(value, dict):
        return []
    own = [value] if {"value", "unit"} <= set(value) else []
    return own + [figure for inner in value.values() for figure in _figures(inner)]


def test_a_setting_that_changes_is_judged_anew(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["plan", str(root / "recipes/tiny.yaml"), "--store", str(tmp_path)]
    assert main(plan) == 1
    monkeypatch.setenv("QDC_TRAINING_MEMORY_GB", "0.001")
    assert main(plan) == 2
    assert "error[QAD06]" in capsys.readouterr().err
    monkeypatch.setenv("QDC_TRAINING_MEMORY_GB", "1")
    assert main(plan) == 1
    assert "distill: ~16.5 MB of 1 GB, fits" in capsys.readouterr().out


def test_planning_imports_nothing_heavy(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from qdc.cli import main\n"
        f"main(['plan', {str(root / 'recipes/tiny.yaml')!r}, '--store', {str(tmp_path)!r}, '--quiet'])\n"
        "print(' '.join(sys.modules), file=sys.stderr)"
    )
    for extra in (set(), {"yaml", "pydantic"}):  # The second time the recipe is remembered.
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert not (HEAVY | extra) & set(done.stderr.split())
