"""Bytes over HTTP: whole files that go on where they stopped, and parts of files.

Every digest is checked here. Credentials go to the server that they are for: a redirect to another one does not
carry them. Knows no hub, no index and no lock. Standard library only.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qdc import __version__
from qdc.core.files import CHUNK

TIMEOUT_S = 60.0
PAUSES_S = (0.3, 1.0, 3.0)
"""Between tries that brought nothing; one that brought bytes is not counted."""
Report = Callable[[int], None]


class WebError(Exception):
    """A request that failed. `status`: of HTTP, or None where no answer came; `again`: whether a later try may do."""

    def __init__(self, reason: str, status: int | None = None, *, again: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.status, self.again = reason, status, again


class Differs(Exception):
    """The server has other bytes than expected. `was` and `now`: SHA-256 or, with their unit, what differs."""

    def __init__(self, was: str, now: str) -> None:
        super().__init__(f"expected {was}, got {now}")
        self.was, self.now = was, now


@dataclass(frozen=True)
class File:
    """A file of a server: `size` in bytes, `sha256`, and `blob` (git's object id), each where it is known."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    size: int | None = None
    sha256: str | None = None
    blob: str | None = None


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: whom credentials are for."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; what names a user goes no further than to the server that it was meant for."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise WebError(f"a redirect to {urlsplit(newurl).scheme}, which is not the web", code)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and origin(newurl) != origin(req.full_url):
            for name in ("Authorization", "Cookie"):
                request.remove_header(name)
        return request


def request(url: str, headers: Mapping[str, str], first: int | None = None, last: int | None = None) -> Any:
    """An open answer (status 200 or 206) with the bytes from `first` to `last`. Raises WebError."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise WebError(f"not an address of the web: {urlsplit(url).scheme or url[:40]}")
    sent = {"User-Agent": f"qdc/{__version__}", "Accept-Encoding": "identity", **headers}
    if first is not None:
        sent["Range"] = f"bytes={first}-{'' if last is None else last}"
    opener = urllib.request.build_opener(_Redirects)
    try:
        return opener.open(urllib.request.Request(url, headers=sent), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        again = error.code in (408, 429) or error.code >= 500
        raise WebError(f"the server answers {error.code} {error.reason}", error.code, again=again) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise WebError(_reason(error), again=not isinstance(error, ValueError)) from None


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    if isinstance(inner, BaseException):
        return _reason(inner)
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def read(url: str, headers: Mapping[str, str], limit: int) -> tuple[bytes, str]:
    """A small document and the URL that it came from, after redirects. Raises WebError, also beyond `limit` bytes."""
    with request(url, headers) as answer:
        try:
            data = answer.read(limit + 1)
        except (OSError, http.client.HTTPException) as error:
            raise WebError(_reason(error), again=True) from None
        if len(data) > limit:
            raise WebError(f"the answer has more than {limit} bytes")
        return data, answer.geturl()


class WebRange:
    """A file of a server, read by range (`formats.ranges.RangeReader`); `size` must be known."""

    def __init__(self, file: File) -> None:
        assert file.size is not None
        self.file, self._size = file, file.size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Raises WebError, also where the server has no such part."""
        if length == 0:
            return b""
        with request(self.file.url, self.file.headers, offset, offset + length - 1) as answer:
            try:
                data = answer.read(length) if answer.status == 206 or offset == 0 else answer.read(offset + length)
            except (OSError, http.client.HTTPException) as error:
                raise WebError(_reason(error), again=True) from None
        data = data[-length:]
        if len(data) != length:
            raise WebError(f"the server ends the file after {offset + len(data)} of {self._size} bytes")
        return bytes(data)


class _Bytes:
    """A partial file and the digests of what is in it."""

    def __init__(self, path: Path, file: File) -> None:
        self.path, self.file = path, file
        self.restart(keep=True)

    def restart(self, *, keep: bool = False) -> None:
        """Begin with what is there, or with nothing."""
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.blob = hashlib.sha1(usedforsecurity=False) if self.file.blob and not self.file.sha256 else None
        if self.blob is not None:
            self.blob.update(b"blob %d\0" % (self.file.size or 0))
        if not keep:
            self.path.unlink(missing_ok=True)
        with self.path.open("ab+") as stream:
            stream.seek(0)
            while chunk := stream.read(CHUNK):
                self._count(chunk)

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self.sha256.update(chunk)
        if self.blob is not None:
            self.blob.update(chunk)

    def take(self, answer: Any, report: Report) -> None:
        """Append all that `answer` has. Raises WebError where it breaks off."""
        with self.path.open("ab") as stream:
            while True:
                try:
                    chunk = answer.read(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    if isinstance(error, http.client.IncompleteRead):
                        stream.write(error.partial)
                        self._count(error.partial)
                    raise WebError(_reason(error), again=True) from None
                if not chunk:
                    return
                stream.write(chunk)
                self._count(chunk)
                report(self.size)

    def check(self) -> str:
        """SHA-256 of the whole. Raises Differs."""
        found = self.sha256.hexdigest()
        if self.file.size is not None and self.size != self.file.size:
            raise Differs(f"{self.file.size} bytes", f"{self.size} bytes")
        if self.file.sha256 is not None and found != self.file.sha256:
            raise Differs(self.file.sha256, found)
        if self.blob is not None and self.blob.hexdigest() != self.file.blob:
            raise Differs(f"git object {self.file.blob}", f"git object {self.blob.hexdigest()}")
        return found


def download(file: File, path: Path, report: Report) -> tuple[str, int]:
    """Fetch `file` to `path`, going on with what is there; returns its SHA-256 and its size in bytes.

    `report` gets the bytes that are there. What was fetched is kept when a request fails (WebError); where the whole
    is not what was expected, it is fetched once more from its start, and then refused (Differs).
    """
    parts = _Bytes(path, file)
    resumed = parts.size > 0
    while True:
        _fetch(parts, report)
        try:
            return parts.check(), parts.size
        except Differs:
            parts.restart()
            if not resumed:
                raise
            resumed = False


def _fetch(parts: _Bytes, report: Report) -> None:
    """Go on until the server has no more. Raises WebError after some tries without a new byte, Differs on a size."""
    tries = 0
    while parts.file.size is None or parts.size < parts.file.size:
        before = parts.size
        try:
            if _try(parts, report):
                return
        except WebError as error:
            if not error.again:
                raise
            tries = 0 if parts.size > before else tries + 1
            if tries > len(PAUSES_S):
                raise
            time.sleep(PAUSES_S[max(tries - 1, 0)])


def _try(parts: _Bytes, report: Report) -> bool:
    """One request for what is missing; whether the file is whole. Raises WebError and Differs."""
    try:
        answer = request(parts.file.url, parts.file.headers, parts.size if parts.size else None)
    except WebError as error:
        if error.status == 416:  # Nothing after what is here: the digest says whether that is all.
            return True
        raise
    with answer:
        total = _total(answer, parts)
        if parts.file.size is not None and total is not None and total != parts.file.size:
            raise Differs(f"{parts.file.size} bytes", f"{total} bytes")
        parts.take(answer, report)
    if total is not None and parts.size < total:
        raise WebError(f"the connection ended after {parts.size} of {total} bytes", again=True)
    return True


def _total(answer: Any, parts: _Bytes) -> int | None:
    """Bytes of the whole file, where the answer says so; begins anew where it is not the part that was asked for."""
    length = answer.headers.get("Content-Length")
    if answer.status == 206:
        found = re.match(r"bytes (\d+)-\d+/(\d+)\Z", answer.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != parts.size:
            raise WebError("the server answers with another part than it was asked for")
        return int(found[2])
    if parts.size:
        parts.restart()
    return int(length) if length is not None and length.isdecimal() else None
