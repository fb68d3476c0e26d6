"""Reading a recipe: every fault has its place and its cure; what is read is what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.recipe.diagnostics import RecipeInvalid
from qdc.recipe.load import load
from qdc.recipe.reading import parse_document
from qdc.rules.check import check
from qdc.sources.facts import attach


def faults(text: bytes | str) -> list[tuple[int | None, int | None, str]]:
    raw = text.encode() if isinstance(text, str) else text
    with pytest.raises(RecipeInvalid) as caught:
        parse_document(raw, "r.yaml")
    return [(item.line, item.column, item.message) for item in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 1, "given twice, first at line 1"),
        ("a:\n\tb: 1\n", 2, 1, "tab"),
        ("a: no\n", 1, 4, "boolean to some"),
        ("a: {b: y}\n", 1, 8, "boolean to some"),
        ("a: 007\n", 1, 4, "leading zero"),
        ("a: &x 1\nb: {<<: *x}\n", 2, 5, "merge key"),
        ("a: 1\n---\nb: 2\n", 3, 1, "second document"),
        ("<<<<<<< ours\na: 1\n", 1, 1, "merge conflict"),
        ("a: [1\nb: 2\n", 2, 2, "not YAML"),
        ("", 1, 1, "empty"),
        ("- 1\n", 1, 1, "mapping of fields"),
        (b"\xef\xbb\xbfa: 1\n", 1, 1, "byte order mark"),
        (b"a: 1\nb: \xff\n", 2, 4, "not UTF-8"),
        (b"a: " + b"x" * (1 << 20), 1, 1, "at most"),
    ],
)
def test_fault_has_its_place(text: bytes | str, line: int, column: int, words: str) -> None:
    found = faults(text)
    assert [item for item in found if item[:2] == (line, column) and words in item[2]], found


def test_self_reference_is_a_fault() -> None:
    assert "contains itself" in faults("a: &x\n  b: *x\n")[0][2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2e-6", 2e-6),
        ("0.5", 0.5),
        (".5", 0.5),
        ("-3", -3),
        ("true", True),
        ("null", None),
        ("~", None),
        ("word", "word"),
        ('"no"', "no"),
        ("'1'", "1"),
        ("0x10", 16),
        ("1.2.3", "1.2.3"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    read = parse_document(f"a: {text}\n".encode(), "r").data["a"]
    assert read == value and type(read) is type(value)


quoted = st.recursive(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=5), quoted, min_size=1, max_size=4))
def test_what_is_written_with_quotes_is_text(value: dict[str, Any]) -> None:
    assert parse_document(yaml.safe_dump(value, default_style='"').encode(), "r").data == value


@given(st.sampled_from(["!!str 7", '!!int "7"', "!!null x", "!own [1]", "&a !!map {}"]))
def test_an_explicit_tag_is_refused_wherever_it_stands(value: str) -> None:
    for text in (f"a: {value}", f"a:\n  - {value}", f"a: [1, {value}]", f"a: {{b: {value}}}"):
        with pytest.raises(RecipeInvalid, match="an explicit tag"):
            parse_document(text.encode(), "r")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        parse_document(raw, "r.yaml")
    except RecipeInvalid as invalid:
        assert all(item.line and item.column for item in invalid.diagnostics)


@pytest.mark.parametrize("name", ["tiny.yaml", "micro.yaml"])
def test_shipped_recipes_are_valid(root: Path, name: str) -> None:
    assert check(attach(load(root / "recipes" / name))) == []


def edited(recipes: Path, old: str, new: str) -> list[str]:
    path = recipes / "micro.yaml"
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    try:
        found = check(attach(load(path)))
    except RecipeInvalid as invalid:
        found = invalid.diagnostics
    return [str(item) for item in found]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  k: 7", "  k: 8", "K = 8, but a draft block of 8 is one anchor and 7 masks"),
        ("  k: 7", "  kk: 7", "unknown field `kk`"),
        ("  k: 7", "  k: seven", "`serve.k` must be a whole number, not `seven`"),
        ("  k: 7", "  k: 5", "warning[DRF02]"),
        ("group_size: 128", "group_size: 96", "`drafter.ptq.scheme.group_size`"),
        ("heads: 4", "heads: 3", "which groups of 128 do not divide"),
        ("hidden_size: 128", "hidden_size: 144", "group size 32 does not divide the inputs of linear_attn"),
        ("taps: [0, 1, 2]", "taps: [0, 2, 4]", "tap 4 is not a layer"),
        ("taps: [0, 1, 2]", "taps: [2, 1]", "strictly increasing"),
        ("window: 64", "window: 7", "hides part of the draft block"),
        ("from: pretrain", "from: nowhere", "`nowhere` is not an earlier training"),
        ("prompts: prompts_a", "prompts: prompts_z", "`data` has no entry `prompts_z`"),
        ("exclude: [heldout]", "exclude: []", "may share prompts with the held-out"),
        ("templates/chatml.jinja", "templates/none.jinja", "cannot read `templates/none.jinja`"),
        ("templates/chatml.jinja", "/etc/hostname", "`/etc/hostname` is not below the recipe's folder"),
        ("templates/chatml.jinja", "../chatml.jinja", "is not below the recipe's folder"),
        ('vllm: "0.32.0"', "vllm: 0.32", "`serve.engine.vllm` must be text"),
        ("max_model_len: 128", "max_model_len: 39", "has no room"),
        ('vllm: "0.32.0"', 'vllm: "0.31.0"', "nothing is known of vLLM '0.31.0' on cpu"),
        ("gdn-short-verify, ", "", "needs the patch `gdn-short-verify`"),
        ("gdn-short-verify", "gdn-short-verifi", "there is no engine patch `gdn-short-verifi`"),
        ("data: teacher_corpus", "data: target_corpus", "made from it"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(recipes: Path, old: str, new: str, words: str) -> None:
    found = edited(recipes, old, new)
    assert any(words in item for item in found), found
    assert all(item.split(":")[1].isdigit() and item.split(":")[2].isdigit() for item in found)


def test_all_faults_of_a_file_in_one_run(recipes: Path) -> None:
    path = recipes / "micro.yaml"
    path.write_text(path.read_text().replace("  k: 7", "  k: x").replace("conv_kernel", "conv_kernl"))
    with pytest.raises(RecipeInvalid) as caught:
        load(path)
    assert len(caught.value.diagnostics) == 3


def test_set_is_typed_and_checked(root: Path) -> None:
    assert load(root / "recipes/micro.yaml", ["serve.k=5"]).data["serve"]["k"] == 5
    assert (
        load(root / "recipes/micro.yaml", ["target.qad.optimizer.lr=2e-6"]).data["target"]["qad"]["optimizer"]["lr"]
        == 2e-6
    )
    for wrong in ("serve.k", "serve.nothing.k=5", "serve.k=[1", "serve.k=five"):
        with pytest.raises(QdcError):
            load(root / "recipes/micro.yaml", [wrong])


def test_schema_file_is_what_the_models_say(root: Path) -> None:
    from qdc.core import canonical
    from qdc.recipe.schema import recipe_schema

    assert (root / "schema/recipe.schema.json").read_bytes() == canonical.pretty(recipe_schema())


def test_every_field_says_what_it_means(root: Path) -> None:
    schema = json.loads((root / "schema/recipe.schema.json").read_bytes())
    silent = [
        f"{name}.{field}"
        for name, definition in schema["$defs"].items()
        for field, said in definition.get("properties", {}).items()
        if field != "kind" and len(said.get("description", "")) < 8
    ]
    assert silent == []


def test_the_schema_of_a_change_needs_nothing_and_lets_null_delete(root: Path) -> None:
    definitions = json.loads((root / "schema/recipe.schema.json").read_bytes())["$defs"]
    for name, definition in definitions.items():
        if name.endswith("Change"):
            assert "required" not in definition
            assert all({"type": "null"} in field.get("anyOf", []) for n, field in definition["properties"].items()
                       if n != "extends")  # fmt: skip
            assert f"{definition}".count("#/$defs/") == f"{definition}".count("Change'")
    assert "extends" in definitions["RecipeChange"]["properties"]


@pytest.mark.parametrize("path", ["k", "name.", "target.qad.steps"])
def test_a_value_of_set_that_no_reader_can_hold_is_shown_where_it_begins(root: Path, path: str) -> None:
    with pytest.raises(RecipeInvalid) as caught:
        load(root / "recipes/tiny.yaml", [f"{path}={'[' * 3000}"])
    (found,) = caught.value.diagnostics
    assert (found.rule, found.line, found.column) == ("YML14", 1, len(path) + 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 3000, "too many values inside values"),
        ("a: " + "[" * 100 + "]" * 100, "too many values inside values"),
        ("a: " + "9" * 5000, "too large for a number"),
        ('a: "\\ud800"', "half of a surrogate pair"),
        ('"\\ud800": 1', "half of a surrogate pair"),
        (
            "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
            "an alias counts as all that it stands for",
        ),
    ],
    ids=["unclosed", "deep", "digits", "value", "key", "aliases"],
)
def test_what_no_reader_can_hold_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeInvalid, match=words):
        parse_document(text.encode(), "r.yaml")
