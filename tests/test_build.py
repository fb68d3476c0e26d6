"""`qdc build` as a user meets it: micro, whole, through the command line and real worker processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from micro import ROOT, SCRATCH, Micro, qdc

TRACE = "Traceback (most recent call last)"


def ran(answer: Any) -> set[str]:
    return {stage["name"] for stage in answer["stages"] if stage["ran"]}


def test_first_build_runs_every_stage_and_names_the_image(micro: Micro) -> None:
    names = {stage["name"] for stage in micro.first["stages"]}
    assert ran(micro.first) == names
    assert {"base", "distill", "select", "pack-target", "draft-train:finetune", "draft-quantize", "image"} <= names
    assert all(re.fullmatch("[0-9a-f]{64}", stage["output"]) for stage in micro.first["stages"])
    image = micro.first["image"]
    assert re.fullmatch("sha256:[0-9a-f]{64}", image["id"])
    assert image["name"] == f"micro:w4g32-qad6-dflash8k7-gptq128-swa64-cpu-{image['id'][7:19]}"


def test_second_build_does_nothing_and_says_so(micro: Micro) -> None:
    last = micro.build()
    before = micro.written()
    again = micro.build()
    assert ran(again) == set() and again["build"] == last["build"] and again["image"] == micro.first["image"]
    assert "nothing to do: all" in micro.build(json_=False)
    assert micro.written() == before


def test_a_build_with_nothing_to_do_imports_nothing_heavy(micro: Micro) -> None:
    heavy = ["yaml", "pydantic", "rich", "jinja2", "importlib.metadata", "torch", "numpy", "docker", "qdc.graph.code"]
    heavy += ["fsspec", "asyncio", "qdc.store.remote"]
    code = f"""
import sys
from qdc.cli import main
code = main(["build", {str(micro.recipe)!r}, "--store", {str(micro.store)!r}, *{SCRATCH!r}])
print("LOADED", [name for name in {heavy!r} if name in sys.modules])
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler"), "QDC_REMOTE": "s3://nowhere/store"},
    )
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


def test_k_renders_the_image_alone_and_writes_little(micro: Micro) -> None:
    before = micro.written()
    edited = micro.build("--set", "serve.k=5")
    assert ran(edited) == {"image"}
    assert micro.written() - before < 200_000
    done = qdc("diff", micro.first["build"], edited["build"], "--store", str(micro.store))
    assert done.returncode == 1
    assert "K 7 -> 5" in done.stdout.splitlines()
    same = qdc("diff", edited["build"], edited["build"], "--store", str(micro.store))
    assert (same.returncode, same.stdout) == (0, "no difference\n")
    answer = json.loads(
        qdc("diff", micro.first["build"], edited["build"], "--json", "--store", str(micro.store)).stdout
    )
    assert answer["same"] is False and {"subject", "path", "from", "to", "text"} == set(answer["changes"][0])


def test_ptq_method_reruns_from_draft_quantize(micro: Micro) -> None:
    edited = micro.build("--set", "drafter.ptq.method=rtn")
    assert ran(edited) <= {"draft-quantize", "layer:drafter", "image", "evaluate:drafter"}
    assert {"draft-quantize", "image"} <= ran(edited)


def test_plan_and_why_explain(micro: Micro) -> None:
    options = ["--store", str(micro.store), *SCRATCH]
    fresh = qdc("plan", str(micro.recipe), *options)
    assert fresh.returncode == 0 and "stale" not in fresh.stdout
    stale = qdc("plan", str(micro.recipe), *options, "--set", "target.qad.optimizer.lr=5e-5", "--json")
    assert stale.returncode == 1
    stages = {stage["name"]: stage for stage in json.loads(stale.stdout)["stages"]}
    assert stages["distill"]["state"] == "stale" and stages["image"]["state"] == "waiting"
    assert stages["corpus:teacher_corpus"]["state"] == stages["draft-train:pretrain"]["state"] == "fresh"
    assert [r for r in stages["distill"]["reasons"] if r["what"] == "optimizer.lr"] == [
        {"kind": "parameter", "what": "optimizer.lr", "was": 1e-4, "now": 5e-5}
    ]
    why = qdc("why", "distill", str(micro.recipe), *options, "--set", "target.qad.optimizer.lr=5e-5")
    assert "optimizer.lr: 0.0001 -> 5e-05" in why.stdout and len(why.stdout.splitlines()) < 12
    still = qdc("why", "distill", str(micro.recipe), *options)
    assert "distill is fresh" in still.stdout and len(still.stdout.splitlines()) < 12


