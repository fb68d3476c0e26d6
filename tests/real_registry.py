"""Debian's docker-registry on this machine for tests: with TLS, and basic or bearer logins.

Started as a process of the test's own on a free port and ended by its id. Tokens are handed out by a small server here,
signed with openssl.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from registry_server import USER, authority, basic

PROGRAM = "docker-registry"
HASHED = "$2b$05$UQIwKAJLoFTeEj.kyIrH5OqutpO91OjTjwAC2gcv7vnETcV2sl6eW"
"""PASSWORD by bcrypt, as htpasswd writes it."""
ISSUER, SERVICE = "tests", "qdc-tests"


@contextmanager
def serving(folder: Path, auth: str = "") -> Iterator[str]:
    """Its `127.0.0.1:PORT` until the block ends; `auth`: "", "basic" or "bearer". `folder/tls/ca.crt` signs it."""
    tls = authority(folder / "tls")
    port = _free_port()
    options = {
        "REGISTRY_LOG_LEVEL": "warn",
        "REGISTRY_HTTP_ADDR": f"127.0.0.1:{port}",
        "REGISTRY_HTTP_TLS_CERTIFICATE": str(tls / "server.crt"),
        "REGISTRY_HTTP_TLS_KEY": str(tls / "server.key"),
        "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": str(folder / "data"),
    }
    with _tokens(tls) as realm:
        options |= _login(folder, tls, auth, realm)
        config = folder / "config.yml"
        config.write_text("version: 0.1\nstorage: {filesystem: {}, delete: {enabled: true}}\nhttp: {secret: tests}\n")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([PROGRAM, "serve", str(config)], env=options, stdout=log, stderr=log)
            try:
                _wait(process, port, folder / "log")
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(20)


def _login(folder: Path, tls: Path, auth: str, realm: str) -> dict[str, str]:
    if auth == "basic":
        (folder / "htpasswd").write_text(f"{USER}:{HASHED}\n")
        return {"REGISTRY_AUTH_HTPASSWD_REALM": "tests", "REGISTRY_AUTH_HTPASSWD_PATH": str(folder / "htpasswd")}
    if auth == "bearer":
        return {
            "REGISTRY_AUTH_TOKEN_REALM": realm,
            "REGISTRY_AUTH_TOKEN_SERVICE": SERVICE,
            "REGISTRY_AUTH_TOKEN_ISSUER": ISSUER,
            "REGISTRY_AUTH_TOKEN_ROOTCERTBUNDLE": str(tls / "server.crt"),
        }
    return {}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(200):
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"docker-registry does not listen: {log.read_text()}")


@contextmanager
def _tokens(tls: Path) -> Iterator[str]:
    """The address of a server that gives who knows the password a token for what was asked."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            good = self.headers.get("Authorization") == basic()
            scopes = parse_qs(urlsplit(self.path).query).get("scope", [])
            body = json.dumps({"token": token(tls, scopes)}).encode() if good else b"{}"
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/token"
    finally:
        server.shutdown()
        server.server_close()


def token(tls: Path, scopes: list[str]) -> str:
    """A JSON Web Token (ES256) that allows `scopes`, as docker-registry reads them."""
    access = []
    for scope in scopes:
        kind, name, actions = scope.split(":")
        access.append({"type": kind, "name": name, "actions": actions.split(",")})
    now = int(time.time())
    claims = {"iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + 300, "nbf": now - 10, "iat": now, "jti": "1",
              "access": access}  # fmt: skip
    certificate = "".join((tls / "server.crt").read_text().split("\n")[1:-2])
    head = {"typ": "JWT", "alg": "ES256", "x5c": [certificate]}
    text = ".".join(_urlsafe(json.dumps(part).encode()) for part in (head, claims))
    words = ["openssl", "dgst", "-sha256", "-sign", str(tls / "server.key")]
    der = subprocess.run(words, input=text.encode(), capture_output=True, check=True).stdout
    return f"{text}.{_urlsafe(_fixed(der))}"


def _fixed(der: bytes) -> bytes:
    """An ECDSA signature as two numbers of 32 bytes, from its DER form."""
    at, numbers = 2, []
    for _ in range(2):
        length = der[at + 1]
        numbers.append(int.from_bytes(der[at + 2 : at + 2 + length], "big"))
        at += 2 + length
    return b"".join(number.to_bytes(32, "big") for number in numbers)


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
