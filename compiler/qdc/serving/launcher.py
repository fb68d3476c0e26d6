"""The first process of an image: checks what it is to serve, starts the engine, stays its parent.

    launcher.py [serve] [--without-drafter] [--verify] [--root DIR]

Reads /opt/qdc/serve.json and nothing else that decides what is served. `serve` and no argument are the same.
  --without-drafter  serve the same target without speculation and with raw logits as log-probabilities (so that a
                     gate can compare texts); GET /manifest then says {"altered": ["without-drafter"]}
  --verify           read the weights whole and compare their SHA-256; without it, sizes and headers are checked
  --root DIR         read /opt/... under DIR instead (tests outside a container)
The engine's environment holds serve.json's variables and a short list of the machine's own (paths, proxies, NVIDIA
and CUDA). A variable that would reach the engine or qdc otherwise (VLLM_PORT as Kubernetes injects it) is dropped,
logged and shown by GET /manifest; QDC_STRICT_ENV=1 refuses to start instead.
Exit: the engine's own status (128 + N when signal N ended it); 78 when it cannot serve, or when the engine ends well
without having been asked to, with one line that says why.
Standard library only, from Python 3.10 on: it runs in the image without qdc.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

CANNOT_SERVE = 78
GRACE_S = 8.0
CHUNK = 1 << 20
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file raises that is not what was built."""
ALLOWED = re.compile(
    r"NVIDIA_\w+|CUDA_\w+|HOME|TMPDIR|PATH|LANG|LC_\w+|TZ|HOSTNAME|(?i:https?_proxy|no_proxy|all_proxy)"
)
REACHES_ENGINE = re.compile(
    r"(VLLM|QDC|PYTHON|HUGGINGFACE|TRANSFORMERS|TORCH|PYTORCH|TRITON|TOKENIZERS|SAGEMAKER|FLASHINFER|NUMBA)\w*|"
    r"(LD|HF|OMP|KMP|MKL|DNNL|ONEDNN|ATEN|NCCL|GLOO|GOMP|SM|RAY|OTEL)_\w+|MAX_JOBS"
)
OWN = ("QDC_STRICT_ENV",)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class CannotServe(Exception):
    """Why nothing can be served, in one line."""


def log(text: str) -> None:
    print(f"qdc: {text}", file=sys.stderr, flush=True)


def read_config(path: Path) -> dict[str, Any]:
    """serve.json. Raises CannotServe if it is missing or not of schema 1."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CannotServe(f"{path}: {_in_one_line(error)}") from error
    if not isinstance(config, dict) or config.get("schema") != 1:
        raise CannotServe(f"{path}: not a serve.json of schema 1")
    return config


def under_root(value: Any, root: str) -> Any:
    """The same JSON value with each /opt/models and /opt/qdc path in its texts moved under folder `root`."""
    if isinstance(value, str):
        return re.sub(r"(?<![\w./-])(?=/opt/(?:models|qdc)\b)", lambda _: root, value) if root else value
    if isinstance(value, list):
        return [under_root(inner, root) for inner in value]
    if isinstance(value, dict):
        return {key: under_root(inner, root) for key, inner in value.items()}
    return value


def check_weights(weights: list[dict[str, Any]], *, whole: bool) -> None:
    """Each weight file has its size and a header that fills it exactly; with `whole`, its SHA-256.

    Raises CannotServe naming the first file that differs from what was built.
    """
    for weight in weights:
        path = Path(weight["path"])
        try:
            size = path.stat().st_size
            if size != weight["size"]:
                raise CannotServe(f"{path}: {size} bytes, but {weight['size']} were built")
            _check_header(path, size)
            if whole:
                digest = _sha256(path)
                if digest != weight["sha256"]:
                    raise CannotServe(f"{path}: SHA-256 {digest}, but {weight['sha256']} was built")
        except DAMAGED as error:
            raise CannotServe(f"{path}: {_in_one_line(error)}") from error


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_header(path: Path, size: int) -> None:
    """Raises ValueError unless the safetensors header at `path` describes exactly `size` bytes."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise ValueError("the safetensors header is longer than the file")
        header = json.loads(stream.read(length))
    spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    end = 0
    for first, last in spans:
        if first != end or last < first:
            raise ValueError("the tensors overlap or leave a gap")
        end = last
    if 8 + length + end != size:
        raise ValueError(f"the tensors end at {8 + length + end}, the file at {size} bytes")


