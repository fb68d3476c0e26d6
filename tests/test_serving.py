"""What runs inside the image: serve.json, the launcher, the middleware, the engine patches (no engine needed)."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.serving import launcher, middleware, patches, render
from qdc.serving.patches import expand_sampling, gdn_short_verify

ENGINE = {
    "vllm": "0.32.0",
    "platform": "cpu",
    "prefix_caching": False,
    "patches": ["amx-permission", "expand-sampling", "gdn-short-verify", "torchvision-ops"],
}
SERVE = {"engine": ENGINE, "k": 7, "max_model_len": 128, "max_num_seqs": 4, "dtype": "bfloat16"}
PRODUCT: dict[str, Any] = {
    "name": "tiny",
    "serve": SERVE,
    "drafter": {"architecture": {"kind": "dflash"}},
    "deploy": {"contract": "adaptfm"},
}
FILES = {
    "model.safetensors": {"size": 10, "sha256": "a" * 64},
    "config.json": {"size": 2, "sha256": "b" * 64},
}


def digests(engine: dict[str, Any] = ENGINE) -> dict[str, str]:
    return {name: patches.patch_digest(name) for name in render.patches_of(engine)}


def config(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"target_files": FILES, "drafter_files": FILES, "patches": digests(), **changes}
    product = given.pop("product", PRODUCT)
    return render.serve_config(product, **given)


def value_of(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


# serve.json


def test_serve_config_spells_out_what_the_engine_is_to_do() -> None:
    made = config()
    arguments = made["arguments"]
    assert value_of(arguments, "--served-model-name") == "tiny"
    assert value_of(arguments, "--max-model-len") == "128"
    assert value_of(arguments, "--max-num-seqs") == "4"
    assert value_of(arguments, "--dtype") == "bfloat16"
    assert value_of(arguments, "--chat-template") == "/opt/models/target/chat_template.jinja"
    assert value_of(arguments, "--distributed-executor-backend") == "uni"
    assert {"--enforce-eager", "--no-enable-prefix-caching", "--no-trust-remote-code"} <= set(arguments)
    assert json.loads(value_of(arguments, "--speculative-config")) == {
        "method": "dflash",
        "model": "/opt/models/drafter",
        "num_speculative_tokens": 7,
    }
    environment = made["environment"]
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CPU_INT4_W4A8"] == "0"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["TORCH_COMPILE_DISABLE"] == "1", "the image has no C++ compiler"
    assert environment["VLLM_PLUGINS"] == "amx-permission,expand-sampling,gdn-short-verify,torchvision-ops"


def test_serve_config_lists_weights_and_no_other_file() -> None:
    paths = [weight["path"] for weight in config()["weights"]]
    assert paths == ["/opt/models/target/model.safetensors", "/opt/models/drafter/model.safetensors"]


def test_k_changes_the_speculation_and_nothing_else() -> None:
    other = config(product={**PRODUCT, "serve": {**SERVE, "k": 3}})
    first = config()
    at = first["arguments"].index("--speculative-config") + 1
    assert json.loads(other["arguments"][at])["num_speculative_tokens"] == 3
    other["arguments"][at] = first["arguments"][at]
    assert other == first


def test_without_a_drafter_nothing_speculates() -> None:
    made = config(product={**PRODUCT, "drafter": None}, drafter_files=None)
    assert "--speculative-config" not in made["arguments"]


def test_serve_config_refuses_what_does_not_fit() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("serving.drafter", {"drafter_files": None}),
        ("serving.drafter", {"product": {**PRODUCT, "drafter": {"kind": "eagle3"}}}),
        ("serving.drafter", {"product": {**PRODUCT, "drafter": None}}),
        ("serving.patches", {"patches": {"gdn-short-verify": "0" * 64}}),
        ("serving.engine", {"product": {**PRODUCT, "serve": {**SERVE, "engine": {**ENGINE, "vllm": "0.1"}}}}),
        ("serving.manifest-mode", {"manifest_mode": "some"}),
    ]
    for id, change in cases:
        with pytest.raises(QdcError) as caught:
            config(**change)
        assert caught.value.id == id


# Patches


def test_every_patch_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in patches.patch_names():
        lay_out(tmp_path, name)
        monkeypatch.syspath_prepend(str(tmp_path / name))
    importlib.invalidate_caches()
    found = {point.name: point for point in importlib.metadata.entry_points(group=patches.GROUP)}
    for name in patches.patch_names():
        module = importlib.import_module(patches.module_name(name))
        assert name == module.NAME
        assert found[name].load() is module.apply


def test_an_unknown_patch_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(QdcError) as caught:
        patches.patch_files("no-such-patch")
    assert "gdn-short-verify" in str(caught.value)


ENGINE_SOURCE = """
def _spec_forward(B, new_B, offset, width, state_len, q_i, seq_lens=(), native=None):
    if seq_lens and int(seq_lens[0].item()) > 0:
        return native
    keep = B[offset + 1 : offset + 1 + (state_len - q_i)]
    # kept
    B.copy_(new_B)
    return keep
