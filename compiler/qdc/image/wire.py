"""Requests to one registry over HTTP: who is asked, who may know the credentials, what is tried again.

TLS, but for this very machine. Credentials and tokens go to the registry and to who hands out its tokens, never
along a redirect to another server, and nothing follows a redirect from https to http. Answers come open: the caller
reads no more of them than it wants. This module knows no manifests and no blobs.
"""

from __future__ import annotations

import contextlib
import http
import json
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

import requests
import requests.utils
import urllib3.exceptions

from qdc import __version__
from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import CHUNK
from qdc.image.credentials import Credentials
from qdc.image.reference import HUB, Reference, is_loopback

TIMEOUT_S = (20.0, 60.0)
"""To connect, and between bytes of an answer."""
UPLOAD_S = (60.0, 900.0)
"""For bodies: some registries read a blob of GB once more before they answer."""
PAUSES_S = (0.3, 1.0, 3.0)
"""Between tries of a request that brought nothing."""
REDIRECTS = 5
TOKEN_LIMIT = 256 << 10
_SHORT = 16 << 10
_PASSING = (408, 429, 500, 502, 503, 504)
_LATER = "run the same command again when it is back"
_ASTRAY = "look at the address, and at how the registry says its own (behind a proxy: its external URL)"
_PROBE_S = 5.0

Body = Callable[[], Iterator[bytes]]
"""Makes the bytes to send; asked anew for every try."""
Origin = tuple[str, str, int]


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
        if self.response.request.method == "HEAD" or (self.length or 0) <= _SHORT:
            with contextlib.suppress(Dropped):
                self.read(_SHORT)
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


