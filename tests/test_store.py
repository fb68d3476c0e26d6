"""The store keeps what it is given, by content, through kills, damage and other writers."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.store.memo import StatMemo
from qdc.store.store import Store
from qdc.store.trees import Tree

names = st.lists(st.sampled_from(["a", "b", "c.txt", "d e", "ü"]), min_size=1, max_size=3).map("/".join)
folders = st.dictionaries(names, st.binary(max_size=40), max_size=5).filter(
    lambda files: not any(a != b and b.startswith(a + "/") for a in files for b in files)
)


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(max_examples=40, deadline=None)
@given(folders)
def test_what_is_published_is_linked_out_again(tmp_path_factory: Any, files: dict[str, bytes]) -> None:
    base = tmp_path_factory.mktemp("s")
    store = Store(base / "store")
    given_tree = store.ingest(fill(base / "in", files))
    tree = store.publish(fill(base / "work", files))
    assert tree == given_tree and tree.digest == given_tree.digest
    store.link_out(tree.digest, base / "out")
    assert contents(base / "out") == files
    assert store.has_tree(tree.digest)
    assert Tree.from_json(json.loads(json.dumps(tree.as_json()))) == tree


@settings(max_examples=30, deadline=None)
@given(folders, folders)
def test_digests_are_equal_exactly_when_contents_are(
    tmp_path_factory: Any, a: dict[str, bytes], b: dict[str, bytes]
) -> None:
    base = tmp_path_factory.mktemp("s")
    store = Store(base / "store")
    one, two = store.ingest(fill(base / "a", a)), store.ingest(fill(base / "b", b))
    assert (one.digest == two.digest) == (a == b)


def test_objects_are_read_only_and_kept_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.publish(fill(tmp_path / "one", {"x": b"same", "y": b"same"}))
    objects = [p for p in (tmp_path / "store/objects").rglob("*") if p.is_file()]
    assert len(objects) == 1 and objects[0].stat().st_mode & 0o222 == 0


def record(store: Store, tmp_path: Path, key: str, data: bytes) -> dict[str, Any]:
    work = fill(tmp_path / f"w{len(data)}", {"x": data})
    tree = store.publish(work)
    return store.add_record(key, {"instance": "a:b", "output": tree.digest, "components": {}})


def test_first_record_stays_selected_and_differing_reruns_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first = record(store, tmp_path, "k" * 64, b"1")
    second = record(store, tmp_path, "k" * 64, b"22")
    assert (first["n"], second["n"]) == (1, 2)
    found = store.record("k" * 64)
    assert found is not None and found["output"] == first["output"]
    assert len(list((store.root / "records" / ("k" * 64)).glob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["truncate-record", "remove-object", "remove-tree", "shorten-object", "edit-tree"])
def test_a_damaged_record_is_no_record(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path / "store")
    key = "k" * 64
    made = record(store, tmp_path, key, b"data")
    tree = store.tree(made["output"])
    assert tree is not None
    target = {
        "truncate-record": store.root / "records" / key / "1.json",
        "remove-object": store.object_path(tree.entries[0].sha256),
        "shorten-object": store.object_path(tree.entries[0].sha256),
        "remove-tree": store.root / "trees" / f"{made['output']}.json",
        "edit-tree": store.root / "trees" / f"{made['output']}.json",
    }[damage]
    if damage.startswith("remove"):
        target.unlink()
    else:
        target.chmod(0o644)
        target.write_bytes(target.read_bytes()[:-3])
    assert Store(store.root).record(key) is None


def test_same_size_damage_is_found_at_use_and_by_verify(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    tree = store.publish(fill(tmp_path / "w", {"x": b"good"}))
    path = store.object_path(tree.entries[0].sha256)
    assert store.verify() == []
    path.chmod(0o644)
    path.write_bytes(b"evil")
    assert store.verify() == [tree.entries[0].sha256]
    with pytest.raises(QdcError, match="damaged"):
        Store(store.root).link_out(tree.digest, tmp_path / "out")
    assert not path.exists()


def test_memo_sees_a_same_size_edit_within_one_tick(tmp_path: Path) -> None:
    memo = StatMemo(tmp_path / "memo.json")
    path = tmp_path / "f"
    for index in range(50):
        path.write_bytes(b"%03d" % index)
        before = memo.digest(path)
        path.write_bytes(b"%03d" % (index + 500))
        assert memo.digest(path) != before


def test_memo_spares_reading_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    time.sleep(0.12)
    memo = StatMemo(tmp_path / "memo.json")
    first = memo.digest(path)
    memo.save()
    monkeypatch.setattr("qdc.store.memo.sha256_file", lambda path: pytest.fail("read again"))
    assert StatMemo(tmp_path / "memo.json").digest(path) == first


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from qdc.store import store as module
from qdc.store.store import Store
step = int(sys.argv[2]); count = 0
real = {name: getattr(os, name) for name in ("replace", "fsync", "chmod")}
def dying(name):
    def call(*arguments, **named):
        global count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*arguments, **named)
    return call
for name in real:
    setattr(os, name, dying(name))
store = Store(Path(sys.argv[1]) / "store")
with store.staging() as work:
    (work / "out").mkdir()
    (work / "out/a").write_bytes(b"a"); (work / "out/b").write_bytes(b"b")
    tree = store.publish(work / "out")
    store.add_record("k" * 64, {"instance": "x", "output": tree.digest, "components": {}})
print(count)
"""


