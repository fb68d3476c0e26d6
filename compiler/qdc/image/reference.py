"""The name of an image in a registry, as people write it: `HOST/REPOSITORY:TAG@sha256:DIGEST`.

Docker's rules: without a host it is `docker.io`, and a single word there is below `library/`. Asks nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdc.core.errors import WRONG_USE, QdcError

HUB = "docker.io"
_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 255
_LOOPBACK = re.compile(r"localhost|127(?:\.[0-9]{1,3}){3}|\[::1\]")


@dataclass(frozen=True)
class Reference:
    """`host`: with its port where one was given; `tag` and `digest` (`sha256:` and 64 hex): each None where absent."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def selector(self) -> str:
        """What to ask the registry for: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    @property
    def address(self) -> str:
        """The host that answers for it: Docker Hub's registry has another name than Docker Hub."""
        return "registry-1.docker.io" if self.host == HUB else self.host

    @property
    def loopback(self) -> bool:
        """Whether it is this machine: nobody can listen in between, so that plain HTTP may do."""
        return is_loopback(self.host)

    @property
    def name(self) -> str:
        return f"{self.host}/{self.repository}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.name + tag + (f"@{self.digest}" if self.digest else "")


def is_loopback(host: str) -> bool:
    """Whether `host`, with or without a port, is this machine by its name."""
    return _LOOPBACK.fullmatch(re.sub(r":[0-9]+\Z", "", host)) is not None


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def parse(text: str) -> Reference:
    """Raises QdcError `registry.reference` (exit 2) where `text` names no image."""
    rest, at, digest = text.partition("@")
    first, slash, others = rest.partition("/")
    named = bool(slash) and (first == "localhost" or any(mark in first for mark in ".:["))
    host, path = (first, others) if named else (HUB, rest)
    repository, colon, tag = path.partition(":")
    if host in _HUB_NAMES:
        host = HUB
        repository = repository if "/" in repository else f"library/{repository}"
    why = _fault(host, repository, tag if colon else None, digest if at else None)
    if why:
        raise QdcError(
            "registry.reference",
            f"`{text}` names no image of a registry: {why}",
            hint="write HOST/NAME:TAG or HOST/NAME@sha256:DIGEST, in lower case",
            exit_code=WRONG_USE,
        )
    return Reference(host, repository, tag or None, digest or None)


def _fault(host: str, repository: str, tag: str | None, digest: str | None) -> str:
    """What is wrong with the parts, or ""."""
    if not _HOST.fullmatch(host) or ".." in host:
        return f"`{host}` is no host"
    port = re.search(r":([0-9]+)\Z", host)
    if port and not 0 < int(port[1]) < 65536:
        return f"{port[1]} is no port"
    if not _REPOSITORY.fullmatch(repository):
        return f"`{repository}` is no repository"
    if len(host) + 1 + len(repository) > _LONGEST:
        return f"it is longer than {_LONGEST} characters"
    if tag is not None and not _TAG.fullmatch(tag):
        return f"`{tag}` is no tag"
    if digest is not None and not _DIGEST.fullmatch(digest):
        return f"`{digest}` is no digest"
    return ""
