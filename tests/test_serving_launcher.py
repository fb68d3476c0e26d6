"""The first process of an image: what it starts, what it passes on, and what it refuses with one line."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_fixtures import alive, config, launch, lay_out_image, value_of, wait_for, weights

from qdc.serving import launcher


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return lay_out_image(tmp_path / "image")


def test_the_engine_gets_what_serve_json_says_and_a_short_list(tmp_path: Path) -> None:
    outside = {
        "PATH": "/bin",
        "HOME": str(tmp_path),
        "NVIDIA_VISIBLE_DEVICES": "all",
        "https_proxy": "http://proxy",
        "KUBERNETES_PORT": "tcp://10.0.0.1",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "PYTHONPATH": "/elsewhere",
        "LD_PRELOAD": "x.so",
        "QDC_ANYTHING": "1",
        "QDC_STRICT_ENV": "0",
        "OMP_NUM_THREADS": "64",
    }
    made = {"environment": {"OMP_NUM_THREADS": "1"}, "python_path": ["/a", "/b"]}
    environment, dropped = launcher.engine_environment(made, outside)
    assert environment == {
        "PATH": "/bin",
        "HOME": str(tmp_path),
        "NVIDIA_VISIBLE_DEVICES": "all",
        "https_proxy": "http://proxy",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "/a:/b",
    }
    assert dropped == ["LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONPATH", "QDC_ANYTHING", "VLLM_PORT"]


def test_a_home_that_cannot_be_written_is_replaced() -> None:
    made = {"environment": {}, "python_path": []}
    assert launcher.engine_environment(made, {"HOME": "/nowhere/at/all"})[0]["HOME"] == "/tmp"
    assert launcher.engine_environment(made, {})[0]["HOME"] == "/tmp"


def test_only_the_speculation_goes_without_the_drafter() -> None:
    made = config()
    changed = launcher.without_drafter(made)
    assert "--speculative-config" not in changed
    assert value_of(changed, "--logprobs-mode") == "raw_logits"
    at, logits = made["arguments"].index("--speculative-config"), changed.index("--logprobs-mode") + 1
    assert made["arguments"][:at] + made["arguments"][at + 2 :] == [
        "raw_logprobs" if index == logits else part for index, part in enumerate(changed)
    ]


def test_a_root_moves_the_images_own_paths_only() -> None:
    moved = launcher.under_root(
        {"a": ["/opt/qdc/x", '{"model":"/opt/models/drafter"}', "/opt/other", "/x/opt/qdc"]}, "/r"
    )
    assert moved == {"a": ["/r/opt/qdc/x", '{"model":"/r/opt/models/drafter"}', "/opt/other", "/x/opt/qdc"]}


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_the_launcher_starts_the_engine_and_forwards_a_signal(image: Path, arguments: list[str]) -> None:
    process = launch(image, *arguments, VLLM_PORT="tcp://10.0.0.1:80")
    started = wait_for(image / "home/started")
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 7
    assert wait_for(image / "home/signal") == signal.SIGTERM
    assert not alive(started["orphan"]), "a process of the engine outlived it"
    assert value_of(started["arguments"], "--model") == f"{image}/opt/models/target"
    assert "VLLM_PORT" not in started["environment"]
    state = json.loads(started["environment"]["QDC_STATE"])
    assert (state["altered"], state["dropped"]) == ([], ["VLLM_PORT"])
    assert "qdc: kept from the engine: VLLM_PORT" in log.splitlines()


def test_the_launcher_says_when_it_serves_without_the_drafter(image: Path) -> None:
    process = launch(image, "serve", "--without-drafter")
    started = wait_for(image / "home/started")
    process.terminate()
    process.communicate(timeout=60)
    assert "--speculative-config" not in started["arguments"]
    assert json.loads(started["environment"]["QDC_STATE"])["altered"] == ["without-drafter"]


def test_as_the_first_process_it_hears_signals_and_ends_its_orphans(image: Path) -> None:
    own = () if os.getuid() == 0 else ("--user", "--map-root-user")
    process = launch(image, within=("unshare", *own, "--pid", "--fork", "--kill-child"))
    wait_for(image / "home/started")
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    below = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    (engine,) = below
    orphans = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    assert orphans and "NSpid:" in (status := Path(f"/proc/{first}/status").read_text())
    assert status.split("NSpid:")[1].splitlines()[0].split()[-1] == "1"
    os.kill(int(first), signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 7 and wait_for(image / "home/signal") == signal.SIGTERM, log
    assert not [pid for pid in (engine, *orphans) if alive(int(pid))]


@pytest.mark.parametrize(("mode", "status"), [("fail", 3), ("kill", 137)])
def test_the_launcher_ends_as_the_engine_ended(image: Path, mode: str, status: int) -> None:
    (image / "home/mode").write_text(mode)
    process = launch(image)
    _, log = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"qdc: the engine ended with status {status}" in log


def damage_size(image: Path) -> str:
    path = image / "opt/models/drafter/model.safetensors"
    path.write_bytes(weights(31))
    return "bytes, but"


def damage_header(image: Path) -> str:
    path = image / "opt/models/target/model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"[0, 32]", b"[0, 31]"))
    return "the tensors end at"


def damage_content(image: Path) -> str:
    path = image / "opt/models/target/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    return "SHA-256"


def damage_missing(image: Path) -> str:
    (image / "opt/models/target/model.safetensors").unlink()
    return "No such file"


def damage_patch(image: Path) -> str:
    with (image / "opt/qdc/patches/gdn-short-verify/qdc_patch_gdn_short_verify.py").open("a") as stream:
        stream.write("# other\n")
    return "gdn-short-verify is not the one that was built"


def damage_config(image: Path) -> str:
    (image / "opt/qdc/serve.json").write_text("{")
    return "serve.json"


@pytest.mark.parametrize(
    "damage", [damage_size, damage_header, damage_content, damage_missing, damage_patch, damage_config]
)
def test_a_damaged_image_is_not_served_and_one_line_says_why(image: Path, damage: Any) -> None:
    expected = damage(image)
    process = launch(image, "serve", "--verify")
    _, log = process.communicate(timeout=60)
    assert process.returncode == launcher.CANNOT_SERVE
    assert len(log.splitlines()) == 1 and log.startswith("qdc: cannot serve: ") and expected in log
    assert not (image / "home/started").exists()


def test_a_strict_environment_refuses_what_it_would_drop(image: Path) -> None:
    process = launch(image, QDC_STRICT_ENV="1", VLLM_USE_V2="1")
    _, log = process.communicate(timeout=60)
    assert process.returncode == launcher.CANNOT_SERVE
    assert "VLLM_USE_V2" in log.splitlines()[-1]


# Faults

SERVER = """
import http.server, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"half an answer")
        self.wfile.flush()
        time.sleep(0.2)
        os.kill(os.getpid(), 11)
    def log_message(self, *_): pass
