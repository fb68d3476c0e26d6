"""Every finding has a page, a recipe that has it and a twin that has not; acceptances; what users read."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_facts
import pytest
import yaml

from qdc.cli import main
from qdc.cli.common import painted
from qdc.core.spelling import nearest
from qdc.graph.expand import expand
from qdc.graph.table import KINDS
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid
from qdc.recipe.findings import FINDINGS
from qdc.recipe.load import LockState, load
from qdc.recipe.reading import scan_document
from qdc.rules import accept
from qdc.rules.check import PAGES, TOPICS, check, deferred, require
from qdc.rules.pages import files
from qdc.sources.facts import attach
from qdc.tables import kernels, tasks

HERE = Path(__file__).parent
TWINS = {
    path.stem: [
        {"on" if key is True else key: value for key, value in case.items()}  # PyYAML takes the word `on` for true.
        for case in yaml.safe_load(path.read_text())
    ]
    for path in sorted((HERE / "rules").glob("*.yaml"))
}
CASES = [pytest.param(case, id=f"{topic}-{case['id']}") for topic, cases in TWINS.items() for case in cases]
FIRST = {case["id"]: case for cases in TWINS.values() for case in reversed(cases)}
SOURCES = {"hf", "path", "url", "wheel", "ref"}
URL = re.compile(r"(?:https://|wheel:)[^\s;`)]+")


def findings(recipe: Path, sets: list[str] | None = None, edits: dict[str, Any] | None = None) -> list[Diagnostic]:
    """What is found with the facts of what the recipe trains or has in a folder, those of `hub_facts` for every other
    checkpoint, and `edits` merged into them; among them `lock` is the state of the lock, and
    `training_bytes` the user's setting."""
    edits = dict(edits or {})
    state = LockState(**edits.pop("lock")) if "lock" in edits else None
    room = edits.pop("training_bytes", None)
    try:
        loaded = load(recipe, sets)
        facts = hub_facts.facts_for(loaded) | attach(loaded).facts
        return check(replace(loaded, facts=hub_facts.edited(facts, edits), lock=state, training_bytes=room))
    except RecipeInvalid as invalid:
        return invalid.diagnostics


def twin(recipes: Path, edit: dict[str, Any], on: str = "micro") -> list[Diagnostic]:
    """What is found in the recipe `on` with `edit`: a whole text, replacements in it, `set`, `files` that lie below
    or beside its folder, and `facts` merged into those of its checkpoints."""
    for name, content in edit.get("files", {}).items():
        (recipes / name).parent.mkdir(exist_ok=True)
        (recipes / name).write_text(content)
    path = recipes / f"{on}.yaml"
    text = edit.get("text", path.read_text())
    for old, new in edit.get("replace", {}).items():
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    path.write_text(text)
    return findings(path, edit.get("set"), edit.get("facts"))


@pytest.mark.parametrize("case", CASES)
def test_the_failing_twin_has_the_finding_and_the_passing_twin_has_none(recipes: Path, case: dict[str, Any]) -> None:
    on = case.get("on", "micro")
    original = (recipes / f"{on}.yaml").read_text()
    usual = {item.rule for item in twin(recipes, {}, on)}
    found = [item for item in twin(recipes, case["fails"], on) if item.rule == case["id"] or item.rule not in usual]
    assert {item.rule for item in found} == {case["id"], *case.get("also", [])}, "\n".join(map(str, found))
    for item in found:
        assert item.line and item.column and item.mark and item.hint, item
        if item.rule == case["id"]:
            assert item.severity == case["severity"]
    (recipes / f"{on}.yaml").write_text(original)
    left = [item for item in twin(recipes, case["passes"], on) if item.rule == case["id"] or item.rule not in usual]
    assert [item for item in left if item.severity != "accepted"] == [], "\n".join(map(str, left))


def test_no_rule_lacks_a_fixture_and_no_fixture_a_rule() -> None:
    ids = {topic: {rule.finding.id for rule in made.rules} for topic, made in TOPICS.items()}
    ids["accept"] = {item.id for item in accept.FINDINGS}
    ids["yaml"] = {item.id for item in FINDINGS if item.id.startswith("YML")}
    ids["schema"] = {item.id for item in FINDINGS} - ids["yaml"]
    assert {topic: {case["id"] for case in cases} for topic, cases in TWINS.items()} == ids
    assert sorted(PAGES) == sorted(id for topic in ids.values() for id in topic)
    assert sum(map(len, ids.values())) == len(PAGES)


