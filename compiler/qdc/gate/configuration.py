"""Checks of an image before anything starts: what `docker run IMAGE COMMAND` would start, and on what machine.

Pure functions from an image's configuration and files to checks; nothing is executed. Knows the contract.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats.oci import Image
from qdc.formats.overlay import Entry
from qdc.gate.contracts import Contract
from qdc.gate.report import Check

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMPORTED = re.compile(r"imported from", re.IGNORECASE)
MACHINES = {"amd64": 62, "arm64": 183}
"""ELF's e_machine by the name that image configurations use."""
SECRET = re.compile(r"(\w*_)?(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY(_ID)?|CREDENTIALS)(_\w+)?")
NO_SECRET = re.compile(r"TOKENIZERS?_\w+|\w+_TOKENS|.*_(FILE|PATH|DIR)")
INTERPRETER = re.compile(r"(python[\d.]*|(ba|da|k|z)?sh|perl|ruby|node)")
CUDA = re.compile(r"(.*/)?lib(cudart|torch_cuda)\b[^/]*\.so")
PYTHONS = ("usr/bin/python3", "usr/local/bin/python3", "opt/venv/bin/python3", "opt/conda/bin/python3")


def check_layers(image: Image) -> Check:
    """An image of one layer whose whole history is an import was flattened: labels, settings and layers are gone."""
    history = image.config.get("history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    said = [str(entry.get("comment") or "") for entry in entries] + [str(image.config.get("comment") or "")]
    imported = next((text for text in said if IMPORTED.search(text)), None)
    if len(image.layers) == 1 and len(entries) <= 1 and imported is not None:
        why = (
            f"flattened by export and import (history: `{imported}`): entrypoint, environment and labels of the built "
            "image are lost. Upload the image that was built"
        )
        return Check("layers", "fail", 1, why)
    return Check("layers", "pass", len(image.layers), "layers as they were built")


def check_architecture(image: Image, contract: Contract) -> Check:
    """The configuration is for the contract's machine, and so is the program that starts."""
    os, architecture = image.config.get("os"), image.config.get("architecture")
    shown = f"{os}/{architecture}"
    if (os, architecture) != ("linux", contract.architecture):
        return Check("architecture", "fail", shown, f"the contract's machine is linux/{contract.architecture}")
    program = _program(image, _words(image, contract.command))
    machine = _machine(image, program[1]) if program is not None else None
    if machine is not None and machine != MACHINES.get(contract.architecture):
        found = next((name for name, number in MACHINES.items() if number == machine), f"ELF machine {machine}")
        return Check(
            "architecture", "fail", shown, f"/{program[1].path} is a program for {found}" if program else shown
        )
    return Check("architecture", "pass", shown, f"the contract's machine is linux/{contract.architecture}")


def check_entrypoint(image: Image, contract: Contract) -> Check:
    """`docker run IMAGE COMMAND` finds a program, its interpreter and its script."""
    settings = image.settings
    entrypoint, command = _list(settings.get("Entrypoint")), _list(settings.get("Cmd"))
    asked = " ".join(("docker run IMAGE", *contract.command))
    words = _words(image, contract.command)
    if not words:
        return Check("entrypoint", "fail", None, f"`{asked}` starts nothing: there is neither entrypoint nor command")
    found = _program(image, words)
    if found is None and not entrypoint:
        lost = f"; its command {' '.join(command)} is replaced by it" if command else ""
        why = (
            f"there is no entrypoint, so `{asked}` looks for a program `{words[0]}`, which is not in the image{lost}. "
            "Give the image an ENTRYPOINT"
        )
        return Check("entrypoint", "fail", None, why)
    if found is None:
        return Check("entrypoint", "fail", words, f"`{asked}` starts {words[0]}, which is not in the image")
    name, entry = found
    if not entry.mode & 0o111:
        return Check("entrypoint", "fail", words, f"{name} may not be executed (mode {entry.mode & 0o777:o})")
    missing = _missing_part(image, entry, words)
    if missing:
        return Check("entrypoint", "fail", words, missing)
    ignored = len(entrypoint) >= 3 and INTERPRETER.fullmatch(posixpath.basename(words[0])) and entrypoint[1] == "-c"
    if ignored and contract.command and not re.search(r"\$[@*0-9{]", entrypoint[2]):
        why = f"`{asked}` starts {name} in shell form, which does not pass on `{contract.command[0]}`"
        return Check("entrypoint", "pass", words, why)
    return Check("entrypoint", "pass", words, f"`{asked}` starts {name}")


def check_environment(image: Image) -> Check:
    """Each entry is NAME=VALUE and stands once; none holds a secret."""
    entries = _list(image.settings.get("Env"))
    seen: dict[str, str] = {}
    for entry in entries:
        name, mark, value = entry.partition("=")
        if not mark or not name:
            return Check("environment", "fail", len(entries), f"`{entry[:60]}` is no NAME=VALUE")
        if seen.get(name, value) != value:
            return Check("environment", "fail", len(entries), f"{name} stands twice, with two values")
        if value and SECRET.fullmatch(name) and not NO_SECRET.fullmatch(name):
            why = f"{name} is in the image for everybody who gets it to read. Remove it, and let it no longer be valid"
            return Check("environment", "fail", len(entries), why)
        seen[name] = value
    port = seen.get("VLLM_PORT")
    if port is not None and not port.isdecimal():
        return Check("environment", "fail", len(entries), f"VLLM_PORT is {port!r}, and vLLM stops at what is no number")
    return Check("environment", "pass", len(entries), "well-formed, without a secret")


def find_python(image: Image) -> str | None:
    """Path of a Python in the image, through which the gate can ask from inside; None if there is none."""
    folders = [f"{folder.strip('/')}/python3" for folder in _path(image)]
    for path in (*PYTHONS, *folders):
        entry = _find(image, path)
        if entry is not None and entry.mode & 0o111:
            return f"/{path}"
    return None


def wants_gpu(image: Image) -> bool:
    """Whether an image that says nothing else is built for an NVIDIA card: by environment or libraries."""
    names = {entry.partition("=")[0] for entry in environment(image)}
    return bool(names & {"NVIDIA_REQUIRE_CUDA", "CUDA_VERSION"}) or any(map(CUDA.match, image.files()))


def environment(image: Image) -> list[str]:
    return _list(image.settings.get("Env"))


def _words(image: Image, command: Sequence[str]) -> list[str]:
    """The command line that `docker run IMAGE COMMAND` starts."""
    settings = image.settings
    return [*_list(settings.get("Entrypoint")), *(list(command) or _list(settings.get("Cmd")))]


def _path(image: Image) -> list[str]:
    given = [entry.partition("=")[2] for entry in environment(image) if entry.startswith("PATH=")]
    return [folder for folder in (given[-1] if given else DEFAULT_PATH).split(":") if folder.startswith("/")]


def _program(image: Image, words: Sequence[str]) -> tuple[str, Entry] | None:
    """The program of a command line and its file; None if it is not in the image."""
    if not words:
        return None
    if "/" in words[0]:
        names = [_absolute(image, words[0])]
    else:
        names = [posixpath.join(folder, words[0]) for folder in _path(image)]
    for name in names:
        entry = _find(image, name)
        if entry is not None:
            return name, entry
    return None


def _missing_part(image: Image, entry: Entry, words: Sequence[str]) -> str | None:
    """Which interpreter or script of the command line is not in the image, in words."""
    start = image.read(entry.path, 0, min(entry.size, 256))
    if start[:2] == b"#!":
        line = start[2:].split(b"\n")[0].decode("utf-8", "replace").split()
        if line and _find(image, line[0]) is None:
            return f"{words[0]} is a script for {line[0]}, which is not in the image"
        if line[:1] == ["/usr/bin/env"] and len(line) > 1 and _program(image, [line[1]]) is None:
            return f"{words[0]} is a script for {line[1]}, which is not in the image"
    if INTERPRETER.fullmatch(posixpath.basename(words[0])) and len(words) > 1 and not words[1].startswith("-"):
        script = _absolute(image, words[1])
        if _find(image, script) is None:
            return f"{words[0]} is to run {script}, which is not in the image"
    return None


def _machine(image: Image, entry: Entry) -> int | None:
    """e_machine of an ELF file; None for anything else."""
    head = image.read(entry.path, 0, min(entry.size, 20))
    return int.from_bytes(head[18:20], "little") if head[:4] == b"\x7fELF" and len(head) == 20 else None


def _find(image: Image, path: str) -> Entry | None:
    try:
        return image.find(path)
    except QdcError:
        return None


def _absolute(image: Image, path: str) -> str:
    folder = image.settings.get("WorkingDir")
    return posixpath.normpath(posixpath.join(folder if isinstance(folder, str) and folder else "/", path))


def _list(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
