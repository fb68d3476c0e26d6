"""`qdc store gc` and `verify`: what kept builds name stays, what goes goes safely, and damage is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import DAY, listing, pass_days

from qdc.cli import main
from qdc.core.errors import QdcError
from qdc.report.answers import checked
from qdc.store.gc import Policy, decide, holdings
from qdc.store.store import Store
from qdc.store.sweep import sweep
from qdc.store.use import alone, in_use
from qdc.store.verify import remove, verify

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """What reaches the disk before a loss of power is not what these tests are about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Killed(BaseException):
    """The process ends here."""


class Clockwork:
    """A store with a history. `wanted`: build ids by recipe, oldest first."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.number = root, Store(root), 0
        self.kept: dict[str, list[str]] = defaultdict(list)

    def do(self, step: tuple[Any, ...]) -> None:
        kind, *values = step
        self.number += 1
        if kind == "build":
            recipe, value = values
            id = f"20260101-{self.number:06d}-0"
            source = small_store.publish(self.store, {"s": b"source"}) if value % 2 else None
            small_store.build(self.store, f"/r/{recipe}.yaml", value, id, source)
            self.kept[recipe].append(id)
        elif kind == "failed":
            small_store.stages(self.store, values[0])
            (self.store.partial(f"{values[0]:064x}") / "step").write_bytes(b"partial")
        elif kind == "fetched":
            small_store.publish(self.store, {"f": b"fetched %d" % values[0]})
        elif kind == "days":
            pass_days(self.root, values[0])
        else:
            self.gc(Policy(values[0], values[1] * DAY, values[2]))

    def gc(self, policy: Policy) -> None:
        before = {id: self.store.build(id) for id in self.store.builds()}
        young = self.young_records(policy)
        sweep(self.store, policy, time.time())
        self.check(policy, before)
        for key in young - {stage["key"] for id in self.gone(before) for stage in before[id]["stages"]}:
            assert self.store.record(key) is not None
        assert decide(holdings(self.root), policy, time.time()).empty

    def gone(self, before: dict[str, Any]) -> set[str]:
        return set(before) - set(self.store.builds())

    def young_records(self, policy: Policy) -> set[str]:
        limit = time.time() - policy.older_than_s + 60
        return {path.parent.name for path in self.root.glob("records/*/*.json") if path.stat().st_mtime > limit}

    def check(self, policy: Policy, before: dict[str, Any]) -> None:
        """No record without its output; all that builds here name is here, and the newest builds are."""
        assert verify(self.root) == []
        left = self.store.builds()
        for recipe, ids in self.kept.items():
            here = [id for id in ids if id in before]
            assert set(here[len(here) - policy.keep_builds :] if policy.keep_builds else []) <= set(left), recipe
        for id in left:
            build = self.store.build(id)
            assert build is not None
            for row in build["stages"]:
                assert self.store.has_tree(row["output"])
                assert all(map(self.store.has_tree, row["inputs"].values()))
                record = self.store.record(row["key"])
                assert record is not None and record["output"] == row["output"]


values = st.integers(0, 4)
steps = st.one_of(
    st.tuples(st.just("build"), st.sampled_from("ab"), values),
    st.tuples(st.just("build"), st.sampled_from("ab"), values),
    st.tuples(st.just("failed"), values),
    st.tuples(st.just("fetched"), values),
    st.tuples(st.just("days"), st.sampled_from([1, 20, 40])),
    st.tuples(
        st.just("gc"), st.integers(0, 2), st.sampled_from([0.5, 10, 30]), st.sampled_from([None, 0, 60, 100, 200])
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=2, max_size=10), st.sampled_from([0, 1]))
def test_any_history_of_builds_and_gcs_keeps_what_kept_builds_name(
    tmp_path_factory: Any, history: list[Any], last: int
) -> None:
    made = Clockwork(tmp_path_factory.mktemp("h") / "store")
    for step in history:
        made.do(step)
    made.gc(Policy(last, 5 * DAY))


def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """From the `at`-th call that changes the disk on, the process is dead: that call and all later ones fail."""
    calls: list[str] = []
    for name in ("unlink", "replace", "rmdir", "fsync", "mkdir"):
        real = getattr(os, name)

        def call(*arguments: Any, _name: str = name, _real: Any = real, **named: Any) -> Any:
            calls.append(_name)
            if 0 < at <= len(calls):
                raise Killed
            return _real(*arguments, **named)

        monkeypatch.setattr(os, name, call)
    return calls


def an_old_store(root: Path) -> Clockwork:
    """Two old builds beside what stays, a failed build of late, a fetch, and a build to forget for its size."""
    made = Clockwork(root)
    for step in (("build", "a", 0), ("build", "b", 1), ("days", 20), ("build", "a", 2), ("fetched", 1), ("days", 20)):
        made.do(step)
    for step in (("build", "a", 3), ("failed", 4), ("build", "a", 4), ("days", 1), ("fetched", 2)):
        made.do(step)
    return made


def test_a_kill_at_any_call_leaves_a_whole_store_and_the_next_run_ends_the_same_way(tmp_path: Path) -> None:
    policy = Policy(1, 10 * DAY, max_bytes=80)
    whole = an_old_store(tmp_path / "whole")
    origin = tmp_path / "origin"
    shutil.copytree(whole.root, origin)
    with pytest.MonkeyPatch.context() as patch:
        calls = dying(patch, 0)
        made = sweep(Store(whole.root), policy, time.time())
    young = "20260101-000007-0"
    assert len(made.builds) >= 2 and young in {id for id, _ in made.builds}
    assert made.records and made.trees and made.objects and made.rest
    wanted = listing(whole.root)
    assert len(calls) > 20
    for at in range(1, len(calls) + 1):
        root = tmp_path / str(at)
        shutil.copytree(origin, root)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            dying(patch, at)
            sweep(Store(root), policy, time.time())
        left = Clockwork(root)
        left.kept = whole.kept
        left.check(policy, dict.fromkeys(whole.store.builds()))
        sweep(left.store, policy, time.time())
        left.check(policy, dict.fromkeys(whole.store.builds()))
        assert listing(root) == wanted, f"killed at call {at}, {calls[at - 1]}"
        shutil.rmtree(root)


def test_a_dry_run_says_what_goes_and_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = an_old_store(tmp_path / "s")
    before = listing(made.root)
    arguments = ["store", "gc", "--store", str(made.root), "--keep-builds", "1", "--older-than", "10d"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "would forget build 20260101-000001-0 of /r/a.yaml" in said and "say --yes" in said
    assert listing(made.root) == before
    assert main([*arguments, "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--yes", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert checked("store", done) and done["gc"]["removed"] and not dry["gc"]["removed"]
    assert {**dry["gc"], "removed": True} == done["gc"]
    lost = sum(size for name, size in before.items() if name not in listing(made.root))
    assert done["gc"]["bytes"] == lost > 0
    assert main([*arguments, "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_under_a_size_the_oldest_builds_go_and_the_newest_of_each_recipe_stay(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    for number in range(6):
        small_store.build(store, f"/r/{'ab'[number % 2]}.yaml", number, f"20260101-{number:06d}-0")
    each = 2 * len(b"weights 0") - 2
    made = sweep(store, Policy(1, 30 * DAY, max_bytes=19 + 4 * each), time.time())
    assert [id for id, _ in made.builds] == ["20260101-000000-0", "20260101-000001-0"]
    assert made.stays <= 19 + 4 * each and made.unreached == 0
    made = sweep(store, Policy(1, 30 * DAY, max_bytes=1), time.time())
    assert store.builds() == ["20260101-000004-0", "20260101-000005-0"]
    assert made.unreached == made.stays - 1 > 0
    assert verify(store.root) == []


def test_what_a_young_record_was_made_from_stays_with_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    source = small_store.publish(store, {"s": b"given"})
    first = small_store.stage(store, "weights", 1, {"source": source}, {"w": b"1"})
    pass_days(tmp_path, 90)
    second = small_store.stage(store, "image", 1, {"weights": first["output"]}, {"i": b"1"})
    lone = small_store.stage(store, "weights", 2, {}, {"w": b"2"})
    pass_days(tmp_path, 1)
    os.utime(next((tmp_path / "records" / lone["key"]).glob("*.json")), (0, 0))
    sweep(store, Policy(), time.time())
    assert store.record(first["key"]) and store.record(second["key"]) and store.has_tree(source)
    assert store.record(lone["key"]) is None and not store.has_tree(lone["output"])


def test_records_without_output_and_leftovers_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    row = small_store.stage(store, "weights", 1, {}, {"w": b"1", "v": b"2"})
    whole = small_store.stage(store, "weights", 2, {}, {"w": b"3"})
    tree = store.tree(row["output"])
    assert tree is not None
    store.discard(tree.entries[0].sha256)
    (store.partial(whole["key"]) / "step").write_bytes(b"left")
    (tmp_path / "trees" / ".unfinished").write_bytes(b"x")
    os.utime(tmp_path / "trees" / ".unfinished", (0, 0))
    dead = tmp_path / "staging" / "999999-dead"
    dead.mkdir(parents=True)
    with store.staging() as alive:
        sweep(store, Policy(), time.time())
        assert alive.is_dir() and not dead.exists()
    assert not (tmp_path / "records" / row["key"]).exists() and verify(tmp_path) == []
    assert store.record(whole["key"]) and not (tmp_path / "partial" / whole["key"]).exists()
    assert not (tmp_path / "trees" / ".unfinished").exists()


def test_of_a_kept_build_whose_output_is_damaged_the_rest_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = small_store.build(store, "/r/a.yaml", 1, "20260101-000001-0")
    pass_days(tmp_path, 90)
    row = made["stages"][0]
    tree = store.tree(row["output"])
    assert tree is not None
    store.discard(tree.entries[0].sha256)
    image = store.tree(made["stages"][1]["output"])
    assert image is not None
    store.discard(image.entries[0].sha256)
    sweep(store, Policy(), time.time())
    assert store.record_with(row["key"], row["output"]) is None, "a record without its output"
    assert store.tree(image.digest) is not None, "a build names it"
    assert store.object_path(tree.entries[1].sha256).is_file() and store.tree(row["output"]) is not None
    small_store.stages(store, 1)
    assert verify(tmp_path) == [] and store.record(row["key"]) is not None


def test_a_build_record_that_cannot_be_read_stops_gc(tmp_path: Path) -> None:
    store = Store(tmp_path)
    small_store.build(store, "/r/a.yaml", 1, "20260101-000001-0")
    path = tmp_path / "builds" / "20260101-000001-0.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(QdcError, match="nobody knows what it needs") as caught:
        sweep(store, Policy(), time.time())
    assert caught.value.exit_code == 4
    found = verify(tmp_path)
    assert [(item.kind, item.name) for item in found] == [("build", "20260101-000001-0")]
    remove(found)
    sweep(store, Policy(), time.time())


HOLD = """
import sys, time
from pathlib import Path
from qdc.store.use import in_use
with in_use(Path(sys.argv[3])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_gc_never_runs_beside_a_build_and_says_who_is_in_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = an_old_store(tmp_path / "s")
    before = listing(made.root)
    program = tmp_path / "qdc"
    program.write_text(HOLD)
    holder = subprocess.Popen(
        [sys.executable, str(program), "build", "https://user:planted@host/x", str(made.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")},
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        assert main(["store", "gc", "--yes", "--keep-builds", "0", "--store", str(made.root)]) == 4
        said = capsys.readouterr().err
        assert f"process {holder.pid}" in said and "`qdc build https://host/x" in said and "planted" not in said
        assert listing(made.root) == before
        with in_use(made.root):
            pass
    finally:
        holder.communicate(b"")
    assert main(["store", "gc", "--yes", "--keep-builds", "0", "--store", str(made.root)]) == 0


@pytest.mark.parametrize("verb", ["export", "audit"])
def test_gc_does_not_begin_while_an_image_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    small_store.build(Store(tmp_path), "/r/a.yaml", 1, "20260101-000001-0")
    tried = []

    def meanwhile(*_: object) -> None:
        with pytest.raises(QdcError, match="in use"), alone(tmp_path):
            pass
        tried.append(verb)
        raise QdcError("test", "enough")

    monkeypatch.setattr("qdc.image.export.export_archive", meanwhile)
    more = [f"archive:{tmp_path / 'x.tar'}"] if verb == "export" else []
    main([verb, "@1", *more, "--store", str(tmp_path)])
    assert tried


def test_a_build_waits_for_gc_and_says_so(tmp_path: Path) -> None:
    said, done = threading.Event(), threading.Event()

    def wait() -> None:
        with in_use(tmp_path, said.set):
            done.set()

    with alone(tmp_path):
        thread = threading.Thread(target=wait)
        thread.start()
        assert said.wait(10) and not done.is_set()
    assert done.wait(10)
    thread.join()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--older-than", "soon"], "no age"),
        (["--max-size", "big"], "no size"),
        (["--keep-builds", "-1"], "less than none"),
    ],
)
def test_odd_policies_are_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["store", "gc", "--store", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_action_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verfy"]) == 2
    assert "verify" in capsys.readouterr().err
    assert main(["store", "--help"]) == 0 and "push" in capsys.readouterr().out


def test_verify_names_what_depends_on_a_damaged_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    one = small_store.build(store, "/r/a.yaml", 1, "20260101-000001-0")
    small_store.build(store, "/r/a.yaml", 2, "20260101-000002-0")
    weights = one["stages"][0]
    tree = store.tree(weights["output"])
    assert tree is not None
    entry = tree.find("w/model")
    assert entry is not None
    small_store.spoil(store.object_path(entry.sha256), b"weights X")
    assert main(["store", "verify", "--store", str(tmp_path), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    checked("store", answer)
    (found,) = answer["verify"]["found"]
    assert (found["kind"], found["name"], found["removed"]) == ("object", entry.sha256, True)
    assert found["trees"] == {weights["output"]: ["w/model"]}
    assert found["stages"] == [{"key": weights["key"], "n": 1, "instance": "weights"}]
    assert found["builds"] == ["20260101-000001-0"]
    assert not store.object_path(entry.sha256).exists()
    # The tree stays: it says what is lacking until a build has made it anew.
    assert main(["store", "verify", "--store", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"tree {weights['output']}: lacks 1 of its 2 files: w/model; kept" in said and "`qdc build RECIPE`" in said
    small_store.stages(store, 1)
    assert main(["store", "verify", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}: whole"


@pytest.mark.parametrize(
    ("damage", "kind", "words", "removed"),
    [
        ("truncated tree", "tree", "truncated", True),
        ("renamed tree", "tree", "its name is not its digest", True),
        ("no tree", "record", "is not here", False),
        ("truncated record", "record", "truncated", True),
        ("another key", "record", "it is the record of another key", True),
        ("edited components", "record", "do not hash to its key", True),
        ("truncated build", "build", "truncated", True),
    ],
)
def test_verify_finds_documents_that_are_not_what_they_are_called(
    tmp_path: Path, damage: str, kind: str, words: str, removed: bool
) -> None:
    store = Store(tmp_path)
    made = small_store.build(store, "/r/a.yaml", 1, "20260101-000001-0")
    row = made["stages"][1]
    record, tree = tmp_path / "records" / row["key"] / "1.json", tmp_path / "trees" / f"{row['output']}.json"
    value = json.loads(record.read_bytes())
    if damage == "truncated tree":
        small_store.spoil(tree, tree.read_bytes()[:-3])
    elif damage == "renamed tree":
        tree.rename(tree.with_name("1" * 64 + ".json"))
    elif damage == "no tree":
        tree.unlink()
    elif damage == "truncated record":
        small_store.spoil(record, record.read_bytes()[:-9])
    elif damage == "another key":
        small_store.spoil(record, json.dumps({**value, "key": "1" * 64}).encode())
    elif damage == "edited components":
        value["components"]["params"]["value"] = 2
        small_store.spoil(record, json.dumps(value).encode())
    else:
        path = tmp_path / "builds" / "20260101-000001-0.json"
        small_store.spoil(path, path.read_bytes()[:-9])
    found = verify(tmp_path)
    named = next(item for item in found if item.kind == kind)
    assert words in named.problem
    remove(found)
    assert (named.removed, named.path.exists()) == (removed, not removed)


def test_verify_of_a_store_that_cannot_be_changed_still_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    row = small_store.stage(store, "weights", 1, {}, {"w": b"1"})
    tree = store.tree(row["output"])
    assert tree is not None
    small_store.spoil(store.object_path(tree.entries[0].sha256), b"2")

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(30, "Read-only file system")

    found = verify(tmp_path)
    monkeypatch.setattr(os, "unlink", refuse)
    remove(found)
    assert [item.removed for item in found] == [False]


def test_verify_reads_on_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    small_store.publish(store, {"a": b"1", "b": b"2"})
    both = threading.Barrier(2, timeout=10)

    def slow(path: Path) -> str:
        both.wait()
        return path.name

    monkeypatch.setattr("qdc.store.verify.sha256_file", slow)
    assert verify(tmp_path) == []
