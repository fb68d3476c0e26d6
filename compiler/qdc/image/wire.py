"""Requests to one registry over HTTP: who is asked, who may know the credentials, what is tried again.

TLS, but for this very machine. Credentials and tokens go to the registry and to who hands out its tokens, never
along a redirect to another server, and nothing follows a redirect from https to http. Answers come open: the caller
reads no more of them than it wants. This module knows no manifests and no blobs.
"""

from __future__ import annotations

import contextlib
import http
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

from qdc.core.errors import COULD_NOT, QdcError
from qdc.image.credentials import Credentials
from qdc.image.reference import HUB, Reference, is_loopback
from qdc.image.transport import SHORT, Answer, Counts, Dropped, Request, Transport, Untrusted, origin

T = TypeVar("T")
PAUSES_S = (0.3, 1.0, 3.0)
"""Between tries of a request that brought nothing."""
REDIRECTS = 5
TOKEN_LIMIT = 256 << 10
_PASSING = (408, 429, 500, 502, 503, 504)
_LATER = "run the same command again when it is back"
_ASTRAY = "look at the address, and at how the registry says its own (behind a proxy: its external URL)"
_PROBE_S = 5.0


class Wire:
    """The way to the registry of `reference`. `ca`: a file or folder of CA certificates, or None for the usual ones."""

    def __init__(self, reference: Reference, credentials: Credentials | None, ca: str | None) -> None:
        self.reference, self._credentials = reference, credentials
        self._transport = Transport(ca)
        self._authorization: str | None = None
        self._place: str | None = None

    @property
    def counts(self) -> Counts:
        return self._transport.counts

    # What the caller asks for

    @contextlib.contextmanager
    def ask(self, request: Request, accepted: tuple[int, ...], *, once: bool = False) -> Iterator[Answer]:
        """The open answer to a request, if its status is one of `accepted`; closed when the block ends.

        The request's `url`: a path of the registry, or a URL on the registry that it gave. Raises QdcError
        `registry.*`; with `once` it is not tried again, and Dropped is raised where the connection breaks off.
        """
        answer = self._authorized(request) if once else self._tried(request)
        try:
            if answer.status not in accepted:
                raise self._refusal(request.method, answer)
            yield answer
        finally:
            answer.close()

    def again(self, make: Callable[[], T]) -> T:
        """What `make` gives, tried again where the connection breaks off in an answer."""
        for pause in (*PAUSES_S, None):
            try:
                return make()
            except Dropped as error:
                if pause is None:
                    raise self.dropped(error) from None
                time.sleep(pause)
        raise AssertionError("it is made at least once")

    def error(self, id: str, message: str, hint: str | None = None) -> QdcError:
        """A failure with this registry."""
        return QdcError(f"registry.{id}", f"{self.reference.host}: {message}", hint=hint, exit_code=COULD_NOT)

    def dropped(self, why: object) -> QdcError:
        return self.error("dropped", f"the connection broke off: {why}", _LATER)

    def close(self) -> None:
        self._transport.close()

    # Tries

    def _tried(self, request: Request) -> Answer:
        """The first answer that is not a passing trouble; else the last one, or an error."""
        for pause in (*PAUSES_S, None):
            try:
                answer = self._authorized(request)
            except Dropped as error:
                if pause is None:
                    raise self.error("unreachable", f"it cannot be reached: {error}", _LATER) from None
            else:
                if answer.status not in _PASSING or pause is None:
                    return answer
                asked = answer.headers.get("Retry-After", "")
                pause = max(pause, min(float(asked), 10.0)) if asked.isdecimal() else pause
                answer.close()
            time.sleep(pause)
        raise AssertionError("a request is tried at least once")

    def _authorized(self, request: Request) -> Answer:
        """The answer to a request that says who asks, if the registry wants to know."""
        answer = self._followed(request)
        challenge = answer.headers.get("WWW-Authenticate")
        if answer.status == 401 and challenge and origin(answer.url) == origin(self._url(request.url)):
            answer.close()
            if self._introduce(challenge):
                return self._followed(request)
            raise self._denied("it asks for a login")
        return answer

    # Redirects

    def _followed(self, request: Request) -> Answer:
        url = self._url(request.url)
        home = origin(url)
        known = True
        for _ in range(REDIRECTS + 1):
            told = {"Authorization": self._authorization} if known and self._authorization else {}
            answer = self._send(replace(request, url=url, headers={**request.headers, **told}))
            place = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or place is None:
                return answer
            answer.close()
            if request.method not in ("GET", "HEAD"):
                raise self.error("redirect", "it sends an upload on to another place, which is not followed", _ASTRAY)
            url = self._onward(url, place)
            known = known and origin(url) == home
        raise self.error("redirect", f"it sends a request around more than {REDIRECTS} times", _ASTRAY)

    def _onward(self, url: str, place: str) -> str:
        """Where a redirect leads. Raises QdcError `registry.redirect` where it must not be followed."""
        onward, parts = self._joined(url, place)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise self.error("redirect", f"it sends a request on to `{parts.scheme}:`, which is not followed", _ASTRAY)
        if parts.scheme == "http" and (urlsplit(url).scheme == "https" or not is_loopback(parts.hostname)):
            raise self.error(
                "redirect", f"it sends a request on to {parts.hostname} without TLS: not followed", _ASTRAY
            )
        return onward

    # One request

    def _send(self, request: Request) -> Answer:
        """Raises Dropped where no answer comes, QdcError `registry.tls` where the server is not trusted."""
        try:
            return self._transport.send(request)
        except Untrusted as error:
            hint = "name the CA that signed its certificate: QDC_REGISTRY_CA=FILE (or SSL_CERT_FILE=FILE)"
            raise self.error("tls", str(error), hint) from None

    def _url(self, path: str) -> str:
        """`path` at the registry. A URL must be the registry's own: it gets credentials and contents."""
        if self._place is None:
            self._place = f"{self._scheme()}://{self.reference.address}"
        url, parts = self._joined(self._place + "/", path)
        if origin(url) != origin(self._place) or "@" in parts.netloc:
            message = f"it names a place on {parts.hostname}, to which nothing is sent"
            raise self.error("redirect", message, _ASTRAY)
        return url

    def _joined(self, url: str, place: str) -> tuple[str, SplitResult]:
        """A place that the registry names, seen from `url`. Raises QdcError where it is no address."""
        try:
            joined = urljoin(url, place)
            parts = urlsplit(joined)
            origin(joined)
        except ValueError:
            raise self.error("redirect", "it names a place that is no address", _ASTRAY) from None
        return joined, parts

    def _scheme(self) -> str:
        """https; on this machine http, where that is what answers there."""
        if not self.reference.loopback:
            return "https"
        try:
            url = f"http://{self.reference.address}/v2/"
            answer = self._send(Request("GET", url, timeout=(_PROBE_S, _PROBE_S)))
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
        _, realm = self._joined("", fields["realm"])
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
            return self._send(Request("POST", realm, headers, lambda: iter((data,)), len(data)))
        query = urlencode([*service.items(), *(("scope", part) for part in scope.split())])
        headers = {"Authorization": secret.basic} if secret is not None else {}
        return self._send(Request("GET", f"{realm}{'&' if urlsplit(realm).query else '?'}{query}", headers))

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
            first = json.loads(answer.whole(SHORT) or b"")["errors"][0]
            parts = [str(first[name]) for name in ("code", "message", "detail") if first.get(name)]
        except (Dropped, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return words
        text = re.sub(r"[^\x20-\x7e]+", " ", ": ".join(parts))
        return f"{words} ({text[:300]})" if text else words
