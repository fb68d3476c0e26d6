"""Which facts a rule waits for, and that facts which nobody established decide nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_facts
import pytest

from qdc.recipe.load import Loaded, load
from qdc.rules.check import RULES, check, deferred
from qdc.sources.facts import attach

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes").glob("*.yaml"))


def with_facts(path: Path, sets: list[str] | None = None) -> Loaded:
    """The recipe with facts of every checkpoint that it names."""
    loaded = attach(load(path, sets))
    return replace(loaded, facts=hub_facts.facts_for(loaded) | loaded.facts)


def waiting(path: Path) -> set[str]:
    return {id for id, _ in deferred(load(path))}


def test_a_rule_waits_only_where_it_can_fire(root: Path) -> None:
    mtp, nota = waiting(root / "recipes/qwen35-4b-mtp.yaml"), waiting(root / "recipes/qwen35-4b-nota.yaml")
    of_the_drafter = {"DRF03", "DRF04", "DRF07", "PTQ01", "PTQ04", "PTQ05", "ENG07"}
    assert of_the_drafter <= nota and not of_the_drafter & mtp
    of_others = {"PTQ03", "PTQ09", "ENG05", "ENG06", "ENG08", "DRF13", "SWA07", "DRF05", "DRF09"}
    assert not of_others & nota


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_rule_that_waits_for_nothing_finds_nothing_once_facts_are_there(path: Path) -> None:
    loaded = with_facts(path)
    silent = [rule for rule in RULES if rule.about is not None and not rule.about(loaded)]
    assert [found for rule in silent for found in rule.check(loaded)] == []


def test_a_cell_that_is_not_established_decides_nothing(root: Path) -> None:
    """Mixed layers with vLLM 0.24.0 (known to lack them), 0.25.1 (not established) and 0.27.1 (known to have them)."""
    path = root / "recipes/qwen35-4b-dflash-public.yaml"
    mixed = {"sliding_window": 2048, "layer_types": ["sliding_attention", *["full_attention"] * 5]}
    fired = {}
    for version in ("0.24.0", "0.25.1", "0.27.1"):
        loaded = with_facts(path, [f'serve.engine.vllm="{version}"'])
        facts = hub_facts.edited(loaded.facts, {"drafter.checkpoint": {"config": mixed}})
        fired[version] = "SWA06" in {item.rule for item in check(replace(loaded, facts=facts))}
    assert fired == {"0.24.0": True, "0.25.1": False, "0.27.1": False}


ODD: list[Any] = [None, "x", 0, [None], {"a": 1}]


def edits(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field of a configuration."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from edits(inner, (*path, key))


@pytest.mark.parametrize("place", ["target.base", "target.quantization.grid", "drafter.checkpoint"])
def test_no_field_of_a_published_file_makes_a_traceback(root: Path, place: str) -> None:
    """Files of others may hold anything: every field of config.json in turn with values of other types."""
    loaded = with_facts(root / "recipes/qwen35-4b-dflash-public.yaml")
    facts = loaded.facts[place]
    assert facts.config is not None
    rules = [rule for rule in RULES if place in rule.needs]
    for path in list(edits(facts.config)):
        for odd in ODD:
            config = json.loads(json.dumps(facts.config))
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = odd
            odd_facts = loaded.facts | {place: replace(facts, config=config)}
            for rule in rules:
                list(rule.check(replace(loaded, facts=odd_facts)))