def test_show_gives_manifest_record_and_list(micro: Micro) -> None:
    store = ["--store", str(micro.store)]
    id = micro.first["build"]
    manifest = json.loads(qdc("show", id, "--manifest", "--json", *store).stdout)["manifest"]
    assert manifest["recipe"]["serve"]["k"] == 7
    text = json.dumps(manifest)
    for private in (str(micro.folder), os.uname().nodename, "2026-"):
        assert private not in text
    record = json.loads(qdc("show", id, "--record", "--json", *store).stdout)["record"]
    assert record["image"]["id"] == micro.first["image"]["id"]
    assert record["origins"]["serve.k"].startswith("micro.yaml:")
    assert {row["image"] for row in record["measurements"]} == {record["image"]["id"]}
    assert id in qdc("show", *store).stdout


def test_table_has_every_row_with_n_and_interval(micro: Micro) -> None:
    record = json.loads(qdc("show", micro.first["build"], "--record", "--json", "--store", str(micro.store)).stdout)[
        "record"
    ]
    rows = {(row["subject"], row["metric"]): row for row in record["measurements"]}
    subjects = {subject for subject, _ in rows}
    assert {"pretrain", "finetune", "gptq"} <= subjects
    for row in record["measurements"]:
        assert row["n"] > 0
        if row["low"] is not None:
            assert row["low"] <= row["value"] <= row["high"]


