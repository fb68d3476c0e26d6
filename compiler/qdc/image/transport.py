"""One HTTP request and its open answer: TLS, proxies, what was counted. Knows no registry and no credentials.

An answer is read no further than the caller wants; redirects are the caller's to follow or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import requests.utils
import urllib3.exceptions

from qdc import __version__
from qdc.core.errors import QdcError
from qdc.core.files import CHUNK

TIMEOUT_S = (20.0, 60.0)
"""To connect, and between bytes of an answer."""
UPLOAD_S = (60.0, 900.0)
"""For bodies: some registries read a blob of GB once more before they answer."""
SHORT = 16 << 10
"""Bytes of a body that are read for the sake of the connection, or of its words."""

Body = Callable[[], Iterator[bytes]]
"""Makes the bytes to send; asked anew for every try."""
Origin = tuple[str, str, int]


@dataclass(frozen=True)
class Request:
    """`url`: may be a path, for who knows its server. `body`: of `size` bytes. `timeout`: to connect and between
    bytes, in seconds; None takes the usual ones."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Body | None = field(default=None, repr=False)
    size: int = 0
    timeout: tuple[float, float] | None = None


@dataclass
class Counts:
    """Requests sent, bytes of their answers that were read, bytes of bodies that were sent."""

    requests: int = 0
    received: int = 0
    sent: int = 0


class Dropped(Exception):
    """A connection that ended too early; a later try may do."""


class Answer:
    """An open answer. `read` raises Dropped where the connection ends before the body does."""

    def __init__(self, response: requests.Response, counts: Counts) -> None:
        self.response, self.counts = response, counts
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self.url = str(response.url)

    @property
    def length(self) -> int | None:
        """Bytes of the whole body, where the answer says so."""
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() else None

    def read(self, limit: int) -> bytes:
        """At most `limit` bytes more; b"" at the end."""
        try:
            data = self.response.raw.read(limit, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Dropped(_reason(error)) from None
        self.counts.received += len(data)
        return bytes(data)

    def whole(self, limit: int) -> bytes | None:
        """The body, or None where it has more than `limit` bytes: the rest is then not read."""
        if self.length is not None and self.length > limit:
            return None
        parts: list[bytes] = []
        size = 0
        while chunk := self.read(min(CHUNK, limit + 1 - size)):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                return None
        return b"".join(parts)

    def close(self) -> None:
        """What is left of a short body is read, so that the connection serves again; a long one ends it."""
        if self.response.request.method == "HEAD" or (self.length or 0) <= SHORT:
            with contextlib.suppress(Dropped):
                self.read(SHORT)
        self.response.close()


class _Sized:
    """A body of known size as `requests` sends it: streamed, with a Content-Length."""

    def __init__(self, body: Body, size: int, counts: Counts) -> None:
        self.body, self.size, self.counts = body, size, counts

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.body():
            yield chunk
            self.counts.sent += len(chunk)


class _Session(requests.Session):
    """`requests` reads the body of a redirect and parses its place even where it does not follow it: not here."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


class Untrusted(Exception):
    """A server whose certificate is not trusted."""


class Transport:
    """`ca`: a file or folder of CA certificates, or None for the usual ones. Proxies are the environment's."""

    def __init__(self, ca: str | None) -> None:
        self.counts = Counts()
        self._session = _Session()
        self._session.trust_env = False  # No .netrc: its passwords are for other uses.
        self._session.verify = _trusted(ca)
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    def close(self) -> None:
        self._session.close()

    def send(self, request: Request) -> Answer:
        """The answer to one request, as it is. Raises Dropped where no answer comes, Untrusted before anything is said
        to a server without a good certificate."""
        self.counts.requests += 1
        data: Any = None
        if request.body is not None:
            data = _Sized(request.body, request.size, self.counts) if request.size else b""
        own = {"User-Agent": f"qdc/{__version__}", "Accept-Encoding": "identity"}
        try:
            response = self._session.request(
                request.method,
                request.url,
                headers={**own, **request.headers},
                data=data,
                proxies=requests.utils.get_environ_proxies(request.url),
                timeout=request.timeout or (UPLOAD_S if request.size else TIMEOUT_S),
                allow_redirects=False,
                stream=True,
            )
        except requests.exceptions.SSLError as error:
            raise Untrusted(f"{urlsplit(request.url).netloc} is not trusted: {_reason(error)}") from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Dropped(_reason(error)) from None
        return Answer(response, self.counts)


def origin(url: str) -> Origin:
    """Scheme, host and port: whom credentials are for."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _trusted(ca: str | None) -> str | bool:
    """The certificates that TLS trusts: those of `ca`, else the system's, else those that `requests` brings."""
    if ca is not None:
        if not os.path.exists(ca):
            hint = "correct QDC_REGISTRY_CA or SSL_CERT_FILE"
            raise QdcError("registry.ca", "no CA certificates are here", file=Path(ca), hint=hint)
        return ca
    return ssl.get_default_verify_paths().cafile or True


def _reason(error: BaseException) -> str:
    """The cause at the bottom of an HTTP library's error, in one line without addresses of objects."""
    inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
    if isinstance(inner, BaseException):
        return _reason(inner)
    text = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return re.sub(r"<[^>]*>:?\s*", "", text).replace("\n", " ")[:200]
