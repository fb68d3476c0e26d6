"""What lets a user into a registry: as `docker login` left it, read when a registry is opened.

From Docker's config.json in DOCKER_CONFIG or ~/.docker: its `auths`, or the helper that it names. What is read
here goes to the registry (or to who hands out its tokens) and nowhere else: no key, record, log or message.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.image.reference import HUB

_HELPER_S = 30.0
_HELPER = re.compile(r"[A-Za-z0-9._-]+")
_NO_USER = "<token>"


@dataclass(frozen=True)
class Credentials:
    """A user and a password, or an `identity` token that buys access tokens; never shown."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class Logins:
    """The credentials of each host in the user's settings."""

    def __init__(self, path: Path | None = None) -> None:
        folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
        self.path = path or Path(folder) / "config.json"
        self._value: dict[str, Any] | None = None

    def of(self, host: str) -> Credentials | None:
        """Those of `host` (with its port), or None. Raises QdcError `registry.credentials`."""
        value = self._read()
        helpers = value.get("credHelpers")
        helper = helpers.get(_server(host)) if isinstance(helpers, dict) else None
        if helper is None:
            auths = value.get("auths")
            for name, entry in auths.items() if isinstance(auths, dict) else ():
                if _host(name) == host and isinstance(entry, dict) and (found := self._entry(name, entry)):
                    return found
            helper = value.get("credsStore")
        return self._asked(str(helper), _server(host)) if helper else None

    def _read(self) -> dict[str, Any]:
        if self._value is None:
            try:
                value = json.loads(self.path.read_bytes())
                if not isinstance(value, dict):
                    raise ValueError("it is no JSON object")
                self._value = value
            except FileNotFoundError:
                self._value = {}
            except OSError as error:
                raise self._wrong(f"cannot be read: {error.strerror}") from None
            except (ValueError, RecursionError):
                raise self._wrong("is not JSON") from None
        return self._value

    def _entry(self, name: str, entry: dict[str, Any]) -> Credentials | None:
        if token := entry.get("identitytoken"):
            return Credentials(identity=str(token))
        if entry.get("username"):
            return Credentials(str(entry["username"]), str(entry.get("password") or ""))
        if not entry.get("auth"):
            return None
        try:
            user, colon, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise self._wrong(f"holds no user and password for {_host(name)}") from None
        return Credentials(user, password.rstrip("\0")) if colon else None

    def _asked(self, helper: str, server: str) -> Credentials | None:
        """What the program `docker-credential-HELPER` has for `server`."""
        if not _HELPER.fullmatch(helper):
            raise self._wrong("names a helper that is no program")
        try:
            done = subprocess.run(
                [f"docker-credential-{helper}", "get"],
                input=server.encode(),
                capture_output=True,
                timeout=_HELPER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            raise self._wrong(f"names the helper docker-credential-{helper}, which does not answer") from None
        if done.returncode != 0:
            return None  # Helpers end so where they have nothing for a server.
        try:
            value = json.loads(done.stdout)
            user, secret = str(value["Username"]), str(value["Secret"])
        except (ValueError, KeyError, TypeError):
            raise self._wrong(f"names the helper docker-credential-{helper}, which gives no JSON") from None
        return Credentials(identity=secret) if user == _NO_USER else Credentials(user, secret)

    def _wrong(self, what: str) -> QdcError:
        return QdcError(
            "registry.credentials",
            f"the file of your logins {what}",
            file=self.path,
            hint="log in again: `docker login HOST` (DOCKER_CONFIG names another folder for it)",
            exit_code=COULD_NOT,
        )


def _host(name: str) -> str:
    """The host that a key of `auths` is for: keys are hosts, or URLs of older days."""
    host = re.sub(r"\Ahttps?://", "", name).partition("/")[0]
    return HUB if host in ("index.docker.io", "registry-1.docker.io", HUB) else host


def _server(host: str) -> str:
    """What helpers call a host."""
    return "https://index.docker.io/v1/" if host == HUB else host
