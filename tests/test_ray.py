"""Stages on a Ray cluster: the same keys and outputs; workers, nodes and builds that are lost; what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from micro import SCRATCH, Micro, qdc
from ray_nodes import Nodes, probes
from small_store import listing
from test_remote import SECRET, bucket, free_port, s3, texts  # noqa: F401

from qdc.cli.progress import Quiet
from qdc.core.errors import QdcError
from qdc.graph.instances import Instance
from qdc.graph.signature import package_signature
from qdc.graph.table import KINDS, Kind
from qdc.run import process, ray_cluster, ray_executor
from qdc.run.about import about, differences
from qdc.run.build import Build
from qdc.run.cluster import Cluster, Need, cluster, processes
from qdc.run.front import Front
from qdc.run.settings import Settings
from qdc.run.sweep import Variant, cause, union
from qdc.store.remote import Remote
from qdc.store.store import Store
from qdc.store.transfer import Transfer
from qdc.store.verify import verify

WRITE = "(output / 'x').write_text(context.params['name'])"


def waited(what: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What `what()` gives, once that is something."""
    until = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probes(tmp_path_factory.mktemp("site") / "probes")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"), site)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setitem(KINDS, "probe", Kind("probe", "train", "exact", parallel=True))
    monkeypatch.setattr(process, "SOURCE_ROOT", f"{process.SOURCE_ROOT}{os.pathsep}{site}")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")


def stage(name: str, code: str = WRITE, trace: Path | None = None, **inputs: str) -> Instance:
    params = {"name": name, "code": code, "trace": str(trace) if trace else None}
    return Instance(name, "probe", params, inputs, "code", {}, "exact", "train", "compute")


class Heard(Quiet):
    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, str]] = []

    def progress(self, name: str, done: int, total: int, note: str) -> None:
        self.rows.append((name, done, total, note))


class Place:
    """A store, a remote and a cluster for one test."""

    def __init__(self, folder: Path, address: str | None) -> None:
        self.folder, self.address = folder, address
        self.url, self.store, self.heard = f"file://{folder}/remote", Store(folder / "store"), Heard()

    def settings(self, executor: str = "ray", **more: Any) -> Settings:
        needs = {"default": Need(1, 0, 1e8)} | more.pop("needs", {})
        there = Cluster(self.address, needs=needs, **more)
        return Settings(sys.executable, 1, 2, remote=self.url, executor=executor, cluster=there)

    def build(self, *instances: Instance, **more: Any) -> dict[str, bool]:
        """Whether each stage ran, of those that are fresh at the end."""
        build = Build(self.store, self.settings(**more), list(instances), self.heard)
        return {row.name: row.ran for row in build.run()}

    def text(self, instance: Instance) -> str:
        record = self.store.record(instance.key({}))
        assert record is not None
        return self.store.read(record["output"], "x").decode()

    def log(self, instance: Instance) -> str:
        return self.store.log_path(instance.key({})).read_text()


@pytest.fixture
def there(tmp_path: Path, nodes: Nodes) -> Place:
    return Place(tmp_path, nodes.address)


# The same work


def test_progress_and_log_come_as_from_a_stage_here(there: Place, tmp_path: Path) -> None:
    code = "context.report(1, 2, 'half'); print('said by the stage'); time.sleep(0.5); context.report(2, 2, 'all'); "
    one = stage("one", code + WRITE, tmp_path / "trace")
    two = stage("two", "(output / 'x').write_text((context.inputs['one'] / 'x').read_text() + '2')", one="one")
    assert there.build(one, two) == {"one": True, "two": True}
    assert there.text(one) == "one" and "said by the stage" in there.log(one)
    assert {("one", 1, 2, "half"), ("one", 2, 2, "all")} <= set(there.heard.rows)
    assert any(note.startswith("on ") for _, _, _, note in there.heard.rows)
    record = there.store.record(one.key({}))
    assert record is not None and record["hardware"]["cores"] == os.cpu_count() and "fetched" not in record
    assert verify(there.store.root) == [] and verify(tmp_path / "remote") == []
    assert not any(path.is_file() for name in ("leases", "partial") for path in (tmp_path / "remote" / name).rglob("*"))
    assert there.build(one, two) == {"one": False, "two": False}
    other = Place(tmp_path, None)
    other.store = Store(tmp_path / "another")
    assert other.build(one, two) == {"one": False, "two": False}, "another store fetches, without a cluster"
    assert (tmp_path / "trace").read_text() == "one\n"


