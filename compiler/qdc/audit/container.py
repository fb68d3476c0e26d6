"""How a container begins: ENTRYPOINT, CMD, ENV, WorkingDir and User of an image, and the arguments of `docker run`.

Gives the words of the first process and its environment, each with where it came from. It reads no file.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qdc.audit.shell_programs import PATH
from qdc.audit.shell_state import Place, Value, unknown
from qdc.core.errors import QdcError

ENV, RUN, ENGINE = Place("ENV"), Place("docker run"), Place("engine")
CONFIGURATION = "(image configuration)"
_PLAIN = set("ditPq") | {"rm", "init", "privileged", "read-only", "no-healthcheck", "oom-kill-disable", "publish-all",
                         "sig-proxy", "disable-content-trust", "detach", "interactive", "tty", "quiet",
                         "use-api-socket"}  # fmt: skip
_SHORT = {"e": "env", "w": "workdir", "u": "user", "v": "volume"}


@dataclass
class Arguments:
    """What of a `docker run` line changes the process that starts."""

    environment: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    entrypoint: str | None = None
    workdir: str | None = None
    user: str | None = None
    words: list[str] | None = None


@dataclass
class Start:
    """The first process. `root`: whether it runs as root; `mounts`: paths that are not the image's."""

    words: tuple[Value, ...]
    environment: dict[str, Value]
    cwd: Value
    root: bool
    mounts: tuple[str, ...]


def run_arguments(line: str) -> Arguments:
    """`-e K=4 IMAGE serve --x`, as after `docker run`. Raises QdcError `audit.run` for what cannot be read so."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise _bad(f"{line!r}: {error}") from error
    if words[:2] == ["docker", "run"] or words[:2] == ["podman", "run"]:
        words = words[2:]
    found = Arguments()
    while words and words[0].startswith("-"):
        words = _option(words, found)
    if not words:
        raise _bad(f"{line!r} names no image; the word IMAGE will do")
    found.words = words[1:] or None
    return found


def _option(words: list[str], found: Arguments) -> list[str]:
    """Take one option (and its value); gives the rest."""
    word, rest = words[0], words[1:]
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
    else:
        letters = word[1:]
        while len(letters) > 1 and letters[0] in _PLAIN:
            letters = letters[1:]
        name, value = letters[:1], letters[1:].removeprefix("=")
        equals = "=" if value else ""
        name = _SHORT.get(name, name)
    if name in _PLAIN:
        return rest
    if not equals:
        if not rest:
            raise _bad(f"{word} has no value")
        value, rest = rest[0], rest[1:]
    if name == "env":
        if not re.fullmatch(r"[^=\s]+(=.*)?", value, re.DOTALL):
            raise _bad(f"{word} {value!r} names no variable")
        found.environment.append(value)
    elif name == "env-file":
        raise _bad(f"{word} names a file outside of the image", "write its lines as -e NAME=VALUE")
    elif name in ("entrypoint", "workdir", "user"):
        setattr(found, name, value)
    elif name in ("volume", "mount", "tmpfs"):
        found.mounts += _mounted(name, value)
    elif name == "volumes-from":
        raise _bad(f"{word} brings files that are not in the image")
    return rest


def _mounted(name: str, value: str) -> list[str]:
    if name == "mount":
        table = dict(part.partition("=")[::2] for part in value.split(","))
        target = table.get("target") or table.get("destination") or table.get("dst")
        return [target] if target else []
    parts = value.split(":")
    return [parts[0] if name == "tmpfs" or len(parts) == 1 else parts[1]]


def start(settings: Mapping[str, Any], run: Arguments | None = None) -> Start:
    """The first process of a container of an image with these `settings` (the `config` of its configuration)."""
    run = run or Arguments()
    entrypoint = _words(settings.get("Entrypoint"), Place("file", CONFIGURATION, 1))
    command = _words(settings.get("Cmd"), Place("file", CONFIGURATION, 1))
    if run.entrypoint is not None:
        entrypoint, command = ((Value(run.entrypoint, RUN),) if run.entrypoint else ()), ()
    if run.words is not None:
        command = tuple(Value(word, RUN) for word in run.words)
    user = run.user if run.user is not None else settings.get("User")
    root = not isinstance(user, str) or user.partition(":")[0] in ("", "root", "0")
    folder = run.workdir or settings.get("WorkingDir") or "/"
    cwd = posixpath.normpath(str(folder)) if str(folder).startswith("/") else f"/{folder}"
    volumes = settings.get("Volumes")
    mounts = (*(str(path) for path in volumes), *run.mounts) if isinstance(volumes, dict) else tuple(run.mounts)
    environment = _environment(settings.get("Env"), run.environment, root)
    return Start((*entrypoint, *command), environment, Value(cwd, RUN if run.workdir else ENV), root, mounts)


def _words(value: Any, place: Place) -> tuple[Value, ...]:
    if isinstance(value, str):
        return (Value("/bin/sh", place), Value("-c", place), Value(value, place))
    return tuple(Value(item, place) for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _environment(given: Any, run: list[str], root: bool) -> dict[str, Value]:
    found: dict[str, Value] = {"PATH": Value(PATH, ENGINE)}
    found["HOME"] = Value("/root", ENGINE) if root else unknown(ENGINE, "the home of a user who is not root")
    found["HOSTNAME"] = unknown(ENGINE, "the name of the container")
    for item in given if isinstance(given, list) else []:
        if isinstance(item, str) and "=" in item:
            name, _, text = item.partition("=")
            found[name] = Value(text, ENV).over(_real(found.get(name)))
    for item in run:
        name, equals, text = item.partition("=")
        value = Value(text, RUN) if equals else unknown(RUN, f"-e {name} takes it from the caller", many=True)
        found[name] = value.over(_real(found.get(name)))
    return found


def _real(value: Value | None) -> Value | None:
    """A value that a person set (not the engine)."""
    return value if value is not None and value.place != ENGINE else None


def _bad(message: str, hint: str = 'for example --run "-e K=4 IMAGE serve"') -> QdcError:
    return QdcError("audit.run", f"--run: {message}", hint=hint)
