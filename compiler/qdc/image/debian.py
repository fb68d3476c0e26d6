"""The Debian base of an image: made by mmdebstrap, written again by our own tar writer.

Kept as the packages install it: owners, set-user-ID bits, links. Left out: what names the building
machine (host name, resolver, package sources), caches, logs, device nodes (the engine brings its own),
compiled Python files (their stamps would not fit). This module does not know stages.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from qdc.core.errors import COULD_NOT, QdcError
from qdc.image.children import ends_with_parent
from qdc.image.tar import CHUNK, END, EPOCH, Entry, EntryType, header, padded

PACKAGES = ("ca-certificates", "libgomp1", "libnuma1", "libstdc++6", "python3")
"""What the launcher and vLLM's wheels need beside Debian's required packages."""

_INSTALL_HINT = "as root: apt-get install --no-install-recommends mmdebstrap, then build again as root"
_DROPPED_FOLDERS = ("dev/", "proc/", "sys/", "run/", "tmp/", "var/cache/", "var/log/", "var/lib/apt/lists/")
_DROPPED = re.compile(
    r"(etc/(hostname|resolv\.conf|hosts|machine-id|\.pwd\.lock|apt/sources\.list.*)"
    r"|etc/(apt/apt\.conf|dpkg/dpkg\.cfg)\.d/99mmdebstrap"
    r"|etc/(passwd|group|shadow|gshadow|subuid|subgid)-"
    r"|var/lib/dbus/machine-id|var/lib/dpkg/(.*-old|lock.*)|.*\.pyc|(.*/)?__pycache__(/.*)?)"
)
_KINDS: dict[bytes, EntryType] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.LNKTYPE: "hardlink",
    tarfile.SYMTYPE: "symlink",
    tarfile.DIRTYPE: "dir",
}


def bootstrap(suite: str, packages: Sequence[str], tar: Path, log: Path) -> None:
    """Run mmdebstrap for `suite` with `packages` into `tar`. Raises QdcError `stage.base-image.*` (exit 4).

    The mirror is mmdebstrap's default, or `QDC_DEBIAN_MIRROR`: a user setting, never part of the image.
    """
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise QdcError(
            "stage.base-image.mmdebstrap",
            "mmdebstrap is not installed, and it makes the Debian base of the image",
            hint=_INSTALL_HINT,
            exit_code=COULD_NOT,
        )
    if os.geteuid() != 0:
        raise QdcError(
            "stage.base-image.root",
            "making a Debian base needs root (mmdebstrap unpacks packages with their owners)",
            hint="run the same command as root (sudo -E), or name an OCI layout as image.base",
            exit_code=COULD_NOT,
        )
    excludes = [f"path-exclude=/usr/share/{name}/*" for name in ("man", "locale", "info", "doc")]
    options = [*excludes, "path-include=/usr/share/doc/*/copyright", "force-unsafe-io"]
    command = [tool, "--variant=minbase", "--format=tar", "--include=" + ",".join(packages)]
    command += ["--aptopt=Acquire::Languages none", *(f"--dpkgopt={option}" for option in options)]
    command += [suite, str(tar)]
    if mirror := os.environ.get("QDC_DEBIAN_MIRROR"):
        command.append(mirror)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C", "TZ": "UTC"}
    with log.open("wb") as stream:
        code = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            umask=0o022,
            preexec_fn=ends_with_parent(),
        ).returncode
    if code != 0:
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise QdcError(
            "stage.base-image.failed",
            f"mmdebstrap ended with status {code}: {tail}",
            file=log,
            hint="check that Debian's archive can be reached (QDC_DEBIAN_MIRROR names another mirror)",
            exit_code=COULD_NOT,
        )


def _kept(path: str) -> bool:
    return not path.startswith(_DROPPED_FOLDERS) and not _DROPPED.fullmatch(path)


def _entry(path: str, member: tarfile.TarInfo) -> Entry:
    kind = _KINDS[member.type]
    prefix = "SCHILY.xattr."
    xattrs = [(k[len(prefix) :], v) for k, v in member.pax_headers.items() if k.startswith(prefix)]
    link = member.linkname.removeprefix("./") if kind == "hardlink" else member.linkname
    return Entry(
        path=path,
        type=kind,
        mode=0o777 if kind == "symlink" else member.mode & 0o7777,
        size=member.size if kind == "file" else 0,
        link=link if kind in ("hardlink", "symlink") else None,
        uid=member.uid,
        gid=member.gid,
        xattrs=tuple(sorted(xattrs)),
    )


def _plan(source: tarfile.TarFile) -> list[tuple[Entry, tarfile.TarInfo]]:
    """What to write, sorted: of several names of one file the first holds it and the others link to it."""
    members: dict[str, tuple[Entry, tarfile.TarInfo]] = {}
    for member in source:
        path = member.name.removeprefix("./").strip("/")
        if path not in ("", ".") and member.type in _KINDS and _kept(path):
            members[path] = (_entry(path, member), member)
    groups: dict[str, list[str]] = {}
    for path, (entry, _) in members.items():
        if entry.type == "hardlink" and entry.link in members:
            groups.setdefault(entry.link, [entry.link]).append(path)
        elif entry.type == "hardlink":
            raise QdcError("image.path", f"{path} links to {entry.link}, which is left out", exit_code=COULD_NOT)
    for held, names in groups.items():
        content, member = members[held]
        first, *others = sorted(names)
        members[first] = (_renamed(content, first, "file", None), member)
        for name in others:
            members[name] = (_renamed(content, name, "hardlink", first), member)
    return [members[path] for path in sorted(members)]


def _renamed(entry: Entry, path: str, kind: EntryType, link: str | None) -> Entry:
    size = entry.size if kind == "file" else 0
    return Entry(path, kind, entry.mode, size, None, link, entry.uid, entry.gid, entry.xattrs)


def _chunks(source: tarfile.TarFile) -> Iterator[bytes]:
    for entry, member in _plan(source):
        yield header(entry)
        if entry.type == "file" and entry.size:
            stream = source.extractfile(member)
            assert stream is not None
            while chunk := stream.read(CHUNK):
                yield padded(chunk) if len(chunk) < CHUNK else chunk
    yield END


def rewrite(tar: Path, out: IO[bytes]) -> tuple[str, int]:
    """Write mmdebstrap's `tar` again, sorted, with fixed times; return SHA-256 (64 hex) and size in bytes."""
    state, size = hashlib.sha256(), 0
    with tarfile.open(tar, "r:", encoding="utf-8", errors="surrogateescape") as source:
        for chunk in _chunks(source):
            state.update(chunk)
            size += out.write(chunk)
    return state.hexdigest(), size


def packages(tar: Path) -> list[dict[str, str]]:
    """Installed packages: `{name, version, architecture}`, sorted by name."""
    with tarfile.open(tar, "r:") as source:
        stream = source.extractfile("./var/lib/dpkg/status")
        assert stream is not None
        return installed(stream.read().decode())


def installed(text: str) -> list[dict[str, str]]:
    """What dpkg's own record says is installed: `{name, version, architecture}`, sorted by name."""
    found = []
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            names = (("name", "Package"), ("version", "Version"), ("architecture", "Architecture"))
            found.append({name: fields.get(field, "") for name, field in names})
    return sorted(found, key=lambda package: package["name"])