@pytest.mark.parametrize("case", CASES)
def test_the_page_names_the_evidence_of_the_fixture(case: dict[str, Any]) -> None:
    page = PAGES[case["id"]]
    urls = {url for url in case["evidence"] if url.startswith(("https://", "wheel:"))}
    assert urls == set(URL.findall(page.evidence))
    assert page.severity == FIRST[case["id"]]["severity"]
    if not urls:
        assert page.evidence.startswith({"derived": "Follows ", "measured": "Measured "}[case["evidence"][0]])


@pytest.mark.parametrize("id", PAGES)
def test_the_examples_of_a_page_are_true(recipes: Path, id: str) -> None:
    """On the recipe of the rule's first fixture, with the facts of its twins."""
    page = PAGES[id]
    assert id in _rules_of(recipes, page.failing, FIRST[id], "fails")
    if id != "SRC08":  # whose passing example needs a checkpoint
        assert id not in _rules_of(recipes, page.passing, FIRST[id], "passes")


def _rules_of(recipes: Path, example: str, case: dict[str, Any], twin: str) -> set[str]:
    """What is found in the case's recipe with the example's fields, or in the example's text."""
    try:
        document = scan_document(example.encode(), "example")
    except RecipeInvalid as invalid:
        return {item.rule for item in invalid.diagnostics}
    if document.faults:
        return {item.rule for item in document.faults}
    original = scan_document((recipes / f"{case.get('on', 'micro')}.yaml").read_bytes(), "original").data
    path = recipes / "example.yaml"
    merged = _merged(original, document.data)
    if "contract" not in document.data.get("deploy", {"contract": 1}):
        del merged["deploy"]["contract"]
    path.write_text(json.dumps(merged, indent=1))
    return {item.rule for item in findings(path, edits=case[twin].get("facts"))}


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict) and not SOURCES & (new.keys() - old.keys()):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and old and isinstance(old[0], dict):
        return [_merged(*pair) for pair in zip(old, new, strict=True)]
    return new


def test_the_pages_in_docs_are_what_the_rules_say(root: Path) -> None:
    folder = root / "docs" / "rules"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files(PAGES)


def test_an_acceptance_lets_one_finding_stand(root: Path) -> None:
    entry = "accept=[{rule: DRF02, because: measured at K 5}]"
    found = findings(root / "recipes/micro.yaml", ["serve.k=5", entry])
    assert [(item.severity, item.rule) for item in found] == [("accepted", "DRF02")]
    assert str(found[0]).endswith("; because: measured at K 5") and "\n" not in str(found[0])


def test_the_image_stage_gets_the_acceptances_for_the_manifest(root: Path) -> None:
    sets = ["serve.k=5", "accept=[{rule: DRF02, because: measured at K 5}]"]
    loaded = load(root / "recipes/micro.yaml", sets)
    assert require(loaded) == check(loaded)
    code = dict.fromkeys(KINDS, "0" * 64)
    versions = {name: "1" for kind in KINDS.values() for name in kind.packages}
    facts = {"code": code, "versions": versions, "chat_template": "", "serve_lock": ""}
    facts |= {"sources": {}, "trees": {}, "templates": {}, "pins": {}, "licences": []}
    (image,) = [item for item in expand(loaded.data, facts) if item.name == "image"]
    assert image.params["accepted"] == [{"rule": "DRF02", "because": "measured at K 5"}]


def test_a_rule_that_waits_for_facts_can_be_accepted(recipes: Path) -> None:
    loaded = load(recipes / "qwen35-4b-nota.yaml", ["accept=[{rule: SRC10, because: its owner allows it}]"])
    assert "SRC10" in {id for id, _ in deferred(loaded)}
    assert not {item.rule for item in check(loaded)} & {"ACC01", "ACC02", "ACC03"}
    assert "ACC01" in {item.rule for item in check(replace(loaded, facts=hub_facts.facts_for(loaded)))}


