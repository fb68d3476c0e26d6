"""A server on this machine, outside any container: for developing the engine's side and for tests of it.

Starts the image's launcher with `--root` on a folder laid out as the image is (opt/models, opt/qdc), on a loopback
port instead of the image's own. Never used to gate an image.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from qdc.gate import client
from qdc.gate.served import Served

LOG_TAIL = 1500


class PipeStream:
    """A process's stdin and stdout as a stream."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, timeout_s: float) -> bytes:
        stdout = self.process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"no answer in {timeout_s:.0f} s")
        return os.read(stdout.fileno(), 1 << 16)


@contextlib.contextmanager
def serve(
    python: str | Path,
    root: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log_file: Path | None = None,
) -> Iterator[Served]:
    """Serve the image laid out under `root` with interpreter `python`; the server ends with the context.

    `arguments`: more for the launcher (`--without-drafter`). `environment`: the launcher's; by default HOME and PATH.
    `log_file`: where its log is kept; by default it goes with the context.
    """
    with tempfile.TemporaryDirectory(prefix="qdc-serve-") as folder, contextlib.ExitStack() as stack:
        port = free_port()
        laid_out = Path(folder, "root")
        _at_port(root, laid_out, port)
        log = stack.enter_context((log_file or Path(folder, "log")).open("w+b"))
        launcher = laid_out / "opt/qdc/serving/launcher.py"
        process = subprocess.Popen(
            [str(python), str(launcher), "serve", "--root", str(laid_out), *arguments],
            env={**{name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        stack.callback(_end, process, signal.SIGTERM)
        asking = subprocess.Popen(
            [str(python), "-u", client.__file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(_end, asking, signal.SIGKILL)
        yield Served(_Watched(asking, process), lambda: _tail(log))


class _Watched(PipeStream):
    """A PipeStream to the client that ends when the server it asks has ended."""

    def __init__(self, asking: subprocess.Popen[bytes], server: subprocess.Popen[bytes]) -> None:
        super().__init__(asking)
        self.server = server

    def write(self, data: bytes) -> None:
        if self.server.poll() is not None:
            raise OSError(f"the launcher ended with status {self.server.returncode}")
        super().write(data)


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _at_port(root: Path, copy: Path, port: int) -> None:
    """`copy` shows the same files as `root`, but its serve.json listens on loopback `port`."""
    (copy / "opt/qdc").mkdir(parents=True)
    (copy / "opt/models").symlink_to((root / "opt/models").resolve())
    for path in (root / "opt/qdc").iterdir():
        if path.name == "patches" or path.name == "serving":
            shutil.copytree(path, copy / "opt/qdc" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name != "serve.json":
            (copy / "opt/qdc" / path.name).symlink_to(path.resolve())
    config = json.loads((root / "opt/qdc/serve.json").read_bytes())
    arguments = config["arguments"]
    arguments[arguments.index("--host") + 1] = "127.0.0.1"
    arguments[arguments.index("--port") + 1] = str(port)
    (copy / "opt/qdc/serve.json").write_text(json.dumps(config))


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: IO[bytes]) -> str:
    log.flush()
    text = Path(log.name).read_bytes()[-LOG_TAIL:].decode(errors="replace")
    return f"The end of its log:\n{text}"
