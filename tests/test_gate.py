"""The gate against a stand-in engine: real HTTP servers and the real client behind a docker SDK made of paper."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdc.cli.gate import _conversations as conversations
from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.gate import Options, artifact, checks, client, container, exit_code, gate, memory, texts
from qdc.gate.report import BEFORE_START, IDS
from qdc.gate.served import Answer

K = 3
LIMIT = 128
EOS = 2


def manifest(drafter: bool = True) -> dict[str, Any]:
    arguments = ["--max-model-len", str(LIMIT)] + (["--speculative-config", "{}"] if drafter else [])
    return {
        "recipe": {"serve": {"k": K}, "deploy": {"size_limit": {"bytes": 20e9, "of": "docker-save"}}},
        "serving": {
            "served_model_name": "tiny",
            "arguments": arguments,
            "contract": {"name": "adaptfm", "ping": "/ping", "invocations": "/invocations"},
        },
    }


# A model: tokens are words; an answer follows from the prompt alone


class Model:
    """What a stand-in server answers. Every field may be changed to make it a wrong one."""

    def __init__(self) -> None:
        self.manifest = canonical.pretty(manifest())
        self.speculates = True
        self.accepted_per_draft = 2
        self.pings_before_ready = 2
        self.change: Callable[[list[int], int], list[int]] = lambda ids, prompt: ids
        self.gap = 1.0
        self.completions = 200
        self.drafts = self.accepted = 0
        self.lock = threading.Lock()

    def prompt(self, messages: list[dict[str, str]]) -> int:
        return sum(2 + len(message["content"].split()) for message in messages)

    def completion(self) -> bytes:
        usage = {"prompt_tokens": 4, "completion_tokens": 3}
        return json.dumps({"choices": [{"text": "w1 w2 w3", "finish_reason": "length"}], "usage": usage}).encode()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.prompt(body["messages"])
        seed = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
        natural = [10 + byte for byte in seed[: 16 + seed[0] % 8]] + [EOS]
        room = min(LIMIT - prompt, body.get("max_tokens", LIMIT))
        if body.get("ignore_eos"):
            natural = (natural * 20)[:room]
        ids = self.change(natural[:room], prompt)
        steps = -(-len(ids) // (1 + self.accepted_per_draft))
        with self.lock:
            self.drafts += steps
            self.accepted += steps * self.accepted_per_draft
        choice: dict[str, Any] = {
            "token_ids": ids,
            "message": {"content": " ".join(f"w{id}" for id in ids)},
            "finish_reason": "length" if len(ids) == room else "stop",
        }
        if body.get("logprobs"):
            choice["logprobs"] = {
                "content": [
                    {"top_logprobs": [self.top(id, 16.0), self.top(id + 1, 16.0 - self.gap * 2.0**-3)]} for id in ids
                ]
            }
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}

    @staticmethod
    def top(id: int, logit: float) -> dict[str, Any]:
        return {"token": f"token_id:{id}", "logprob": logit}


class Handler(BaseHTTPRequestHandler):
    model: Model

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/ping":
            self.model.pings_before_ready -= 1
            self.reply(200 if self.model.pings_before_ready < 0 else 503, b'{"why": "starting"}')
        elif self.path == "/manifest":
            self.reply(200, self.model.manifest)
        else:
            name = 'vllm:spec_decode_num_{}_total{{engine="0"}} {}.0\n'
            counters = (("drafts", self.model.drafts), ("accepted_tokens", self.model.accepted))
            lines = "".join(name.format(*counter) for counter in counters) if self.model.speculates else ""
            self.reply(200, lines.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply(200, json.dumps({"count": self.model.prompt(body["messages"])}).encode())
        elif self.path == "/v1/completions":
            self.reply(self.model.completions, self.model.completion())
        elif "messages" not in body:
            self.reply(200, self.model.completion())
        else:
            self.reply(200, json.dumps(self.model.answer(body)).encode())


# A docker engine


class Socket:
    """The connection of an exec: the real client as a process, its output in Docker's frames."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-u", client.__file__, str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.buffer = b""

    def settimeout(self, timeout_s: float) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def recv(self, length: int) -> bytes:
        assert self.process.stdout is not None
        if not self.buffer:
            line = self.process.stdout.readline()
            noise = struct.pack(">BxxxI", 2, 5) + b"noise"
            self.buffer = noise + struct.pack(">BxxxI", 1, len(line)) + line if line else b""
        part, self.buffer = self.buffer[:length], self.buffer[length:]
        return part