def test_an_error_can_be_accepted_too(root: Path) -> None:
    entry = "accept=[{rule: DAT05, because: the set is the same on purpose}]"
    sets = ["data.prompts_a.exclude=[]", entry]
    assert {item.severity for item in findings(root / "recipes/micro.yaml", sets)} == {"accepted"}
    assert {item.severity for item in findings(root / "recipes/micro.yaml", sets[:1])} == {"error"}


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("buidl", ["build", "validate"], "build"),
        ("max_num_seq", ["max_num_seqs", "max_model_len"], "max_num_seqs"),
        ("max-num-seqs", ["max_num_seqs"], "max_num_seqs"),
        ("GPTQ", ["rtn", "gptq"], "gptq"),
        ("frob", ["build", "plan"], None),
    ],
)
def test_nearest_spelling(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == meant


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  k: 7", "  k: 7\n  dtyp: bfloat16", "did you mean `dtype`?"),
        ("    platform: cpu", "    platform: cpu\n    k: 7", "`k` belongs to `serve`"),
        ("kind: adamw, lr: 1e-4", "kind: adamw, momentum: 0.9, lr: 1e-4", "remove it; fields here: kind, lr, betas"),
        ("method: gptq", "method: gtpq", "did you mean `gptq`?"),
        ("data: teacher_corpus", "data: techer_corpus", "did you mean `teacher_corpus`?"),
        ("from: pretrain", "from: pretrian", "did you mean `pretrain`?"),
        ("expand-sampling", "expand-samplng", "did you mean `expand-sampling`?"),
        ("optimizer: {kind: muon, lr: 8e-3", "optimizer: {lr: 8e-3", "add `kind: muon` or `kind: adamw`"),
        ("      seed: 5\n", "", "add `seed: ...`, a whole number"),
        ("group_size: 32", "group_size: 33", "write `-1`, `32`, `64` or `128`"),
        ("seed: 42", "seed: 42.0", "write 42"),
        ("name: micro", "name: Micro", "use lower-case letters"),
        ("  heldout: {", "  Held: {", "use lower-case letters"),
        ("warmup_ratio: 0.03", "warmup_ratio: 3", "write a value of at most 1"),
    ],
)
def test_the_help_says_what_to_type(recipes: Path, old: str, new: str, words: str) -> None:
    found = twin(recipes, {"replace": {old: new}})
    assert any(words in (item.hint or "") for item in found), "\n".join(map(str, found))


def test_a_path_gets_the_nearest_of_what_is_there(recipes: Path) -> None:
    (recipes / "weights").mkdir()
    (found,) = twin(recipes, {"set": ["target.base={path: wieghts}"]})
    assert (found.rule, found.hint) == ("SRC08", "did you mean `weights`?")


@pytest.mark.parametrize(
    ("sizes", "sm", "taken"),
    [
        ((4, 64, 2048, 8256), "9.0", False),  # the report's matrix
        ((4, 64, 2048, 8192), "9.0", True),
        ((4, 128, 2048, 8320), "8.0", True),
        ((4, 16, 2048, 8192), "8.0", False),
        ((4, 128, 2040, 8192), "8.0", False),
        ((4, 128, 2040, 8192), "9.0", True),
    ],
)
def test_a_kernel_takes_a_matrix_or_says_why_not(sizes: tuple[int, int, int, int], sm: str, taken: bool) -> None:
    bits, group, out, columns = sizes
    matrix = kernels.Matrix(bits, group, True, out, columns, "bfloat16")
    assert any(kernel.refuses(matrix) is None for kernel in kernels.rows("cuda", sm)) == taken


@pytest.mark.parametrize(
    ("task", "dataset", "same"),
    [
        ("gsm8k", "openai/gsm8k", True),
        ("gpqa_diamond_cot_zeroshot", "Idavidrein/gpqa", True),
        ("humaneval", "someone/HumanEval", True),
        ("mmlu_pro", "TIGER-Lab/MMLU-Pro", True),
        ("mmlu_pro", "cais/mmlu", False),
        ("own_task", "someone/own-task", True),
        ("gsm8k", "nvidia/Nemotron-Post-Training-Dataset-v2", False),
    ],
)
def test_a_task_knows_its_dataset(task: str, dataset: str, same: bool) -> None:
    assert tasks.dataset_is(task, dataset) == same


def test_a_stage_and_a_rule_get_the_nearest_spelling(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "store")]
    assert main(["why", "distil", str(root / "recipes/micro.yaml"), *store]) == 2
    assert "did you mean `distill`?" in capsys.readouterr().err
    assert main(["explain", "DFR01"]) == 2
    assert "did you mean `DRF01`?" in capsys.readouterr().err
    assert main(["buidl"]) == 2
    assert "did you mean `build`?" in capsys.readouterr().err


def test_explain_prints_the_page_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "drf01"]) == 0
    assert capsys.readouterr().out.encode() == files(PAGES)["DRF01.md"]
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PAGES)


