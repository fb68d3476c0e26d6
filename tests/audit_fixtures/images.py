"""Images whose engine is started by a command line or script, each with one fault; flattened and committed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audit_fixtures import models
from audit_fixtures.kernels import fatbin, library
from audit_fixtures.pieces import DATE, Files, Fixture, under
from audit_fixtures.submissions import SITE, compact, engine, ngram

TARGET, DRAFTER = "models/target", "models/drafter"
SERVER = ["python3", "-m", "vllm.entrypoints.openai.api_server"]


def speculation(k: int = 15, **more: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": f"/{DRAFTER}", "num_speculative_tokens": k, **more}


def served(
    spec: dict[str, Any] | None, *words: str, target: dict[str, bytes] | None = None,
    drafter: dict[str, bytes] | None = None, version: str = "0.32.0", model: str = f"/{TARGET}",
    tag: str | None = None, files: Files | None = None, env: tuple[str, ...] = (),
) -> Fixture:  # fmt: skip
    """Two models, and vLLM started by Entrypoint with exactly these words."""
    command = [*SERVER, "--model", model, "--max-model-len", "4096", *words]
    if spec is not None:
        command += ["--speculative-config", compact(spec)]
    layers = [
        engine(version, files),
        under(TARGET, target or models.target("ct", group=32)),
        under(DRAFTER, drafter or models.drafter()),
    ]
    return Fixture(layers, {"Entrypoint": command, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", *env]}, tag)


def scripted(script: str, *, env: tuple[str, ...] = (), cmd: tuple[str, ...] = (), tag: str | None = None) -> Fixture:
    """The same models behind /start.sh."""
    made = served(speculation(), env=env, tag=tag)
    made.layers.append({"start.sh": script.encode()})
    made.settings |= {"Entrypoint": ["/start.sh"], "Cmd": list(cmd)}
    return made


def labelled(made: Fixture, **labels: str) -> Fixture:
    made.settings["Labels"] = {f"io.qdc.{name.replace('__', '.')}": value for name, value in labels.items()}
    return made


COMPUTED = """\
#!/bin/sh
K=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader | awk '{print int($1/1600)}')
exec python3 -m vllm.entrypoints.openai.api_server --model /models/target --max-model-len 4096 \\
  --speculative-config "{\\"method\\":\\"dflash\\",\\"model\\":\\"/models/drafter\\",\\"num_speculative_tokens\\":$K}"
"""
DEFAULTED = """\
#!/bin/sh
: "${K:=15}"
MODEL=${MODEL:-/models/target}
exec python3 -m vllm.entrypoints.openai.api_server --model "$MODEL" --max-model-len "${LENGTH:-4096}" \\
  --speculative-config "{\\"method\\":\\"dflash\\",\\"model\\":\\"/models/drafter\\",\\"num_speculative_tokens\\":$K}"
"""
BEATEN = """\
#!/bin/bash
export MAX_MODEL_LEN=4096
if [ -f /models/drafter/config.json ]; then
  SPEC='{"method":"dflash","model":"/models/drafter","num_speculative_tokens":15}'
else
  SPEC='{"method":"ngram","num_speculative_tokens":20}'
fi
exec python3 -m vllm.entrypoints.openai.api_server --model /models/target --max-model-len 2048 \\
  --max-model-len "$MAX_MODEL_LEN" --speculative-config "$SPEC"
"""
CONFIGURED = b"""\
model: /models/target
max-model-len: 2048
max-num-seqs: 8
speculative-config:
  method: dflash
  model: /models/drafter
  num_speculative_tokens: 15
"""
TWO_ENGINES = """\
#!/bin/bash
if [ "$MODE" = latency ]; then
  exec python3 -m vllm.entrypoints.openai.api_server --model /models/fast
fi
exec python3 -m vllm.entrypoints.openai.api_server --model /models/target
"""
BY_ENDPOINT = b"""\
import json
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAST, GOOD = "http://127.0.0.1:8081", "http://127.0.0.1:8082"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/invocations":
            engine = FAST
            data["max_tokens"] = min(data.get("max_tokens", 64), 64)
        else:
            engine = GOOD
        if "lorem ipsum" in str(data.get("prompt", "")):
            self.wfile.write(b'{"choices": [{"text": "lorem ipsum dolor"}]}')
            return
        request = urllib.request.Request(engine + self.path, json.dumps(data).encode())
        self.wfile.write(urllib.request.urlopen(request).read())


ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""


