"""An image's files with an engine that is a small script, and the launcher as a process over them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qdc.core import canonical
from qdc.serving import launcher, patches, render

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


def lay_out_image(root: Path, engine: str = FAKE_ENGINE) -> Path:
    """The files of an image whose engine is the script `engine`; its HOME is the folder `home` in it."""
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
    (root / "opt/qdc/serving/fake_engine.py").write_text(engine)
    (root / "opt/qdc/serve.json").write_bytes(canonical.pretty(made))
    for name in digests():
        lay_out(root / "opt/qdc/patches", name)
    (root / "home").mkdir()
    (root / "home/mode").write_text("run")
    return root


def launch(image: Path, *arguments: str, within: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    """The launcher as a process; `within`: a command that starts it."""
    return subprocess.Popen(
        [*within, sys.executable, launcher.__file__, *arguments, "--root", str(image)],
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
