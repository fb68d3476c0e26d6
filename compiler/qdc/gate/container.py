"""The Docker engine: loads an image, starts it as a harness would, talks to it, and leaves no container behind.

Knows the `docker` SDK and nothing of what is asked. Every failure becomes one QdcError `gate.docker.*`. A container
has no network. It is asked through a Python of its own (`docker exec`); an image without one from this machine, inside
the container's network (as root), or else by a port published on loopback.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.gate import client
from qdc.gate.host import PipeStream
from qdc.gate.served import Served, Stream

LABEL = "io.qdc.gate"
LOG_LINES = 15
NO_CARD = ("could not select device driver", "nvidia-container", "unresolvable CDI devices")
NOT_THE_IMAGES = ("no space left on device", "disk quota exceeded", "cannot allocate memory")


class NoEngine(QdcError):
    """Nobody can say anything about the image: the engine is not there, went away, or has no room or device."""


def engine() -> Any:
    """A docker client (DOCKER_HOST honoured) of an engine that answers. Raises NoEngine `gate.docker.unreachable`."""
    import docker
    import docker.errors
    import requests.exceptions

    try:
        found = docker.from_env(timeout=600)
        found.ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise NoEngine(
            "gate.docker.unreachable",
            f"no Docker engine answers: {error}",
            hint="start dockerd, or set DOCKER_HOST to its socket",
            exit_code=COULD_NOT,
        ) from error
    return found


@contextlib.contextmanager
def docker_errors(doing: str) -> Iterator[None]:
    """Turns an engine's refusal into QdcError `gate.docker`, and its absence into NoEngine `gate.docker.gone`."""
    import docker.errors
    import requests.exceptions
    import urllib3.exceptions

    try:
        yield
    except docker.errors.APIError as error:
        text = str(error.explanation or error)
        if any(sign.lower() in text.lower() for sign in (*NO_CARD, *NOT_THE_IMAGES)):
            raise NoEngine("gate.docker.cannot", f"{doing}: {text}", exit_code=COULD_NOT) from error
        raise QdcError("gate.docker", f"{doing}: {text}", exit_code=COULD_NOT) from error
    except (
        docker.errors.DockerException,
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        raise NoEngine("gate.docker.gone", f"{doing}: the engine went away ({error})", exit_code=COULD_NOT) from error


def load(engine: Any, chunks: Iterable[bytes], shown: str) -> list[str]:
    """`docker load` of an archive's bytes; the names and IDs that the engine says it loaded."""
    said: list[str] = []
    with docker_errors(f"loading {shown}"):
        for answer in engine.api.load_image(chunks, quiet=True) or ():
            if "error" in answer:
                text = str(answer["error"])
                kind = NoEngine if any(sign in text.lower() for sign in NOT_THE_IMAGES) else QdcError
                raise kind("gate.docker.load", f"the engine did not load it: {text}", exit_code=COULD_NOT)
            line = str(answer.get("stream", "")).strip()
            if line.startswith("Loaded image"):
                said.append(line.partition(":")[2].strip())
    return said


def knows(engine: Any, name: str) -> bool:
    """Whether the engine holds an image of this name. Raises QdcError `gate.docker.*`."""
    import docker.errors

    with docker_errors(f"looking for {name}"):
        try:
            engine.images.get(name)
        except docker.errors.ImageNotFound:
            return False
    return True


def held(engine: Any, image_id: str, diff_ids: Sequence[str], names: Sequence[str] = ()) -> str | None:
    """How the engine calls the image with this configuration and these layers; None if it holds no such image.

    Most engines call it by the configuration's digest; one that keeps images as a registry does has IDs of its own,
    and is asked for `names`.
    """
    import docker.errors

    for name in (image_id, *names):
        with docker_errors(f"looking for {name}"):
            try:
                found = engine.images.get(name)
            except docker.errors.ImageNotFound:
                continue
            if found.attrs["RootFS"].get("Layers", []) == list(diff_ids):
                return str(found.id)
    return None


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the work inside is done; then KeyboardInterrupt is raised."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise KeyboardInterrupt


@dataclass
class Containers:
    """The containers of one gate; `removed` at its end, however it ends. `python`: of the image, or None."""

    engine: Any
    image: str
    python: str | None
    port: int
    gpus: bool = False
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @contextlib.contextmanager
    def removed(self) -> Iterator[Containers]:
        try:
            yield self
        finally:
            with unbroken():
                self._remove()

    @contextlib.contextmanager
    def serve(self, command: Sequence[str]) -> Iterator[Served]:
        """A container of the image, running `command`, and a client beside its server; removed at the end."""
        container = self._create(command)
        asking: list[subprocess.Popen[bytes]] = []
        try:
            with docker_errors("starting the container"), unbroken():
                container.start()
            with self._ended(container):
                pid = self._pid(container)
                stream = self._stream(container, pid, asking)
            yield Served(stream, lambda: last_words(container), pid=pid)
        finally:
            with unbroken():
                for process in asking:
                    process.kill()
                    process.wait()
                with contextlib.suppress(Exception):
                    container.remove(force=True, v=True)

    def _create(self, command: Sequence[str]) -> Any:
        options: dict[str, Any] = {"labels": {LABEL: self.mark}, "network_mode": "none"}
        if self.publishes:
            del options["network_mode"]
            options["ports"] = {f"{self.port}/tcp": ("127.0.0.1", None)}
        if self.gpus:
            import docker.types

            options["device_requests"] = [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])]
        with docker_errors(f"creating a container of {self.image}"), unbroken():
            return self.engine.containers.create(self.image, command=list(command) or None, **options)

    @property
    def publishes(self) -> bool:
        """Whether the only way to the server is a port on this machine."""
        if self.python is not None:
            return False
        return os.geteuid() != 0 or shutil.which("nsenter") is None or not self._local()

    def _local(self) -> bool:
        return str(getattr(self.engine.api, "base_url", "")).startswith("http+docker://")

    def _pid(self, container: Any) -> int | None:
        """The container's first process, if it is on this machine. Raises QdcError when it has ended already."""
        with docker_errors("looking at the container"):
            container.reload()
        state = container.attrs["State"]
        if not state["Running"]:
            raise QdcError("gate.ended", last_words(container), exit_code=COULD_NOT)
        with contextlib.suppress(OSError):
            if self._local() and container.id in Path(f"/proc/{state['Pid']}/cgroup").read_text():
                return int(state["Pid"])
        return None

    def _stream(self, container: Any, pid: int | None, asking: list[subprocess.Popen[bytes]]) -> Stream:
        if self.python is not None:
            source = Path(client.__file__).read_text(encoding="utf-8")
            command = [self.python, "-u", "-c", source, str(self.port)]
            with docker_errors("asking inside the container"):
                made = self.engine.api.exec_create(container.id, command, stdin=True)
                return ExecStream(self.engine.api.exec_start(made["Id"], socket=True))
        ask = [sys.executable, "-u", client.__file__]
        if self.publishes:
            ports = container.attrs["NetworkSettings"]["Ports"].get(f"{self.port}/tcp")
            if not ports:
                raise NoEngine("gate.docker.port", "the engine publishes no port of the container", exit_code=COULD_NOT)
            ask.append(str(ports[0]["HostPort"]))
        elif pid is not None:
            ask = ["nsenter", f"--net=/proc/{pid}/ns/net", *ask, str(self.port)]
        else:
            why = "the image has no Python to ask through, and the container is not on this machine"
            raise NoEngine("gate.docker.far", why, exit_code=COULD_NOT)
        asking.append(subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True))
        return PipeStream(asking[-1])

    @contextlib.contextmanager
    def _ended(self, container: Any) -> Iterator[None]:
        """A container that ended while it was being reached is told as such."""
        try:
            yield
        except QdcError as error:
            words = last_words(container)
            if error.id != "gate.ended" and words.startswith("the container ended"):
                raise QdcError("gate.ended", words, exit_code=COULD_NOT) from error
            raise

    def _remove(self) -> None:
        with contextlib.suppress(Exception):
            for container in self.engine.containers.list(all=True, filters={"label": f"{LABEL}={self.mark}"}):
                with contextlib.suppress(Exception):
                    container.remove(force=True, v=True)