"""


@pytest.fixture
def engine_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function like the engine's, in place of the engine's."""
    (tmp_path / "short_verify_engine.py").write_text(ENGINE_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "short_verify_engine", raising=False)
    monkeypatch.setattr(gdn_short_verify, "MODULE", "short_verify_engine")
    importlib.invalidate_caches()
    return importlib.import_module("short_verify_engine")


class Buffer:
    """Columns of a convolution window; remembers what is written where."""

    def __init__(self, size: int) -> None:
        self.size_, self.written = size, 0

    def __getitem__(self, index: Any) -> Any:
        part = index[1] if isinstance(index, tuple) else index
        return Buffer(len(range(self.size_)[part])) if not isinstance(index, tuple) else Leading(self, part.stop)

    def size(self, _: int) -> int:
        return self.size_


class Leading:
    def __init__(self, whole: Buffer, stop: int) -> None:
        self.whole, self.stop = whole, stop

    def copy_(self, other: Buffer) -> None:
        assert self.stop == other.size_
        self.whole.written = self.stop


@given(st.integers(1, 8), st.integers(1, 8))
def test_the_patched_step_keeps_width_less_two_columns_whatever_its_length(k: int, length: int) -> None:
    length, width = min(length, k + 1), 4
    source = ENGINE_SOURCE.lstrip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gdn_short_verify, "SOURCE_SHA256", hashlib.sha256(source.encode()).hexdigest())
        names: dict[str, Any] = {}
        exec(gdn_short_verify.patched(source), names)
    whole = Buffer(width - 1 + k)
    keep = names["_spec_forward"](whole, Buffer(width - 2 + length), 0, width, width - 1 + k, length)
    assert keep.size_ == width - 2
    assert whole.written == width - 2 + length
    steps = [type("Length", (), {"item": lambda self: length})()]
    native = names["_spec_forward"](whole, Buffer(width - 2 + length), 0, width, width - 1 + k, length, steps, "native")
    assert (native == "native") == (length == k + 1), "the compiled convolution is for whole steps"