class Container:
    def __init__(self, engine: Engine, command: list[str] | None, options: dict[str, Any]) -> None:
        self.engine, self.command, self.options = engine, command, options
        self.id = f"container-{len(engine.made)}"
        self.removed = False
        self.attrs = {"State": {"Running": True, "ExitCode": 0, "Pid": 0}, "NetworkSettings": {"Ports": {}}}

    def start(self) -> None:
        if self.engine.start_error:
            import docker.errors

            raise docker.errors.APIError(self.engine.start_error)
        model = self.engine.plain if "--without-drafter" in (self.command or ()) else self.engine.model
        handler = type("Bound", (Handler,), {"model": model})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reload(self) -> None:
        pass

    def logs(self, tail: int) -> bytes:
        return b"qdc: cannot serve: the weights differ"

    def remove(self, **options: Any) -> None:
        self.removed = True
        if hasattr(self, "server"):
            self.server.shutdown()
            self.server.server_close()


class Engine:
    """As much of the docker SDK as the gate uses. `held`: IDs of the images in it."""

    def __init__(self) -> None:
        self.model, self.plain = Model(), Model()
        self.plain.speculates = False
        self.held: set[str] = set()
        self.made: list[Container] = []
        self.sockets: list[Socket] = []
        self.loaded = b""
        self.start_error = ""
        self.image_id = ""
        self.diff_ids: list[str] = []
        self.saves = b""
        self.containers = self.images = self.api = self

    def ping(self) -> bool:
        return True

    def info(self) -> dict[str, Any]:
        return {"Runtimes": {"runc": {}}, "MemTotal": 8 << 30}

    def list(self, all: bool, filters: dict[str, str]) -> list[Container]:
        assert filters["label"].startswith(f"{container.LABEL}=")
        return [made for made in self.made if not made.removed]

    def version(self) -> dict[str, str]:
        return {"Version": "0"}

    def get(self, name: str) -> Any:
        import docker.errors

        if name not in self.held:
            raise docker.errors.ImageNotFound(name)
        attrs = {"RootFS": {"Layers": self.diff_ids}}
        saves = self.saves
        return type("Image", (), {"id": name, "attrs": attrs, "save": lambda self, named: iter([saves])})()

    def load_image(self, chunks: Iterator[bytes], quiet: bool) -> list[dict[str, str]]:
        self.loaded = b"".join(chunks)
        self.held.add(self.image_id)
        return []

    def create(self, image_id: str, command: list[str] | None = None, **options: Any) -> Container:
        self.made.append(Container(self, command, options))
        return self.made[-1]

    def exec_create(self, id: str, command: list[str], stdin: bool) -> dict[str, str]:
        assert command[0] == "/usr/bin/python3" and "127.0.0.1" in command[3]
        return {"Id": id}

    def exec_start(self, id: str, socket: bool) -> Socket:
        found = next(made for made in self.made if made.id == id)
        self.sockets.append(Socket(found.server.server_address[1]))
        return self.sockets[-1]


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755
    tar.addfile(info, io.BytesIO(data))


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            add(tar, name, data)
    return buffer.getvalue()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine()
    monkeypatch.setattr(container, "engine", lambda: made)
    monkeypatch.setattr(artifact, "audit", lambda image, expect, **_: audited(image.image_id, expect))
    monkeypatch.setattr("qdc.gate.served.time.sleep", lambda seconds: None)
    yield made
    for socket in made.sockets:
        socket.process.kill()
        socket.process.wait()


def audited(image_id: str, expect: str | None) -> dict[str, Any]:
    """An audit's report that proves the image ID and one claim."""
    same = "proved" if expect in (None, image_id) else "refuted"
    texts = [{"text": f"expected {expect}"}]
    rows = [("image.id", same), ("serve.k", "proved")]
    return {"verdicts": [{"claim": claim, "verdict": word, "value": 1, "evidence": texts} for claim, word in rows]}