def test_image_is_the_same_from_another_folder_after_ctrl_c_and_kill(micro: Micro, tmp_path: Path) -> None:
    """Another folder, umask, locale and clock zone; interrupted once, killed once, then finished."""
    folder = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    store = folder / "other-store"
    command = ["build", "recipes/micro.yaml", "--store", str(store), *SCRATCH]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "compiler"), "LC_ALL": "C", "TZ": "Pacific/Kiritimati"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "qdc", *command],
            cwd=folder,
            text=True,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def until(process: subprocess.Popen[str], words: str) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(words):
                return
        raise AssertionError(f"never said {words!r}")

    process = start()
    until(process, "base: started")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and TRACE not in said and "run the same command" in said

    process = start()
    until(process, "distill: started")
    process.kill()
    process.communicate()
    time.sleep(0.5)
    assert children_of_nobody(str(store)) == []

    done = subprocess.run(
        [sys.executable, "-m", "qdc", *command, "--json"],
        cwd=folder,
        text=True,
        env=environment,
        capture_output=True,
        preexec_fn=lambda: os.umask(0o077) and None,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["image"] == micro.first["image"]
    assert {"base", "quantize"} & ran(answer) == set() and "distill" in ran(answer)
    verified = qdc("store", "verify", "--store", str(store))
    assert verified.returncode == 0, verified.stdout


def children_of_nobody(words: str) -> list[int]:
    """Processes whose command line has `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_damage_is_found_and_only_that_is_rebuilt(micro: Micro, tmp_path: Path) -> None:
    store = tmp_path / "copy"
    shutil.copytree(micro.store, store, symlinks=True)
    output = next(stage["output"] for stage in micro.first["stages"] if stage["name"] == "select")
    tree = json.loads((store / "trees" / f"{output}.json").read_bytes())
    sha256 = next(entry[3] for entry in tree if entry[0] == "selected.safetensors")
    path = store / "objects/sha256" / sha256[:2] / sha256
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    verify = qdc("store", "verify", "--store", str(store))
    assert verify.returncode == 1 and sha256 in verify.stdout
    again = json.loads(qdc("build", str(micro.recipe), "--store", str(store), *SCRATCH, "--json").stdout)
    # The checkpoint that was selected is one object in both outputs; with it back, `select` is whole again.
    assert ran(again) == {"distill"} and again["image"] == micro.first["image"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["build", "no.yaml"], 2, "cannot read the recipe"),
        (["build", "{recipe}", "--set", "serve.k=9"], 2, "K = 9, but a draft block of 8"),
        (["build", "{recipe}", "--set", "serve.kk=9"], 2, "unknown field `kk`"),
        (["build", "{recipe}", "--set", "serve.max_model_len=long"], 2, "must be a whole number"),
        (["build", "{recipe}", "--set", "drafter.ptq.scheme.group_size=96"], 2, "group_size"),
        (["build", "{recipe}", "--set", "serve.chat_template=none.jinja"], 2, "cannot read `none.jinja`"),
        (["build", "{recipe}", "--frob"], 2, "unrecognized arguments"),
        (["frob"], 2, "there is no verb `frob`"),
        (["why", "frob", "{recipe}"], 2, "no stage `frob`"),
        (["export", "@99", "archive:x.tar"], 2, "has"),
        (["export", "@1", "nowhere:x"], 2, "is no destination"),
        (["export", "@1", "registry:Team/demo"], 2, "`Team/demo` names no image of a registry"),
        (["export", "@1", "registry:127.0.0.1:1/demo"], 4, "127.0.0.1:1: it cannot be reached"),
        (["audit", "archive:none.tar"], 4, "none.tar"),
        (["show", "frob"], 2, "names no image"),
    ],
)
def test_bad_input_is_one_clear_error(micro: Micro, arguments: list[str], code: int, words: str) -> None:
    given = [item.replace("{recipe}", str(micro.recipe)) for item in arguments]
    done = qdc(*given, "--store", str(micro.store), cwd=micro.folder)
    assert done.returncode == code, done.stderr
    assert words in done.stderr and TRACE not in done.stderr + done.stdout
    as_json = qdc(*given, "--store", str(micro.store), "--json", cwd=micro.folder)
    error = json.loads(as_json.stdout)["error"]
    assert set(error) == {"id", "message", "file", "line", "column", "hint"} and as_json.returncode == code
    assert ran(micro.build()) == set()


def test_a_failing_stage_names_its_log_and_keeps_the_store(micro: Micro, tmp_path: Path) -> None:
    broken = micro.folder / "recipes" / "broken"
    broken.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    (broken / "config.json").write_text(json.dumps(config))
    empty = {"dtype": "BF16", "shape": [0, 128], "data_offsets": [0, 0]}
    named = ["mlp.up_proj", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d"]
    header = json.dumps({f"model.layers.0.{name}.weight": empty for name in named}).encode()
    (broken / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    done = qdc("build", str(micro.recipe), "--store", str(micro.store), *SCRATCH, "--set", "target.base={path: broken}")
    assert done.returncode == 4, done.stderr
    assert "stage base:" in done.stderr and "/logs/" in done.stderr and TRACE not in done.stderr
    assert ran(micro.build()) == set()


def test_a_wrong_environment_is_refused(micro: Micro, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    done = qdc(
        "build",
        str(micro.recipe),
        "--store",
        str(tmp_path / "store"),
        *SCRATCH,
        QDC_TRAIN_PYTHON=str(tmp_path / "empty/bin/python"),
    )
    assert done.returncode == 4
    assert "is not the train environment" in done.stderr and "make setup" in done.stderr and TRACE not in done.stderr
    done = qdc(
        "build", str(micro.recipe), "--store", str(tmp_path / "store"), *SCRATCH, QDC_TRAIN_PYTHON="/nowhere/python"
    )
    assert done.returncode == 4 and "cannot start" in done.stderr and TRACE not in done.stderr


def test_a_store_that_cannot_be_written_is_one_clear_error(micro: Micro) -> None:
    done = qdc("build", str(micro.recipe), "--store", "/proc/nowhere", *SCRATCH)
    assert done.returncode == 4 and "cannot write to the store" in done.stderr and TRACE not in done.stderr


def test_archive_of_micro_is_audited_and_edits_are_refuted(micro: Micro, tmp_path: Path) -> None:
    archive = tmp_path / "micro.tar"
    done = qdc("export", micro.first["build"], f"archive:{archive}", "--store", str(micro.store))
    assert done.returncode == 0, done.stderr
    report = json.loads(qdc("audit", f"archive:{archive}", "--recipe", str(micro.recipe), "--json").stdout)
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
    ):
        assert verdicts[claim] == "proved", (claim, verdicts[claim])
    assert "refuted" not in verdicts.values()
    refuted = qdc("audit", f"archive:{archive}", "--require", "serve.k=15")
    assert refuted.returncode == 1
    anchored = qdc("audit", f"archive:{archive}", "--expect", micro.first["image"]["id"])
    assert anchored.returncode in (0, 3), anchored.stdout
    wrong = qdc("audit", f"archive:{archive}", "--expect", "sha256:" + "0" * 64)
    assert wrong.returncode == 1
    second = tmp_path / "again.tar"
    qdc("export", micro.first["build"], f"archive:{second}", "--store", str(micro.store))
    assert archive.read_bytes() == second.read_bytes()