def test_the_patch_is_put_in_place_once(engine_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ENGINE_SOURCE.lstrip()
    monkeypatch.setattr(gdn_short_verify, "SOURCE_SHA256", hashlib.sha256(source.encode()).hexdigest())
    assert not gdn_short_verify.is_in_place()
    gdn_short_verify.apply()
    first = engine_module._spec_forward
    gdn_short_verify.apply()
    assert gdn_short_verify.is_in_place() and engine_module._spec_forward is first


def test_the_patch_refuses_a_source_that_was_not_examined(engine_module: Any) -> None:
    before = engine_module._spec_forward
    with pytest.raises(RuntimeError, match="not the examined source"):
        gdn_short_verify.apply()
    assert engine_module._spec_forward is before


@pytest.mark.parametrize(
    ("values", "dtype"), [([20, 0, 7], "int32"), ([0.5, 0.0, 0.75], "float32"), ([20, 0, 7], "int64")]
)
def test_sampling_parameters_are_repeated_for_each_token_of_their_request(values: list[float], dtype: str) -> None:
    import torch

    x = torch.tensor(values, dtype=getattr(torch, dtype))
    found = expand_sampling.expand_batch_to_tokens(x, torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert found.dtype == x.dtype
    assert found.tolist() == [values[0]] * 2 + [values[2]] * 3
    assert expand_sampling.expand_batch_to_tokens(x, torch.tensor([1, 2, 3]), 3, 0, 1).tolist() == [
        values[0],
        1,
        values[2],
    ]


# Launcher: the parts


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


# Launcher: the process


FAKE_ENGINE = """
import json, os, signal, subprocess, sys, time
folder = os.environ["HOME"]
mode = open(os.path.join(folder, "mode")).read()
def say(name, value):
    with open(os.path.join(folder, name + ".part"), "w") as out:
        json.dump(value, out)
    os.replace(os.path.join(folder, name + ".part"), os.path.join(folder, name))
def stop(number, frame):
    say("signal", number)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
say("started", {"arguments": sys.argv[1:], "environment": dict(os.environ), "orphan": orphan.pid})
if mode == "fail":
    sys.exit(3)
if mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def weights(size: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def lay_out(folder: Path, name: str) -> None:
    for path, data in patches.patch_files(name).items():
        place = folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The files of an image whose engine is FAKE_ENGINE; its HOME is the folder `home` in it."""
    root = tmp_path / "image"
    data = weights(32)
    facts = {"model.safetensors": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    made = config(target_files=facts, drafter_files=facts)
    made["engine"]["module"] = "fake_engine"
    with socket.socket() as probe:  # the contract's own port may be taken on this machine
        probe.bind(("127.0.0.1", 0))
        for name, value in (("--host", "127.0.0.1"), ("--port", str(probe.getsockname()[1]))):
            made["arguments"][made["arguments"].index(name) + 1] = value
    for model in ("target", "drafter"):
        (root / "opt/models" / model).mkdir(parents=True)
        (root / "opt/models" / model / "model.safetensors").write_bytes(data)
    (root / "opt/qdc/serving").mkdir(parents=True)
    (root / "opt/qdc/serving/fake_engine.py").write_text(FAKE_ENGINE)
    (root / "opt/qdc/serve.json").write_bytes(canonical.pretty(made))
    for name in digests():
        lay_out(root / "opt/qdc/patches", name)
    (root / "home").mkdir()
    (root / "home/mode").write_text("run")
    return root


def launch(image: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, launcher.__file__, *arguments, "--root", str(image)],
        env={"HOME": str(image / "home"), "PATH": os.environ["PATH"], **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> Any:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return json.loads(path.read_text())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


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


# Middleware


class Backend:
    """An ASGI application in place of the engine's server; `failing` first completions answer 500."""

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.healthy, self.seen = failing, True, []
        self.application = object()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        assert scope["app"] is self.application, "the framework's own entry is missing"
        body = await middleware.read_body(receive)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        assert int(length) == len(body)
        self.seen.append((scope["path"], json.loads(body) if body else None))
        status, answer = 200, {"usage": {"completion_tokens": 3}}
        if scope["path"] == "/health":
            status = 200 if self.healthy else 503
        elif self.failing > 0:
            self.failing -= 1
            status, answer = 500, {"error": "no"}
        await middleware.respond_json(send, status, answer)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "manifest.json").write_bytes(canonical.pretty({"schema": 1, "name": "tiny"}))
    value = {
        "altered": [],
        "dropped": [],
        "manifest_path": str(tmp_path / "manifest.json"),
        "manifest": "full",
        "patches": [],
        "served_model_name": "tiny",
        "contract": {"ping": "/ping", "invocations": "/invocations"},
    }
    monkeypatch.setattr(middleware.asyncio, "sleep", instantly)
    return value


async def instantly(seconds: float, sleep: Any = asyncio.sleep) -> None:
    await sleep(0)


class Client:
    """Sends requests through the middleware as the framework would."""

    def __init__(self, state: dict[str, Any], backend: Backend) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QDC_STATE", json.dumps(state))
            self.middleware = middleware.Middleware(backend)
        self.backend = backend

    async def start(self) -> None:
        async def nothing(message: Any = None) -> Any:
            return None

        await self.middleware({"type": "lifespan", "app": self.backend.application}, nothing, nothing)

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        scope = middleware.internal_scope(method, path, body, own={"app": self.backend.application})
        status, parts = [0], []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            else:
                parts.append(message["body"])

        await self.middleware(scope, middleware.once(body), send)
        return status[0], b"".join(parts)

    async def settle(self) -> None:
        assert self.middleware.warming is not None
        await self.middleware.warming


def test_ping_is_200_only_after_a_completion(state: dict[str, Any]) -> None:
    async def scenario() -> None:
        client = Client(state, Backend(failing=1))
        assert (await client.ask("GET", "/ping"))[0] == 503
        await client.settle()
        assert (await client.ask("GET", "/ping"))[0] == 200
        completions = [body for path, body in client.backend.seen if path == "/v1/completions"]
        assert len(completions) == 2 and completions[0]["model"] == "tiny"

    asyncio.run(scenario())


def test_the_first_completion_needs_no_visitor(state: dict[str, Any]) -> None:
    async def scenario() -> None:
        client = Client(state, Backend())
        await client.start()
        await client.settle()
        assert [path for path, _ in client.backend.seen] == ["/v1/completions"]

    asyncio.run(scenario())


def test_ping_says_why_it_is_not_ready_and_when_the_engine_breaks(state: dict[str, Any]) -> None:
    async def scenario() -> None:
        client = Client(state, Backend(failing=3))
        await client.ask("GET", "/ping")
        await client.settle()
        status, body = await client.ask("GET", "/ping")
        assert status == 503 and "status 500" in json.loads(body)["why"]
        await client.settle()
        assert (await client.ask("GET", "/ping"))[0] == 200
        client.backend.healthy = False
        assert (await client.ask("GET", "/ping"))[0] == 503

    asyncio.run(scenario())


def test_the_manifest_is_shown_byte_for_byte(state: dict[str, Any]) -> None:
    client = Client(state, Backend())
    status, body = asyncio.run(client.ask("GET", "/manifest"))
    assert (status, body) == (200, Path(state["manifest_path"]).read_bytes())


def test_the_manifest_shows_what_was_altered_and_dropped(state: dict[str, Any]) -> None:
    client = Client({**state, "altered": ["without-drafter"], "dropped": ["VLLM_PORT"]}, Backend())
    shown = json.loads(asyncio.run(client.ask("GET", "/manifest"))[1])
    assert shown == {"schema": 1, "name": "tiny", "altered": ["without-drafter"], "dropped": ["VLLM_PORT"]}


def test_a_digest_may_stand_for_the_manifest(state: dict[str, Any]) -> None:
    client = Client({**state, "manifest": "digest"}, Backend())
    digest = hashlib.sha256(Path(state["manifest_path"]).read_bytes()).hexdigest()
    assert json.loads(asyncio.run(client.ask("GET", "/manifest"))[1]) == {"manifest_digest": f"sha256:{digest}"}


@pytest.mark.parametrize(
    ("body", "path", "sent"),
    [
        ({"messages": []}, "/v1/chat/completions", {"messages": [], "model": "tiny"}),
        (
            {"messages": [], "thinking": True, "model": "m"},
            "/v1/chat/completions",
            {"messages": [], "model": "m", "chat_template_kwargs": {"enable_thinking": True}},
        ),
        (
            {"messages": [], "thinking": False, "chat_template_kwargs": {"a": 1}},
            "/v1/chat/completions",
            {"messages": [], "model": "tiny", "chat_template_kwargs": {"a": 1, "enable_thinking": False}},
        ),
        ({"prompt": "x", "thinking": True}, "/v1/completions", {"prompt": "x", "model": "tiny"}),
    ],
)
def test_invocations_go_to_chat_or_completions(
    state: dict[str, Any], body: dict[str, Any], path: str, sent: dict[str, Any]
) -> None:
    client = Client(state, Backend())
    status, _ = asyncio.run(client.ask("POST", "/invocations", json.dumps(body).encode()))
    assert status == 200
    assert client.backend.seen == [(path, sent)]


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"messages": [], "thinking": "yes"}'])
def test_a_wrong_invocation_is_400_and_reaches_nobody(state: dict[str, Any], body: bytes) -> None:
    client = Client(state, Backend())
    assert asyncio.run(client.ask("POST", "/invocations", body))[0] == 400
    assert client.backend.seen == []


def test_everything_else_passes_through(state: dict[str, Any]) -> None:
    client = Client(state, Backend())
    assert asyncio.run(client.ask("POST", "/v1/completions", b'{"a": 1}'))[0] == 200
    assert client.backend.seen == [("/v1/completions", {"a": 1})]


def test_the_server_does_not_start_without_its_patches(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="not found by the engine"):
        Client({**state, "patches": ["test-patch"]}, Backend())
    info = tmp_path / "test_patch-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-patch\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{middleware.GROUP}]\ntest-patch = test_patch_module:apply\n")
    (tmp_path / "test_patch_module.py").write_text(
        "placed = False\ndef apply(): pass\ndef is_in_place(): return placed\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError, match="not in place"):
        Client({**state, "patches": ["test-patch"]}, Backend())
    importlib.import_module("test_patch_module").placed = True
    Client({**state, "patches": ["test-patch"]}, Backend())