def test_kill_at_every_step_of_publishing_leaves_all_or_nothing(tmp_path: Path) -> None:
    source = str(Path(__file__).resolve().parents[1] / "compiler")

    def attempt(folder: Path, step: int) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(step), source], capture_output=True, text=True
        )

    whole = attempt(tmp_path / "whole", 0)
    steps = int(whole.stdout)
    assert steps >= 8
    for step in range(1, steps + 1):
        folder = tmp_path / f"s{step}"
        assert attempt(folder, step).returncode == -signal.SIGKILL
        store = Store(folder / "store")
        found = store.record("k" * 64)
        assert found is None or contents_of(store, found["output"]) == {"a": b"a", "b": b"b"}
        assert attempt(folder, 0).returncode == 0
        found = store.record("k" * 64)
        assert found is not None and contents_of(store, found["output"]) == {"a": b"a", "b": b"b"}
        assert store.verify() == []


def contents_of(store: Store, digest: str) -> dict[str, bytes]:
    tree = store.tree(digest)
    assert tree is not None
    return {entry.path: store.resolve(entry.sha256).read_bytes() for entry in tree.entries}


def hold(root: Path, ready: Any, go: Any) -> None:
    with Store(root).lock("x"):
        ready.set()
        go.wait()
        os._exit(9)


def test_a_dead_holder_frees_its_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    child = context.Process(target=hold, args=(tmp_path, ready, go))
    child.start()
    assert ready.wait(20)
    go.set()
    with Store(tmp_path).lock("x"):
        pass
    child.join()


def test_staging_of_dead_processes_is_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    left = tmp_path / "staging" / "999999999-x"
    left.mkdir(parents=True)
    with store.staging() as work:
        assert work.is_dir() and not left.exists()
    assert not work.exists()


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr("qdc.store.store.os.replace", full)
    with pytest.raises(QdcError, match="disk is full") as caught:
        store.publish(fill(tmp_path / "w", {"x": b"1"}))
    assert caught.value.exit_code == 4


def test_a_moved_store_is_the_same_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "one")
    made = record(store, tmp_path, "k" * 64, b"data")
    shutil.move(tmp_path / "one", tmp_path / "two")
    found = Store(tmp_path / "two").record("k" * 64)
    assert found is not None and found["output"] == made["output"]


@pytest.mark.parametrize("link", ["file", "folder", "nothing"])
def test_a_link_in_what_is_published_is_refused(tmp_path: Path, link: str) -> None:
    """Adopting a link would make an object of the link: it ends with the staging folder."""
    work = fill(tmp_path / "w", {"b": b"data", "d/e": b"more"})
    (work / "a").symlink_to({"file": "b", "folder": "d", "nothing": "z"}[link])
    with pytest.raises(QdcError, match="a link"):
        Store(tmp_path / "store").publish(work)


def test_links_to_files_are_ingested_and_nothing_is_passed_over(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    folder = fill(tmp_path / "in", {"b": b"data", "d/e": b"more"})
    (folder / "a").symlink_to("b")
    tree = store.ingest(folder)
    assert contents_of(store, tree.digest) == {"a": b"data", "b": b"data", "d/e": b"more"}
    (folder / "c").symlink_to("d")
    with pytest.raises(QdcError, match="a link, but not to a file"):
        store.ingest(folder)


def test_staging_of_a_live_process_stays_whatever_its_process_id(tmp_path: Path) -> None:
    """Another container has its own process IDs: only the lock tells."""
    one, two = Store(tmp_path), Store(tmp_path)
    with one.staging() as work:
        moved = work.with_name("999999999-live")
        work.rename(moved)
        with one.lock(moved.name), two.staging():
            assert moved.exists()
        with two.staging():
            assert not moved.exists()
    assert list((tmp_path / "staging").iterdir()) == []
    assert [path.name for path in (tmp_path / "locks").iterdir()] == ["staging"]


def test_a_full_disk_is_one_clear_error_for_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    tree = store.publish(fill(tmp_path / "w", {"x": b"1"}))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr("qdc.core.files.os.replace", full)
    for write in (
        lambda: store.add_record("k" * 64, {"instance": "x", "output": tree.digest}),
        lambda: store.add_build({"build": "1"}),
    ):
        with pytest.raises(QdcError, match="disk is full"):
            write()
