"""Staleness as a table: which edit reruns what. plan() is pure, so records are injected, not made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core import canonical
from qdc.graph.code import code_digests
from qdc.graph.expand import expand
from qdc.graph.instances import Instance
from qdc.graph.plan import Plan, plan
from qdc.graph.table import KINDS
from qdc.recipe.load import load

ROOT = Path(__file__).resolve().parents[1]
FACTS: dict[str, Any] = {
    "code": {kind: canonical.digest(kind) for kind in KINDS},
    "versions": {name: "1.0" for kind in KINDS.values() for name in kind.packages},
    "chat_template": "template",
    "serve_lock": "lock",
    "templates": {},
    "sources": {},
    "trees": {},
    "pins": {},
    "licences": [],
}


def instances(*sets: str, facts: dict[str, Any] = FACTS) -> list[Instance]:
    return expand(load(ROOT / "recipes/tiny.yaml", list(sets)).data, facts)


def built(items: list[Instance]) -> dict[str, dict[str, Any]]:
    """Records as if everything had been built; each output is a function of what its key covers."""
    records: dict[str, dict[str, Any]] = {}
    while todo := [s for s in plan(items, records.get).stages if s.state == "stale"]:
        for stage in todo:
            assert stage.key
            records[stage.key] = {"output": canonical.digest(["output", stage.key])}
    return records


def not_fresh(planned: Plan) -> set[str]:
    return {stage.instance.name for stage in planned.stages if stage.state != "fresh"}


BASE = built(instances())


def test_everything_is_fresh_after_a_build() -> None:
    assert plan(instances(), BASE.get).fresh


def test_nothing_is_fresh_before_it() -> None:
    planned = plan(instances(), {}.get)
    assert not planned.names("fresh")
    assert set(planned.names("stale")) == {"prompts:heldout", "base-image", "runtime"}


REF = "image.base={ref: example.org/base@sha256:" + "1" * 64 + "}"


def test_a_given_base_reruns_what_stands_on_it_alone_and_counts_by_its_content() -> None:
    locked = {**FACTS, "sources": {"image.base": "a" * 64}}
    assert not_fresh(plan(instances(REF, facts=locked), BASE.get)) == {"base-image", "runtime", "image"}
    records = built(instances(REF, facts=locked))
    other = REF.replace("example.org", "mirror.org")
    assert not_fresh(plan(instances(other, facts=locked), records.get)) == {"image"}, "its name is in the manifest"
    moved = {**FACTS, "sources": {"image.base": "b" * 64}}
    assert not_fresh(plan(instances(REF, facts=moved), records.get)) == {"base-image", "image"}
    waiting = plan(instances(REF), records.get)
    assert waiting.names("waiting") == ["base-image", "image"], "a lock must name its bytes first"


OLD_GPU = ("serve.engine.platform=cuda", "deploy.hardware=a10g", "serve.engine.patches=[w4-drafter]")


def test_an_engine_that_knows_only_whole_models_gets_the_target_wrapped_and_nothing_is_made_anew() -> None:
    older = instances('serve.engine.vllm="0.25.1"', *OLD_GPU)
    assert not_fresh(plan(older, BASE.get)) == {"wrap-target", "layer:target", "image"}
    wrapped = next(item for item in older if item.name == "wrap-target")
    assert wrapped.inputs == {"target": "pack-target"} and wrapped.params == {}
    assert {i.name for i in older if "wrap-target" in i.inputs.values()} == {"layer:target", "image"}
    newer = instances('serve.engine.vllm="0.27.1"', *OLD_GPU)
    assert "wrap-target" not in {item.name for item in newer}


AFTER_TARGET = {
    "pack-target",
    "corpus:target_corpus",
    "draft-train:finetune",
    "calibrate",
    "draft-quantize",
    "layer:target",
    "layer:drafter",
    "image",
    "evaluate:target",
    "evaluate:drafter",
}


@pytest.mark.parametrize(
    ("change", "reruns"),
    [
        ("serve.k=5", {"image"}),
        ("drafter.swa.window=48", {"image"}),
        ("serve.max_model_len=160", {"image"}),
        ("serve.max_num_seqs=2", {"image"}),
        ("drafter.ptq.method=rtn", {"draft-quantize", "layer:drafter", "image", "evaluate:drafter"}),
        ("target.qad.optimizer.lr=2e-4", {"distill", "select"} | AFTER_TARGET),
        (
            "drafter.training.1.optimizer.lr=2e-3",
            {"draft-train:finetune", "draft-quantize", "layer:drafter", "image", "evaluate:drafter"},
        ),
        ("target.quantization.scheme.group_size=64", {"quantize", "distill", "select"} | AFTER_TARGET),
        ("evaluate.quality.prompts=100", {"evaluate:target"}),
        ("name=other", {"image"}),
        ("deploy.size_limit.bytes=1e9", {"image"}),
        (f"image.base={{debian: bookworm, digest: sha256:{'a' * 64}}}", {"base-image", "image"}),
    ],
)
def test_an_edit_reruns_exactly_what_depends_on_it(change: str, reruns: set[str]) -> None:
    planned = plan(instances(change), BASE.get)
    assert not_fresh(planned) == reruns
    assert len(planned.names("stale")) >= 1


def test_qad_learning_rate_never_touches_what_does_not_depend_on_it() -> None:
    planned = plan(instances("target.qad.optimizer.lr=1e-3"), BASE.get)
    kept = {
        "prompts:prompts_a",
        "prompts:prompts_b",
        "corpus:teacher_corpus",
        "pack:teacher_corpus",
        "draft-train:pretrain",
        "base",
        "quantize",
    }
    assert kept & not_fresh(planned) == set()


def test_an_unchanged_output_stops_the_rerun() -> None:
    """A stage that reruns to the same bytes leaves what follows fresh (early cut-off)."""
    items = instances("target.qad.checkpoints.every=30")
    records = dict(BASE)
    planned = plan(items, records.get)
    assert planned["distill"].state == "stale" and planned["select"].state == "waiting"
    old = plan(instances(), BASE.get)
    records[str(planned["distill"].key)] = {"output": old["distill"].output}
    after = plan(items, records.get)
    assert not_fresh(after) == {"image"}


def test_swapped_inputs_are_another_key() -> None:
    one = Instance("x", "pack", {}, {"a": "tree:" + "1" * 64, "b": "tree:" + "2" * 64}, "c", {}, "exact", "train", "io")
    assert one.key({"a": "1" * 64, "b": "2" * 64}) != one.key({"a": "2" * 64, "b": "1" * 64})


def test_code_and_package_versions_are_in_the_key() -> None:
    code = {**FACTS, "code": {**FACTS["code"], "pack-target": "changed"}}
    assert "pack-target" in not_fresh(plan(instances(facts=code), BASE.get))
    assert "distill" not in not_fresh(plan(instances(facts=code), BASE.get))
    torch = {**FACTS, "versions": {**FACTS["versions"], "torch": "changed"}}
    assert "base" in not_fresh(plan(instances(facts=torch), BASE.get))
    assert not not_fresh(plan(instances(facts=torch), BASE.get)) & {"prompts:heldout", "runtime", "base-image"}


def test_reasons_name_the_parameter_with_both_values() -> None:
    record = {"components": plan(instances(), BASE.get)["image"].instance.components({}), "output": "0" * 64}
    planned = plan(instances("serve.k=5"), BASE.get, lambda name: record if name == "image" else None)
    reasons = [(r["kind"], r["what"], r["was"], r["now"]) for r in planned["image"].reasons if r["kind"] == "parameter"]
    assert reasons == [("parameter", "recipe.serve.k", 7, 5)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_keys_differ_exactly_when_parameters_do(a: Any, b: Any) -> None:
    def key(value: Any) -> str:
        return Instance("x", "pack", {"v": value}, {}, "c", {}, "exact", "train", "io").key({})

    assert (key(a) == key(b)) == (canonical.dumps(a) == canonical.dumps(b))


@settings(max_examples=20)
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.randoms())
def test_key_does_not_depend_on_the_order_of_fields(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical.digest(value) == canonical.digest(dict(items))


class TestCodeDigest:
    @pytest.fixture
    def package(self, tmp_path: Path) -> Path:
        copy = tmp_path / "qdc"
        shutil.copytree(ROOT / "compiler/qdc", copy, ignore=shutil.ignore_patterns("__pycache__"))
        return copy

    def changed(self, package: Path, file: str, old: str, new: str) -> set[str]:
        before = code_digests(package)
        path = package / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        after = code_digests(package)
        return {kind for kind in before if before[kind] != after[kind]}

    def test_comments_docstrings_and_formatting_are_outside(self, package: Path) -> None:
        path = package / "methods/grid.py"
        text = path.read_text()
        more = 'EXPLAINED = 1\n"""Of what it is."""\n'
        path.write_text(text + more)
        before = code_digests(package)
        more = more.replace("is", "was")
        path.write_text("# a comment\n" + (text + more).replace('"""', '"""Other words. ', 1) + "\n\n\n")
        assert code_digests(package) == before

    def test_a_helper_reaches_exactly_its_users(self, package: Path) -> None:
        path = package / "methods/grid.py"
        before = code_digests(package)
        path.write_text(path.read_text() + "\nEXTRA = 1\n")
        changed = {kind for kind, digest in code_digests(package).items() if digest != before[kind]}
        assert {"quantize", "distill", "pack-target", "draft-quantize"} <= changed
        assert not changed & {"prompts", "pack", "runtime", "base-image", "layer", "calibrate"}

    def test_core_is_outside(self, package: Path) -> None:
        path = package / "core/stage.py"
        before = code_digests(package)
        path.write_text(path.read_text() + "\nEXTRA = 1\n")
        assert code_digests(package) == before

    def test_files_that_go_into_the_image_count_by_their_bytes(self, package: Path) -> None:
        before = code_digests(package)
        path = package / "serving/launcher.py"
        path.write_text(path.read_text() + "# a comment\n")
        changed = {kind for kind, digest in code_digests(package).items() if digest != before[kind]}
        assert changed == {"image"}

    @pytest.mark.parametrize(
        "text",
        [
            "from qdc.methods import extra",
            "from qdc.methods.extra import VALUE",
            "import qdc.methods.extra",
            "import qdc.methods.extra as other",
            "from ..methods import extra",
            "from ..methods.extra import VALUE",
            "def late():\n    from qdc.methods import extra",
        ],
    )
    def test_every_form_of_import_is_followed(self, package: Path, text: str) -> None:
        extra, stage = package / "methods/extra.py", package / "stages/prompts.py"
        extra.write_text("VALUE = 1\n")
        stage.write_text(f"{stage.read_text()}\n{text}\n")
        before = code_digests(package)
        extra.write_text("VALUE = 2\n")
        assert {kind for kind, digest in code_digests(package).items() if digest != before[kind]} == {"prompts"}

    def test_a_package_that_runs_code_counts_with_its_modules(self, package: Path) -> None:
        before = code_digests(package)
        (package / "methods/__init__.py").write_text("EXTRA = 1\n")
        after = code_digests(package)
        assert before["prompts"] != after["prompts"] and before["layer"] == after["layer"]
