"""A stand-in for a hub, its store of large files, a package index and a web server: on two ports of this machine.

It speaks as much of the hub's HTTP API as `huggingface_hub` and `qdc lock` use, keeps a log of what it was asked,
and can break off, cut short, move and change what it serves.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Request:
    """`server`: "hub" or "large"; `sent`: bytes of the body."""

    server: str
    path: str
    authorization: str | None
    range: str | None
    status: int = 0
    sent: int = 0


@dataclass
class Hub:
    """`repositories`: ("models" | "datasets", name) -> commit -> path -> bytes. `pages`: other paths -> bytes.

    `break_after`: path -> bytes after which its next answer breaks off (once). `short`: path -> bytes that it has
    lost. `refused`: path -> status of every answer after that. `listed`: path -> bytes that the list of files speaks
    of. `sha`: commit that the hub claims to have answered with. `gated`: names that need a token.
    `ranges`: whether a part of a file can be asked for.
    """

    repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]] = field(default_factory=dict)
    pages: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    listed: dict[str, bytes] = field(default_factory=dict)
    sha: str | None = None
    gated: set[str] = field(default_factory=set)
    log: list[Request] = field(default_factory=list)
    url: str = ""
    large_url: str = ""

    def asked(self, part: str = "") -> list[Request]:
        """The requests whose path has `part`."""
        return [request for request in self.log if part in request.path]

    def large(self, path: str) -> bool:
        return path.endswith((".safetensors", ".parquet", "tokenizer.json"))


def blob_id(data: bytes) -> str:
    """Git's name of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on two free ports of this machine, until the block ends."""
    hub = Hub()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, name)) for name in ("hub", "large")]
    hub.url, hub.large_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(hub: Hub, name: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            self.entry = Request(name, path, self.headers.get("Authorization"), self.headers.get("Range"))
            hub.log.append(self.entry)
            if path in hub.redirects:
                self.answer(302, b"", Location=hub.redirects[path])
            elif path in hub.pages:
                self.file(path, hub.pages[path])
            elif name == "large":
                self.file(path, _large(hub, path.removeprefix("/")))
            elif found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/([^/]+)", path):
                self.info(*found.groups())
            elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.resolve("datasets" if found[1] else "models", found[2], found[3], found[4])
            else:
                self.answer(404, b"nothing here")

        def info(self, kind: str, repository: str, revision: str) -> None:
            commits = hub.repositories.get((kind, repository))
            if commits is None:
                self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
            elif repository in hub.gated and self.entry.authorization is None:
                self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
            elif revision not in commits:
                self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
            else:
                value = {"id": repository, "sha": hub.sha or revision, "private": False, "tags": [], "siblings": []}
                for path, data in commits[revision].items():
                    value["siblings"].append(_sibling(hub, path, hub.listed.get(path, data)))
                self.answer(200, json.dumps(value).encode())

        def resolve(self, kind: str, repository: str, revision: str, path: str) -> None:
            data = hub.repositories.get((kind, repository), {}).get(revision, {}).get(path)
            if data is None:
                self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
            elif hub.large(path):
                sha256 = hashlib.sha256(data).hexdigest()
                headers = {"X-Repo-Commit": revision, "X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
                self.answer(302, b"", Location=f"{hub.large_url}/{sha256}/{path}", **headers)
            else:
                self.file(path, data, {"X-Repo-Commit": revision, "ETag": f'"{blob_id(data)}"'})

        def file(self, path: str, data: bytes | None, headers: dict[str, str] | None = None) -> None:
            """The bytes, or the part that was asked for; broken off or cut short where the test says so."""
            if data is None:
                self.answer(404, b"")
                return
            key = path.rpartition("/")[2]
            if key in hub.refused and key not in hub.break_after:
                self.answer(hub.refused[key], b"")
                return
            data = data[: len(data) - hub.short.get(key, 0)]
            start, end = 0, len(data)
            part = self.entry.range if hub.ranges else None
            if part:
                first, _, last = part.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last) + 1 if last else end
                if start >= len(data):
                    self.answer(416, b"", **{"Content-Range": f"bytes */{len(data)}"})
                    return
                headers = {**(headers or {}), "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            cut = hub.break_after.pop(key, None)
            self.answer(206 if part else 200, data[start:end], cut, **(headers or {}))

        def answer(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
            self.entry.status = status
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body if cut is None else body[:cut]
            self.entry.sent = len(body)
            self.wfile.write(body)
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

    return Handler


def _large(hub: Hub, path: str) -> bytes | None:
    sha256 = path.partition("/")[0]
    everything = (
        data for commits in hub.repositories.values() for files in commits.values() for data in files.values()
    )
    return next((data for data in everything if hashlib.sha256(data).hexdigest() == sha256), None)


def _sibling(hub: Hub, path: str, data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
    if hub.large(path):
        value["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return value
