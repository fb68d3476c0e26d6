"""The gate beside a container engine: one that dies, containers that are left, memory, Ctrl-C, the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import pytest
from gate_images import Stub, pack

from qdc.cli import main
from qdc.core.errors import QdcError
from qdc.gate import container, memory
from qdc.gate.container import Containers, NoEngine, held, unbroken
from qdc.gate.served import Gone
from qdc.gate.steps import Steps, Stop

ROOT = Path(__file__).resolve().parents[1]
START = {"srv/start": (0o755, b"#!/bin/sh\n"), "bin/sh": (0o755, b"\x7fELF")}


def image(folder: Path) -> Stub:
    made = Stub([pack({**START, "weights": (0o644, os.urandom(4 << 20))})], {"Entrypoint": ["/srv/start"]})
    made.archive(folder / "image.tar")
    return made


# An engine that answers, and goes away in the middle of a load


class Dying(BaseHTTPRequestHandler):
    """Docker's API as far as a load; `read` bytes of which are taken."""

    protocol_version = "HTTP/1.1"
    take = 1 << 20
    answer: bytes | None = None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return "here"

    def say(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.endswith("/version"):
            self.say(200, {"Version": "0", "ApiVersion": "1.41"})
        elif "/images/" in self.path:
            self.say(404, {"message": "No such image"})
        else:
            self.say(200, {} if "info" in self.path else [])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        left = self.take
        while left > 0 and (data := self.rfile.read(min(left, 1 << 16))):
            left -= len(data)
        if self.answer is not None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(self.answer)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(self.answer)
            self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Dying]]:
    """DOCKER_HOST is such an engine."""
    handler = type("Bound", (Dying,), {})
    with tempfile.TemporaryDirectory(prefix="qdc-") as folder, Server(f"{folder}/sock", handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/sock")
        yield handler
        server.shutdown()


def gated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main(["gate", *map(str, arguments), "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def test_an_engine_that_dies_in_mid_load_says_nothing_of_the_image(
    dying: type[Dying], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = image(tmp_path)
    code, answer = gated(capsys, tmp_path / "image.tar", "--store", tmp_path / "store")
    loads = next(check for check in answer["checks"] if check["id"] == "loads")
    assert code == 3 and loads["outcome"] == "not-run" and "went away" in loads["why"]
    assert answer["image"] == made.id
    assert {check["outcome"] for check in answer["checks"]} == {"pass", "undecided", "not-run"}


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [("archive/tar: invalid tar header", "fail", 1), ("write /x: no space left on device", "not-run", 3)],
)
def test_an_engine_that_refuses_says_why(
    dying: type[Dying], tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str, outcome: str, code: int
) -> None:
    image(tmp_path)
    dying.take = (tmp_path / "image.tar").stat().st_size
    dying.answer = json.dumps({"error": error, "errorDetail": {"message": error}}).encode()
    found, answer = gated(capsys, tmp_path / "image.tar", "--store", tmp_path / "store")
    loads = next(check for check in answer["checks"] if check["id"] == "loads")
    assert (found, loads["outcome"]) == (code, outcome) and error in loads["why"]


def test_an_engine_that_says_it_loaded_and_holds_nothing_fails(
    dying: type[Dying], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image(tmp_path)
    dying.take = (tmp_path / "image.tar").stat().st_size
    dying.answer = b'{"stream": "Loaded image: stub:1\\n"}'
    code, answer = gated(capsys, tmp_path / "image.tar", "--store", tmp_path / "store")
    loads = next(check for check in answer["checks"] if check["id"] == "loads")
    assert code == 1 and loads["outcome"] == "fail" and "holds no sha256:" in loads["why"]


# The command line


def test_without_an_engine_the_report_is_kept_and_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    made, kept = image(tmp_path), tmp_path / "report.json"
    code, answer = gated(capsys, tmp_path / "image.tar", "--store", tmp_path / "store", "--report", kept)
    report = json.loads(kept.read_bytes())
    assert code == 3 == report["exit"] and report["image"] == answer["image"] == made.id
    assert report["checks"] == answer["checks"]
    main(["gate", str(tmp_path / "image.tar"), "--store", str(tmp_path / "store"), "--quiet"])
    assert "no Docker engine answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "id"),
    [
        (["--report", "/none/report.json"], 2, "gate.report"),
        (["--contract", "nobody"], 2, "gate.contract"),
        (["--floor", "-1"], 2, "cli.usage"),
        (["--gpus", "--no-gpus"], 2, "cli.usage"),
        (["--prompts", "0"], 2, "cli.usage"),
        (["--require", "nothing"], 2, "audit.require"),
        (["--expect", "sha256:12"], 2, "gate.expect"),
    ],
)
def test_wrong_use_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, id: str
) -> None:
    image(tmp_path)
    found, answer = gated(capsys, tmp_path / "image.tar", "--store", tmp_path / "store", *options)
    assert (found, answer["error"]["id"]) == (code, id)
    for other in (f"folder:{tmp_path}", "registry:127.0.0.1:1/a"):
        assert gated(capsys, other, "--store", tmp_path / "store")[1]["error"]["id"] == "gate.image"


def test_what_is_no_image_fails_and_what_is_not_there_could_not_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.tar").write_text("no image")
    code, answer = gated(capsys, tmp_path / "text.tar", "--store", tmp_path / "store")
    assert code == 1 and answer["image"] is None and answer["checks"][0]["outcome"] == "fail"
    code, answer = gated(capsys, "archive:/none.tar", "--store", tmp_path / "store")
    assert code == 4 and answer["error"]["id"] == "image.missing"


# Containers


class Paper:
    """As much of an engine as creating and removing needs; `slow_s` for each call."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s
        self.there: dict[str, dict[str, Any]] = {}
        self.containers = self.images = self.api = self
        self.base_url = "http+docker://localhost"

    def create(self, image: str, command: Any, **options: Any) -> Any:
        time.sleep(self.slow_s)
        self.there[id := f"c{len(self.there)}"] = options
        engine = self

        class Made:
            def __init__(self) -> None:
                self.attrs = {"State": {"Running": False, "ExitCode": 1}}

            def start(self) -> None:
                time.sleep(engine.slow_s)

            def reload(self) -> None: ...

            def logs(self, tail: int) -> bytes:
                return b"its log"

            def remove(self, force: bool, v: bool) -> None:
                time.sleep(engine.slow_s)
                engine.there.pop(id, None)

        return Made()

    def list(self, all: bool, filters: dict[str, str]) -> list[Any]:
        name, _, value = filters["label"].partition("=")

        class Left:
            def __init__(self, id: str) -> None:
                self.id = id

            def remove(left, force: bool, v: bool) -> None:
                self.there.pop(left.id, None)

        return [Left(id) for id, options in self.there.items() if options["labels"].get(name) == value]


def test_a_container_that_ended_is_told_with_its_log_and_removed() -> None:
    engine = Paper()
    with Containers(engine, "x", "/usr/bin/python3", 8080).removed() as made:
        said = r"the container ended with status 1\. The end of its log:\nits log"
        with pytest.raises(QdcError, match=said), made.serve(["serve"]):
            pass
        assert engine.there == {}


def test_what_serve_lost_track_of_is_removed_by_its_label() -> None:
    engine = Paper()
    with pytest.raises(KeyboardInterrupt), Containers(engine, "x", None, 8080).removed() as made:
        made._create(["serve"])
        raise KeyboardInterrupt
    assert engine.there == {}
    engine.there["other"] = {"labels": {container.LABEL: "another gate's"}}
    with Containers(engine, "x", None, 8080).removed():
        pass
    assert list(engine.there) == ["other"]


@pytest.mark.parametrize("after", [0.05, 0.15, 0.25, 0.35, 0.45])
def test_an_interrupt_at_any_moment_leaves_no_container(after: float) -> None:
    engine = Paper(0.1)
    timer = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), Containers(engine, "x", "/p", 1).removed() as made:
        with contextlib.suppress(QdcError), made.serve(["serve"]):
            pass
        time.sleep(1)
    timer.join()
    assert engine.there == {}


def test_an_interrupt_waits_for_what_must_not_be_broken() -> None:
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), unbroken():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(1)
    assert done == [1] and signal.getsignal(signal.SIGINT) is before


def test_an_image_without_python_is_published_where_nobody_may_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Paper()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    made = Containers(engine, "x", None, 8080, gpus=True)
    made._create(["serve"])
    (options,) = engine.there.values()
    assert options["ports"] == {"8080/tcp": ("127.0.0.1", None)} and "network_mode" not in options
    assert options["device_requests"][0]["Capabilities"] == [["gpu"]]


def test_an_engine_with_ids_of_its_own_is_asked_by_name() -> None:
    import docker.errors

    class Named:
        def __init__(self) -> None:
            self.images = self

        def get(self, name: str) -> Any:
            if name not in ("stub:1", "lying:1"):
                raise docker.errors.ImageNotFound(name)
            layers = ["sha256:a"] if name == "stub:1" else ["sha256:b"]
            return type("Image", (), {"id": "sha256:own", "attrs": {"RootFS": {"Layers": layers}}})()

    assert held(Named(), "sha256:config", ["sha256:a"], ["lying:1", "stub:1"]) == "sha256:own"
    assert held(Named(), "sha256:config", ["sha256:a"], ["lying:1"]) is None


def test_an_engine_without_a_card_is_no_fault_of_the_image() -> None:
    import docker.errors

    response = type("Response", (), {"status_code": 500, "reason": ""})()
    with pytest.raises(NoEngine), container.docker_errors("starting"):
        raise docker.errors.APIError("x", response, 'could not select device driver "" with capabilities: [[gpu]]')


@pytest.mark.parametrize(("there", "outcome"), [(True, "fail"), (False, "not-run")])
def test_a_server_that_is_gone_is_its_own_fault_only_while_the_engine_answers(there: bool, outcome: str) -> None:
    class Asked:
        def ping(self) -> bool:
            if not there:
                raise ConnectionRefusedError("nobody listens")
            return True

    steps = Steps(lambda done, total, note: None)
    steps.engine = Asked()
    with pytest.raises(Stop), steps.step("repeats", stop=False):
        raise Gone("its stream ended")
    assert [(check.id, check.outcome) for check in steps.checks] == [("repeats", outcome)]


# Memory


@pytest.mark.parametrize(
    ("files", "place", "line", "outcome"),
    [
        ({"memory.peak": 800, "memory.max": "max", "memory.stat": "anon 500\nshmem 10\n"}, "a/b", "0::/a/b", "pass"),
        ({"memory.peak": 990, "memory.max": 1000, "memory.stat": "anon 500\nshmem 10\n"}, "a/b", "0::/a/b", "pass"),
        ({"memory.peak": 990, "memory.max": 1000, "memory.stat": "anon 940\nshmem 10\n"}, "a/b", "0::/a/b", "fail"),
        ({"memory.max_usage_in_bytes": 950, "memory.limit_in_bytes": 1 << 62,
          "memory.stat": "cache 9\ntotal_rss 940\n"}, "memory/a", "5:memory:/a\n0::/", "fail"),
        ({}, "a/b", "0::/c", "not-run"),
    ],
)  # fmt: skip
def test_head_room_is_the_peak_against_the_limit(
    tmp_path: Path, files: dict[str, Any], place: str, line: str, outcome: str
) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(line + "\n")
    folder = tmp_path / "cgroup" / place
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    with memory.watched(7, tmp_path / "cgroup", tmp_path / "proc") as seen:
        check = memory.check_memory(seen, 1000, False)
    assert check.outcome == outcome, check


def test_without_nvidia_smi_the_card_is_said_not_to_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with memory.watched(None) as seen:
        check = memory.check_memory(seen, 1000, True)
    assert check.outcome == "not-run" and "no nvidia-smi" in check.why


@pytest.mark.parametrize(("used", "outcome"), [(22000, "pass"), (24000, "fail")])
def test_a_full_card_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: int, outcome: str) -> None:
    tool = tmp_path / "nvidia-smi"
    rows = [f"NVIDIA A10G, {number}, 24100" for number in (used, 1)]
    tool.write_text(f"#!{sys.executable}\n" + "".join(f"print('{row}')\n" for row in rows))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory.card_memory() == ("NVIDIA A10G", used, 24100)
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "memory.peak").write_text("10")
    check = memory.check_memory(memory.Watched(folder), 1000, True)
    assert check.outcome == outcome and f"{used} of 24100 MiB" in check.figure["card"]


def test_the_gate_ends_with_130_on_sigterm_while_it_reads(tmp_path: Path) -> None:
    image(tmp_path)
    code = "import sys, time\nfrom qdc.gate import artifact\nartifact.open_artifact = lambda *a: time.sleep(30)\n"
    code += "from qdc.cli import main\nprint('started', flush=True)\nsys.exit(main(sys.argv[1:]))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "gate", str(tmp_path / "image.tar"), "--store", str(tmp_path / "store")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(1.5)
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said and "interrupted" in said
