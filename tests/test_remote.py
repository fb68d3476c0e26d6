"""The remote store: push, pull and read-through at a folder, in memory and at an S3 server; what lies is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import small_store
from micro import SCRATCH, Micro
from small_store import listing
from test_run import Scripts, made, scripts  # noqa: F401

from qdc.cli import main
from qdc.cli.progress import Quiet
from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.core.redact import hide, secrets, without_credentials
from qdc.graph.instances import Instance
from qdc.report.answers import checked
from qdc.run.build import Build
from qdc.run.settings import Settings
from qdc.run.settings import settings as user_settings
from qdc.store import remote as remote_module
from qdc.store import transfer as transfer_module
from qdc.store.remote import Refused, Remote
from qdc.store.store import Store
from qdc.store.transfer import Stopped, Transfer
from qdc.store.trees import Entry, Tree, sound
from qdc.store.verify import verify

ROOT = Path(__file__).resolve().parents[1]
ID = "20260101-000001-0"
SECRET = "Planted4711Secret"


@pytest.fixture(autouse=True, scope="module")
def no_waiting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(remote_module, "PAUSES_S", (0.0, 0.0, 0.0))
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server in a process of its own."""
    port = free_port()
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=stream, stderr=stream
        )
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket of one test's own, and the credentials for it in the environment."""
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIA" + SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": s3,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(tmp_path)):x}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/team/store"


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/remote"
    if request.param == "memory":
        return f"memory://{tmp_path.name}/store"
    return str(request.getfixturevalue("bucket"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with a build."""
    found = Store(tmp_path / "one")
    small_store.build(found, "/r/a.yaml", 1, ID)
    return found


def whole(root: Path) -> Store:
    """The store there, if nothing in it is wrong."""
    assert verify(root) == []
    return Store(root)


def test_what_is_pushed_is_pulled_again(store: Store, url: str, tmp_path: Path) -> None:
    build = store.build(ID)
    assert build is not None
    push = Transfer(store, Remote(url))
    push.push_build(build)
    assert (push.moved.objects, push.moved.there, push.moved.trees, push.moved.records) == (3, 0, 2, 2)
    assert push.moved.builds == [ID] and push.moved.bytes == 9 + 19 + 7
    again = Transfer(store, Remote(url))
    again.push_build(build)
    assert (again.moved.objects, again.moved.there, again.moved.trees, again.moved.records) == (0, 3, 0, 0)
    pull = Transfer(Store(tmp_path / "two"), Remote(url))
    pull.pull_build(ID)
    two = whole(tmp_path / "two")
    assert two.build(ID) == build and two.builds() == [ID]
    for row in build["stages"]:
        record = two.record(row["key"])
        assert record is not None and (record["output"], record["fetched"]) == (row["output"], True)
    twice = Transfer(two, Remote(url))
    twice.pull_build(ID)
    assert (twice.moved.objects, twice.moved.there, twice.moved.records, twice.moved.builds) == (0, 3, 0, [])


def test_large_objects_go_in_parts_and_come_by_range(bucket: str, tmp_path: Path) -> None:
    store, size = Store(tmp_path / "one"), 2 * transfer_module.PART + 12345
    row = small_store.stage(store, "weights", 1, {}, {"large": os.urandom(1) * size, "empty": b""})
    Transfer(store, Remote(bucket)).push_records([row["key"]])
    two = Store(tmp_path / "two")
    told: list[tuple[int, int]] = []
    pull = Transfer(two, Remote(bucket), lambda done, total: told.append((done, total)))
    assert pull.fetch_stage(row["key"]) is not None
    assert whole(two.root).has_tree(row["output"])
    assert told[-1] == (size, size) and len({done for done, _ in told}) >= 3


def test_the_remote_has_the_layout_of_a_store(store: Store, tmp_path: Path) -> None:
    build = store.build(ID)
    assert build is not None
    Transfer(store, Remote(f"file://{tmp_path}/remote")).push_build(build)
    found, mine = listing(tmp_path / "remote"), listing(store.root)
    assert {name: size for name, size in mine.items() if name.split("/")[0] not in ("logs", "log", "memo")} == found
    assert whole(tmp_path / "remote").record(build["stages"][0]["key"]) is not None


class Broken(Exception):
    """The connection ends."""


def test_a_push_that_ends_anywhere_names_nothing_that_is_not_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = store.build(ID)
    assert build is not None
    written: list[str] = []
    real = Remote._place

    def counted(end: int) -> Callable[..., None]:
        def place(self: Remote, name: str, size: int, act: Any) -> None:
            if len(written) == end:
                raise Broken
            written.append(name)
            real(self, name, size, act)

        return place

    monkeypatch.setattr(transfer_module, "AT_ONCE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "_place", counted(-1))
        Transfer(store, Remote(f"file://{tmp_path}/whole")).push_build(build)
    order = [name.split("/")[0] for name in written]
    assert order == ["objects"] * 3 + ["trees"] * 2 + ["records"] * 2 + ["builds"]
    for end in range(len(order)):
        there = tmp_path / f"r{end}"
        written.clear()
        with monkeypatch.context() as patch, pytest.raises(Broken):
            patch.setattr(Remote, "_place", counted(end))
            Transfer(store, Remote(f"file://{there}")).push_build(build)
        assert verify(there) == []
        Transfer(store, Remote(f"file://{there}")).push_build(build)
        assert listing(there) == listing(tmp_path / "whole")


def test_a_pull_that_ends_anywhere_is_gone_on_with(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, there = store.build(ID), f"file://{tmp_path}/remote"
    assert build is not None
    Transfer(store, Remote(there)).push_build(build)
    monkeypatch.setattr(transfer_module, "AT_ONCE", 1)
    monkeypatch.setattr(transfer_module, "PART", 4)
    real, calls = Remote._try, [0]

    def trying(end: int) -> Callable[..., Any]:
        def attempt(self: Remote, act: Any, name: str, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == end:
                raise Broken
            return real(self, act, name, **more)

        return attempt

    end = 0
    while True:
        end, calls[0] = end + 1, 0
        two = Store(tmp_path / f"s{end}")
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "_try", trying(end))
            try:
                Transfer(two, Remote(there)).pull_build(ID)
                break
            except Broken:
                assert verify(two.root) == []
        before = sum(path.stat().st_size for path in (two.root / "partial").rglob("bytes"))
        again = Transfer(two, Remote(there))
        again.pull_build(ID)
        assert whole(two.root).build(ID) == build
        assert not list((two.root / "partial").rglob("bytes"))
        assert before % 4 == 0
    assert end > 12


def test_what_is_there_of_an_object_is_not_asked_for_again(store: Store, tmp_path: Path) -> None:
    build, there = store.build(ID), f"file://{tmp_path}/remote"
    assert build is not None
    Transfer(store, Remote(there)).push_build(build)
    tree = store.tree(build["stages"][0]["output"])
    assert tree is not None
    entry = tree.find("w/shared")
    assert entry is not None
    for begun, asked in ((b"the same", (8, 19)), (b"other by", (8, 19)), (b"longer than the object is", (0, 19))):
        two = Store(tmp_path / begun.decode())
        (two.partial(entry.sha256) / "bytes").write_bytes(begun)
        remote, parts = Remote(there), []
        real = remote.part

        def part(name: str, start: int, end: int, real: Any = real, parts: list[Any] = parts) -> Any:
            if name.endswith(entry.sha256):
                parts.append((start, end))
            return real(name, start, end)

        remote.part = part  # type: ignore[method-assign]
        Transfer(two, remote).pull_build(ID)
        whole(two.root)
        # What was begun wrong is found by the digest, and begun anew.
        assert parts == [asked, (0, 19)] if begun == b"other by" else parts == [asked]


def remote_of(store: Store, folder: Path) -> Path:
    build = store.build(ID)
    assert build is not None
    Transfer(store, Remote(f"file://{folder}")).push_build(build)
    return folder


LIES = {
    "object truncated": ("objects/", "it has 7 bytes in place of 9"),
    "object emptied": ("objects/", "it has 0 bytes in place of 9"),
    "object of the same size": ("objects/", "its content has the SHA-256"),
    "object grown": ("objects/", None),
    "object gone": ("objects/", "not there, although a tree names it"),
    "tree truncated": ("trees/", "truncated"),
    "tree of another content": ("trees/", "its digest is"),
    "tree gone": ("tree", "although a record names it"),
    "tree that leaves its folder": ("trees/", "leaves its folder"),
    "record truncated": ("records/", "truncated"),
    "record of other components": ("records/", "do not hash to its key"),
    "record of another key": ("records/", "the record of another key"),
    "record with an odd output": ("records/", "its output is no digest"),
    "record without a stage": ("records/", "its key is not"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_what_it_is_called_is_refused_by_name_and_nothing_of_it_enters(
    store: Store, tmp_path: Path, lie: str
) -> None:
    there = remote_of(store, tmp_path / "remote")
    build = store.build(ID)
    assert build is not None
    row = build["stages"][0]
    tree = store.tree(row["output"])
    assert tree is not None
    entry = tree.find("w/model")
    assert entry is not None
    held = there / "objects/sha256" / entry.sha256[:2] / entry.sha256
    listed, record = there / f"trees/{row['output']}.json", there / f"records/{row['key']}/1.json"
    value = json.loads(record.read_bytes())
    if lie == "object truncated":
        small_store.spoil(held, held.read_bytes()[:-2])
    elif lie == "object emptied":
        small_store.spoil(held, b"")
    elif lie == "object of the same size":
        small_store.spoil(held, b"weights X")
    elif lie == "object grown":
        small_store.spoil(held, held.read_bytes() + b"more")
    elif lie == "object gone":
        held.unlink()
    elif lie == "tree truncated":
        small_store.spoil(listed, listed.read_bytes()[:-4])
    elif lie == "tree of another content":
        small_store.spoil(listed, listed.read_bytes().replace(b"w/model", b"w/mOdel"))
    elif lie == "tree gone":
        listed.unlink()
    elif lie == "tree that leaves its folder":
        evil = Tree((Entry("../../evil", entry.size, 0o644, entry.sha256),))
        (there / f"trees/{evil.digest}.json").write_bytes(canonical.dumps(evil.as_json()))
        value["output"] = evil.digest
    elif lie == "record truncated":
        small_store.spoil(record, record.read_bytes()[:-5])
    elif lie == "record of other components":
        value["components"]["params"]["value"] = 2
    elif lie == "record of another key":
        value["key"] = "1" * 64
    elif lie == "record with an odd output":
        value["output"] = "../" + value["output"]
    else:
        value["stage"] = "image"
    if record.exists() and lie != "record truncated":
        record.write_bytes(canonical.pretty(value))

    two, (place, words) = Store(tmp_path / "two"), LIES[lie]
    transfer = Transfer(two, Remote(f"file://{there}"))
    got = transfer.fetch_stage(row["key"])
    whole(two.root)
    if words is None:
        assert got is not None and two.record(row["key"]) is not None
        return
    assert got is None and two.record(row["key"]) is None
    assert len(transfer.moved.refused) == 1
    assert place in transfer.moved.refused[0] and words in transfer.moved.refused[0]
    assert not (two.root / "objects/sha256" / entry.sha256[:2] / entry.sha256).exists() or "object" not in lie
    # A build names its outputs itself: where only the record lies, the output comes, and no record of it.
    again = Transfer(two, Remote(f"file://{there}"))
    if lie.startswith("record") or lie == "tree that leaves its folder":
        again.pull_build(ID)
        assert two.has_tree(row["output"]) and two.record(row["key"]) is None
    else:
        with pytest.raises(Refused, match=place):
            again.pull_build(ID)
        assert two.builds() == []
    whole(two.root)


@pytest.mark.parametrize("damage", ["truncated", "another id", "no artifact"])
def test_a_build_record_that_is_none_is_refused(store: Store, tmp_path: Path, damage: str) -> None:
    there = remote_of(store, tmp_path / "remote")
    path = there / "builds" / f"{ID}.json"
    value = json.loads(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        value |= {"build": "x"} if damage == "another id" else {"image": {"artifact": "1" * 64}}
        path.write_bytes(canonical.pretty(value))
    two = Store(tmp_path / "two")
    with pytest.raises(Refused, match="builds/"):
        Transfer(two, Remote(f"file://{there}")).pull_build(ID)
    assert two.builds() == []
    # A push from a store that has it writes it anew.
    build = store.build(ID)
    assert build is not None
    Transfer(store, Remote(f"file://{there}")).push_build(build)
    assert json.loads(path.read_bytes()) == build


def test_two_builds_of_one_name_do_not_replace_each_other(store: Store, tmp_path: Path) -> None:
    there = remote_of(store, tmp_path / "remote")
    other = Store(tmp_path / "two")
    build = small_store.build(other, "/r/b.yaml", 2, ID)
    for act in (lambda t: t.push_build(build), lambda t: t.pull_build(ID)):
        with pytest.raises(QdcError, match="another"):
            act(Transfer(other, Remote(f"file://{there}")))
    assert json.loads((there / "builds" / f"{ID}.json").read_bytes()) == store.build(ID)
    assert other.build(ID) == build


def test_outputs_that_differ_under_one_key_are_both_kept_and_the_first_is_taken(store: Store, tmp_path: Path) -> None:
    there = remote_of(store, tmp_path / "remote")
    mine = store.build(ID)
    assert mine is not None
    key = mine["stages"][0]["key"]
    other = Store(tmp_path / "two")
    row = small_store.stage(other, "weights", 1, {}, {"w": b"another outcome"})
    assert row["key"] == key
    Transfer(other, Remote(f"file://{there}")).push_records([key])
    assert sorted(path.name for path in (there / "records" / key).iterdir()) == ["1.json", "2.json"]
    three = Store(tmp_path / "three")
    got = Transfer(three, Remote(f"file://{there}")).fetch_stage(key)
    assert got is not None and got["output"] == mine["stages"][0]["output"]


@pytest.mark.parametrize(
    "paths",
    [["../x"], ["/x"], ["a//b"], ["a/./b"], ["a", "a"], ["a", "a/b"], ["a/b", "a/b/c/d"], [""]],
)
def test_trees_with_paths_that_clash_or_leave_are_no_trees(paths: list[str]) -> None:
    with pytest.raises(ValueError, match=r"leaves|twice|also a folder"):
        sound([[path, 1, 0o644, "0" * 64] for path in paths])
    good = [[f"n{index}", 1, 0o755, "0" * 64] for index, _ in enumerate(paths)]
    assert sound(good).as_json() == good
    for bad in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError):
            sound([["a", bad, 0o644, "0" * 64]])
    for mode in (0o600, 0o4755, "644"):
        with pytest.raises(ValueError):
            sound([["a", 1, mode, "0" * 64]])


class Flaky:
    """A back end whose calls fail the first times."""

    def __init__(self, fs: Any, errors: list[Exception]) -> None:
        self.fs, self.errors, self.calls = fs, errors, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.fs, name)
        if not callable(real):
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.errors:
                raise self.errors.pop(0)
            return real(*arguments, **named)

        return call


def opened(folder: Path, errors: list[Exception]) -> tuple[Remote, Flaky, list[float]]:
    pauses: list[float] = []
    remote = Remote(f"file://{folder}", pauses.append)
    remote.open()
    assert remote._opened is not None
    flaky = Flaky(remote._opened[0], errors)
    remote._opened = (flaky, *remote._opened[1:])
    return remote, flaky, pauses


def test_what_may_work_later_is_tried_again_after_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PAUSES_S", (0.3, 1.0, 3.0))
    (tmp_path / "x").write_bytes(b"data")
    remote, _, pauses = opened(tmp_path, [ConnectionResetError("reset"), TimeoutError("slow"), OSError(5, "busy")])
    assert remote.part("x", 0, 4) == b"data" and pauses == [0.3, 1.0, 3.0]
    remote, _, pauses = opened(tmp_path, [ConnectionResetError("reset")] * 4)
    with pytest.raises(QdcError, match="reset") as caught:
        remote.part("x", 0, 4)
    assert len(pauses) == 3 and caught.value.exit_code == 4 and "run the same command" in str(caught.value.hint)
    remote, flaky, pauses = opened(tmp_path, [PermissionError(13, "Access denied")])
    with pytest.raises(QdcError, match="Access denied") as caught:
        remote.part("x", 0, 4)
    assert (pauses, flaky.calls) == ([], 1) and "credentials" in str(caught.value.hint)


def test_eight_objects_move_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "one")
    row = small_store.stage(store, "weights", 1, {}, {f"f{index}": b"%d" % index for index in range(16)})
    remote = Remote(f"file://{tmp_path}/remote")
    Transfer(store, remote).push_records([row["key"]])
    together = threading.Barrier(8, timeout=20)
    real = remote.part

    def part(name: str, start: int, end: int) -> Any:
        together.wait()
        return real(name, start, end)

    remote.part = part  # type: ignore[method-assign]
    two = Transfer(Store(tmp_path / "two"), remote)
    assert two.fetch_stage(row["key"]) is not None and two.moved.objects == 16


def test_a_back_end_without_ranges_is_read_whole(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = remote_of(store, tmp_path / "remote")
    monkeypatch.setattr(transfer_module, "PART", 4)
    remote = Remote(f"file://{there}")
    monkeypatch.setattr(remote, "part", lambda name, start, end: (there / name).read_bytes())
    Transfer(Store(tmp_path / "two"), remote).pull_build(ID)
    whole(tmp_path / "two")


def test_a_write_that_breaks_off_leaves_nothing_under_its_name(store: Store, tmp_path: Path) -> None:
    remote, flaky, _ = opened(tmp_path / "remote", [])

    def half(source: str, path: str, **more: Any) -> None:
        Path(path).write_bytes(b"hal")
        raise ValueError("broken")

    flaky.put_file = half  # type: ignore[attr-defined]
    tree = store.tree(store.record(small_store.stages(store, 1)[0]["key"])["output"])  # type: ignore[index]
    assert tree is not None
    sha256 = tree.entries[0].sha256
    with pytest.raises(QdcError, match="broken"):
        remote.send(f"objects/sha256/{sha256[:2]}/{sha256}", store.object_path(sha256), 9, lambda count: None)
    assert [path for path in (tmp_path / "remote").rglob("*") if path.is_file()] == []
    # Where the process ends before it can clear up, what is left has a name that nobody reads.
    flaky.rm_file = lambda path: None  # type: ignore[attr-defined]
    with pytest.raises(QdcError, match="broken"):
        remote.send(f"objects/sha256/{sha256[:2]}/{sha256}", store.object_path(sha256), 9, lambda count: None)
    assert [path.name[:2] for path in (tmp_path / "remote").rglob("*") if path.is_file()] == [f".{sha256[0]}"]
    assert verify(tmp_path / "remote") == []


def test_a_damaged_object_is_not_pushed(store: Store, tmp_path: Path) -> None:
    build = store.build(ID)
    assert build is not None
    tree = store.tree(build["stages"][0]["output"])
    assert tree is not None
    path = store.object_path(tree.entries[0].sha256)
    small_store.spoil(path, b"weights X")
    with pytest.raises(QdcError, match="is damaged and was removed"):
        Transfer(store, Remote(f"file://{tmp_path}/remote")).push_build(build)
    assert verify(tmp_path / "remote") == [] and not path.exists()
    with pytest.raises(QdcError, match="cannot be pushed"):
        Transfer(store, Remote(f"file://{tmp_path}/remote")).push_build(build)


def test_a_transfer_that_is_told_to_stop_stops_and_is_gone_on_with(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, stop = remote_of(store, tmp_path / "remote"), threading.Event()
    monkeypatch.setattr(transfer_module, "PART", 2)
    remote, two = Remote(f"file://{there}"), Store(tmp_path / "two")
    real = remote.part

    def part(name: str, start: int, end: int) -> Any:
        if start >= 4:
            stop.set()
        return real(name, start, end)

    remote.part = part  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        Transfer(two, remote, stop=stop).pull_build(ID)
    assert verify(two.root) == [] and list((two.root / "partial").rglob("bytes"))
    Transfer(two, Remote(f"file://{there}")).pull_build(ID)
    assert whole(two.root).builds() == [ID]


INTERRUPTED = """
import os, signal, sys, threading, time
from qdc.cli import main
from qdc.store import remote, transfer
transfer.PART = 4
real, parts = remote.Remote.part, []
def slow(self, name, start, end):
    parts.append(name)
    if len(parts) == 8:
        os.kill(os.getpid(), signal.SIGINT)
    if len(parts) >= 8:
        time.sleep(0.3)
    return real(self, name, start, end)
remote.Remote.part = slow
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_leaves_what_came_and_the_same_command_goes_on(store: Store, tmp_path: Path) -> None:
    there, two = remote_of(store, tmp_path / "remote"), tmp_path / "two"
    arguments = ["store", "pull", ID, "--store", str(two), "--remote", f"file://{there}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "compiler")}
    started = time.monotonic()
    stopped = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, env=environment
    )
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr and "run the same command to go on" in stopped.stderr
    assert time.monotonic() - started < 20 and verify(two) == [] and Store(two).builds() == []
    done = command(*arguments)
    assert done.returncode == 0 and f"pulled build {ID}" in done.stdout, done.stderr
    assert whole(two).builds() == [ID]


# Read-through


def reading(root: Path, url: str | None, *instances: Instance) -> tuple[Build, dict[str, tuple[bool, bool]]]:
    """A build with a remote, and (ran, fetched) of its stages."""
    build = Build(Store(root), Settings(sys.executable, 1, 1, None, url), list(instances), Quiet())
    return build, {row.name: (row.ran, row.fetched) for row in build.run()}


def test_a_stage_that_the_remote_has_is_fetched_instead_of_run(tmp_path: Path, made: Scripts) -> None:  # noqa: F811
    one, two = made.instance("one"), made.instance("two", input="one")
    url = f"file://{tmp_path}/remote"
    reading(tmp_path / "a", None, one)
    source = Store(tmp_path / "a")
    Transfer(source, Remote(url)).push_records([one.key({})])
    build, rows = reading(tmp_path / "b", url, one, two)
    assert rows == {"one": (False, True), "two": (True, False)} and made.ran() == ["one", "two"]
    mine = source.record(one.key({}))
    got = Store(tmp_path / "b").record(one.key({}))
    assert mine is not None and got is not None and got == {**mine, "fetched": True}
    assert build.decisions is not None and build.decisions.stages["one"]["state"] == "fetched"
    assert build.notes == [] and verify(tmp_path / "b") == []
    again, rows = reading(tmp_path / "b", "s3://nowhere/x", one, two)
    assert rows == {"one": (False, False), "two": (False, False)} and again.through is None


def test_a_lying_remote_is_named_and_the_stage_runs(tmp_path: Path, made: Scripts) -> None:  # noqa: F811
    one = made.instance("one")
    url = f"file://{tmp_path}/remote"
    reading(tmp_path / "a", None, one)
    Transfer(Store(tmp_path / "a"), Remote(url)).push_records([one.key({})])
    (held,) = [path for path in (tmp_path / "remote/objects").rglob("*") if path.is_file()]
    small_store.spoil(held, b"eno")
    build, rows = reading(tmp_path / "b", url, one)
    assert rows == {"one": (True, False)}
    (note,) = build.notes
    assert held.name in note and "its content has the SHA-256" in note and "was not used" in note
    whole(tmp_path / "b")


def test_an_answer_that_comes_between_two_looks_is_no_endless_wait(
    tmp_path: Path,
    made: Scripts,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The remote has nothing, and says so after the build has left the stage to it and before it waits."""
    real = Build._wait

    def wait(build: Build) -> None:
        if build.through is not None:
            build.through.close()
        real(build)

    monkeypatch.setattr(Build, "_wait", wait)
    done = threading.Thread(
        target=reading, args=(tmp_path / "s", f"file://{tmp_path}/none", made.instance("one")), daemon=True
    )
    done.start()
    done.join(20)
    assert not done.is_alive() and made.ran() == ["one"]


@pytest.mark.parametrize("url", ["s3://none.such/x", "nosuch://x/y", "file:///proc/version/x"])
def test_a_remote_that_cannot_be_read_is_named_and_the_build_goes_on(
    tmp_path: Path,
    made: Scripts,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    url: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    build, rows = reading(tmp_path / "s", url, made.instance("one"), made.instance("two"))
    assert rows == {"one": (True, False), "two": (True, False)}
    assert len(build.notes) <= 2 and all("was not used" in note for note in build.notes)
    assert build.notes or url.startswith("file")


def test_two_builds_at_once_fetch_each_output_once(
    tmp_path: Path,
    made: Scripts,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = [made.instance("a"), made.instance("b", input="a"), made.instance("c", input="b")]
    url = f"file://{tmp_path}/remote"
    reading(tmp_path / "a", None, *chain)
    Transfer(Store(tmp_path / "a"), Remote(url)).push_records([p.name for p in (tmp_path / "a/records").iterdir()])
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: reading(tmp_path / "b", url, *chain)[1]})) for n in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(made.ran()) == ["a", "b", "c"], "only the first store's build ran"
    assert set(found) == {1, 2} and verify(tmp_path / "b") == []


# Through the command line, and what must not be seen


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qdc", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")},
    )


def texts(root: Path) -> Iterator[tuple[Path, bytes]]:
    for path in root.rglob("*"):
        yield path, str(path.relative_to(root)).encode()
        if path.is_file():
            yield path, path.read_bytes()


def unseen(root: Path, *said: str) -> None:
    for path, data in texts(root):
        assert SECRET.encode() not in data, path
    assert all(SECRET not in text for text in said), said


def test_the_verbs_push_and_pull_at_an_s3_server(
    store: Store, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QDC_REMOTE", bucket)
    pushed = command("store", "push", "--store", store.root, "--json")
    assert pushed.returncode == 0, pushed.stderr
    answer = json.loads(pushed.stdout)
    checked("store", answer)
    assert answer["push"]["remote"] == bucket and answer["push"]["builds"] == [ID]
    two = tmp_path / "two"
    pulled = command("store", "pull", "--store", two)
    assert pulled.returncode == 0, pulled.stderr
    assert f"pulled build {ID}" in pulled.stdout and "3 objects (35 bytes) moved" in pulled.stdout
    everything = command("store", "push", "--all", "--store", two)
    assert everything.returncode == 0 and "0 objects" in everything.stdout, everything.stderr
    assert whole(two).builds() == [ID]
    unseen(two, pushed.stdout, pushed.stderr, pulled.stdout, pulled.stderr, everything.stdout, everything.stderr)
    unknown = command("store", "pull", "20200101-000000-0", "--store", two)
    assert unknown.returncode == 4 and "has no build 20200101-000000-0" in unknown.stderr


def test_another_machine_builds_micro_from_the_remote_alone(micro: Micro, tmp_path: Path) -> None:
    """The same recipe in an empty store: every stage is fetched, none runs, and the image is the same."""
    url = f"file://{tmp_path}/remote"
    pushed = command("store", "push", micro.first["build"], "--store", micro.store, "--remote", url)
    assert pushed.returncode == 0, pushed.stderr
    arguments = ["build", micro.recipe, "--store", tmp_path / "other", *SCRATCH, "--remote", url]
    built = command(*arguments, "--json")
    assert built.returncode == 0, built.stderr
    answer = json.loads(built.stdout)
    checked("build", answer)
    assert answer["image"] == micro.first["image"]
    assert {(row["ran"], row["fetched"]) for row in answer["stages"]} == {(False, True)}
    store = whole(tmp_path / "other")
    record = store.build(answer["build"])
    assert record is not None and all(row["fetched"] for row in record["stages"])
    assert url not in json.dumps(record) and "file://" not in built.stderr
    for _, data in texts(store.root):
        assert url.encode() not in data
    assert "nothing to do" in command(*arguments).stdout
    assert "fetched" in command("show", answer["build"], "--store", store.root).stdout
    forgotten = command("store", "gc", "--keep-builds", "0", "--older-than", "0s", "--store", store.root, "--yes")
    assert forgotten.returncode == 0 and f"forgot build {answer['build']}" in forgotten.stdout
    assert not list(store.root.glob("objects/*/*/*")) and whole(store.root).builds() == []


def test_credentials_of_a_refused_request_are_not_shown(
    store: Store, s3: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = command("store", "push", "--store", store.root, "--remote", "s3://none-such-bucket/x", "--json")
    assert missing.returncode == 4 and "none-such-bucket" in json.loads(missing.stdout)["error"]["message"]
    unseen(store.root, missing.stdout, missing.stderr)


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent, as a careless server does."""

    def do_GET(self) -> None:
        words = f"no {self.path} for {self.headers.get('Authorization')} {SECRET}".encode()
        self.send_response(403, f"denied {SECRET}")
        self.send_header("Content-Length", str(len(words)))
        self.end_headers()
        self.wfile.write(words)

    do_HEAD = do_PUT = do_GET

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def echo() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()


@pytest.mark.parametrize("where", ["url", "query", "environment", "config"])
def test_planted_credentials_reach_no_record_message_or_log(
    tmp_path: Path,
    made: Scripts,  # noqa: F811
    echo: int,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "store"
    plain = f"http://127.0.0.1:{echo}/x"
    url = {
        "url": f"http://user:{SECRET}@127.0.0.1:{echo}/x",
        "query": f"{plain}?sig={SECRET}",
        "environment": plain,
        "config": f"http://{SECRET}:x@127.0.0.1:{echo}/x",
    }[where]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if where == "environment":
        monkeypatch.setenv("STORE_TOKEN", SECRET)
    if where == "config":
        (tmp_path / "config/qdc").mkdir(parents=True)
        (tmp_path / "config/qdc/config.yaml").write_text(f"remote: {url}\n")
    else:
        monkeypatch.setenv("QDC_REMOTE", url)
    given = user_settings()
    assert given.remote == url and SECRET not in repr(given)
    build, rows = reading(root, given.remote, made.instance("one"))
    assert rows == {"one": (True, False)}
    small_store.build(Store(root), "/r/a.yaml", 1, ID)
    for action in ("push", "pull"):
        for more in ([], ["--json"], ["--verbose"]):
            assert main(["store", action, "--store", str(root), *more]) == 4
    said = capfd.readouterr()
    assert "127.0.0.1" in said.err and "x" in said.err
    unseen(root, said.out, said.err, *build.notes)


@pytest.mark.parametrize(
    ("url", "shown", "secret"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b", None),
        ("http://host:8080/a@b", "http://host:8080/a@b", None),
        ("ftp://me:Pa55word@host/x", "ftp://host/x", "Pa55word"),
        ("http://me:Pa55@word@host:80/x", "http://host:80/x", "Pa55@word"),
        ("http://me:Pa55%20word@host:80/x", "http://host:80/x", "Pa55 word"),
        ("s3://AKIA1:ab/Pa55word@bucket/x", "s3://bucket/x", "ab/Pa55word"),
        ("http://host/x?X-Sig=Pa55word&a=1", "http://host/x", "Pa55word"),
        ("abfs://c@account/x#Pa55word", "abfs://account/x", "Pa55word"),
    ],
)
def test_no_url_is_shown_with_what_opens_it(url: str, shown: str, secret: str | None) -> None:
    assert without_credentials(f"see '{url}', or {url} there") == f"see '{shown}', or {shown} there"
    if secret is not None:
        assert hide(f"{url} said {secret}", secrets(url, {})) == f"{shown} said ***"
    assert hide("of Pa55word", secrets("", {"MY_TOKEN": "Pa55word", "HOME": "of"})) == "of ***"


def test_a_worker_is_not_told_of_the_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_run import REAL_START, worker_says

    assert REAL_START
    monkeypatch.setattr("test_run.process.SOURCE_ROOT", f"{ROOT / 'compiler'}{os.pathsep}{tmp_path}")
    for name in ("QDC_REMOTE", "AWS_SECRET_ACCESS_KEY", "FSSPEC_S3_SECRET"):
        monkeypatch.setenv(name, SECRET)
    code = "import os\ndef run(context): (context.output / 'made').write_text(str(dict(os.environ)))\n"
    worker = worker_says(tmp_path, code)
    assert worker.process.returncode == 0, (tmp_path / "log").read_text()
    assert SECRET not in (tmp_path / "made").read_text()


def test_the_settings_name_the_remote_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qdc.run.settings import remote

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("QDC_REMOTE", raising=False)
    assert remote() is None
    (tmp_path / "qdc").mkdir()
    (tmp_path / "qdc/config.yaml").write_text("remote: s3://from/file\n")
    assert remote() == "s3://from/file"
    monkeypatch.setenv("QDC_REMOTE", "s3://from/environment")
    assert remote() == "s3://from/environment" and remote("s3://given/x") == "s3://given/x"
    assert remote("none") is None
    monkeypatch.setenv("QDC_REMOTE", "")
    assert remote() is None


def test_a_verb_without_a_remote_says_how_to_name_one(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("QDC_REMOTE", raising=False)
    assert main(["store", "push", "--store", str(store.root)]) == 2
    assert "QDC_REMOTE" in capsys.readouterr().err
    assert main(["store", "push", "@1", "--all", "--remote", "memory://x", "--store", str(store.root)]) == 2
    assert main(["store", "pull", "--remote", "nosuch://x", "--store", str(store.root)]) in (2, 4)
    assert "nosuch" in capsys.readouterr().err


def test_pull_of_a_recipe_brings_every_stage_that_is_there(
    tmp_path: Path, recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what no stage must make first can be known of a recipe whose stages never ran: prompts, here."""
    from qdc.graph.plan import plan
    from qdc.run.front import front

    recipe, one, two = recipes / "micro.yaml", Store(tmp_path / "one"), tmp_path / "two"
    read = front(recipe, [], one)
    stage = next(item for item in plan(read.instances, one.record).stages if item.instance.kind == "prompts")
    output = small_store.publish(one, {"prompts.jsonl": b"{}\n"})
    row = {"instance": stage.instance.name, "stage": "prompts", "determinism": "exact", "output": output}
    components = stage.instance.components(stage.inputs)
    one.add_record(str(stage.key), {**row, "components": components, "seconds": 1.0, "finished": "x"})
    Transfer(one, Remote(f"file://{tmp_path}/remote")).push_records([str(stage.key)])
    arguments = ["store", "pull", str(recipe), "--store", str(two), "--remote", f"file://{tmp_path}/remote"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    checked("store", answer)
    assert answer["pull"]["stages"][stage.instance.name] == output
    assert whole(two).record(str(stage.key)) is not None
    shutil.rmtree(two)
    assert main(arguments) == 0
    assert f"fetched {stage.instance.name}" in capsys.readouterr().out


def test_memory_is_a_back_end_like_others(tmp_path: Path) -> None:
    """Nothing of the remote is remembered between two of its users."""
    store = Store(tmp_path / "one")
    row = small_store.stage(store, "weights", 1, {}, {"w": b"1"})
    url = f"memory://{tmp_path.name}-more"
    remote = Remote(url)
    assert remote.builds() == [] and remote.records(row["key"]) == ([], [])
    Transfer(store, Remote(url)).push_records([row["key"]])
    good, bad = remote.records(row["key"])
    assert [record["output"] for record in good] == [row["output"]] and bad == []
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}-more", recursive=True)
    assert remote.records(row["key"]) == ([], [])
