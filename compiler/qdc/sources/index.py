"""Where a wheel is: asked of the package index that pip is set up with, in its JSON form (PEP 691).

Which index that is, pip knows: its settings and its own default are not repeated here.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from qdc.sources import web

_ACCEPT = "application/vnd.pypi.simple.v1+json"
_LIMIT = 256 << 20
_ASK = """
import json
from pip._internal.commands import create_command
options = create_command("download").parser.parse_args([])[0]
print(json.dumps([] if options.no_index else [options.index_url, *options.extra_index_urls]))
"""


class NotFound(Exception):
    """No such wheel; the text says what there is instead."""


def indexes() -> list[str]:
    """The addresses of pip's indexes on the web, first to last. Raises NotFound where there is none."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        found = [str(url) for url in json.loads(done.stdout.splitlines()[-1])]
    except (ValueError, IndexError):
        raise NotFound("pip does not say which package index it uses") from None
    found = [url for url in found if urlsplit(url).scheme in ("http", "https")]
    if not found:
        raise NotFound("pip is set up without a package index on the web")
    return found


def find(pin: str, sha256: str) -> web.File:
    """The wheel `name==version` with this SHA-256. Raises NotFound, or WebError of the last index."""
    name, version = pin.split("==")
    misses: list[str] = []
    failure: web.WebError | None = None
    for index in indexes():
        address, headers = _credentials(index)
        page = f"{address.rstrip('/')}/{_normal(name)}/"
        try:
            data, final = web.read(page, {"Accept": _ACCEPT, **headers}, _LIMIT)
        except web.WebError as error:
            if error.status == 404:
                misses.append(f"the index has no package {name}")
            else:
                failure = error
            continue
        files = _files(data)
        for file in files:
            if file["hashes"].get("sha256") != sha256:
                continue
            if not _is(file["filename"], name, version):
                raise NotFound(f"that SHA-256 is of {file['filename']}, not of {pin}")
            url = urljoin(final, file["url"])
            size = file.get("size")
            kept = headers if web.origin(url) == web.origin(address) else {}
            return web.File(url, kept, size if isinstance(size, int) else None, sha256)
        misses.append(_instead(files, name, version))
    if failure is not None:
        raise failure
    raise NotFound("; ".join(dict.fromkeys(misses)))


def _credentials(index: str) -> tuple[str, dict[str, str]]:
    """The address without `user:password@`, and the header that says it."""
    parts = urlsplit(index)
    if parts.username is None:
        return index, {}
    host = parts.netloc.rpartition("@")[2]
    secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {base64.b64encode(secret).decode()}"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _files(data: bytes) -> list[dict[str, Any]]:
    try:
        value = json.loads(data)
        files = [file for file in value["files"] if isinstance(file["hashes"], Mapping) and str(file["url"])]
        return [file for file in files if isinstance(file["filename"], str)]
    except (ValueError, KeyError, TypeError):
        raise NotFound("the index does not answer in JSON (PEP 691)") from None


def _is(filename: str, name: str, version: str) -> bool:
    parts = filename.split("-")
    return filename.endswith(".whl") and _normal(parts[0]) == _normal(name) and parts[1:2] == [version]


def _instead(files: list[dict[str, Any]], name: str, version: str) -> str:
    """What the index has in place of the wheel that was asked for."""
    same = [file for file in files if _is(file["filename"], name, version)]
    if same:
        listed = ", ".join(f"{file['filename']} {file['hashes'].get('sha256')}" for file in same[:3])
        return f"no wheel {name}=={version} has that SHA-256; there is {listed}"
    wheels = [file["filename"] for file in files if file["filename"].endswith(".whl")]
    return f"the index has no wheel {name}=={version}" + (f"; its last one is {wheels[-1]}" if wheels else "")
