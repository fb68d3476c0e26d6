"""The gate in a real Docker engine: images that never answered, or answered wrong, are stopped for the right reason.

Starts its own engine and fails, never skips, where it cannot. The images are small and hold a stand-in engine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import gate_images as images
import pytest
from gate_images import Stub, stub

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "docker-engine"
FULL = ("--without-drafter", "serve --without-drafter", "--prompts", "60")


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """DOCKER_HOST of a private engine."""
    folder = Path(tempfile.mkdtemp(prefix="qdc-g-"))
    try:
        done = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield done.stdout.strip().removeprefix("DOCKER_HOST=")
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(host: str) -> Iterator[Any]:
    client = docker.DockerClient(base_url=host, timeout=120)
    yield client
    client.close()


class Gate:
    """`qdc gate` as a user runs it; `containers` are those that it left."""

    def __init__(self, host: str, engine: Any, folder: Path) -> None:
        self.host, self.engine, self.folder = host, engine, folder

    def start(self, image: str | Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "qdc", "gate", str(image), "--json", "--store", str(self.folder / "store")]
        environment = {**os.environ, "DOCKER_HOST": self.host, "PYTHONPATH": str(ROOT / "compiler")}
        return subprocess.Popen(
            [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, image: str | Path | Stub, *options: str) -> Outcome:
        if isinstance(image, Stub):
            image = image.archive(self.folder / "image.tar")
        process = self.start(image, *options)
        out, err = process.communicate(timeout=150)
        assert "Traceback" not in err, err
        assert self.engine.containers.list(all=True) == [], "a container was left behind"
        return Outcome(process.returncode, json.loads(out), err)


class Outcome:
    def __init__(self, code: int, answer: dict[str, Any], said: str) -> None:
        self.code, self.answer, self.said = code, answer, said
        self.checks = {check["id"]: check for check in answer.get("checks", [])}
        self.outcomes = {id: check["outcome"] for id, check in self.checks.items()}

    @property
    def failed(self) -> list[str]:
        return [id for id, outcome in self.outcomes.items() if outcome == "fail"]

    def why(self, id: str) -> str:
        return str(self.checks[id]["why"])


@pytest.fixture
def gate(host: str, engine: Any, tmp_path: Path) -> Gate:
    return Gate(host, engine, tmp_path)


# Good images in every form


@pytest.mark.parametrize("name", ["image.tar", "image.tar.gz"])
def test_a_good_file_passes_all_that_can_be_told_of_it(gate: Gate, tmp_path: Path, name: str) -> None:
    image = stub(tag="good:1")
    found = gate.run(image.archive(tmp_path / name), *FULL, "--report", str(tmp_path / "report.json"))
    assert {id for id, outcome in found.outcomes.items() if outcome != "pass"} == {"claims", "manifest"}
    assert found.code == 3 and found.answer["image"] == image.id
    assert found.checks["lossless"]["figure"]["equal"] >= 60
    kept = json.loads((tmp_path / "report.json").read_bytes())
    assert kept["image"] == image.id and kept["checks"] == found.answer["checks"] and kept["exit"] == 3


def test_an_oci_layout_and_an_image_of_the_engine_are_gated_alike(gate: Gate, engine: Any, tmp_path: Path) -> None:
    image = stub(tag="alike:1", WorkingDir="/srv")
    layout = gate.run(f"oci:{image.layout(tmp_path / 'layout')}", *FULL)
    assert layout.answer["image"] == image.id and layout.failed == []
    with image.archive(tmp_path / "image.tar").open("rb") as stream:
        engine.images.load(stream)
    held = gate.run("docker:alike:1", *FULL)
    assert held.answer["image"] == image.id and held.outcomes == layout.outcomes


def test_an_image_without_a_python_is_asked_from_outside(gate: Gate) -> None:
    answer = (
        "#!/bin/sh\nwhile read -r line && [ ${#line} -gt 1 ]; do :; done\n"
        "printf 'HTTP/1.0 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}'\nsleep 0.1\n"
    )
    start = "#!/bin/sh\nexec nc -ll -p 8080 -e /srv/answer\n"
    more: images.Tree = {"srv/start": (0o755, start.encode()), "srv/answer": (0o755, answer.encode())}
    image = Stub([images.shell_root(), images.pack(more)], {"Entrypoint": ["/srv/start"], "Env": ["PATH=/bin"]})
    found = gate.run(image)
    assert found.outcomes["ping"] == "pass", found.answer
    assert found.failed == ["answers"]


VLLM = "#!/bin/sh\ncd /srv && exec python3 -m vllm.entrypoints.openai.api_server --model /models/t --port 8080"
DRAFTS = ' --speculative-config \'{"method": "ngram", "num_speculative_tokens": 20}\''


@pytest.mark.parametrize("drafts", [True, False])
def test_without_counters_the_bytes_say_whether_another_makers_image_drafts(gate: Gate, drafts: bool) -> None:
    module: images.Tree = {"srv/vllm/entrypoints/openai/api_server.py": (0o644, images.STUB.read_bytes())}
    start = f"{VLLM}{DRAFTS if drafts else ''}\n"
    found = gate.run(stub({"metrics": False}, start=start, more=module))
    assert found.failed == [] and found.code == 3
    if drafts:
        assert found.outcomes["repeats"] == found.outcomes["acceptance"] == found.outcomes["lossless"] == "undecided"
        assert "it is started with a drafter (/srv/start: method ngram" in found.why("acceptance")
    else:
        assert found.outcomes["repeats"] == found.outcomes["lossless"] == "pass" and "acceptance" not in found.checks


# The submissions that never answered


@pytest.mark.parametrize("fault", images.FAULTS)
def test_a_known_fault_is_stopped_for_the_right_reason(gate: Gate, engine: Any, tmp_path: Path, fault: str) -> None:
    make, id, why = images.FAULTS[fault]
    found = gate.run(make(engine, tmp_path), "--start-limit", "20")
    assert found.code == 1 and found.outcomes["answers"] == "not-run"
    assert found.failed[0] == id or {found.failed[0], id} == {"starts", "ping"}, found.answer
    assert why in found.why(found.failed[0]), found.answer
    if id not in ("starts", "ping"):
        assert found.outcomes["engine"] == found.outcomes["starts"] == "not-run", "nothing was started"


def test_a_flattened_image_with_its_entrypoint_put_back_is_stopped(gate: Gate, engine: Any, tmp_path: Path) -> None:
    found = gate.run(images.flattened(engine, tmp_path, ['ENTRYPOINT ["/srv/start"]']))
    assert found.code == 1 and found.failed == ["layers"] and found.outcomes["starts"] == "not-run"


def test_kernels_for_the_card_leave_only_the_card_to_be_found(gate: Gate) -> None:
    found = gate.run(images.for_another_card("two"))
    assert found.code == 3 and found.failed == [] and found.outcomes["device"] == "not-run", found.answer
    assert "the engine offers none" in found.why("device") and found.outcomes["starts"] == "not-run"


IGNORES = {
    "runs it as a program": ('#!/bin/sh\nexec "$@"\n', "starts", "status 127"),
    "waits": ("#!/bin/sh\nsleep 1000\n", "ping", "Ports on which the container listens: none"),
}


@pytest.mark.parametrize("how", IGNORES)
def test_an_ignored_argument_is_stopped(gate: Gate, how: str) -> None:
    start, id, why = IGNORES[how]
    found = gate.run(stub(start=start, Cmd=[]), "--start-limit", "3")
    assert found.code == 1 and len(found.failed) == 1 and found.failed[0] in (id, "ping")
    assert why in found.why(found.failed[0]), found.answer


def test_another_port_is_named(gate: Gate) -> None:
    found = gate.run(stub({"port": 8000}), "--start-limit", "3")
    assert found.failed == ["ping"] and "listens: 8000" in found.why("ping")


# Servers that start and are wrong

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "exits at once": ({"exit": [3, "no weights in /opt/ml/model"]}, "ping", "no weights in /opt/ml/model"),
    "hangs in ping": ({"ping": "hang"}, "ping", "/ping did not answer within"),
    "ping answers 500": ({"ping": 500}, "ping", "/ping answered 500"),
    "answers 500": ({"status": 500}, "answers", "/v1/completions answered 500"),
    "no JSON": ({"garbage": "text"}, "answers", "not JSON"),
    "another shape": ({"garbage": "shape"}, "answers", "has no choices"),
    "no HTTP": ({"garbage": "http"}, "answers", "did not answer"),
    "drips": ({"garbage": "drip"}, "answers", "no whole answer within 2 s"),
    "never ends": ({"garbage": "endless"}, "answers", "did not answer"),
    "crashes in an answer": ({"crash_at": 30}, "acceptance", "illegal memory access"),
    "renders chats differently": ({"thinks_on_invocations": True}, "answers", "render it differently"),
    "decays": ({"decay": 0.9}, "repeats", "acceptance decays from"),
    "never accepts": ({"accepted": 0}, "acceptance", "acceptance length is 1.0"),
    "is under the floor": ({"accepted": 0.5}, "acceptance", "1.500 is under the recipe's floor 2.5"),
    "changes the text": ({"wrong": True}, "lossless", "other text than without speculation"),
    "runs away": ({"runaway": True}, "runaway", "again and again"),
    "is slow with many": ({"slow_s": 0.35}, "concurrency", "answers at once take longer than 2 s"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_server_fails_the_right_check(gate: Gate, what: str) -> None:
    behaviour, id, why = WRONG[what]
    limits = ("--start-limit", "4" if "ping" in behaviour else "20", "--answer-limit", "2", "--floor", "2.5")
    asked = ("--prompts", "12") if "slow_s" in behaviour else FULL
    found = gate.run(stub(behaviour), *asked, *limits)
    assert found.code == 1 and id in found.failed, found.answer
    assert why in found.why(id), found.why(id)
    if what not in ("runs away", "decays"):  # what does not end is not the text without speculation either
        assert found.failed == [id] or id == "ping", found.answer


def test_a_taken_port_is_told_by_the_servers_own_words(gate: Gate) -> None:
    holds = "import socket, time; s = socket.create_server(('127.0.0.1', 8080)); time.sleep(1000)"
    start = f'#!/bin/sh\npython3 -c "{holds}" &\nsleep 1\nexec python3 /srv/engine.py "$@"\n'
    found = gate.run(stub(start=start), "--start-limit", "20")
    assert len(found.failed) == 1 and found.failed[0] in ("starts", "ping")
    assert "Address already in use" in found.why(found.failed[0])


def test_memory_without_head_room_fails(gate: Gate, engine: Any) -> None:
    found = gate.run(stub({"memory_mb": 300}), *FULL)
    figure = found.checks["memory"]["figure"]
    assert found.outcomes["memory"] == "pass" and 0.29 < figure["peak GiB"] < 0.6 and figure["held GiB"] > 0.29


# Files that are no image


def test_files_that_are_no_image_are_refused_before_an_engine_is_asked(gate: Gate, tmp_path: Path) -> None:
    whole = stub().archive(tmp_path / "whole.tar").read_bytes()
    packed = stub().archive(tmp_path / "whole.tar.gz").read_bytes()
    for name, data in {
        "text.tar": b"no image at all",
        "empty.tar": b"",
        "cut.tar": whole[: len(whole) // 2],
        "cut.tar.gz": packed[: len(packed) // 2],
        "flipped.tar": whole[:3_000_000] + bytes([whole[3_000_000] ^ 1]) + whole[3_000_001:],
    }.items():
        (tmp_path / name).write_bytes(data)
        found = gate.run(tmp_path / name)
        assert found.code == 1 and found.failed == ["image"], (name, found.answer)
        assert found.outcomes["loads"] == "not-run"
    missing = gate.run(tmp_path / "none.tar")
    assert missing.code in (2, 4) and "error" in missing.answer


# Ctrl-C

SWEEP = [0.2, 0.5, 0.7, 0.9, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 5.5]


def interrupted(gate: Gate, image: Path, after: float, number: signal.Signals, *options: str) -> tuple[int, str]:
    process = gate.start(image, *options)
    time.sleep(after)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_any_phase_leaves_no_container(
    gate: Gate, engine: Any, tmp_path: Path, number: signal.Signals
) -> None:
    image = stub({"slow_s": 0.03}, tag="slow:1").archive(tmp_path / "slow.tar")
    seen = 0
    for after in SWEEP if number == signal.SIGINT else SWEEP[3::2]:
        code, said = interrupted(gate, image, after, number, *FULL)
        # until the gate listens for it, SIGTERM ends any process, and nothing is started yet
        assert code in (130, -number) and "Traceback" not in said, (after, code, said)
        assert engine.containers.list(all=True) == [], f"left behind after {after} s"
        seen += code == 130
    assert seen >= 2


def test_an_interrupt_while_ping_hangs_leaves_no_container(gate: Gate, engine: Any, tmp_path: Path) -> None:
    image = stub({"ping": "hang"}).archive(tmp_path / "hang.tar")
    process = gate.start(image, *FULL)
    deadline = time.monotonic() + 30
    while len(engine.containers.list()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(engine.containers.list()) == 2, "with and without speculation"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # an impatient user
    process.communicate(timeout=60)
    assert process.returncode == 130 and engine.containers.list(all=True) == []