def archive(folder: Path, engine: Engine, **settings: Any) -> str:
    """An archive that holds the engine's manifest; the engine will hold its image ID after loading it."""
    start = {"usr/bin/python3": b"\x7fELF", "opt/qdc/launcher": b"#!/usr/bin/python3\n"}
    manifest_file = {"opt/qdc/manifest.json": engine.model.manifest} if engine.model.manifest else {}
    layer = packed({**manifest_file, **start})
    engine.diff_ids = ["sha256:" + hashlib.sha256(layer).hexdigest()]
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/opt/qdc/launcher"], **settings},
            "rootfs": {"type": "layers", "diff_ids": engine.diff_ids},
        }
    ).encode()
    engine.image_id = "sha256:" + hashlib.sha256(config).hexdigest()
    listing = [{"Config": "config.json", "RepoTags": ["tiny:1"], "Layers": ["layer.tar"]}]
    files = {"config.json": config, "layer.tar": layer, "manifest.json": json.dumps(listing).encode()}
    engine.saves = packed(files)
    (folder / "image.tar").write_bytes(engine.saves)
    return f"archive:{folder / 'image.tar'}"


def rows(count: int, accepted: int = 2) -> list[dict[str, Any]]:
    return [
        {
            "messages": messages,
            "replay": {
                "gptq": {"accepted": 0, "drafts": 9},
                "gptq, window 64": {"accepted": 6 * accepted, "drafts": 6},
            },
        }
        for messages in texts.built_in(count)
    ]


OPTIONS = Options(start_s=30, max_tokens=32, lossless_prompts=60)


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {check["id"]: check["outcome"] for check in report["checks"]}


def one(report: dict[str, Any], id: str) -> dict[str, Any]:
    return next(check for check in report["checks"] if check["id"] == id)


# The whole gate


def test_a_good_archive_passes_every_check(engine: Engine, tmp_path: Path) -> None:
    name = archive(tmp_path, engine)
    report = gate(name, {"image": {"id": engine.image_id}}, rows(70), OPTIONS)
    seen = outcomes(report)
    assert seen.pop("memory") == "not-run", "there is no cgroup of a container made of paper"
    assert seen == dict.fromkeys(seen, "pass"), report
    assert list(outcomes(report)) == list(IDS)
    assert exit_code(report) == 3 and report["image"] == engine.image_id and report["contract"] == "adaptfm"
    assert engine.loaded == (tmp_path / "image.tar").read_bytes()
    assert [made.command for made in engine.made] == [["serve"], ["serve", "--without-drafter"]]
    assert all(made.options["network_mode"] == "none" and made.removed for made in engine.made)
    lossless = one(report, "lossless")["figure"]
    assert lossless["prompts"] == lossless["equal"] >= 60 and lossless["cut_off"] >= checks.MIN_CUT_OFF
    assert one(report, "acceptance")["figure"]["ratio"] == 1.0
    assert one(report, "size")["figure"] == (tmp_path / "image.tar").stat().st_size


def test_an_image_that_the_engine_holds_is_not_loaded_again(engine: Engine, tmp_path: Path) -> None:
    name = archive(tmp_path, engine)
    engine.held.add(engine.image_id)
    report = gate(name, None, rows(70), OPTIONS)
    assert (
        outcomes(report)["loads"] == outcomes(report)["lossless"] == "pass" and "already" in one(report, "loads")["why"]
    )
    assert engine.loaded == b""


def test_a_named_image_is_gated_without_prompts_and_without_a_replay(engine: Engine, tmp_path: Path) -> None:
    archive(tmp_path, engine)
    engine.held |= {"tiny:1", engine.image_id}
    report = gate("docker:tiny:1", None, None, OPTIONS)
    assert [id for id, outcome in outcomes(report).items() if outcome != "pass"] == ["memory"]
    assert one(report, "size")["figure"] == len(engine.saves)
    assert "replay" not in one(report, "acceptance")["figure"]


