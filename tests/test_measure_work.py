"""Hours of the stages to run: from an earlier build on this machine, else from operations and marked so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hub_facts
import pytest

from qdc.measure.past import Past, past
from qdc.measure.work import StageTime, times, units
from qdc.recipe.load import load
from qdc.sources.facts import attach
from qdc.store.store import Store
from qdc.tables.hardware import row

HERE = {"machine": "x86_64", "cores": 2, "processor": "one"}
STAGES = ("distill", "base", "draft-train:finetune", "corpus:target_corpus", "image", "prompts:heldout")


def tiny(root: Path, *sets: str) -> dict[str, Any]:
    return load(root / "recipes" / "tiny.yaml", list(sets)).data


def built(recipe: dict[str, Any], id: str = "1", seconds: float = 36.0, **more: Any) -> dict[str, Any]:
    """A build record as far as a plan reads it."""
    stages = [{"name": name, "built_seconds": seconds, "hardware": HERE} for name in STAGES]
    row = {"metric": "acceptance-length", "what": "drafter, K 7", "subject": "gptq, as served", "value": 5.6}
    build = {"build": id, "recipe_name": "tiny", "recipe": recipe, "stages": stages, "measurements": [row]}
    return {**build, "image": {"artifact": "0" * 64}, **more}


def planned(root: Path, store: Store, *sets: str, hardware: dict[str, Any] = HERE) -> dict[str, StageTime]:
    loaded = attach(load(root / "recipes" / "tiny.yaml", list(sets)))
    known = past(store, loaded.data, hardware)
    return {item.stage: item for item in times(loaded.data, loaded.facts, row("cpu"), known, STAGES)}


def test_a_stage_takes_as_long_as_it_took(root: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_build(built(tiny(root)))
    for item in planned(root, store).values():
        assert item.hours is not None
        assert (item.hours.value, item.hours.assumed, item.build) == (0.01, False, "1")


@pytest.mark.parametrize(
    ("change", "stage", "factor"),
    [
        ("target.qad.schedule.steps=120", "distill", 2),
        ("target.base.scratch.training.steps=700", "base", 2),
        ("drafter.training.1.steps=450", "draft-train:finetune", 3),
        ("data.target_corpus.sampling.max_tokens=96", "corpus:target_corpus", 1.5),
        ("data.heldout.synthetic.count=800", "prompts:heldout", 0.5),
    ],
)
def test_more_work_takes_longer_and_is_assumed(
    root: Path, tmp_path: Path, change: str, stage: str, factor: float
) -> None:
    store = Store(tmp_path)
    store.add_build(built(tiny(root)))
    found = planned(root, store, change)
    for name, item in found.items():
        assert item.hours is not None
        assert item.hours.value == pytest.approx(0.01 * (factor if name == stage else 1))
        assert item.hours.assumed is (name == stage)
    scaled = found[stage].hours
    assert scaled is not None and "scaled by work" in scaled.source


@pytest.mark.parametrize("what", ["another machine", "another target", "another drafter", "a broken record"])
def test_times_of_something_else_do_not_count(root: Path, tmp_path: Path, what: str) -> None:
    store, recipe = Store(tmp_path), tiny(root)
    if what == "another target":
        recipe = tiny(root, "target.base.scratch.architecture.hidden_size=256")
    if what == "another drafter":
        recipe = tiny(root, "drafter.architecture.layers=3")
    build = built(recipe)
    if what == "a broken record":
        del build["stages"]
    store.add_build(build)
    found = planned(root, store, hardware={**HERE, "cores": 64} if what == "another machine" else HERE)
    assert all(item.hours is None for item in found.values())
    assert "image" not in found and "cpu has no rate" in found["distill"].why


def test_the_newest_build_counts(root: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_build(built(tiny(root), "1", 36.0))
    store.add_build(built(tiny(root), "2", 72.0))
    hours = planned(root, store)["distill"].hours
    assert hours is not None and hours.value == 0.02


def test_an_acceptance_length_counts_for_its_k_and_its_recipe(root: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_build(built(tiny(root)))
    same = past(store, tiny(root), HERE)
    assert (same.acceptance, same.acceptance_exact) == (5.6, True)
    retrained = past(store, tiny(root, "drafter.training.1.steps=151"), HERE)
    assert (retrained.acceptance, retrained.acceptance_exact) == (5.6, False)
    assert past(store, tiny(root, "serve.k=5"), HERE).acceptance is None
    assert past(store, {**tiny(root), "name": "other"}, HERE).acceptance is None
    store.add_build(built(tiny(root), "2", measurements=[]))
    assert past(store, tiny(root), HERE).acceptance_of == "1"


def test_an_earlier_schema_without_a_field_is_the_same_recipe(root: Path, tmp_path: Path) -> None:
    store, recipe = Store(tmp_path), tiny(root)
    architecture = {key: value for key, value in recipe["drafter"]["architecture"].items() if value is not None}
    store.add_build(built({**recipe, "drafter": {**recipe["drafter"], "architecture": architecture}}))
    assert planned(root, store)["distill"].hours is not None


def test_without_a_build_operations_and_a_stated_efficiency_give_assumed_hours(root: Path) -> None:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml")
    stages = ["base", "corpus:teacher_corpus", "distill", "draft-train:pretrain", "image"]
    found = times(loaded.data, hub_facts.facts_for(loaded), row("a10g"), Past(), stages)
    assert [item.stage for item in found] == stages[1:4]
    assert all(item.hours and item.hours.assumed and item.hours.value > 0 for item in found)
    assert [item.at_most for item in found] == [True, False, False]
    distill = found[1].hours
    tokens = 8000 * 16 * 16384
    assert distill is not None
    assert distill.value == pytest.approx(8 * 4.2e9 * tokens / (0.4 * 70e12) / 3600, rel=0.01)
    (lacking,) = times(loaded.data, {}, row("a10g"), Past(), ["distill"])
    assert lacking.hours is None and "target.base" in lacking.why


def test_epochs_are_passes_over_the_corpus(root: Path) -> None:
    recipe = load(root / "recipes" / "qwen35-4b-nota.yaml").data
    assert units(recipe, "draft-train:pretrain") == 2 * 219602 * 512
    assert units(recipe, "image") is None
