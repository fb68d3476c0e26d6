"""Running builds: two at once, damage, workers that end badly. Stages are one-line scripts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import small_store

from qdc.cli import main
from qdc.cli.progress import Quiet
from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.graph.code import code_digests
from qdc.graph.instances import Instance
from qdc.graph.signature import package_signature
from qdc.run import process
from qdc.run.build import Build, Ran, artifact_json
from qdc.run.front import Front, front
from qdc.run.outcome import same_build
from qdc.run.records import add_measurements
from qdc.run.references import refer
from qdc.run.settings import Settings, settings
from qdc.run.worker import check_code
from qdc.store.store import Store

STAGE = """
import json, os, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_bytes())
output = Path(job["output"])
with open(job["params"]["trace"], "a") as trace:
    trace.write(job["params"]["name"] + "\\n")
exec(job["params"]["code"])
"""
REAL_START = process.start
WRITE = "(output / 'x').write_text(job['params']['name'])"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that run the code in their parameters."""

    def start(
        name: str, python: str, job: dict[str, Any], work: Path, log: Path, progress: Any, keep: tuple[int, ...] = ()
    ) -> process.Worker:
        reading, writing = os.pipe()
        (work / "job.json").write_text(json.dumps(job))
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", STAGE, str(work / "job.json")],
            pass_fds=[writing, *keep],
            start_new_session=True,
        )
        os.close(writing)
        return process.Worker(name, child, os.fdopen(reading, "rb", buffering=0), log, time.monotonic(), progress)

    monkeypatch.setattr(process, "start", start)


class Scripts:
    """Instances whose stages are scripts, and how often each ran."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "trace"

    def instance(self, name: str, code: str = WRITE, lane: str = "io", **inputs: str) -> Instance:
        params = {"name": name, "code": code, "trace": str(self.trace)}
        return Instance(name, "prompts", params, inputs, "code", {}, "exact", "core", lane)

    def ran(self) -> list[str]:
        return self.trace.read_text().split() if self.trace.exists() else []


@pytest.fixture
def made(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def build(store: Path, *instances: Instance) -> list[str]:
    """Names of the stages that this build ran."""
    ran = Build(Store(store), Settings(sys.executable, 1, 1), list(instances), Quiet()).run()
    return [stage.name for stage in ran if stage.ran]


def test_two_builds_at_once_share_the_work_and_both_end(tmp_path: Path, made: Scripts) -> None:
    """In opposite orders: neither may wait for the other while it holds what the other needs."""
    slow = f"time.sleep(0.6); {WRITE}"
    a, b = made.instance("a", slow), made.instance("b", slow)
    after = made.instance("c", WRITE, one="a", two="b")
    found: dict[str, list[str]] = {}
    threads = [
        Thread(
            target=lambda name=name, order=order: found.update({name: build(tmp_path / "store", *order)}), daemon=True
        )
        for name, order in (("first", (a, b, after)), ("second", (b, a, after)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == ["first", "second"], "a build did not end"
    assert sorted(made.ran()) == ["a", "b", "c"]
    assert sorted(found["first"] + found["second"]) == ["a", "b", "c"]


def test_a_worker_holds_the_lock_on_its_key_until_it_ends(tmp_path: Path, made: Scripts) -> None:
    store = Store(tmp_path)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(store.lock("key"))
        assert lock is not None
        child = subprocess.Popen(["sleep", "30"], pass_fds=[lock])
    try:
        with store.lock("key", wait=False) as held:
            assert held is None
    finally:
        child.kill()
        child.wait()
    with store.lock("key", wait=False) as held:
        assert held is not None


def objects(store: Store, digest: str) -> list[Path]:
    tree = store.tree(digest)
    assert tree is not None
    return [store.object_path(entry.sha256) for entry in tree.entries]


@pytest.mark.parametrize("damage", ["tree", "record", "record of another key", "object shortened", "object gone"])
def test_damage_is_repaired_by_running_that_stage_once(tmp_path: Path, made: Scripts, damage: str) -> None:
    root = tmp_path / "store"
    one, two = made.instance("one"), made.instance("two", input="one")
    assert build(root, one, two) == ["one", "two"]
    store = Store(root)
    record = store.record(one.key({}))
    assert record is not None
    kept = root / "records" / one.key({}) / "1.json"
    target = objects(store, record["output"])[0]
    if damage == "tree":
        tree = root / "trees" / f"{record['output']}.json"
        small_store.spoil(tree, tree.read_bytes()[:-3])
    elif damage == "record":
        small_store.spoil(kept, kept.read_bytes()[:-9])
    elif damage == "record of another key":
        small_store.spoil(kept, json.dumps({**record, "key": "0" * 64}).encode())
    elif damage == "object shortened":
        small_store.spoil(target, b"")
    else:
        target.unlink()
    assert build(root, one, two) == ["one"]
    assert build(root, one, two) == []
    assert Store(root).verify() == []


def test_same_size_damage_stops_what_uses_it_and_the_next_build_repairs_it(tmp_path: Path, made: Scripts) -> None:
    root = tmp_path / "store"
    one, two = made.instance("one"), made.instance("two", input="one")
    build(root, one)
    store = Store(root)
    record = store.record(one.key({}))
    assert record is not None
    small_store.spoil(objects(store, record["output"])[0], b"eno")
    with pytest.raises(QdcError, match="is damaged and was removed"):
        build(root, one, two)
    assert build(root, one, two) == ["one", "two"]


def test_a_damaged_document_is_named_and_made_anew(tmp_path: Path, made: Scripts) -> None:
    """What a verb reads from an artifact is checked: damage there is an error with a way out, never a traceback."""
    root = tmp_path / "store"
    one = made.instance("one", "(output / 'x.json').write_text('{}')")
    build(root, one)
    store = Store(root)
    record = store.record(one.key({}))
    assert record is not None
    assert artifact_json(store, record["output"], "x.json") == {}
    small_store.spoil(objects(store, record["output"])[0], b"{:")
    with pytest.raises(QdcError, match="is damaged and was removed"):
        artifact_json(store, record["output"], "x.json")
    assert build(root, one) == ["one"]


def test_a_store_that_loses_what_is_published_is_no_endless_loop(
    tmp_path: Path, made: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "has_tree", lambda store, digest: False)
    with pytest.raises(QdcError, match="lost what stage one made"):
        build(tmp_path / "store", made.instance("one"))
    assert made.ran() == ["one"]


def params_of(read: Front) -> Any:
    return next(item for item in read.instances if item.name == "image").params


def test_a_recipe_edited_while_it_is_read_is_read_again(
    tmp_path: Path, recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered is remembered under the bytes that were read, not under those that were there later."""
    path, store = recipes / "micro.yaml", Store(tmp_path / "store")
    old = path.read_bytes()
    template = recipes / "templates/chatml.jinja"

    def save_meanwhile(loaded: Any) -> list[Any]:
        path.write_bytes(old.replace(b"max_num_seqs: 4", b"max_num_seqs: 2"))
        template.write_bytes(template.read_bytes() + b"{# more #}")
        return []

    with monkeypatch.context() as patch:
        patch.setattr("qdc.rules.check.require", save_meanwhile)
        first = front(path, [], store)
    assert params_of(first)["recipe"]["serve"]["max_num_seqs"] == 4
    assert first.digest == sha256_bytes(old)
    second = params_of(front(path, [], store))
    assert second["recipe"]["serve"]["max_num_seqs"] == 2
    assert second["chat_template"].endswith("{# more #}")


