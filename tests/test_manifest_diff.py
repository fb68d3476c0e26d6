"""Differences are said in the words of the domain, in a fixed order, and none is hidden."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_manifest_content import PRODUCT, H, manifest, serve_json
from test_manifest_record import record, stage

from qdc.core import canonical
from qdc.manifest.diff import diff, told
from qdc.manifest.flat import arguments, flatten

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

UNCHANGED = ["target unchanged, same weights digest", "drafter unchanged, same weights digest"]


def product(path: str, value: Any) -> dict[str, Any]:
    """PRODUCT with one field set."""
    result = copy.deepcopy(PRODUCT)
    section = result
    *parents, last = path.split(".")
    for part in parents:
        section = section[part]
    section[last] = value
    return result


def texts(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [change["text"] for change in diff(a, b)]


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("serve.k", 5, "K 7 -> 5"),
        ("drafter.ptq.method", "rtn", "drafter PTQ: GPTQ -> RTN"),
        ("drafter.ptq", None, "drafter PTQ: GPTQ -> none"),
        ("drafter.ptq.scheme.group_size", 32, "drafter PTQ: group size 128 -> 32"),
        ("drafter.swa.window", 48, "drafter window 64 -> 48"),
        ("drafter.swa", None, "drafter window 64 -> none"),
        ("drafter.architecture.draft_block_size", 16, "draft block 8 -> 16"),
        ("drafter.architecture.taps", [0, 2], "drafter taps [0, 1, 2] -> [0, 2]"),
        ("drafter", {"kind": "ngram"}, "drafter: DFlash K=7, draft block 8, window 64 -> n-gram 7"),
        ("drafter", None, "drafter: DFlash K=7, draft block 8, window 64 -> none"),
        ("target.quantization.method", "gptq", "target: grid RTN -> GPTQ"),
        ("target.quantization.scheme.group_size", 128, "target: group size 32 -> 128"),
        ("target.quantization.ignore", ["re:.*fc$"], "target: module mask, ignored: -lm_head +re:.*fc$"),
        ("target.qad", None, "target: QAD quantized-weights -> none"),
        ("target.qad.optimizer.lr", 2e-4, "target: QAD lr 0.0001 -> 0.0002"),
        ("target.qad.schedule.steps", 80, "target: QAD steps 60 -> 80"),
        ("serve.engine.vllm", "0.25.1", "engine vLLM 0.32.0 -> 0.25.1"),
        ("serve.engine.prefix_caching", True, "prefix caching off -> on"),
        (
            "serve.engine.patches",
            ["w4-drafter"],
            "engine patches: -amx-permission -expand-sampling -gdn-short-verify -torchvision-ops +w4-drafter",
        ),
        ("serve.max_model_len", 256, "max model length 128 -> 256"),
        ("deploy.hardware", "a10g", "hardware cpu -> a10g"),
        ("target.qad.grad_clip", 1.0, "target.qad.grad_clip (absent) -> 1.0"),
    ],
)
def test_one_field_in_domain_words(path: str, value: Any, text: str) -> None:
    for a, b in ((PRODUCT, product(path, value)), (manifest(), manifest(product=product(path, value)))):
        found = [line for line in texts(a, b) if line not in UNCHANGED]
        assert found == [text]


def test_a_field_without_words_of_its_own_is_said_by_its_path() -> None:
    assert texts(PRODUCT, product("image.base", {"debian": "trixie"})) == [
        "image.base.debian (absent) -> trixie",
        "image.base.oci /home/someone/base -> (absent)",
    ]


def test_ngram_becomes_dflash() -> None:
    ngram = {"drafter": {"kind": "ngram"}, "serve": {"k": 20}}
    dflash = {"drafter": {"architecture": {"kind": "dflash", "draft_block_size": 16}}, "serve": {"k": 15}}
    assert texts(ngram, dflash) == ["drafter: n-gram 20 -> DFlash K=15, draft block 16"]


def test_two_manifests_golden() -> None:
    serve = serve_json(5)
    serve["weights"][1]["sha256"] = "c" * 64
    changed = product("serve.k", 5)
    changed["drafter"]["ptq"]["method"] = "rtn"
    changed["drafter"]["training"][1]["steps"] = 200
    assert diff(manifest(), manifest(product=changed, serve=serve, template_digest="d" * 64)) == [
        {
            "subject": "target",
            "path": "serving.weights",
            "from": [serve["weights"][0]],
            "to": [serve["weights"][0]],
            "text": "target unchanged, same weights digest",
        },
        {
            "subject": "drafter",
            "path": "serving.weights",
            "from": [serve_json()["weights"][1]],
            "to": [serve["weights"][1]],
            "text": "drafter weights bbbbbbbbbbbb -> cccccccccccc",
        },
        {"subject": "serving", "path": "serve.k", "from": 7, "to": 5, "text": "K 7 -> 5"},
        {
            "subject": "drafter",
            "path": "drafter.ptq.method",
            "from": "gptq",
            "to": "rtn",
            "text": "drafter PTQ: GPTQ -> RTN",
        },
        {
            "subject": "serving",
            "path": "serving.template",
            "from": H,
            "to": "d" * 64,
            "text": "chat template changed (0123456789ab -> dddddddddddd)",
        },
        {
            "subject": "drafter",
            "path": "drafter.training[finetune].steps",
            "from": 150,
            "to": 200,
            "text": "drafter.training[finetune].steps 150 -> 200",
        },
    ]


def test_a_repeated_value_that_changed_differently_is_not_hidden() -> None:
    found = texts(manifest(), manifest(product=product("serve.k", 5), serve=serve_json(6)))
    assert "K 7 -> 5" in found
    assert "serving.arguments.speculative-config.num_speculative_tokens 7 -> 6" in found


def test_different_kinds_compare_what_both_hold() -> None:
    recipe = {"version": 1, "name": "tiny", "data": {}, **product("serve.k", 5)}
    recipe["target"]["base"] = {"hf": "x"}
    assert texts(manifest(), recipe) == ["K 7 -> 5"]
    assert texts(record(recipe={**PRODUCT}), recipe) == ["K 7 -> 5"]
    assert diff(manifest(), PRODUCT) == []


def test_records_differ_by_stage() -> None:
    slower = record(stages=[stage(seconds=13.0)])
    assert texts(record(), slower) == ["stages[distill].seconds 12.5 -> 13.0"]


def test_engine_arguments_are_read_as_the_engine_reads_them() -> None:
    words = ["serve", "--a", "1", "--flag", "--b_c=2", "--a", "3", "--j", json.dumps({"x": 1}), "--k", "{no"]
    assert arguments(words) == {"a": "3", "flag": True, "b-c": "2", "j": {"x": 1}, "k": "{no", "": ["serve"]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 2) | st.text('ab.[]"0', max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('ab.[]"0', max_size=3), inner, max_size=3)
        | st.lists(st.fixed_dictionaries({"name": st.text("ab0", max_size=2)}, optional={"x": inner}), max_size=3)
    ),
    max_leaves=8,
)
SECTIONS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("target", "drafter", "serve", "deploy", "image", "name", "data"), JSON)
)


@given(SECTIONS, SECTIONS)
def test_nothing_is_hidden_between_any_two_recipes(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (diff(a, b) == []) == (canonical.dumps(a) == canonical.dumps(b))
    assert diff(a, a) == []


@given(JSON, JSON)
def test_different_documents_have_different_leaves(a: Any, b: Any) -> None:
    same = canonical.dumps(a) == canonical.dumps(b)
    assert (canonical.dumps(flatten(a)) == canonical.dumps(flatten(b))) == same


@given(st.sampled_from(sorted(manifest())), JSON)
def test_nothing_is_hidden_between_manifests(key: str, value: Any) -> None:
    other = manifest() | {key: value}
    same = canonical.dumps(other) == canonical.dumps(manifest())
    differing = [c for c in diff(manifest(), other) if canonical.dumps(c["from"]) != canonical.dumps(c["to"])]
    assert (differing == []) == same


LEAVES = sorted(path for path in flatten(manifest()) if "[" not in path)


@given(st.sampled_from(LEAVES), st.sampled_from([None, 1, True, "x", [], {}, {"y": 1}]))
def test_every_leaf_of_a_manifest_is_seen(path: str, value: Any) -> None:
    other = manifest()
    section = other
    *parents, last = path.split(".")
    for part in parents:
        section = section[part]
    section[last] = value
    same = canonical.dumps(other) == canonical.dumps(manifest())
    differing = [c for c in diff(manifest(), other) if canonical.dumps(c["from"]) != canonical.dumps(c["to"])]
    assert (differing == []) == same


DRAFTER_FIELDS = [path for path in flatten(PRODUCT) if "[" not in path]


@given(st.sampled_from(DRAFTER_FIELDS), st.sampled_from([None, 1, True, "x", [], {}, {"y": 1}]))
def test_every_field_of_the_product_is_seen(path: str, value: Any) -> None:
    other = product(path, value)
    assert (diff(PRODUCT, other) == []) == (canonical.dumps(other) == canonical.dumps(PRODUCT))


def same(row: dict[str, Any]) -> bool:
    return canonical.dumps(row["from"]) == canonical.dumps(row["to"])


@st.composite
def edited_manifests(draw: st.DrawFn) -> dict[str, Any]:
    """A manifest with up to five leaves set to other values."""
    other = manifest()
    for path in draw(st.lists(st.sampled_from(LEAVES), max_size=5)):
        section = other
        *parents, last = path.split(".")
        for part in parents:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section[last] = draw(st.sampled_from([None, 1, True, "x", [], {}, {"y": 1}, "a" * 64]))
    return other


@given(edited_manifests(), edited_manifests())
def test_every_changed_leaf_is_told_by_exactly_one_change(a: dict[str, Any], b: dict[str, Any]) -> None:
    left, right = flatten(opened(a)), flatten(opened(b))
    differing = {
        path for path in left.keys() | right.keys()
        if (path in left, canonical.dumps(left.get(path))) != (path in right, canonical.dumps(right.get(path)))
    }  # fmt: skip
    rows = told(a, b)
    paths = [path for _, leaves in rows for path in leaves]
    assert len(paths) == len(set(paths)) and set(paths) == differing
    for row, leaves in rows:
        assert leaves or same(row)
    assert len({row["path"] for row, _ in rows if row["path"] != "serving.weights"}) == len(
        [row for row, _ in rows if row["path"] != "serving.weights"]
    )


def opened(document: dict[str, Any]) -> dict[str, Any]:
    """A manifest whose engine arguments are a mapping, as they are compared."""
    serving = document.get("serving")
    if isinstance(serving, dict) and isinstance(serving.get("arguments"), list):
        return {**document, "serving": {**serving, "arguments": arguments(serving["arguments"])}}
    return document


@given(edited_manifests(), edited_manifests())
def test_the_other_way_round_is_the_same_with_sides_exchanged(a: dict[str, Any], b: dict[str, Any]) -> None:
    def seen(rows: list[dict[str, Any]], *order: str) -> list[Any]:
        return [[row["subject"], row["path"], *(canonical.dumps(row[side]) for side in order)] for row in rows]

    assert seen(diff(a, b), "from", "to") == seen(diff(b, a), "to", "from")


@given(SECTIONS, SECTIONS)
def test_recipes_too_are_told_once_and_alike_from_both_sides(a: dict[str, Any], b: dict[str, Any]) -> None:
    rows = told(a, b)
    paths = [path for _, leaves in rows for path in leaves]
    assert len(paths) == len(set(paths))
    assert len(rows) == len(told(b, a))
