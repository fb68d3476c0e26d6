"""Text without credentials: what is said, logged or kept of a URL, and of what others say about it.

Knows where credentials are written (URLs, environment variables), not what they are for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, urlsplit

_USER = re.compile(r"(?<=://)(?:[^/\s@:]*:(?!\d+(?:/|\Z))[^\s@]*@(?:[^/\s@]*@)*|[^/\s@]*(?:@[^/\s@]*)*@)")
"""The user part of a URL; a password may have slashes in it, although it should not."""
_QUERY = re.compile(r"(\w://[^\s?#'\"`]*)[?#][^\s'\"`]*")
_NAMED = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|SAS|CONNECTION_STRING", re.IGNORECASE)
SHORTEST = 4
"""Shorter values are no secrets: taking `1` out of every text would leave none."""
HIDDEN = "***"


def without_credentials(text: str) -> str:
    """`text` with no user, password, query or fragment in any URL."""
    return _QUERY.sub(r"\1", _USER.sub("", text))


def secrets(url: str = "", environment: Mapping[str, str] | None = None) -> set[str]:
    """Every value that must not be shown: of the URL's user part and query, and of variables named for secrets."""
    found = []
    parts = urlsplit(url)
    for user in _USER.findall(url):
        found += [user[:-1], *user[:-1].split(":"), user[:-1].partition(":")[2]]
    if parts.query:
        found += [parts.query, *(item.partition("=")[2] for item in parts.query.split("&"))]
    found += [parts.fragment] if parts.fragment else []
    variables = os.environ if environment is None else environment
    found += [value for name, value in variables.items() if _NAMED.search(name)]
    return {form for value in found for form in (value, unquote(value)) if len(form) >= SHORTEST}


def hide(text: str, hidden: Iterable[str]) -> str:
    """`text` without credentials in URLs and without the values `hidden`."""
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return without_credentials(text)
