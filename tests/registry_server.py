"""A registry on this machine for tests: speaks the distribution API in memory, and lies and breaks when it is told to.

Keeps a log of what it was asked, with the Authorization header that came along. With `elsewhere`, blobs are kept by a
second server, to which the registry redirects; a third hands out tokens.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

USER, PASSWORD = "ann", "open sesame"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Request:
    """`server`: "registry", "store" or "tokens"; `sent` and `received`: bytes of the bodies."""

    server: str
    method: str
    path: str
    authorization: str | None
    range: str | None
    status: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class Fake:
    """`manifests`: (repository, tag or digest) -> (type, bytes).

    `auth`: "", "basic" or "bearer"; `realm`: who hands out tokens, if not the third server.
    `breaks`: digest -> bytes after which each next answer (or upload) breaks off, first to last.
    `whole`: answers with the whole blob where a part was asked for. `serves`: digest -> other bytes that are sent.
    `redirects`: digest -> URL; `padding`: bytes of
    their bodies. `elsewhere`: redirects every blob to the second server.
    `answers`: (method, part of the path) -> statuses of the next answers. `says`: digest that it claims of a manifest.
    `room`: bytes that uploads may take, or None. `forgets`: says 201 to an upload that it does not keep.
    `resumes`: whether a broken upload can go on. `uploads_at`: where it sends uploads, if not to itself.
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    auth: str = ""
    realm: str = ""
    breaks: dict[str, list[int]] = field(default_factory=dict)
    whole: bool = False
    serves: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    padding: int = 0
    elsewhere: bool = False
    answers: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    says: str = ""
    room: int | None = None
    forgets: bool = False
    resumes: bool = True
    uploads_at: str = ""
    uploads: dict[str, bytearray] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    log: list[Request] = field(default_factory=list)
    host: str = ""
    store_url: str = ""
    tokens_url: str = ""

    def asked(self, method: str = "", part: str = "", server: str = "registry") -> list[Request]:
        return [r for r in self.log if method in ("", r.method) and part in r.path and r.server == server]

    def add(self, data: bytes) -> str:
        self.blobs[digest_of(data)] = data
        return digest_of(data)

    def put(self, repository: str, tag: str, value: Any, media_type: str = OCI_MANIFEST) -> str:
        """Keep a manifest under its tag and its digest, which is returned."""
        data = json.dumps(value).encode()
        for name in (tag, digest_of(data)):
            self.manifests[repository, name] = (media_type, data)
        return digest_of(data)


@contextmanager
def serving(tls: Path | None = None) -> Iterator[Fake]:
    """A registry on free ports of this machine until the block ends; with `tls`, a folder of `authority`, over TLS."""
    fake = Fake()
    servers = [_Server(("127.0.0.1", 0), _handler(fake, name)) for name in ("registry", "store", "tokens")]
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.crt", tls / "server.key")
        for server in servers:
            server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https" if tls is not None else "http"
    ports = [server.server_address[1] for server in servers]
    fake.host = f"127.0.0.1:{ports[0]}"
    fake.store_url, fake.tokens_url = (f"{scheme}://localhost:{port}" for port in ports[1:])
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield fake
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or speaks no TLS, is none of the tests' concern."""


