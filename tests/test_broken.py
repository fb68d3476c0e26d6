"""Every broken recipe of `tests/broken` is refused under its rule, at its token, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from broken.corpus import Case, Place, cases, copy_recipes, expected, lock, write

from qdc.cli import main
from qdc.core.errors import QdcError
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid
from qdc.recipe.load import load
from qdc.rules.check import check
from qdc.run.settings import training_bytes
from qdc.sources.facts import attach

CASES = cases()


def marked(case: Case) -> object:
    """The case as a parameter; what the product does not say yet must fail, so that a cure is noticed."""
    missed = [pytest.mark.xfail(reason=case.misses, strict=True)] if case.misses else []
    return pytest.param(case, id=f"{case.topic}-{case.id}", marks=missed)


def findings(path: Path, sets: list[str]) -> list[Diagnostic]:
    """What `qdc validate` finds; an error of the command line is one without a place."""
    try:
        return check(replace(attach(load(path, sets)), training_bytes=training_bytes()))
    except RecipeInvalid as invalid:
        return invalid.diagnostics
    except QdcError as error:
        return [Diagnostic(error.id, "error", error.message, error.file, error.line, error.column, error.hint)]


def tokens(item: Diagnostic) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of each token that is underlined."""
    for mark in (item.mark, item.also[0] if item.also else None):
        if mark is not None:
            yield mark.line, mark.column, mark.text[mark.column - 1 : mark.end - 1]


def names(item: Diagnostic, case: Case, place: Place | None) -> bool:
    """Whether a finding is the one expected, with the token underlined."""
    if item.rule != case.rule or item.severity != case.severity:
        return False
    if place is None:
        return item.line is None and item.file is not None
    shown = [(line, column) if place.token is None else (line, column, text) for line, column, text in tokens(item)]
    wanted = (place.line, place.column) if place.token is None else (place.line, place.column, place.token)
    return item.file == place.file and wanted in shown


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file and folder below: size, time and bytes."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_size,
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


def key(item: Diagnostic) -> tuple[str, str, str]:
    """What tells one finding from another, wherever an edit has moved it: rule, message, line."""
    return item.rule, item.message, item.mark.text if item.mark else ""


@cache
def usual(recipe: str, locked: bool) -> set[tuple[str, str, str]]:
    """What is found in the recipe as it is."""
    with TemporaryDirectory() as folder:
        path = copy_recipes(Path(folder) / "recipes") / f"{recipe}.yaml"
        if locked:
            lock(path, {}, [])
        return {key(item) for item in findings(path, [])}


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_broken_recipe_is_named_at_its_token_and_writes_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(case, copy_recipes(tmp_path / "project" / "recipes"))
    place = expected(case, path)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    before = tree(tmp_path)
    found = findings(path, case.sets)
    code = main(["validate", str(path), *(part for given in case.sets for part in ("--set", given))])
    shown = "".join(capsys.readouterr())
    assert code == (2 if any(item.severity == "error" for item in found) else 0)
    named = [item for item in found if names(item, case, place)]
    assert named, f"{case.rule} at {place}\n" + "\n".join(f"{item}\n{list(tokens(item))}" for item in found)
    assert str(named[0]) in shown
    assert not {key(item) for item in named} & usual(case.recipe, "facts" in case.edit)
    if case.severity == "error":
        assert main(["plan", str(path), *(part for given in case.sets for part in ("--set", given))]) == 2
    assert tree(tmp_path) == before


def test_the_corpus_is_large_and_nearly_all_of_it_is_named() -> None:
    assert len(CASES) >= 90
    assert sum(case.misses is not None for case in CASES) <= len(CASES) * 0.05