place = sys.argv
server = ThreadingHTTPServer((place[place.index("--host") + 1], int(place[place.index("--port") + 1])), Answers)
open(os.path.join(os.environ["HOME"], "listening"), "w").write("1")
server.serve_forever()
"""


def address(image: Path) -> tuple[str, int]:
    arguments = json.loads((image / "opt/qdc/serve.json").read_bytes())["arguments"]
    return value_of(arguments, "--host"), int(value_of(arguments, "--port"))


def refused(image: Path, *arguments: str) -> str:
    """The one line with which the launcher refuses to serve."""
    process = launch(image, *arguments)
    _, log = process.communicate(timeout=60)
    assert process.returncode == launcher.CANNOT_SERVE
    said = [line for line in log.splitlines() if line != "qdc: starting the engine"]
    assert len(said) == 1 and said[0].startswith("qdc: cannot serve: "), log
    assert not (image / "home/started").exists()
    return log


def test_a_taken_port_is_said_before_anything_starts(image: Path) -> None:
    with socket.create_server(address(image)):
        log = refused(image)
    assert f"cannot listen on 127.0.0.1:{address(image)[1]}: Address already in use" in log


def test_an_engine_that_ends_well_unasked_has_not_served(image: Path) -> None:
    (image / "opt/qdc/serving/fake_engine.py").write_text("")
    process = launch(image)
    _, log = process.communicate(timeout=60)
    assert process.returncode == launcher.CANNOT_SERVE
    assert log.splitlines()[-1] == "qdc: the engine ended with status 0, and nobody had asked it to"


def test_an_engine_that_dies_in_mid_answer_ends_the_container_with_its_status(tmp_path: Path) -> None:
    image = lay_out_image(tmp_path / "image", SERVER)
    process = launch(image)
    wait_for(image / "home/listening")
    client = http.client.HTTPConnection(*address(image), timeout=30)
    client.request("POST", "/v1/completions", b"{}")
    answer = client.getresponse()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    _, log = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGSEGV
    assert f"qdc: the engine ended with status {128 + signal.SIGSEGV}, and nobody" in log


PARTS = ("weights", "patches", "python_path", "environment", "arguments", "engine")


@pytest.mark.parametrize(
    ("field", "by"), [*((part, None) for part in (*PARTS, "contract")), *((p, {"a": 1}) for p in PARTS)]
)
def test_a_serve_json_that_lacks_a_part_is_one_line_and_no_traceback(image: Path, field: str, by: Any) -> None:
    place = image / "opt/qdc/serve.json"
    made = json.loads(place.read_bytes())
    del made[field]
    place.write_text(json.dumps(made if by is None else {**made, field: by}))
    assert refused(image)


def test_a_launcher_that_still_reads_weights_ends_at_once_when_it_is_asked_to(image: Path) -> None:
    place = image / "opt/models/target/model.safetensors"
    size = 1 << 42
    head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with place.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        stream.truncate(8 + len(head) + size)
    made = json.loads((image / "opt/qdc/serve.json").read_bytes())
    made["weights"][0]["size"] = place.stat().st_size
    (image / "opt/qdc/serve.json").write_text(json.dumps(made))
    process = launch(image, "--verify")
    deadline = time.monotonic() + 30
    while not any(os.path.realpath(link) == str(place.resolve()) for link in Path(f"/proc/{process.pid}/fd").iterdir()):
        assert time.monotonic() < deadline and process.poll() is None
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_of_a_weights_file_passes_and_none_but_a_whole_reading_sees_values(
    data: st.DataObject, tmp_path: Path
) -> None:
    place, good = tmp_path / "model.safetensors", weights(64)
    facts = {"path": str(place), "size": len(good), "sha256": launcher._sha256(_written(place, good))}
    launcher.check_weights([facts], whole=True)
    header = len(good) - 64
    kind = data.draw(st.sampled_from(["cut", "grown", "flipped", "noise"]))
    at = data.draw(st.integers(0, len(good) - 1))
    if kind == "cut":
        bad = good[:at]
    elif kind == "grown":
        bad = good + data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "flipped":
        bad = good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
    else:
        bad = data.draw(st.binary(min_size=header, max_size=header)) + good[header:]
    if bad == good:
        return
    _written(place, bad)
    with pytest.raises(launcher.CannotServe, match=r"model\.safetensors: "):
        launcher.check_weights([facts], whole=True)
    if len(bad) != len(good):
        with pytest.raises(launcher.CannotServe, match="bytes, but"):
            launcher.check_weights([facts], whole=False)


def _written(place: Path, data: bytes) -> Path:
    place.write_bytes(data)
    return place