def authority(folder: Path) -> Path:
    """Make a CA and a certificate for this machine: `ca.crt`, `server.crt`, `server.key` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("test CA", "localhost"))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    ca = _certificate(ca_name, ca_key.public_key(), ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=None))
    server = _certificate(name, key.public_key(), ca_name, ca_key, names)
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "server.key").write_bytes(key.private_bytes(*form))
    return folder


def _certificate(
    name: x509.Name, key: Any, issuer: x509.Name, issuer_key: Any, extension: x509.ExtensionType
) -> x509.Certificate:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number()).add_extension(extension, critical=False)
    made = made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=2))
    return made.sign(issuer_key, hashes.SHA256())


def _handler(fake: Fake, name: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle_any(self) -> None:
            self.url = urlsplit(self.path)
            self.query = {key: values[0] for key, values in parse_qs(self.url.query).items()}
            path = unquote(self.url.path)
            self.entry = Request(name, self.command, path, self.headers.get("Authorization"), self.headers.get("Range"))
            fake.log.append(self.entry)
            for (method, part), statuses in fake.answers.items():
                if method == self.command and part in path and statuses:
                    self.body()
                    return self.answer(statuses.pop(0), b"")
            if name == "store":
                return self.blob(path.removeprefix("/"))
            if name == "tokens":
                return self.token()
            return self.registry(path)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

        def registry(self, path: str) -> None:
            if not self.allowed():
                return
            if path == "/v2/":
                self.answer(200, b"{}")
            elif found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", path):
                self.manifest(*found.groups())
            elif found := re.fullmatch(r"/v2/(.+)/blobs/uploads/([^/]*)", path):
                self.upload(*found.groups())
            elif found := re.fullmatch(r"/v2/(.+)/blobs/(sha256:[0-9a-f]{64})", path):
                digest = found[2]
                if digest in fake.redirects:
                    self.answer(307, bytes(fake.padding), Location=fake.redirects[digest])
                elif fake.elsewhere and digest in fake.blobs:
                    self.answer(307, b"", Location=f"{fake.store_url}/{digest}")
                else:
                    self.blob(digest)
            else:
                self.refuse(404, "UNSUPPORTED", "no such address")

        def allowed(self) -> bool:
            given = self.entry.authorization
            if fake.auth == "basic" and given != basic():
                self.refuse(401, "UNAUTHORIZED", "who are you", **{"WWW-Authenticate": 'Basic realm="registry"'})
                return False
            if fake.auth == "bearer" and given not in [f"Bearer {token}" for token in fake.tokens]:
                realm = fake.realm or f"{fake.tokens_url}/token"
                scope = "pull,push" if self.command in ("POST", "PUT", "PATCH") else "pull"
                scope = f"repository:{self.url.path.split('/')[2]}:{scope}"
                said = f'Bearer realm="{realm}",service="tests",scope="{scope}"'
                self.refuse(401, "UNAUTHORIZED", "who are you", **{"WWW-Authenticate": said})
                return False
            return True

        def token(self) -> None:
            if self.command == "POST":
                form = parse_qs(self.body().decode())
                good = form.get("refresh_token") == ["refresh"] and form["grant_type"] == ["refresh_token"]
            else:
                good = self.entry.authorization == basic()
            if not good:
                return self.refuse(401, "UNAUTHORIZED", "wrong password")
            fake.tokens.append(f"token-{len(fake.tokens)}")
            return self.answer(200, json.dumps({"token": fake.tokens[-1]}).encode())

        def manifest(self, repository: str, reference: str) -> None:
            if self.command == "PUT":
                data = self.body()
                for key in (reference, digest_of(data)):
                    fake.manifests[repository, key] = (self.headers["Content-Type"], data)
                said = {"Docker-Content-Digest": fake.says or digest_of(data)}
                return self.answer(201, b"", **said)
            if (repository, reference) not in fake.manifests:
                return self.refuse(404, "MANIFEST_UNKNOWN", f"no manifest {reference}")
            media_type, data = fake.manifests[repository, reference]
            said = {"Docker-Content-Digest": fake.says or digest_of(data), "Content-Type": media_type}
            return self.answer(200, data, fake.breaks.get(reference), **said)

        def blob(self, digest: str) -> None:
            data = fake.serves.get(digest, fake.blobs.get(digest))
            if data is None:
                return self.refuse(404, "BLOB_UNKNOWN", "no such blob")
            start, end = 0, len(data)
            part = None if fake.whole else re.fullmatch(r"bytes=(\d+)-(\d*)", self.entry.range or "")
            headers = {}
            if part:
                start, end = int(part[1]), min(int(part[2]) + 1 if part[2] else end, end)
                if start >= len(data):
                    return self.answer(416, b"")
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            return self.answer(206 if part else 200, data[start:end], fake.breaks.get(digest), **headers)

        def upload(self, repository: str, uuid: str) -> None:
            if self.command == "POST":
                uuid = f"u{len(fake.uploads)}"
                fake.uploads[uuid] = bytearray()
                place = fake.uploads_at or f"/v2/{repository}/blobs/uploads/{uuid}?state=x"
                return self.answer(202, b"", Location=place)
            held = fake.uploads.get(uuid)
            if held is None:
                return self.refuse(404, "BLOB_UPLOAD_UNKNOWN", "no such upload")
            place = {"Location": f"/v2/{repository}/blobs/uploads/{uuid}?state=y"}
            if self.command == "GET":
                return self.answer(204, b"", Range=f"0-{max(len(held) - 1, 0)}", **place)
            began = re.match(r"(\d+)-", self.headers.get("Content-Range", "0-"))
            if began is None or int(began[1]) != len(held):
                return self.answer(416, b"")
            if not self.take(uuid, held):
                return None
            if self.command == "PATCH":
                return self.answer(202, b"", Range=f"0-{len(held) - 1}", **place)
            digest, data = self.query["digest"], bytes(fake.uploads.pop(uuid))
            if digest_of(data) != digest:
                return self.refuse(400, "DIGEST_INVALID", "these bytes have another digest")
            if not fake.forgets:
                fake.blobs[digest] = data
            return self.answer(201, b"", **{"Docker-Content-Digest": fake.says or digest})

        def take(self, uuid: str, held: bytearray) -> bool:
            """Read the body into `held`; False where the connection was broken off or the disk is full."""
            length = int(self.headers.get("Content-Length", "0"))
            cuts = fake.breaks.get(self.query.get("digest", ""))
            cut = cuts.pop(0) if cuts else None
            while length:
                wanted = min(length, 1 << 16 if cut is None else cut - self.entry.received, 1 << 16)
                data = self.rfile.read(wanted) if wanted else b""
                if not data:
                    if not fake.resumes:
                        del fake.uploads[uuid]
                    self.close_connection = True
                    self.connection.close()
                    return False
                self.entry.received += len(data)
                held += data
                length -= len(data)
                if fake.room is not None and sum(map(len, fake.blobs.values())) + len(held) > fake.room:
                    self.close_connection = True
                    self.refuse(500, "UNKNOWN", "unknown error", detail="write: no space left on device")
                    self.drain(length)
                    return False
            return True

        def drain(self, length: int) -> None:
            while length and (data := self.rfile.read(min(length, 1 << 16))):
                length -= len(data)

        def body(self) -> bytes:
            data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.entry.received += len(data)
            return data

        def refuse(self, status: int, code: str, message: str, detail: str = "", **headers: str) -> None:
            error = {"code": code, "message": message, **({"detail": detail} if detail else {})}
            self.answer(status, json.dumps({"errors": [error]}).encode(), **headers)

        def answer(self, status: int, body: bytes, cuts: list[int] | None = None, **headers: str) -> None:
            self.entry.status = status
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = cuts.pop(0) if cuts else None
            if cut is not None:
                body = body[:cut]
                self.close_connection = True
            try:
                self.wfile.write(body)
                self.entry.sent = len(body)
            except OSError:
                self.close_connection = True
            if cut is not None:
                self.wfile.flush()

    return Handler


def basic() -> str:
    return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
