"""tiny from nothing to a gated image in a real container engine, as `make demo` does it; and what must be equal.

Slow: trains, downloads the runtime packages, makes a Debian base, starts an engine of its own. Nothing here skips.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "recipes" / "tiny.yaml"


def run(*words: str | Path, cwd: Path = ROOT, ok: tuple[int, ...] = (0,), **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode in ok, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def qdc(*arguments: str | Path, ok: tuple[int, ...] = (0,), **more: Any) -> str:
    return run(sys.executable, "-m", "qdc", *arguments, ok=ok, PYTHONPATH=str(ROOT / "compiler"), **more)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny") / "artifacts"


@pytest.fixture(scope="module")
def built(store: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(qdc("build", TINY, "--store", store, "--json"))
    return answer


@pytest.fixture(scope="module")
def record(built: dict[str, Any], store: Path) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(qdc("show", built["build"], "--record", "--json", "--store", store))["record"]
    return shown


@pytest.fixture(scope="module")
def archive(built: dict[str, Any], store: Path) -> Path:
    file = store.parent / "image.tar"
    qdc("export", built["build"], f"archive:{file}", "--store", store)
    return file


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """DOCKER_HOST of an engine that this test starts and ends."""
    folder = Path(tempfile.mkdtemp(prefix="qdc-t-"))
    script = ROOT / "scripts" / "docker-engine"
    try:
        yield run(script, "start", folder).strip().removeprefix("DOCKER_HOST=")
    finally:
        run(script, "stop", folder)
        shutil.rmtree(folder)


def test_the_plan_predicts_the_archives_size(store: Path, archive: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "empty", store):
        planned = json.loads(qdc("plan", TINY, "--json", "--store", place, ok=(0, 1)))["predictions"]["image"]
        assert planned["total"]["value"] == pytest.approx(archive.stat().st_size, rel=0.01)


def rows(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["subject"], row["metric"]): row for row in record["measurements"]}


def test_qad_removes_half_of_the_divergence_and_changes_fewer_answers(record: dict[str, Any]) -> None:
    found = rows(record)
    ptq, qad = found["ptq", "kl-all-tokens"], found["qad", "kl-all-tokens"]
    assert qad["value"] <= 0.5 * ptq["value"]
    changed = next(test for test in record["tests"] if test["metric"] == "changed-answers")
    assert changed["n"] >= 1500 and changed["p"] < 0.05
    assert changed["qad_only_changed"] < changed["ptq_only_changed"]


def test_the_quantized_drafter_is_accepted(record: dict[str, Any]) -> None:
    found = rows(record)
    assert found["gptq", "acceptance-length"]["value"] > 4
    assert {"pretrain", "finetune", "gptq"} <= {subject for subject, metric in found if metric == "acceptance-length"}


def test_a_second_build_runs_nothing(built: dict[str, Any], store: Path) -> None:
    again = json.loads(qdc("build", TINY, "--store", store, "--json"))
    assert not [stage for stage in again["stages"] if stage["ran"]]
    assert again["image"] == built["image"] and again["build"] == built["build"]


def test_the_artifact_passes_its_gate(archive: Path, store: Path, engine: str, built: dict[str, Any]) -> None:
    answer = json.loads(
        qdc("gate", f"archive:{archive}", "--recipe", TINY, "--store", store, "--json", DOCKER_HOST=engine)
    )
    outcomes = {check["id"]: check["outcome"] for check in answer["checks"]}
    assert set(outcomes.values()) == {"pass"}, answer["checks"]
    assert {"loads", "ping", "manifest", "answers", "lossless", "acceptance", "size"} <= set(outcomes)
    shown = json.loads(qdc("show", built["build"], "--record", "--json", "--store", store))["record"]
    served = [row for row in shown["measurements"] if row["subject"] == "engine's counters"]
    assert served and served[0]["image"] == built["image"]["id"]


def test_without_an_engine_only_what_the_bytes_show_is_said(archive: Path, store: Path) -> None:
    answer = json.loads(
        qdc(
            "gate",
            f"archive:{archive}",
            "--no-replay",
            "--json",
            "--store",
            store,
            ok=(3,),
            DOCKER_HOST="unix:///nowhere",
        )
    )
    outcomes = {check["id"]: check["outcome"] for check in answer["checks"]}
    before = ("image", "size", "layers", "architecture", "entrypoint", "environment", "claims")
    assert {outcomes.pop(id) for id in before} == {"pass"}, answer["checks"]
    assert set(outcomes.values()) == {"not-run"}
    assert all(check["why"] for check in answer["checks"])


def test_the_image_that_is_exported_is_the_one_that_loads(archive: Path, engine: str, built: dict[str, Any]) -> None:
    loaded = run("docker", "load", "-i", archive, DOCKER_HOST=engine)
    assert built["image"]["name"] in loaded
    id = run("docker", "image", "inspect", "-f", "{{.Id}}", built["image"]["name"], DOCKER_HOST=engine).strip()
    assert id == built["image"]["id"]


def test_audit_proves_what_the_recipe_says(archive: Path, store: Path, built: dict[str, Any]) -> None:
    report = json.loads(
        qdc(
            "audit",
            f"archive:{archive}",
            "--recipe",
            TINY,
            "--expect",
            built["image"]["id"],
            "--json",
            "--store",
            store,
        )
    )
    verdicts = {item["claim"]: item["verdict"] for item in report["verdicts"]}
    for claim in (
        "target.quantization.scheme.bits",
        "target.quantization.scheme.group_size",
        "target.quantization.modules",
        "drafter.kind",
        "drafter.architecture.draft_block_size",
        "drafter.architecture.taps",
        "drafter.swa.window",
        "serve.k",
        "serve.engine.vllm",
        "image.id",
    ):
        assert verdicts[claim] == "proved", claim


def share(source: Path, target: Path, stages: set[str]) -> None:
    """Copy the records of `stages`, with what they made, into another store."""
    for path in source.glob("records/*/*.json"):
        made = json.loads(path.read_bytes())
        if made["instance"] not in stages:
            continue
        tree = source / "trees" / f"{made['output']}.json"
        wanted = [path, tree]
        wanted += [source / "objects/sha256" / entry[3][:2] / entry[3] for entry in json.loads(tree.read_bytes())]
        for file in wanted:
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                os.link(file, place)


def test_micro_in_two_folders_is_one_image_and_runtime_is_reproducible(
    built: dict[str, Any], store: Path, tmp_path: Path
) -> None:
    answers = []
    for name in ("one", "two"):
        folder = tmp_path / name
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        shared = {"base-image", "runtime"} if name == "one" else {"base-image"}
        share(store, folder / "artifacts", shared)
        answers.append(json.loads(qdc("build", "recipes/micro.yaml", "--json", cwd=folder)))
    ran = [{stage["name"] for stage in answer["stages"] if stage["ran"]} for answer in answers]
    assert "base-image" not in ran[0] | ran[1] and "runtime" not in ran[0] and "runtime" in ran[1]
    outputs = [{stage["name"]: stage["output"] for stage in answer["stages"]} for answer in answers]
    assert outputs[0]["runtime"] == outputs[1]["runtime"]
    assert answers[0]["image"] == answers[1]["image"]