def test_given_conversations_are_asked_instead_of_the_built_in_ones(engine: Engine, tmp_path: Path) -> None:
    asked = [{"messages": [{"role": "user", "content": f"Say {number} and no more."}]} for number in range(70)]
    report = gate(archive(tmp_path, engine), None, asked, OPTIONS)
    assert outcomes(report)["lossless"] == "pass" and "replay" not in one(report, "acceptance")["figure"]
    assert one(report, "acceptance")["figure"]["prompts"] == 70


def test_a_file_of_conversations_is_read_or_the_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}], "id": 3}\n\n')
    assert conversations(file) == [{"messages": [{"role": "user", "content": "Hi"}]}]
    for line in (
        "no JSON",
        "[]",
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": "Hi"}',
        "[" * 9999,
    ):
        file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' + line)
        with pytest.raises(QdcError) as error:
            conversations(file)
        assert (error.value.id, error.value.line) == ("gate.ask", 2)
    file.write_bytes(b"\xff")
    for path in (file, tmp_path / "none", tmp_path):
        with pytest.raises(QdcError, match="cannot be read"):
            conversations(path)


def test_other_text_than_without_speculation_fails(engine: Engine, tmp_path: Path) -> None:
    engine.model.change = lambda ids, prompt: [*ids[:3], ids[3] + 2, *ids[4:]] if prompt == 16 else ids
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert outcomes(report)["lossless"] == "fail" and exit_code(report) == 1
    assert "not one of the 2 highest" in one(report, "lossless")["why"]
    assert all(made.removed for made in engine.made)


@pytest.mark.parametrize(("every", "gap", "outcome"), [(0, 1.0, "pass"), (0, 5.0, "fail"), (1, 1.0, "undecided")])
def test_a_difference_passes_only_at_a_tie_and_only_a_few_times(
    engine: Engine, tmp_path: Path, every: int, gap: float, outcome: str
) -> None:
    seen: list[int] = []

    def change(ids: list[int], prompt: int) -> list[int]:
        seen.append(prompt)
        return [*ids[:3], ids[3] + 1, 99] if len(ids) > 4 and (every or len(seen) == 20) else ids

    engine.model.change, engine.plain.gap = change, gap
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert outcomes(report)["lossless"] == outcome, report
    if outcome == "pass":
        assert one(report, "lossless")["figure"]["ties"] == 1


def test_an_answer_that_ends_early_is_no_tie(engine: Engine, tmp_path: Path) -> None:
    engine.model.change = lambda ids, prompt: ids[:-1] if prompt == 16 else ids
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert "the shorter a beginning" in one(report, "lossless")["why"]


@pytest.mark.parametrize(
    ("change", "outcome"), [({"accepted_per_draft": 3}, "fail"), ({"accepted_per_draft": 0}, "fail")]
)
def test_an_acceptance_unlike_the_replays_fails(
    engine: Engine, tmp_path: Path, change: dict[str, Any], outcome: str
) -> None:
    vars(engine.model).update(change)
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert outcomes(report)["acceptance"] == outcome


def test_an_engine_that_does_not_speculate_fails(engine: Engine, tmp_path: Path) -> None:
    engine.model.speculates = False
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert "does not speculate" in one(report, "acceptance")["why"]


def test_too_few_prompts_decide_nothing(engine: Engine, tmp_path: Path) -> None:
    report = gate(archive(tmp_path, engine), None, rows(10), Options(start_s=30, max_tokens=32, lossless_prompts=10))
    assert outcomes(report)["lossless"] == outcomes(report)["acceptance"] == "undecided"
    assert exit_code(report) == 3


def test_an_image_without_a_drafter_has_no_acceptance(engine: Engine, tmp_path: Path) -> None:
    engine.model.manifest = canonical.pretty(manifest(drafter=False))
    report = gate(archive(tmp_path, engine), None, None, OPTIONS)
    assert "acceptance" not in outcomes(report) and outcomes(report)["lossless"] == "pass"
    assert len(engine.made) == 1


