"""The recipes of published submissions: what is found in each, without a lock and with its checkpoints' headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hub_facts
import pytest

from qdc.recipe.load import load
from qdc.rules.check import check, deferred

WITHOUT = {
    "qwen35-4b-2026": ["note DAT07"],
    "qwen35-4b-dflash-public": ["accepted DRF06", "note DRF16"],
    "qwen35-4b-mtp": ["warning SRC13"],
    "qwen35-4b-ngram": [],
    "qwen35-4b-nota": ["note DAT07", "warning DEP06", "warning SRC13", "warning SRC13"],
    "qwen35-4b-nota-2048": ["note DAT07", "warning SRC13", "warning SRC13"],
    "qwen35-4b-suffix": ["warning SRC13", "warning SRC13", "warning SRV02"],
}
MORE_WITH_HEADERS = {
    "qwen35-4b-dflash-public": ["note ENG13", "warning ENG02"],
    "qwen35-4b-ngram": ["error DRF13", "warning DEP05"],
    "qwen35-4b-nota": ["warning ENG02"],
    "qwen35-4b-suffix": ["error DRF13"],
}


def test_every_real_recipe_is_judged_here(root: Path) -> None:
    assert {path.stem for path in (root / "recipes").glob("qwen*.yaml")} == set(WITHOUT)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_found_in_a_published_recipe(root: Path, name: str) -> None:
    loaded = load(root / "recipes" / f"{name}.yaml")
    assert sorted(f"{item.severity} {item.rule}" for item in check(loaded)) == WITHOUT[name]
    assert {"TGT06", "SRC04"} <= {id for id, _ in deferred(loaded)}
    known = replace(loaded, facts=hub_facts.facts_for(loaded))
    found = sorted(f"{item.severity} {item.rule}" for item in check(known))
    assert found == sorted(WITHOUT[name] + MORE_WITH_HEADERS.get(name, []))
    assert {id for id, _ in deferred(known)} == {"SRC04", "SRC05"}


def test_the_best_practice_accepts_nothing(root: Path) -> None:
    assert load(root / "recipes" / "qwen35-4b-2026.yaml").model.accept == []


def test_papers_and_code_can_both_be_said(root: Path) -> None:
    """The published code trains everything but the scales, clips the sum, and asks for more than 256 conversations."""
    mix = "{code: {share: 0.25, floor: 64}, math: {share: 0.25, floor: 64}, science: {share: 0.25, floor: 64}}"
    sets = ["target.qad.trainable=all", "target.qad.clip_of=sum", f"drafter.ptq.calibration.mix={mix}"]
    qad = load(root / "recipes" / "qwen35-4b-nota.yaml", sets).model.target.qad
    assert qad is not None and (qad.trainable, qad.clip_of) == ("all", "sum")
    floors = mix.replace("floor: 64", "floor: 128")
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml", [f"drafter.ptq.calibration.mix={floors}"])
    assert "PTQ06" in {item.rule for item in check(loaded)}