def check_patches(patches: list[dict[str, str]], folders: list[str]) -> None:
    """Each patch folder holds what was built. Raises CannotServe naming the first that does not."""
    for patch in patches:
        found = [Path(folder) for folder in folders if Path(folder).name == patch["name"]]
        if len(found) != 1 or not found[0].is_dir():
            raise CannotServe(f"the engine patch {patch['name']} is not in the image")
        files = {
            str(path.relative_to(found[0])): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in found[0].rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        text = json.dumps(files, sort_keys=True, separators=(",", ":"))
        if hashlib.sha256(text.encode()).hexdigest() != patch["digest"].removeprefix("sha256:"):
            raise CannotServe(f"the engine patch {patch['name']} is not the one that was built")


def engine_environment(config: Mapping[str, Any], outside: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The engine's environment, and the sorted names of the outside variables that were kept from it."""
    kept = {name: value for name, value in outside.items() if ALLOWED.fullmatch(name)}
    dropped = sorted(
        name for name in outside if name not in kept and name not in OWN and REACHES_ENGINE.fullmatch(name) is not None
    )
    home = kept.get("HOME")
    if not home or not os.access(home, os.W_OK):
        kept["HOME"] = "/tmp"
    return {
        **kept,
        **config["environment"],
        "PYTHONPATH": os.pathsep.join(config["python_path"]),
    }, dropped


def check_port(arguments: list[str]) -> None:
    """Raises CannotServe unless the engine can listen where its arguments say."""
    host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
            probe.listen(1)
        except OSError as error:
            raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror}") from error


def without_drafter(config: Mapping[str, Any]) -> list[str]:
    """The engine arguments of the same target without speculation, as serve.json's `without_drafter` says."""
    change = config["without_drafter"]
    parts, result = list(config["arguments"]), []
    while parts:
        part = parts.pop(0)
        if part in change["remove"]:
            parts.pop(0)
        elif part in change["set"]:
            parts.pop(0)
            result += [part, change["set"][part]]
        else:
            result.append(part)
    return result


def run(command: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Run the engine as the leader of its own process group until it ends; forward signals; leave nothing behind.

    Its status, and whether a signal had been passed on to it. Raises CannotServe if it cannot be started.
    """
    asked: list[int] = []
    previous = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in FORWARDED}
    try:
        child = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise CannotServe(f"the engine does not start: {_in_one_line(error)}") from error

    def forward(number: int, _frame: object = None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    for early in list(asked):  # what came while the child was being started
        forward(early)
    try:
        while True:
            pid, status = os.waitpid(-1, 0)  # as PID 1 also the orphans of the engine
            if pid == child.pid:
                break
    finally:
        child.returncode = 0  # reaped here, not by subprocess
        _end_group(child.pid)
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    return (code if code >= 0 else 128 - code), bool(asked)


def _end_group(group: int) -> None:
    """Ask what is left of the engine's process group to end; after a grace time, end it."""
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            os.killpg(group, 0 if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.05)


def prepare(options: argparse.Namespace, outside: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The engine's command line and environment. Raises CannotServe."""
    root = options.root.rstrip("/")
    place = Path(f"{root}/opt/qdc/serve.json")
    config = under_root(read_config(place), root)
    try:
        return _prepared(options, root, config, outside)
    except DAMAGED as error:
        raise CannotServe(f"{place}: {type(error).__name__}: {_in_one_line(error)}") from error


def _prepared(
    options: argparse.Namespace, root: str, config: dict[str, Any], outside: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    check_weights(config["weights"], whole=options.verify)
    check_patches(config["patches"], config["python_path"])
    environment, dropped = engine_environment(config, outside)
    if dropped:
        log("kept from the engine: " + " ".join(dropped))
        if outside.get("QDC_STRICT_ENV") == "1":
            raise CannotServe(f"QDC_STRICT_ENV=1 and the environment names the engine: {' '.join(dropped)}")
    altered = ["without-drafter"] if options.without_drafter else []
    environment["QDC_STATE"] = json.dumps(
        {
            "altered": altered,
            "dropped": dropped,
            "manifest_path": f"{root}/opt/qdc/manifest.json",
            "manifest": config["manifest"],
            "manifest_digest": config.get("manifest_digest"),
            "patches": [patch["name"] for patch in config["patches"]],
            "served_model_name": config["served_model_name"],
            "contract": config["contract"],
        }
    )
    arguments = without_drafter(config) if options.without_drafter else config["arguments"]
    check_port(arguments)
    isolated = ["-s", "-P"] if sys.version_info >= (3, 11) else ["-s"]
    return [sys.executable, *isolated, "-m", config["engine"]["module"], *arguments], environment


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="launcher.py", description="Serve the model of this image.")
    parser.add_argument("command", nargs="?", default="serve", choices=["serve"])
    parser.add_argument("--without-drafter", action="store_true", help="no speculation, raw logits")
    parser.add_argument("--verify", action="store_true", help="compare the SHA-256 of the weights")
    parser.add_argument("--root", default="", metavar="DIR", help="read /opt/... under DIR")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # the kernel spares PID 1 what it has not asked for
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        command, environment = prepare(options, os.environ)
        log("starting the engine" + (" without the drafter" if options.without_drafter else ""))
        code, asked = run(command, environment)
    except CannotServe as reason:
        log(f"cannot serve: {reason}")
        sys.exit(CANNOT_SERVE)
    log(f"the engine ended with status {code}" + ("" if asked else ", and nobody had asked it to"))
    sys.exit(code if code or asked else CANNOT_SERVE)


if __name__ == "__main__":
    main()