def last_words(container: Any) -> str:
    """How the container ended, if it did, and the end of its log, on as few lines as it takes."""
    with contextlib.suppress(Exception):
        container.reload()
        log = container.logs(tail=LOG_LINES).decode(errors="replace").strip()
        state = container.attrs["State"]
        killed = ", killed for memory" if state.get("OOMKilled") else ""
        ended = f"the container ended with status {state['ExitCode']}{killed}. " if not state["Running"] else ""
        return f"{ended}The end of its log:\n{log}" if log else f"{ended}Its log is empty"
    return ""


class ExecStream:
    """The connection of a `docker exec`: frames of 8 bytes head (stream, length) and content; only stdout is kept."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.socket: socket.socket = getattr(connection, "_sock", connection)
        self.stderr = b""

    def write(self, data: bytes) -> None:
        self.socket.settimeout(60)
        self.socket.sendall(data)

    def read(self, timeout_s: float) -> bytes:
        self.socket.settimeout(timeout_s)
        while head := self._exactly(8):
            stream, length = struct.unpack(">BxxxI", head)
            content = self._exactly(length)
            if stream == 1:
                return content
            self.stderr = (self.stderr + content)[-1000:]
        return b""

    def _exactly(self, length: int) -> bytes:
        """`length` bytes, or b"" at the end of the stream."""
        data = b""
        while len(data) < length:
            part = self.socket.recv(length - len(data))
            if not part:
                return b""
            data += part
        return data
