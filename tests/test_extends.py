"""A recipe that extends another: what merges, what replaces, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.cli import main
from qdc.recipe.diagnostics import RecipeInvalid
from qdc.recipe.extends import read_extended
from qdc.recipe.load import load
from qdc.recipe.reading import scan_document


def child(recipes: Path, text: str, name: str = "child.yaml") -> Path:
    (recipes / name).write_text(text)
    return recipes / name


def test_mappings_merge_lists_replace_and_null_deletes(recipes: Path) -> None:
    path = child(
        recipes,
        "extends: micro.yaml\nname: child\nserve: {k: 5}\ndrafter: {swa: null, architecture: {taps: [1, 2]}}\n"
        "evaluate: {quality: null}\n",
    )
    made, base = load(path).data, load(recipes / "micro.yaml").data
    wanted = json.loads(json.dumps(base))
    wanted["name"], wanted["serve"]["k"], wanted["drafter"]["swa"] = "child", 5, None
    wanted["drafter"]["architecture"]["taps"], wanted["evaluate"]["quality"] = [1, 2], None
    assert made == wanted


def test_each_value_keeps_its_file_and_line(recipes: Path) -> None:
    child(recipes, "extends: micro.yaml\nname: middle\nserve:\n  k: 5\n", "middle.yaml")
    path = child(recipes, "extends: middle.yaml\nname: child\n\ntarget:\n  qad: {seed: 43}\n")
    origins = load(path, ["serve.max_num_seqs=2"]).origins
    lines = (recipes / "micro.yaml").read_text().splitlines()
    assert origins["name"] == "child.yaml:2"
    assert origins["target.qad.seed"] == "child.yaml:5"
    assert origins["serve.k"] == "middle.yaml:4"
    assert origins["serve.max_num_seqs"] == "--set"
    assert origins["serve.dtype"] == f"micro.yaml:{lines.index('  dtype: bfloat16') + 1}"


def test_a_fault_is_shown_in_the_file_that_has_it(recipes: Path) -> None:
    text = (recipes / "micro.yaml").read_text()
    (recipes / "micro.yaml").write_text(text.replace("dtype: bfloat16", "dtype: bf16"))
    path = child(recipes, "extends: micro.yaml\nname: child\nserve: {kk: 5}\n")
    with pytest.raises(RecipeInvalid) as caught:
        load(path)
    found = {(Path(item.file or "").name, item.rule): item for item in caught.value.diagnostics}
    assert set(found) == {("child.yaml", "YML03"), ("micro.yaml", "SCH03")}
    mark = found["micro.yaml", "SCH03"].mark
    assert mark is not None and mark.text[mark.column - 1 : mark.end - 1] == "bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nothing.yaml\nname: a\n", "cannot read `nothing.yaml`"),
        ("extends: child.yaml\nname: a\n", "in a circle"),
        ("extends: ../micro.yaml\nname: a\n", "one recipe beside this one"),
        ("extends: [micro.yaml]\nname: a\n", "one recipe beside this one"),
    ],
)
def test_what_cannot_be_extended_is_named_at_its_token(recipes: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeInvalid) as caught:
        load(child(recipes, text))
    first = next(item for item in caught.value.diagnostics if item.rule == "YML08")
    assert message in first.message and (first.line, first.column) == (1, 10) and first.hint


def test_a_broken_base_is_reported_as_itself(recipes: Path) -> None:
    (recipes / "micro.yaml").write_text("serve: {k: 7\n")
    with pytest.raises(RecipeInvalid) as caught:
        load(child(recipes, "extends: micro.yaml\nname: child\n"))
    assert {Path(item.file or "").name for item in caught.value.diagnostics} == {"micro.yaml"}


def test_show_origins_names_every_value(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = child(recipes, "extends: micro.yaml\nname: child\nserve: {k: 5}\n")
    assert main(["show", str(path), "--origins", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)["origins"]}
    assert rows["serve.k"] == {"path": "serve.k", "value": 5, "origin": "child.yaml:3"}
    assert rows["serve.kv_cache_dtype"]["origin"] == "default"
    assert rows["drafter.training.1.seed"]["origin"].startswith("micro.yaml:")
    assert main(["show", str(path), "--origins"]) == 0
    assert "serve.k " in capsys.readouterr().out


JSON = st.recursive(
    st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
TREE = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


def merged(base: dict[str, object], top: dict[str, object]) -> dict[str, object]:
    result = dict(base)
    for key, value in top.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


@given(TREE, TREE)
@settings(max_examples=60, deadline=None)
def test_a_merge_has_the_values_of_both_and_the_place_of_each(
    tmp_path_factory: pytest.TempPathFactory, base: dict[str, object], top: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("extends")
    (folder / "base.yaml").write_text(json.dumps({**base, "z": 1}, indent=1))
    (folder / "top.yaml").write_text(json.dumps({**top, "extends": "base.yaml"}, indent=1))
    document, files = read_extended(folder / "top.yaml")
    assert document.data == merged({**base, "z": 1}, top)
    assert len(files) == 2
    for path, span in document.values.items():
        if not path or path == ("extends",):
            continue
        value: object = document.data
        for part in path:
            value = value[part]  # type: ignore[index]
        source = document.source(path)
        if not isinstance(value, dict | list):
            assert source.lines[span.line - 1][span.column - 1 : span.end_column - 1] == json.dumps(value)
            own = scan_document(Path(source.file).read_bytes(), source.file)
            assert own.values[path] == span
