"""The Docker engine: loads an image, starts it without a network, talks to it through `docker exec`.

Knows the `docker` SDK and nothing of what is asked. Every failure becomes one QdcError `gate.docker.*`.
"""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.gate import client
from qdc.gate.served import Served

PYTHON = "/usr/bin/python3"
PORT = 8080
CHUNK = 1 << 20
LOG_LINES = 15


def engine() -> Any:
    """A docker client (DOCKER_HOST honoured) of an engine that answers. Raises QdcError `gate.docker.unreachable`."""
    import docker
    import docker.errors
    import requests.exceptions

    try:
        found = docker.from_env(timeout=600)
        found.ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise QdcError(
            "gate.docker.unreachable",
            f"no Docker engine answers: {error}",
            hint="start dockerd, or set DOCKER_HOST to its socket",
            exit_code=COULD_NOT,
        ) from error
    return found


@contextlib.contextmanager
def docker_errors(doing: str) -> Iterator[None]:
    """Turns an engine's or a connection's failure into QdcError `gate.docker`."""
    import docker.errors
    import requests.exceptions

    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise QdcError("gate.docker", f"{doing}: {error}", exit_code=COULD_NOT) from error


def has_image(engine: Any, image_id: str) -> bool:
    """Whether the engine holds the image with this ID (and so these very contents)."""
    import docker.errors

    with docker_errors(f"looking for {image_id}"):
        try:
            engine.images.get(image_id)
        except docker.errors.ImageNotFound:
            return False
        return True


def load(engine: Any, archive: Path, report: Callable[[int, int, str], None]) -> None:
    """`docker load` of an archive."""
    total = archive.stat().st_size

    def chunks() -> Iterator[bytes]:
        done = 0
        with archive.open("rb") as stream:
            while data := stream.read(CHUNK):
                done += len(data)
                report(done, total, "loading")
                yield data

    with docker_errors(f"loading {archive}"):
        for answer in engine.api.load_image(chunks(), quiet=True) or ():
            if "error" in answer:
                raise QdcError(
                    "gate.docker.load", f"the engine did not load it: {answer['error']}", exit_code=COULD_NOT
                )


def saved_size(engine: Any, image_id: str, report: Callable[[int, int, str], None]) -> int:
    """The bytes of `docker save`, counted as they stream by."""
    done = 0
    with docker_errors(f"saving {image_id}"):
        for chunk in engine.images.get(image_id).save():
            done += len(chunk)
            report(done, 0, "saving")
    return done


def read_file(engine: Any, image_id: str, path: str) -> bytes:
    """A small file out of an image, without starting it."""
    with docker_errors(f"reading /{path} of {image_id}"):
        made = engine.containers.create(image_id, network_mode="none")
        try:
            packed, _ = made.get_archive(f"/{path}")
            with tarfile.open(fileobj=io.BytesIO(b"".join(packed))) as tar:
                member = tar.extractfile(tar.getmembers()[0])
                if member is None:
                    raise OSError("not a regular file")
                return member.read()
        finally:
            made.remove(v=True)


@contextlib.contextmanager
def serve(engine: Any, image_id: str, command: Sequence[str]) -> Iterator[Served]:
    """A container of the image, without a network, running `command`; removed by its ID at the end."""
    with docker_errors(f"creating a container of {image_id}"):
        container = engine.containers.create(image_id, command=list(command), network_mode="none")
    try:
        with docker_errors("starting the container"):
            container.start()
            source = Path(client.__file__).read_text(encoding="utf-8")
            made = engine.api.exec_create(container.id, [PYTHON, "-u", "-c", source, str(PORT)], stdin=True)
            connection = engine.api.exec_start(made["Id"], socket=True)
        yield Served(ExecStream(connection), lambda: last_words(container))
    finally:
        with contextlib.suppress(Exception):
            container.remove(force=True, v=True)


def last_words(container: Any) -> str:
    """How the container ended, if it did, and the end of its log, on as few lines as it takes."""
    with contextlib.suppress(Exception):
        container.reload()
        log = container.logs(tail=LOG_LINES).decode(errors="replace").strip()
        state = container.attrs["State"]
        ended = f"the container ended with status {state['ExitCode']}. " if not state["Running"] else ""
        return f"{ended}The end of its log:\n{log}"
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