GOLDEN: dict[str, dict[str, Any]] = {
    "text-and-shape": {
        "replace": {
            "name: micro": "name: no",
            "kind: muon, lr: 8e-3": "kind: moun, lr: 8e-3",
            "lr: 1e-4": 'lr: "1e-4"',
            "seed: 42": "seed: 042",
            "      taps_from: teacher": "      taps_form: teacher",
            "method: gptq": "method: gtpq",
            "  max_num_seqs: 4": "  max_num_seqs: 4\n  max_num_seqs: 8",
            "  hardware: cpu": "\thardware: cpu",
        }
    },
    "broken-sections": {
        "replace": {
            "scheme: {bits: 4, group_size: 32": "scheme: {bits: 4, group_size: [32",
            "drafter:": "<<<<<<< ours\ndrafter:\n=======\ndraftr:\n>>>>>>> theirs",
            "  k: 7": "  k: 7: 8",
            "image: {base: {debian: bookworm}}": "image: {base: {debian: bookwrom}}",
        }
    },
    "rules": {
        "replace": {
            "  k: 7": "  k: 8",
            "taps: [0, 1, 2]": "taps: [0, 1, 4]",
            "window: 64": "window: 4",
            "exclude: [heldout]}\n  prompts_b": "exclude: []}\n  prompts_b",
            "gdn-short-verify, ": "gdn-short-verfy, ",
        }
    },
    "wide-and-long": {
        "replace": {
            '"re:.*conv1d$"]': '"re:.*conv1d$"]  # \u5c64 \u2026',
            "ignore: [lm_head": 'ignore: [\u5168\u5c64, \u200be\u0301, "re:[", lm_head'
            + ", some.module.with.a.long.name" * 6,
        }
    },
    "set": {"set": ["serve.k=8", "drafter.swa={window: 4, semantics: symmetric-per-query, apply: always}"]},
    "set-unknown": {"set": ["serve.kk=5", "drafter.swa={windw: 64, semantics: symmetric-per-query, apply: always}"]},
    "accepted": {"set": ["serve.k=5", "accept=[{rule: DRF02, because: K 5 is as fast on this machine}]"]},
    "accepted-in-vain": {
        "replace": {
            "evaluate:": "accept:\n"
            "  - {rule: DFR02, because: a reason}\n"
            "  - {rule: DRF01, because: a reason}\n"
            "  - {rule: SRV01, because: a reason}\n\n"
            "evaluate:"
        }
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_a_user_reads(
    name: str, recipes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit = GOLDEN[name]
    twin(recipes, {key: value for key, value in edit.items() if key != "set"})
    monkeypatch.chdir(recipes.parent)
    sets = [part for given in edit.get("set", []) for part in ("--set", given)]
    code = main(["validate", "recipes/micro.yaml", *sets])
    shown = capsys.readouterr().out
    golden = HERE / "golden" / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(shown)
    assert shown == golden.read_text()
    assert code == (2 if ": error[" in shown else 0)


def test_json_has_the_same_findings_in_its_own_shape(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(root / "recipes/micro.yaml"), "--set", "serve.k=8", "--json"]) == 2
    (item,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert list(item) == ["rule", "severity", "file", "line", "column", "message", "hint"]
    assert (item["rule"], item["line"], item["column"]) == ("DRF01", 1, 9)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = "\n".join(map(str, findings(root / "recipes/micro.yaml", ["serve.k=8"])))
    shown = painted(text, Terminal())
    assert shown != text and re.sub("\x1b\\[[0-9]+m", "", shown) == text
    assert painted(text, io.StringIO()) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(text, Terminal()) == text


def test_a_recipe_cannot_move_the_cursor(recipes: Path) -> None:
    found = twin(recipes, {"replace": {"  k: 7": '  k: "\\e[2J\\u202e"'}})
    assert found and all(letter == "\n" or letter.isprintable() for item in found for letter in str(item))


@pytest.mark.parametrize(
    ("old", "new", "places"),
    [
        ("  qad:", "  qad:\nbare", [("YML10", 35, 1)]),
        ("name: micro", "name micro", [("YML10", 4, 1)]),
        ("chat_template: ", "chat_template: '", [("YML10", 122, 18)]),
        ("  k: 7", "  k: \u0007\u0007", [("YML08", 118, 6), ("YML08", 118, 7)]),
        ("version: 1", "version: 1\n---\nversion: 1", [("YML08", 5, 1)]),
        ("lr: 8e-3", "lr: [8e-3", [("YML10", 24, 98)]),
    ],
)
def test_one_fault_of_the_text_is_not_many(
    recipes: Path, old: str, new: str, places: list[tuple[str, int, int]]
) -> None:
    found = twin(recipes, {"replace": {old: new}})
    shown = [(item.rule, item.line, item.column) for item in found]
    assert shown == places, "\n".join(map(str, found))