class Wire:
    """The way to the registry of `reference`. `ca`: a file or folder of CA certificates, or None for the usual ones."""

    def __init__(self, reference: Reference, credentials: Credentials | None, ca: str | None) -> None:
        self.reference, self._credentials = reference, credentials
        self.counts = Counts()
        self._authorization: str | None = None
        self._place: str | None = None
        self._session = requests.Session()
        self._session.trust_env = False  # No .netrc: its passwords are for other uses.
        self._session.verify = _trusted(ca)
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    # What the caller asks for

    @contextlib.contextmanager
    def ask(
        self,
        method: str,
        path: str,
        accepted: tuple[int, ...],
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        size: int = 0,
    ) -> Iterator[Answer]:
        """The open answer to a request, if its status is one of `accepted`; closed when the block ends.

        `path`: of the registry, or a URL on the registry that it gave. Raises QdcError `registry.*`.
        """
        with self._given(method, self._tried(method, path, headers or {}, body, size), accepted) as answer:
            yield answer

    @contextlib.contextmanager
    def once(
        self,
        method: str,
        path: str,
        accepted: tuple[int, ...],
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        size: int = 0,
    ) -> Iterator[Answer]:
        """The same without another try: raises Dropped where the connection breaks off."""
        with self._given(method, self._authorized(method, path, headers or {}, body, size), accepted) as answer:
            yield answer

    @contextlib.contextmanager
    def _given(self, method: str, answer: Answer, accepted: tuple[int, ...]) -> Iterator[Answer]:
        try:
            if answer.status not in accepted:
                raise self._refusal(method, answer)
            yield answer
        finally:
            answer.close()

    def error(self, id: str, message: str, hint: str | None = None) -> QdcError:
        """A failure with this registry."""
        return QdcError(f"registry.{id}", f"{self.reference.host}: {message}", hint=hint, exit_code=COULD_NOT)

    def dropped(self, why: object) -> QdcError:
        return self.error("dropped", f"the connection broke off: {why}", _LATER)

    def close(self) -> None:
        self._session.close()

    # Tries

    def _tried(self, method: str, path: str, headers: Mapping[str, str], body: Body | None, size: int) -> Answer:
        """The first answer that is not a passing trouble; else the last one, or an error."""
        for left in reversed(range(len(PAUSES_S) + 1)):
            pause = PAUSES_S[-left]
            try:
                answer = self._authorized(method, path, headers, body, size)
            except Dropped as error:
                if not left:
                    raise self.error("unreachable", f"it cannot be reached: {error}", _LATER) from None
            else:
                if answer.status not in _PASSING or not left:
                    return answer
                asked = answer.headers.get("Retry-After", "")
                pause = max(pause, min(float(asked), 10.0)) if asked.isdecimal() else pause
                answer.close()
            time.sleep(pause)
        raise AssertionError("a request is tried at least once")

    def _authorized(self, method: str, path: str, headers: Mapping[str, str], body: Body | None, size: int) -> Answer:
        """The answer to a request that says who asks, if the registry wants to know."""
        answer = self._followed(method, path, headers, body, size)
        challenge = answer.headers.get("WWW-Authenticate")
        if answer.status == 401 and challenge and _origin(answer.url) == _origin(self._url(path)):
            answer.close()
            if self._introduce(challenge):
                return self._followed(method, path, headers, body, size)
            raise self._denied("it asks for a login")
        return answer

    # Redirects

    def _followed(self, method: str, path: str, headers: Mapping[str, str], body: Body | None, size: int) -> Answer:
        url = self._url(path)
        home = _origin(url)
        known = True
        for _ in range(REDIRECTS + 1):
            sent = {**headers}
            if known and self._authorization:
                sent["Authorization"] = self._authorization
            answer = self._send(method, url, sent, body, size)
            place = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or place is None:
                return answer
            answer.close()
            if method not in ("GET", "HEAD"):
                raise self.error("redirect", "it sends an upload on to another place, which is not followed", _ASTRAY)
            url = self._onward(url, place)
            known = known and _origin(url) == home
        raise self.error("redirect", f"it sends a request around more than {REDIRECTS} times", _ASTRAY)

    def _onward(self, url: str, place: str) -> str:
        """Where a redirect leads. Raises QdcError `registry.redirect` where it must not be followed."""
        onward = urljoin(url, place)
        parts = urlsplit(onward)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise self.error("redirect", f"it sends a request on to `{parts.scheme}:`, which is not followed", _ASTRAY)
        if parts.scheme == "http" and (urlsplit(url).scheme == "https" or not is_loopback(parts.hostname)):
            raise self.error(
                "redirect", f"it sends a request on to {parts.hostname} without TLS: not followed", _ASTRAY
            )
        return onward

    # One request

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        size: int = 0,
        timeout: tuple[float, float] | None = None,
    ) -> Answer:
        """Raises Dropped where no answer comes, QdcError `registry.tls` where the server is not trusted."""
        self.counts.requests += 1
        data: Any = _Sized(body, size, self.counts) if body is not None and size else b"" if body is not None else None
        try:
            response = self._session.request(
                method,
                url,
                headers={"User-Agent": f"qdc/{__version__}", "Accept-Encoding": "identity", **headers},
                data=data,
                proxies=requests.utils.get_environ_proxies(url),
                timeout=timeout or (UPLOAD_S if size else TIMEOUT_S),
                allow_redirects=False,
                stream=True,
            )
        except requests.exceptions.SSLError as error:
            host = urlsplit(url).netloc
            hint = "name the CA that signed its certificate: QDC_REGISTRY_CA=FILE (or SSL_CERT_FILE=FILE)"
            raise self.error("tls", f"{host} is not trusted: {_reason(error)}", hint) from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Dropped(_reason(error)) from None
        return Answer(response, self.counts)

    def _url(self, path: str) -> str:
        """`path` at the registry. A URL must be the registry's own: it gets credentials and contents."""
        if self._place is None:
            self._place = f"{self._scheme()}://{self.reference.address}"
        url = urljoin(self._place + "/", path)
        if _origin(url) != _origin(self._place) or "@" in urlsplit(url).netloc:
            message = f"it names a place on {urlsplit(url).hostname}, to which nothing is sent"
            raise self.error("redirect", message, _ASTRAY)
        return url

    def _scheme(self) -> str:
        """https; on this machine http, where that is what answers there."""
        if not self.reference.loopback:
            return "https"
        try:
            url = f"http://{self.reference.address}/v2/"
            answer = self._send("GET", url, {}, timeout=(_PROBE_S, _PROBE_S))
        except Dropped:
            return "https"
        answer.close()
        return "https" if answer.status == 400 else "http"

    # Who asks

    def _introduce(self, challenge: str) -> bool:
        """Do what a `WWW-Authenticate` header asks for; False where there is nothing (more) to say."""
        scheme, _, rest = challenge.strip().partition(" ")
        fields = {name.lower(): value for name, value in re.findall(r'([A-Za-z_]+)="([^"]*)"', rest)}
        before = self._authorization
        if scheme.lower() == "bearer" and "realm" in fields:
            self._authorization = f"Bearer {self._token(fields)}"
        elif scheme.lower() == "basic" and self._credentials is not None and self._credentials.user:
            self._authorization = self._credentials.basic
        else:
            return False
        return self._authorization != before

    def _token(self, fields: Mapping[str, str]) -> str:
        """An access token, of the server that the challenge names."""
        realm = urlsplit(fields["realm"])
        secret = self._credentials
        safe = realm.scheme == "https" or (realm.scheme == "http" and is_loopback(realm.hostname or ""))
        if not safe or not realm.hostname or "@" in realm.netloc:
            raise self.error("token", "the place of its tokens is no address with TLS, and is not asked")
        if secret is not None and not self._trusts(realm.hostname):
            message = f"it wants your password to be sent to {realm.hostname}, which is not done"
            raise self.error("token", message, f"if that is right, log in there too: `docker login {realm.hostname}`")
        answer = self._token_answer(fields, secret)
        try:
            if answer.status in (400, 401, 403):
                raise self._denied(f"{realm.hostname} gives no token")
            if answer.status in _PASSING:
                raise Dropped(f"{realm.hostname} answers {answer.status} and gives no token")
            if answer.status != 200:
                raise self.error("token", f"{realm.hostname} answers {answer.status} and gives no token")
            return self._read_token(answer.whole(TOKEN_LIMIT))
        finally:
            answer.close()

    def _token_answer(self, fields: Mapping[str, str], secret: Credentials | None) -> Answer:
        """What the server of a challenge answers to whoever asks for its scope."""
        realm, scope = fields["realm"], fields.get("scope") or f"repository:{self.reference.repository}:pull"
        service = {"service": fields["service"]} if fields.get("service") else {}
        if secret is not None and secret.identity:
            form = {"grant_type": "refresh_token", "client_id": "qdc", "refresh_token": secret.identity}
            data = urlencode({**form, **service, "scope": scope}).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            return self._send("POST", realm, headers, lambda: iter((data,)), len(data))
        query = urlencode([*service.items(), *(("scope", part) for part in scope.split())])
        headers = {"Authorization": secret.basic} if secret is not None else {}
        return self._send("GET", f"{realm}{'&' if urlsplit(realm).query else '?'}{query}", headers)

    def _trusts(self, host: str) -> bool:
        """Whether the user's password for the registry may go to `host`: the registry itself, or who owns its name."""
        own = urlsplit(f"//{self.reference.host}").hostname or ""
        if self.reference.host == HUB:
            return host == HUB or host.endswith(f".{HUB}")
        parent = own.partition(".")[2]
        return host == own or ("." in parent and host == parent) or self._elsewhere(host)

    def _elsewhere(self, host: str) -> bool:
        """Whether the user has said the same of `host` as of the registry."""
        from qdc.image.credentials import Logins

        return Logins().of(host) == self._credentials

    def _read_token(self, data: bytes | None) -> str:
        try:
            value = json.loads(data or b"")
            token = value.get("token") or value.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise self.error("token", "what hands out its tokens gives none that can be used")
        return token

    # Refusals

    def _denied(self, why: str) -> QdcError:
        what = "does not let you in with the login that you have" if self._credentials else "wants a login"
        hint = f"log in: `docker login {self.reference.host}`"
        return self.error("denied", f"it {what} for {self.reference.repository}: {why}", hint)

    def _refusal(self, method: str, answer: Answer) -> QdcError:
        said = self._said(answer)
        if answer.status in (401, 403):
            return self._denied(said)
        if answer.status == 404:
            hint = "look at the spelling; a private repository hides from who is not logged in"
            return self.error("absent", f"it has no such thing: {said}", hint)
        doing = "an upload" if method in ("POST", "PATCH", "PUT") else "the request"
        hint = _LATER if answer.status in _PASSING else "its own log says more: ask who runs it"
        return self.error("answer", f"it answers {doing} with {said}", hint)

    def _said(self, answer: Answer) -> str:
        """Status and the registry's own words, as one line without control characters."""
        words = str(answer.status)
        with contextlib.suppress(ValueError):
            words += f" {http.HTTPStatus(answer.status).phrase}"
        if answer.response.request.method == "HEAD":
            return words
        try:
            first = json.loads(answer.whole(_SHORT) or b"")["errors"][0]
            parts = [str(first[name]) for name in ("code", "message", "detail") if first.get(name)]
        except (Dropped, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return words
        text = re.sub(r"[^\x20-\x7e]+", " ", ": ".join(parts))
        return f"{words} ({text[:300]})" if text else words


def _origin(url: str) -> Origin:
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