def test_the_exact_stages_of_micro_have_the_keys_and_outputs_that_they_have_here(
    micro: Micro, nodes: Nodes, tmp_path: Path
) -> None:
    """What they read of trained models comes from the remote; each of them runs on the cluster."""
    here, url = Store(micro.store), f"file://{tmp_path}/remote"
    build = here.build(micro.first["build"])
    assert build is not None
    rows = {row["name"]: row for row in build["stages"]}
    seeded = [row["key"] for row in rows.values() if row["determinism"] == "seeded"]
    Transfer(here, Remote(url)).push_records(seeded)
    wanted = ["prompts:prompts_b", "pack:teacher_corpus", "calibrate"]
    done = qdc(
        "build", micro.recipe, "--store", tmp_path / "store", *SCRATCH, "--json", "--remote", url,
        "--executor", "ray", "--address", nodes.address, *(f"--until={name}" for name in wanted),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "ray" not in done.stderr.lower(), done.stderr
    made = {row["name"]: row for row in json.loads(done.stdout)["stages"]}
    exact = {name for name in made if rows[name]["determinism"] == "exact"}
    assert exact == {*wanted, "prompts:heldout", "prompts:teacher_text", "prompts:prompts_a"}
    store = Store(tmp_path / "store")
    for name, row in made.items():
        assert (row["ran"], row["fetched"]) == (name in exact, name not in exact)
        assert row["output"] == rows[name]["output"] and store.record(rows[name]["key"]) is not None


@pytest.mark.slow
def test_micro_whole_is_the_same_image(micro: Micro, nodes: Nodes, tmp_path: Path) -> None:
    """Seeded stages too, on the same machine."""
    done = qdc(
        "build", micro.recipe, "--store", tmp_path / "store", *SCRATCH, "--json", "--executor", "ray",
        "--remote", f"file://{tmp_path}/remote", "--address", nodes.address,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["image"] == micro.first["image"] and all(row["ran"] for row in answer["stages"])
    assert {r["name"]: r["output"] for r in answer["stages"]} == {r["name"]: r["output"] for r in micro.first["stages"]}


def test_nodes_reach_s3_with_credentials_that_are_kept_nowhere(
    nodes: Nodes,
    bucket: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, nodes.address)
    place.url = bucket
    one = stage("one", f"print('AWS_ENDPOINT_URL' in os.environ, sorted(os.environ)); {WRITE}; # {tmp_path}")
    passed = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
    assert place.build(one, passed=(*passed, "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")) == {"one": True}
    assert place.log(one).startswith("False") and Remote(bucket).record_numbers(one.key({})) == [1]
    for root in (place.store.root, nodes.folder):
        for path, data in texts(root):
            assert SECRET.encode() not in data, path


def test_members_of_a_sweep_share_stages_on_the_cluster_and_one_may_fail(there: Place, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    one = stage("one", f"{WRITE} # {tmp_path}", trace)
    ends = [stage("two", code, trace, one="one") for code in ("raise ValueError('bad')", WRITE, f"{WRITE} # more")]
    found = [Variant(n, {}, [], Front({}, "", [one, end], [], {}, [], {})) for n, end in enumerate(ends, 1)]
    instances, real = union(found)
    build = Build(there.store, there.settings(), instances, Quiet(), names=real, going=True)
    assert {row.name for row in build.run()} == {"one", "two#2", "two#3"}
    assert sorted(trace.read_text().split()) == ["one", "two", "two", "two"]
    error = cause(found[0], build)
    assert error is not None and "stage two: ValueError: bad (on " in error.message


# What is lost


def test_a_stage_whose_worker_is_killed_goes_on_with_its_partial_work(
    there: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
begun = context.partial / 'begun'
if not begun.exists():
    begun.write_text('as it was left')
    print('begins')
    sys.stdout.flush()
    time.sleep(0.5)
    os.kill(os.getppid(), 9)
    time.sleep(60)
(output / 'x').write_text(begun.read_text())
"""
    one = stage("one", code, tmp_path / "trace")
    assert there.build(one) == {"one": True}
    assert there.text(one) == "as it was left" and (tmp_path / "trace").read_text() == "one\none\n"
    assert "begins" in there.log(one) and "it is started again" in there.log(one)
    assert capfd.readouterr() == ("", ""), "Ray says nothing itself: stdout is the answer's"


@pytest.mark.parametrize("victim", ["os.getppid()", "os.getpid()"])
def test_a_stage_that_is_always_killed_is_given_up(there: Place, tmp_path: Path, victim: str) -> None:
    one, two = (
        stage("one", f"os.kill({victim}, 9); time.sleep(60)", tmp_path / "trace"),
        stage("two", f"{WRITE} # {victim}"),
    )
    with pytest.raises(QdcError, match="started 2 times") as caught:
        there.build(two, one, retries=1)
    assert caught.value.exit_code == 4 and (tmp_path / "trace").read_text() == "one\none\n"
    assert there.store.record(one.key({})) is None and verify(there.store.root) == []


def test_a_stage_that_fails_says_why_and_where(there: Place) -> None:
    one = stage("one", "print('before'); raise ValueError('no such thing')")
    with pytest.raises(QdcError, match=r"stage one: ValueError: no such thing \(on ") as caught:
        there.build(one)
    assert caught.value.exit_code == 4 and caught.value.file == str(there.store.log_path(one.key({})))
    assert "before" in there.log(one) and "Traceback" in there.log(one)


def test_what_a_lost_node_had_begun_is_gone_on_with_on_another(there: Place, nodes: Nodes, tmp_path: Path) -> None:
    code = """
begun = context.partial / 'state-1' / 'begun'
if not begun.exists():
    begun.parent.mkdir()
    begun.write_text('as it was left')
    time.sleep(600)
(output / 'x').write_text(begun.read_text())
"""
    one = stage("one", code, tmp_path / "trace")
    first = nodes.add(num_cpus=4)["number"]
    ended: list[Any] = []
    more = {"needs": {"probe": Need(3, 0, 1e8)}, "partial_s": 0.1}
    building = threading.Thread(target=lambda: ended.append(there.build(one, **more)), daemon=True)
    building.start()
    waited(lambda: list((tmp_path / "remote" / "partial").rglob("*.tar")))
    second = nodes.add(num_cpus=4)["number"]
    nodes.lose(first)
    building.join(90)
    nodes.lose(second)
    assert ended == [{"one": True}] and there.text(one) == "as it was left"
    assert (tmp_path / "trace").read_text() == "one\none\n"
    assert not list((tmp_path / "remote" / "partial").rglob("*.tar"))


DRIVER = """
import json, sys
sys.path.insert(0, {tests!r})
from test_ray import Place, stage
from pathlib import Path
place = Place(Path(sys.argv[1]), sys.argv[2])
place.store = type(place.store)(Path(sys.argv[3]))
rows = json.loads(Path(sys.argv[4]).read_text())
print(json.dumps(place.build(*(stage(name, code, Path(trace), **inputs) for name, code, trace, inputs in rows))))
"""


def driver(place: Place, site: Path, rows: list[Any], store: Path | None = None) -> subprocess.Popen[str]:
    """A build in a process of its own."""
    file = place.folder / "rows.json"
    file.write_text(json.dumps(rows))
    code = DRIVER.format(tests=str(Path(__file__).parent))
    path = os.pathsep.join([str(process.SOURCE_ROOT), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, place.folder, str(place.address), store or place.store.root, file],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_ended_and_started_again_runs_nothing_in_vain(
    there: Place, site: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Its running stage ends with it; the next build takes what is finished and goes on with what was begun."""
    code = f"""
begun = context.partial / 'begun'
if not begun.exists():
    begun.write_text(str(os.getpid()))
    time.sleep(600)
(output / 'x').write_text('went on') # {how}
"""
    trace = str(tmp_path / "trace")
    rows = [["one", f"{WRITE} # {how}", trace, {}], ["two", code, trace, {"one": "one"}]]
    first = driver(there, site, rows)
    one = stage("one", rows[0][1], Path(trace))
    waited(lambda: (tmp_path / "trace").exists() and (tmp_path / "trace").read_text() == "one\ntwo\n")
    record = there.store.record(one.key({}))
    assert record is not None
    two = stage("two", code, Path(trace), one="one")
    key = two.key({"one": record["output"]})
    first.send_signal(how)
    first.wait(30)
    again = driver(there, site, rows)
    out, _ = again.communicate(timeout=90)
    assert json.loads(out) == {"one": False, "two": True}
    assert (tmp_path / "trace").read_text() == "one\ntwo\ntwo\n"
    found = there.store.record(key)
    assert found is not None and there.store.read(found["output"], "x") == b"went on"


def test_two_builds_with_stores_of_their_own_run_a_stage_once(there: Place, site: Path, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    rows = [["one", f"time.sleep(2); {WRITE} # {tmp_path}", trace, {}]]
    running = [driver(there, site, rows, tmp_path / f"store{number}") for number in (1, 2)]
    assert [json.loads(child.communicate(timeout=90)[0]) for child in running] == [{"one": True}] * 2
    assert (tmp_path / "trace").read_text() == "one\n"


@pytest.mark.slow
def test_a_cluster_that_goes_is_named_and_the_build_ends(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "LOOK_S", 0.5)
    monkeypatch.setattr(ray_executor, "LOST_S", 2.0)
    (tmp_path / "nodes").mkdir()
    nodes = Nodes(tmp_path / "nodes", site)
    try:
        place, trace = Place(tmp_path, nodes.address), tmp_path / "trace"
        caught: list[BaseException] = []

        def build() -> None:
            try:
                place.build(stage("one", "time.sleep(600)", trace))
            except BaseException as error:
                caught.append(error)

        building = threading.Thread(target=build, daemon=True)
        building.start()
        waited(trace.exists)
        nodes.behead()
        building.join(60)
        (error,) = caught
        assert isinstance(error, QdcError) and (error.id, error.exit_code) == ("ray.gone", 4)
    finally:
        nodes.close()


# Clusters that do not fit


def refused(place: Place, id: str, *words: str, **more: Any) -> QdcError:
    """The error of a build on a cluster that will not do; it comes soon, and leaves nothing."""
    began = time.monotonic()
    with pytest.raises(QdcError) as caught:
        place.build(stage("one"), **more)
    assert (caught.value.id, caught.value.exit_code) == (id, 4 if id != "ray.remote" else 2)
    said = str(caught.value)
    assert all(word in said for word in words) and "Traceback" not in said, said
    assert time.monotonic() - began < 30 and not list(place.store.root.rglob("records/*/*"))
    assert not [name for name in listing(place.folder) if name.startswith(("remote/records", "remote/trees"))]
    return caught.value


class Web(BaseHTTPRequestHandler):
    def do_GET(self) -> None: ...

    def log_message(self, *arguments: Any) -> None: ...


def test_an_address_without_a_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(Place(tmp_path, f"127.0.0.1:{(port := free_port())}"), "ray.unreachable", str(port), "--address")
    refused(Place(tmp_path, "no.such.host.example:6379"), "ray.unreachable", "no.such.host.example:6379")
    for text in ("here", "ray://127.0.0.1:10001", "host:99999", ":6379"):
        refused(Place(tmp_path, text), "ray.address", f"`{text}` is no address")
    web = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    refused(Place(tmp_path, f"127.0.0.1:{web.server_port}"), "ray.not-ray", "is not Ray")
    web.shutdown()
    monkeypatch.setattr(ray_cluster, "REACH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused(Place(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}"), "ray.not-ray", "is not Ray")


@pytest.mark.parametrize(
    ("need", "words"),
    [(Need(64), "64 CPUs"), (Need(1, 2), "2 GPUs"), (Need(1, 0, 9e12), "9e+03 GB")],
)
def test_a_stage_that_no_node_can_run_is_an_error_at_once(there: Place, need: Need, words: str) -> None:
    refused(there, "ray.resources", "stage one needs", words, "the cluster's nodes have 2 CPUs", needs={"probe": need})


def test_a_remote_is_needed_and_must_answer(there: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there.url = "memory://x"
    refused(there, "ray.remote", "remote store that all nodes reach")
    there.url = "file:///proc/version/x"
    refused(there, "remote.failed", "/proc/version/x")
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("MAX_ATTEMPTS", "1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("qdc.store.remote.PAUSES_S", (0.0,))
    there.url = "s3://none.such/x"
    refused(there, "remote.failed", "s3://none.such/x")


def test_without_the_package_the_error_says_what_to_install(there: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(there, "ray.package", "pip install 'qdc[ray]'")


def test_another_qdc_on_the_cluster_is_refused_with_what_differs(there: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = about()
    changed = {**mine["files"], "environments/train.lock": "1" * 64, "run/build.py": "2" * 64}
    monkeypatch.setattr(ray_cluster, "about", lambda: {"qdc": "9.9", "python": "3.11.99", "files": changed})
    refused(there, "ray.mismatch", "qdc 0.1.0 (here 9.9)", "(here 3.11.99)", "train.lock", "(here 111", "run/build.py")


def test_a_node_that_joins_with_another_qdc_is_found_by_its_own_answer(
    there: Place, nodes: Nodes, tmp_path: Path, site: Path
) -> None:
    other = tmp_path / "other" / "qdc"
    shutil.copytree(Path(process.__file__).parents[1], other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "__init__.py").write_text('__version__ = "0.0.7"\n')
    (other / "environments" / "train.lock").write_text("torch==1.0.0\n")
    number = nodes.add({"PYTHONPATH": os.pathsep.join([str(other.parent), str(site)])}, num_cpus=1)["number"]
    try:
        refused(there, "ray.mismatch", "qdc 0.0.7 (here 0.1.0)", "train.lock", "qdc's own files differ: __init__.py")
    finally:
        nodes.lose(number)


def test_what_differs_is_said_in_words() -> None:
    mine = {"qdc": "1", "python": "3.11.7", "files": {f"a{index}.py": "x" for index in range(9)}}
    assert differences(mine, mine) == []
    (said,) = differences(mine, {**mine, "files": {}})
    assert said.endswith("a0.py, a1.py, a2.py, a3.py and 5 more")


def test_a_build_without_an_address_has_a_cluster_of_its_own(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(process.SOURCE_ROOT))
    place = Place(tmp_path, None)
    assert place.build(stage("one", f"{WRITE} # {tmp_path}"), store=str(tmp_path / "node")) == {"one": True}
    assert (tmp_path / "node" / "records").is_dir()


# Settings


def test_settings_of_a_cluster_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QDC_RAY_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert cluster(None, None, 3, tmp_path) == Cluster(needs={"default": Need(3)})
    given = {"address": "a:1", "pass": ["X"], "retries": 0, "needs": {"distill": {"gpus": 2, "memory_gb": 0.5}}}
    made = cluster(given, None, 1, tmp_path)
    assert (made.address, made.passed, made.retries) == ("a:1", ("X",), 0)
    assert made.need("distill") == Need(1, 2, 5e8) and made.need("base") == Need()
    monkeypatch.setenv("QDC_RAY_ADDRESS", "b:2")
    assert cluster(given, None, 1, tmp_path).address == "b:2" and cluster(given, "c:3", 1, tmp_path).address == "c:3"
    assert cluster(given, "local", 1, tmp_path).address is None
    for bad in ({"addres": "x"}, {"needs": {"distil": {}}}, {"needs": {"base": {"cpus": -1}}}, {"pass": "X"}, [1]):
        with pytest.raises(QdcError, match="must be") as caught:
            cluster(bad, None, 1, tmp_path)
        assert str(tmp_path) in str(caught.value)


def test_on_cards_a_stage_with_models_needs_one_for_each_process(tmp_path: Path) -> None:
    plain = replace(
        Settings("python3", 1, 1), cluster=Cluster(needs={"select": Need(gpus=2)}), processes={"distill": 4}
    )
    assert {kind: plain.need(kind).gpus for kind in ("distill", "select", "prompts")} == {
        "distill": 0, "select": 2, "prompts": 0,
    }  # fmt: skip
    cards = replace(plain, device="cuda")
    assert {kind: cards.need(kind).gpus for kind in ("distill", "select", "corpus", "prompts")} == {
        "distill": 4, "select": 2, "corpus": 1, "prompts": 0,
    }  # fmt: skip


def test_only_a_kind_that_can_trains_in_several_processes(tmp_path: Path) -> None:
    assert processes({"distill": 8, "draft-train": 2, "base": 1}, tmp_path) == {
        "distill": 8,
        "draft-train": 2,
        "base": 1,
    }
    for bad in ({"select": 2}, {"probe": 0}, {"nosuch": 1}):
        with pytest.raises(QdcError, match="must be"):
            processes(bad, tmp_path)


TRAINING = """
import torch
import torch.distributed as group
total = torch.tensor([float(context.rank + 1)])
if context.processes > 1:
    group.all_reduce(total)
context.report(context.processes, context.processes, 'trained')
if context.rank == 0:
    (output / 'x').write_text(f'{context.processes} {total.item():g}')
"""


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_a_training_has_as_many_processes_as_the_settings_say_and_its_key_does_not_know(
    there: Place, executor: str
) -> None:
    one = stage("one", TRAINING + f"# {there.folder}")
    two = replace(there.settings(executor), processes={"probe": 2})
    heard = Heard()
    (row,) = Build(there.store, two, [one], heard, signature=package_signature()).run()
    assert row.ran and there.text(one) == "2 3" and ("one", 2, 2, "trained") in heard.rows
    (row,) = Build(there.store, there.settings(executor), [one], Quiet()).run()
    assert not row.ran


def test_a_process_of_a_training_that_fails_ends_it_with_its_own_words(there: Place) -> None:
    code = "if context.rank == 1: raise ValueError('the second has failed')\ntime.sleep(300)"
    two = replace(there.settings("local"), processes={"probe": 2})
    with pytest.raises(QdcError, match="ValueError: the second has failed"):
        Build(there.store, two, [stage("one", code)], Quiet(), signature=package_signature()).run()