def test_another_manifest_than_the_archives_fails(engine: Engine, tmp_path: Path) -> None:
    name = archive(tmp_path, engine)
    engine.model.manifest += b" "
    assert outcomes(gate(name, None, rows(70), OPTIONS))["manifest"] == "fail"


def test_a_server_that_does_not_answer_completions_fails(engine: Engine, tmp_path: Path) -> None:
    engine.model.completions = 500
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert one(report, "answers")["why"].startswith("/v1/completions answered 500")
    assert outcomes(report)["repeats"] == "not-run"


def test_a_server_that_never_gets_ready_fails_and_nothing_more_is_asked(engine: Engine, tmp_path: Path) -> None:
    engine.model.pings_before_ready = 10**9
    report = gate(archive(tmp_path, engine), None, rows(70), Options(start_s=0.001, max_tokens=32, lossless_prompts=60))
    found = outcomes(report)
    assert found["ping"] == "fail" and found["answers"] == found["lossless"] == "not-run"
    assert "qdc: cannot serve: the weights differ" in one(report, "ping")["why"]
    assert all(made.removed for made in engine.made)


def test_a_container_that_does_not_start_fails_and_is_removed(engine: Engine, tmp_path: Path) -> None:
    engine.start_error = "no such runtime"
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert "no such runtime" in one(report, "starts")["why"] and exit_code(report) == 1
    assert engine.made and all(made.removed for made in engine.made)


def test_another_image_than_the_builds_fails(engine: Engine, tmp_path: Path) -> None:
    report = gate(archive(tmp_path, engine), {"image": {"id": "sha256:" + "0" * 64}}, None, OPTIONS)
    assert one(report, "image")["outcome"] == "fail" and "expected sha256:000" in one(report, "image")["why"]
    assert engine.made == [] and engine.loaded == b""


def test_an_archive_over_its_limit_fails(engine: Engine, tmp_path: Path) -> None:
    small = manifest()
    small["recipe"]["deploy"]["size_limit"] = {"bytes": 1000, "of": "docker-save"}
    engine.model.manifest = canonical.pretty(small)
    assert outcomes(gate(archive(tmp_path, engine), None, rows(70), OPTIONS))["size"] == "fail"


def test_a_limit_on_the_compressed_archive_is_measured_compressed(engine: Engine, tmp_path: Path) -> None:
    small = manifest()
    small["recipe"]["deploy"]["size_limit"] = {"bytes": 4000, "of": "docker-save-gzip"}
    engine.model.manifest = canonical.pretty(small)
    archive(tmp_path, engine)
    engine.held |= {"tiny:1", engine.image_id}
    size = one(gate("docker:tiny:1", None, None, OPTIONS), "size")
    assert size["outcome"] == "pass" and 0 < size["figure"] < 4000 < len(engine.saves)


def test_an_image_that_qdc_did_not_build_is_gated_as_far_as_it_can_be(engine: Engine, tmp_path: Path) -> None:
    engine.model.manifest = b""
    found = gate(archive(tmp_path, engine), None, None, OPTIONS)
    seen = outcomes(found)
    assert seen.pop("manifest") == seen.pop("memory") == "not-run" and seen.pop("lossless") == "undecided"
    assert set(seen.values()) == {"pass"} and exit_code(found) == 3
    assert "--without-drafter" in one(found, "lossless")["why"]
    with_plain = replace(OPTIONS, plain=("serve", "--without-drafter"))
    found = gate(archive(tmp_path, engine), None, None, with_plain)
    assert outcomes(found)["runaway"] == "pass"
    assert engine.made[-1].command == ["serve", "--without-drafter"] and all(made.removed for made in engine.made)


def for_card(hardware: str) -> bytes:
    made = manifest()
    made["recipe"]["deploy"]["hardware"] = hardware
    return canonical.pretty(made)


def test_without_a_card_a_gpu_image_is_not_started(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "card_memory", lambda: None)
    engine.model.manifest = for_card("a10g")
    found = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert one(found, "device")["outcome"] == "not-run" and "built for a10g" in one(found, "device")["why"]
    assert exit_code(found) == 3 and engine.made == [] and engine.loaded == b""