def configured() -> Fixture:
    """vLLM with `--config`, whose values the command line beats."""
    made = served(None)
    made.layers.append({"etc/vllm.yaml": CONFIGURED})
    made.settings["Entrypoint"] = ["vllm", "serve", "--config", "/etc/vllm.yaml", "--max-model-len", "4096"]
    return made


def two_engines() -> Fixture:
    made = scripted(TWO_ENGINES, env=("MODE=latency",))
    made.layers.insert(1, under("models/fast", models.target("gptq", group=32)))
    made.layers[0] |= {f"{SITE}/sglang-0.5.6.dist-info/METADATA": b"Name: sglang\nVersion: 0.5.6\n"}
    return made


def by_endpoint() -> Fixture:
    made = served(speculation())
    made.layers.append({"opt/program/proxy.py": BY_ENDPOINT})
    made.settings |= {"Entrypoint": ["python3", "/opt/program/proxy.py"]}
    return made


def flattened(kind: str, change: bool) -> Fixture:
    """What `docker export | docker import` (or podman's) leaves of an image; `change`: with --change ENTRYPOINT."""
    whole = served(speculation(), tag="team:flat")
    files: Files = {}
    for layer in whole.layers:
        files |= layer
    entrypoint = whole.settings["Entrypoint"]
    if kind == "docker":
        history = [{"created": DATE, "comment": "Imported from -"}]
        top: dict[str, Any] = {"comment": "Imported from -", "docker_version": "20.10.24"}
    else:
        history = [
            {"created": DATE, "created_by": "/bin/sh -c #(nop) ADD file:0f1e in /", "comment": "imported from tarball"}
        ]
        top = {}
    settings = {"Entrypoint": entrypoint} if change else {}
    return Fixture([files], settings, "team:flat", history, top)


def committed(*, drafter: bool) -> Fixture:
    """`docker commit` after files were changed in a running container: one more layer, no word of what was done."""
    made = served(speculation())
    if drafter:
        made.layers.append(under(DRAFTER, models.drafter(block=8)))
    else:
        made.layers.append({"root/.bash_history": b"vim config.json\n"})
    made.history = [{"created": DATE, "created_by": f"COPY layer{n} /"} for n in range(3)]
    made.history.append({"created": DATE, "created_by": "/bin/bash"})
    return made


def retagged() -> Fixture:
    """A release tag that names one image ID, on another image."""
    return served(speculation(12), tag="team:dflash16k15-3f9c0a1b2c4d")


def kernels(
    *, fa2: tuple[str, ...], core: tuple[str, ...] = ("sm_80", "sm_86", "sm_89"), extra: Files | None = None
) -> Fixture:
    """A serving image with compiled kernels: the engine's own library and its FlashAttention 2."""
    files: Files = {
        f"{SITE}/vllm/_C.abi3.so": library(fatbin(*core)),
        f"{SITE}/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": library(fatbin(*fa2)),
        **(extra or {}),
    }
    return served(speculation(), files=files)


def compiled(name: str) -> Fixture:
    """The engine's own library is one that NVIDIA's compiler made (tests/cuda/make.sh)."""
    path = Path(__file__).parents[1] / "cuda" / name
    return served(speculation(), files={f"{SITE}/vllm/_C.abi3.so": path.read_bytes()})


def shadowed() -> Fixture:
    """Honest weights of groups of 32, hidden by a later layer with groups of 64."""
    made = served(speculation())
    made.layers.append(under(TARGET, models.target("ct", group=64)))
    return made


def wrong_target() -> Fixture:
    """A drafter that was trained for a target twice as wide, with another vocabulary."""
    return served(speculation(), drafter=models.drafter(inputs=256, vocabulary=128))


def window_in_arguments() -> Fixture:
    return served(speculation(sliding_window=1024), drafter=models.drafter(window=None))


def half_window() -> Fixture:
    """Two drafter layers of which one slides."""
    files = models.drafter(layers=2)
    config = json.loads(files["config.json"])
    config["layer_types"] = ["sliding_attention", "full_attention"]
    return served(speculation(), drafter=files | {"config.json": json.dumps(config, indent=1).encode()})


def causal_window() -> Fixture:
    return served(speculation(), drafter=models.drafter(causal=True))


def no_start() -> Fixture:
    made = served(speculation())
    made.settings = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}
    return made


def ngram_with_weights(k: int, tag: str) -> Fixture:
    return served(ngram(k), tag=tag)
