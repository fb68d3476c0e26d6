"""`qdc lock` on a hub's checkpoint: digests, resumed, refused, and offline afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub
from lock_project import MODEL, REVISION, WEIGHTS, Project, prompts

from qdc.cli import main
from qdc.core import canonical
from qdc.formats.checkpoint import read_folder
from qdc.recipe.load import load
from qdc.sources import models
from qdc.sources.facts import attach
from qdc.sources.lock import Locked, lock_bytes, read_lock, safe, trees
from qdc.store.store import Store


def test_a_pinned_revision_is_locked_and_its_files_are_in_the_store(project: Project, hub: Hub) -> None:
    entry = project.locked()["target.base"]
    files = hub.repositories["models", MODEL][REVISION]
    kept = {name for name in files if "/" not in name and not name.endswith((".bin", ".py"))}
    digest = {name: hashlib.sha256(files[name]).hexdigest() for name in kept}
    assert entry["files"] == {name: {"size": len(files[name]), "sha256": digest[name]} for name in kept}
    assert entry["identity"] == {"hf": MODEL, "revision": REVISION}
    assert entry["licence"] == "apache-2.0"
    assert project.store.resolve(digest[WEIGHTS]).read_bytes() == files[WEIGHTS]
    assert project.store.verify() == []
    folder = project.folder / "checkpoint"
    folder.mkdir()
    for name in kept:
        (folder / name).write_bytes(files[name])
    assert entry["facts"] == json.loads(json.dumps(read_folder(folder).as_json()))
    tree = Store(project.folder / "other").ingest(folder)
    assert trees(load(project.recipe))["target.base"].digest == tree.digest
    assert project.store.has_tree(tree.digest)


def test_the_lock_has_the_shape_of_its_schema(project: Project, root: Path) -> None:
    project.locked("--headers-only")
    models.LockFile.model_validate_json(project.lock.read_bytes())
    assert (root / "schema/lock.schema.json").read_bytes() == models.schema_bytes()


def test_a_second_run_asks_for_nothing_and_writes_nothing(project: Project, hub: Hub) -> None:
    project.locked()
    hub.log.clear()
    before = os.stat(project.lock).st_mtime_ns
    done = project.run()
    assert done.code == 0 and not done.answer["written"] and hub.log == []
    assert os.stat(project.lock).st_mtime_ns == before


def test_the_lock_is_the_same_from_two_stores(project: Project) -> None:
    project.locked()
    first = project.lock.read_bytes()
    project.lock.unlink()
    project.locked("--store", str(project.folder / "another"))
    assert project.lock.read_bytes() == first
    locked = read_lock(project.recipe)
    assert locked is not None and lock_bytes(locked) == first


def test_a_broken_connection_is_resumed_where_it_broke(project: Project, hub: Hub) -> None:
    whole = len(hub.repositories["models", MODEL][REVISION][WEIGHTS])
    hub.break_after = {WEIGHTS: 100_000, "config.json": 10}
    project.locked()
    asked = [request for request in hub.asked(WEIGHTS) if request.server == "large"]
    assert [request.range for request in asked] == [None, "bytes=100000-"]
    assert sum(request.sent for request in asked) == whole
    assert hub.asked("/config.json")[-1].range == "bytes=10-"


def test_a_stopped_run_leaves_the_old_lock_and_the_next_one_goes_on(project: Project, hub: Hub) -> None:
    old = '{"version": 1, "sources": {}}'
    project.lock.write_text(old)
    hub.break_after, hub.refused = {WEIGHTS: 70_000}, {WEIGHTS: 404}
    done = project.run()
    assert done.code == 2 and project.lock.read_text() == old
    assert (done.error["id"], done.error["line"], done.error["column"]) == ("lock.fetch", *project.place("hf"))
    hub.refused = {}
    hub.log.clear()
    project.locked()
    asked = [request for request in hub.asked(WEIGHTS) if request.server == "large"]
    assert [request.range for request in asked] == ["bytes=70000-"]


def test_a_resumed_file_is_verified_and_fetched_anew_where_its_start_was_wrong(project: Project, hub: Hub) -> None:
    data = hub.repositories["models", MODEL][REVISION][WEIGHTS]
    key = canonical.digest([{"hf": MODEL, "revision": REVISION}, WEIGHTS])
    (project.store.partial(key) / "bytes").write_bytes(b"\0" * 5000)
    project.locked()
    asked = [request.range for request in hub.asked(WEIGHTS) if request.server == "large"]
    assert asked == ["bytes=5000-", None]
    assert project.store.resolve(hashlib.sha256(data).hexdigest()).read_bytes() == data


@pytest.mark.parametrize(
    ("fault", "id", "field", "code", "words"),
    [
        ({"sha": "f" * 40}, "lock.moved", "revision", 2, "the revision has moved"),
        ({"listed": {WEIGHTS: b"other"}}, "lock.digest", "hf", 4, "is not what the hub's own list says"),
        ({"listed": {"config.json": b"{}"}}, "lock.digest", "hf", 4, "is not what the hub's own list says"),
        ({"short": {WEIGHTS: 1}}, "lock.digest", "hf", 4, "is not what the hub's own list says"),
        ({"short": {"config.json": 1}}, "lock.digest", "hf", 4, "is not what the hub's own list says"),
        ({"repositories": {("models", MODEL): {}}}, "lock.revision", "revision", 2, "has no such commit"),
        ({"repositories": {}}, "lock.absent", "hf", 2, "the hub has no model `someone/small`"),
        ({"gated": {MODEL}}, "lock.gated", "hf", 4, "is gated"),
        ({"refused": {"config.json": 403}}, "lock.fetch", "hf", 4, "the server answers 403"),
    ],
)
def test_what_cannot_be_locked_is_refused_at_its_place(
    project: Project, hub: Hub, fault: dict[str, Any], id: str, field: str, code: int, words: str
) -> None:
    for name, value in fault.items():
        setattr(hub, name, value)
    done = project.run()
    assert done.code == code, done.err
    error = done.error
    assert error["id"] == id and words in error["message"] and error["hint"]
    assert (error["file"], error["line"], error["column"]) == (str(project.recipe), *project.place(field))
    assert not project.lock.exists()


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_change_that_keeps_the_size_is_refused(project: Project, hub: Hub, name: str) -> None:
    data = hub.repositories["models", MODEL][REVISION][name]
    hub.listed = {name: data[:-1] + bytes([data[-1] ^ 1])}
    done = project.run()
    assert done.error["id"] == "lock.digest" and not project.lock.exists()


def test_a_server_without_ranges_sends_the_whole_again(project: Project, hub: Hub) -> None:
    hub.ranges = False
    hub.break_after = {WEIGHTS: 100_000}
    done = project.run()
    assert done.code == 0 and "target.base: started" in done.err
    assert [request.status for request in hub.asked(WEIGHTS) if request.server == "large"] == [200, 200]
    assert project.run("--check").code == 0 and project.store.verify() == []


def test_a_server_that_is_gone_is_said_and_the_old_lock_stays(project: Project, tmp_path: Path) -> None:
    project.locked()
    old = project.lock.read_bytes()
    project.write({"hf": "someone/else", "revision": REVISION})
    done = project.run(HF_ENDPOINT="http://127.0.0.1:9")
    assert done.code == 4 and done.error["id"] == "lock.hub" and "cannot reach the hub" in done.error["message"]
    assert project.lock.read_bytes() == old
    offline = project.run(HF_HUB_OFFLINE="1")
    assert offline.code == 4 and offline.error["id"] == "lock.offline"


def test_a_commit_of_zeros_is_refused_before_anything_is_asked(project: Project, hub: Hub) -> None:
    project.write({"hf": MODEL, "revision": "0" * 40})
    done = project.run()
    assert done.code == 2 and done.error["id"] == "recipe.SRC13" and hub.log == []
    assert (done.error["line"], done.error["column"]) == project.place("revision")


def test_other_bytes_than_the_lock_says_are_refused(project: Project, hub: Hub) -> None:
    project.locked()
    old = project.lock.read_bytes()
    files = hub.repositories["models", MODEL][REVISION]
    was = hashlib.sha256(files["config.json"]).hexdigest()
    files["config.json"] = files["config.json"].replace(b"qwen3_5", b"qwen3_6")
    now = hashlib.sha256(files["config.json"]).hexdigest()
    assert project.run().code == 0, "what the store has is not asked for again"
    done = project.run("--store", str(project.folder / "another"))
    assert done.code == 2 and done.error["id"] == "recipe.SRC05"
    assert all(text in done.error["message"] for text in ("config.json", was, now))
    assert (done.error["line"], done.error["column"]) == project.place("revision")
    assert project.lock.read_bytes() == old
    del files["config.json"]
    assert project.run("--store", str(project.folder / "third")).error["id"] == "recipe.SRC05"


def test_headers_only_leaves_the_weights_where_they_are(
    project: Project, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = len(hub.repositories["models", MODEL][REVISION][WEIGHTS])
    done = project.run("--headers-only")
    assert done.code == 0, done.err
    assert 0 < sum(request.sent for request in hub.asked(WEIGHTS)) < whole / 50
    first = project.lock.read_bytes()
    assert len(done.answer["sources"][0]["missing"]) == 2
    code, plan = project.qdc(capsys, "plan")
    (base,) = [stage for stage in plan["stages"] if stage["name"] == "base"]
    assert base["state"] == "stale" and base["key"]
    code, answer = project.qdc(capsys, "build")
    assert code == 4 and answer["error"]["id"] == "build.fetch" and "target.base" in answer["error"]["message"]
    assert main(["lock", str(project.recipe), "--store", str(project.store.root), "--check"]) == 1
    assert main(["lock", str(project.recipe), "--store", str(project.store.root), "--check", "--headers-only"]) == 0
    capsys.readouterr()
    hub.log.clear()
    project.locked()
    assert {request.path.rpartition("/")[2] for request in hub.log} == {WEIGHTS, WEIGHTS.replace("2-of", "1-of")}
    assert project.lock.read_bytes() == first


def test_afterwards_everything_is_offline(project: Project, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, before = project.qdc(capsys, "validate")
    assert code == 0 and "SRC04" in {item["rule"] for item in before["deferred"]}
    code, plan = project.qdc(capsys, "plan")
    (base,) = [stage for stage in plan["stages"] if stage["name"] == "base"]
    assert base["state"] == "waiting" and [reason["kind"] for reason in base["reasons"]] == ["lock"]
    code, build = project.qdc(capsys, "build")
    assert (
        code == 2
        and build["error"]["id"] == "recipe.SRC04"
        and "there is no `recipe.lock`" in build["error"]["message"]
    )
    assert project.qdc(capsys, "build", "--until", "base")[1] == build
    assert main(["plan", str(project.recipe), "--store", str(project.store.root)]) == 1
    assert "error[SRC04]" in capsys.readouterr().err
    project.locked()
    hub.log.clear()
    code, after = project.qdc(capsys, "validate")
    assert code == 0 and after["deferred"] == []
    code, plan = project.qdc(capsys, "plan")
    (base,) = [stage for stage in plan["stages"] if stage["name"] == "base"]
    assert base["state"] == "stale" and base["key"]
    assert project.qdc(capsys, "plan")[1] == plan, "the remembered answer is the same"
    assert attach(load(project.recipe)).facts["target.base"].licence == "apache-2.0"
    project.write({"hf": MODEL, "revision": "a" * 40})
    code, plan = project.qdc(capsys, "plan")
    (base,) = [stage for stage in plan["stages"] if stage["name"] == "base"]
    assert base["state"] == "waiting", "a lock of another revision pins nothing"
    assert hub.log == []


def test_check_says_whether_lock_recipe_and_store_agree(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = project.qdc(capsys, "lock", "--check")
    assert code == 1 and "there is no `recipe.lock`" in answer["faults"][0]
    project.locked()
    code, answer = project.qdc(capsys, "lock", "--check")
    assert code == 0 and answer["ok"] and answer["faults"] == []
    project.write({"hf": MODEL, "revision": "a" * 40})
    code, answer = project.qdc(capsys, "lock", "--check")
    assert code == 1 and REVISION in answer["faults"][0]
    project.write({"path": "."}, asked=prompts(["chat"]))
    (project.folder / "config.json").write_text("{}")
    code, answer = project.qdc(capsys, "lock", "--check")
    assert code == 1 and "the recipe does not name it" in answer["faults"][1]


def test_a_file_that_is_no_lock_is_kept_and_named(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.locked()
    text = project.lock.read_text()
    good = json.loads(text)
    escape = json.loads(text)
    escape["sources"]["target.base"]["files"]["../../escape"] = {"size": 1, "sha256": "a" * 64}
    for damaged in ("<<<<<<< ours\n" + text, "[]", json.dumps(escape), '{"version": 1}'):
        project.lock.write_text(damaged)
        done = project.run()
        assert done.code == 2 and done.error["id"] == "lock.damaged" and done.error["file"] == str(project.lock)
        assert project.lock.read_text() == damaged
        assert project.qdc(capsys, "validate")[0] == 0
        _, plan = project.qdc(capsys, "plan")
        assert [stage["state"] for stage in plan["stages"] if stage["name"] == "base"] == ["waiting"]
    project.lock.write_text(json.dumps({**good, "version": 0}))
    assert project.run().code == 0 and project.lock.read_text() == text


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../x", "a//x", "./x", "a\\x", "c:x", "a\nx", "a/"])
def test_no_file_of_a_source_can_leave_its_folder(name: str) -> None:
    assert not safe(name) and safe("data/a-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="no file of a source"):
        Locked.from_json(
            {"identity": {}, "files": {name: {"size": 1, "sha256": "a" * 64}}, "facts": None, "licence": None}
        )


def test_a_recipe_without_such_sources_gets_no_lock(project: Project, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qdc", "lock", str(root / "recipes/micro.yaml"), "--store", str(project.store.root)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "names no source" in done.stdout
    assert not (root / "recipes/micro.lock").exists()