@pytest.mark.parametrize(("card", "outcome"), [("NVIDIA A10G", "pass"), ("NVIDIA H200", "undecided")])
def test_on_a_card_one_server_runs_at_a_time(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, outcome: str
) -> None:
    monkeypatch.setattr(memory, "card_memory", lambda: (card, 20000, 24000))
    engine.model.manifest = for_card("a10g")
    at_once: list[int] = []
    start = Container.start

    def counted(made: Container) -> None:
        start(made)
        at_once.append(sum(not other.removed for other in engine.made))

    monkeypatch.setattr(Container, "start", counted)
    found = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    assert outcomes(found)["device"] == outcome and outcomes(found)["lossless"] == "pass"
    assert at_once == [1, 1] and [made.command for made in engine.made][1] == ["serve", "--without-drafter"]
    assert all(made.options["device_requests"] for made in engine.made)


def test_the_recipes_floor_is_held(engine: Engine, tmp_path: Path) -> None:
    def record(floor: float) -> dict[str, Any]:
        recipe = {"evaluate": {"acceptance": {"floor": floor}}}
        return {"image": {"id": engine.image_id}, "recipe": recipe}

    name = archive(tmp_path, engine)
    assert outcomes(gate(name, record(2.5), rows(70), OPTIONS))["acceptance"] == "pass"
    below = one(gate(name, record(3.5), rows(70), OPTIONS), "acceptance")
    assert below["outcome"] == "fail" and "under the recipe's floor 3.5" in below["why"]


def test_without_an_engine_only_what_the_bytes_show_is_said(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Any:
        raise container.NoEngine("gate.docker.unreachable", "no Docker engine answers", exit_code=4)

    monkeypatch.setattr(container, "engine", nobody)
    report = gate(archive(tmp_path, engine), None, rows(70), OPTIONS)
    seen = outcomes(report)
    assert {seen.pop(id) for id in BEFORE_START} == {"pass"}
    assert set(seen.values()) == {"not-run"} and exit_code(report) == 3
    assert "no Docker engine answers" in one(report, "lossless")["why"]
    named = gate("docker:tiny:1")
    assert set(outcomes(named).values()) == {"not-run"} and exit_code(named) == 3


def test_a_missing_file_and_a_wrong_name(engine: Engine) -> None:
    wrong = {"archive:/none.tar": 4, "oci:/none": 4, "docker:none": 4, "registry:x": 2, "archive:": 2}
    for image, code in wrong.items():
        with pytest.raises(QdcError) as caught:
            gate(image)
        assert caught.value.exit_code == code


# The parts


def test_a_wrong_answer_is_compared_as_such() -> None:
    good = Answer(200, json.dumps({"choices": [{"token_ids": [1]}]}).encode(), 0.0)
    assert checks.difference(good, good) is None
    assert (checks.difference(good, Answer(500, b"dead", 0.0)) or "").startswith("status 500")


@given(st.floats(1.0, 1.99), st.integers(-10, 10), st.integers(0, 4))
def test_steps_are_units_of_the_last_of_eight_bits(mantissa: float, exponent: int, steps: int) -> None:
    a = mantissa * 2.0**exponent
    step = 2.0 ** (exponent - 7)
    assert checks.bf16_steps(a, a - steps * step) == pytest.approx(steps, abs=1e-6)
    assert checks.bf16_steps(0.0, 0.0) == 0.0


def test_built_in_prompts_are_different_and_always_the_same() -> None:
    found = texts.built_in(300)
    assert found == texts.built_in(300)
    assert len({canonical.dumps(messages) for messages in found[:120]}) == 120


@given(st.integers(40, 400), st.integers(8, 60))
def test_long_conversations_grow_by_a_word_and_fit(limit: int, tokens: int) -> None:
    words = " ".join(["word"] * (tokens // 2))
    turns = [([{"role": "user", "content": words}], words, tokens) for _ in range(9)]
    found = texts.long_conversations(turns, limit, 10)
    assert found
    for messages in found:
        assert messages[-1]["role"] == "user"
        assert (len(messages) - 1) // 2 * tokens < limit
        assert [message["role"] for message in messages[:-1]] == ["user", "assistant"] * ((len(messages) - 1) // 2)