def test_what_is_remembered_is_what_was_read(tmp_path: Path, recipes: Path) -> None:
    path, store = recipes / "micro.yaml", Store(tmp_path / "store")
    sets = ["serve.k=5", "image.base={scratch: true}"]
    first = front(path, sets, store)
    assert front(path, sets, store) == first
    assert first.origins["serve.k"] == "--set" == first.origins["image.base"]
    assert "image.base.debian" not in first.origins
    assert first.origins["serve.dtype"].startswith("micro.yaml:")


def test_a_store_that_cannot_be_written_can_be_planned_on(tmp_path: Path, recipes: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    assert front(recipes / "micro.yaml", [], Store(tmp_path / "store")).instances


def test_a_build_is_the_latest_one_only_if_all_its_outputs_are(tmp_path: Path) -> None:
    """Evaluations are no input of the image: the same image can belong to builds that measured other things."""
    store, recipe, image = Store(tmp_path), {"name": "x"}, {"id": "sha256:0"}
    file = tmp_path / "x.yaml"
    stages = [{"name": "image", "output": "1"}, {"name": "evaluate:target", "output": "2"}]
    row = {"recipe_file": str(file), "recipe": recipe, "image": image, "stages": stages}
    store.add_build({**row, "build": "b"})

    def now(evaluation: str) -> list[Ran]:
        return [Ran("image", False, 0.0, "1"), Ran("evaluate:target", False, 0.0, evaluation)]

    assert same_build(store, file, recipe, image, now("2")) == "b"
    assert same_build(store, file, recipe, image, now("3")) is None
    assert same_build(store, file, {"name": "y"}, image, now("2")) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "@²"], "names no image"),
        (["validate", "{recipe}", "--set", "serve.²=1"], "unknown field `²`"),
        (["validate", "{recipe}", "--set", "name=\udcff"], "byte 0xff is not UTF-8"),
        (["plan", "{recipe}\udcff.yaml"], "not text"),
    ],
)
def test_odd_text_is_wrong_use(
    tmp_path: Path, recipes: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    recipe = str(recipes / "micro.yaml")
    given = [item.replace("{recipe}", recipe) for item in arguments]
    assert main([*given, "--store", str(tmp_path / "store")]) == 2
    captured = capsys.readouterr()
    assert words in captured.out + captured.err


@pytest.mark.parametrize("more", [["--help"], ["show"], ["show", "--json"]])
def test_an_answer_that_cannot_be_written_is_not_a_yes(tmp_path: Path, more: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qdc", *more], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 4 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "qdc", *more], cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (4, "")


def test_a_build_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_build({"build": "1"})
    (tmp_path / "builds" / "1.json").write_text("{")
    for text in ("@1", "1"):
        with pytest.raises(QdcError, match="cannot be read") as caught:
            refer(text, store)
        assert caught.value.exit_code == 4


def test_an_interpreter_given_by_a_path_is_found_from_the_stage_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for given, found in ((".venv/bin/python", str(tmp_path / ".venv/bin/python")), ("python3", "python3")):
        monkeypatch.setenv("QDC_TRAIN_PYTHON", given)
        assert settings().train_python == found


def worker_says(tmp_path: Path, code: str, python: str = sys.executable) -> process.Worker:
    """A real worker whose stage is the module `probe` with this code, ended."""
    job = {
        "module": "probe",
        "params": {},
        "inputs": {},
        "digests": {},
        "output": str(tmp_path),
        "partial": str(tmp_path),
        "threads": 1,
        "packages": {},
        "signature": package_signature(),
        "data": False,
    }
    (tmp_path / "probe.py").write_text(code)
    (tmp_path / "sitecustomize.py").write_text(
        f"import qdc.stages; qdc.stages.__path__.append({str(tmp_path)!r})\n", encoding="utf-8"
    )
    worker = REAL_START("probe", python, job, tmp_path, tmp_path / "log", lambda *said: None)
    assert process.wait_any([worker], 30) is worker
    return worker


def test_locale_umask_and_time_zone_of_the_user_do_not_reach_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SOURCE_ROOT", f"{process.SOURCE_ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    before = os.umask(0o077)
    try:
        worker = worker_says(
            tmp_path,
            "import os, time\n"
            "def run(context):\n"
            "    (context.output / 'made').write_text('ü' + time.strftime('%z', time.localtime(0)))\n",
        )
    finally:
        os.umask(before)
    assert worker.process.returncode == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "made").read_bytes() == "ü+0000".encode()
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o644


def test_an_interpreter_behind_another_program_is_refused_in_words(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    worker = worker_says(tmp_path, "def run(context): pass\n", str(wrapper))
    error = worker.failure(worker.process.returncode)
    assert error.id == "environment.python" and "started by another program" in error.message


def test_a_stage_that_leaves_only_folders_left_nothing(tmp_path: Path, made: Scripts) -> None:
    with pytest.raises(QdcError, match="left no output"):
        build(tmp_path / "store", made.instance("one", "(output / 'empty').mkdir()"))


def test_a_gate_adds_to_the_record_as_it_is_now(tmp_path: Path) -> None:
    """Gates take minutes: what another one added meanwhile stays."""
    store = Store(tmp_path)
    row = {"what": "w", "subject": "s", "metric": "m"}
    store.add_build({"build": "1", "measurements": [{**row, "value": 0}]})
    add_measurements(store, "1", [{**row, "subject": "t"}])
    add_measurements(store, "1", [{**row, "value": 1}])
    found = store.build("1")
    assert found is not None
    assert found["measurements"] == [{**row, "subject": "t"}, {**row, "value": 1}]


def test_an_interrupt_while_modules_are_imported_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(given: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("qdc.cli._main", interrupted)
    assert main(["show"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_code_that_changed_since_its_key_was_made_does_not_run() -> None:
    code = code_digests()["prompts"]
    check_code({"signature": package_signature(), "kind": "prompts", "code": "0" * 64})
    check_code({"signature": "of other files", "kind": "prompts", "code": code})
    with pytest.raises(QdcError, match="changed while it was building"):
        check_code({"signature": "of other files", "kind": "prompts", "code": "0" * 64})
