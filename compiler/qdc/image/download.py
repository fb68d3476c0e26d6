"""The wheels of a hash-pinned lock, fetched by pip and kept until all are there.

pip only downloads: nothing of a wheel is run or built. Wheels that are present with the right hash are not
asked for again, so an interrupted download goes on where it stopped. This module does not know what the
wheels are for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import sha256_file
from qdc.image.children import ends_with_parent

_LINE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?==([^\s;]+)\s*(;.*?)?((?:\s+--hash=sha256:[0-9a-f]{64})+)"
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_BATCH = 12


@dataclass(frozen=True)
class Pin:
    """One requirement of a lock: any wheel whose SHA-256 is in `hashes` satisfies it."""

    name: str
    version: str
    hashes: tuple[str, ...]
    text: str


def read_lock(text: str) -> list[Pin]:
    """Pins of a lock in pip's requirements form. Raises QdcError `image.lock` at a line without a hash."""
    pins: dict[str, Pin] = {}
    for number, line in _logical_lines(text):
        match = _LINE.fullmatch(line)
        if match is None:
            raise QdcError(
                "image.lock",
                f"line {number} of the lock is not `name==version --hash=sha256:<64 hex>`: {line[:60]}",
                exit_code=COULD_NOT,
            )
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        if name in pins:
            raise QdcError("image.lock", f"the lock pins {name} twice (line {number})", exit_code=COULD_NOT)
        pins[name] = Pin(name, match[3], tuple(_HASH.findall(match[5])), line)
    return list(pins.values())


def _logical_lines(text: str) -> list[tuple[int, str]]:
    lines, held, start = [], "", 1
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if not held:
            start = number
        held += " " + line.removesuffix("\\").strip()
        if not line.endswith("\\"):
            if held.strip():
                lines.append((start, held.strip()))
            held = ""
    return lines


def _present(folder: Path, pins: list[Pin]) -> dict[str, Path]:
    """Pin name -> its wheel in `folder`. Files that no pin asks for, half-written ones too, are removed."""
    wanted = {digest: pin.name for pin in pins for digest in pin.hashes}
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name = wanted.get(sha256_file(path)) if path.suffix == ".whl" else None
        if name is None or name in found:
            path.unlink()
        else:
            found[name] = path
    return found


def _platform_options(python: str) -> list[str]:
    """pip's words for "a wheel for CPython `python` on Debian 12, x86-64", whatever runs pip."""
    digits = python.replace(".", "")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    options = ["--implementation", "cp", "--python-version", python]
    options += [option for abi in (f"cp{digits}", "abi3", "none") for option in ("--abi", abi)]
    return options + [option for platform in platforms for option in ("--platform", platform)]


def download(lock: str, python: str, folder: Path, report: Callable[[int, int, str], None]) -> list[tuple[Pin, Path]]:
    """Every pin of `lock` with its wheel in `folder`, by name. Raises QdcError `stage.runtime.download`."""
    pins = read_lock(lock)
    folder.mkdir(parents=True, exist_ok=True)
    found = _present(folder, pins)
    missing = [pin for pin in pins if pin.name not in found]
    for start in range(0, len(missing), _BATCH):
        report(len(pins) - len(missing) + start, len(pins), "download wheels")
        _pip(missing[start : start + _BATCH], python, folder)
    if missing:
        found = _present(folder, pins)
    lacking = [pin.name for pin in pins if pin.name not in found]
    if lacking:
        raise _failed(f"pip ended well but brought no wheel for {', '.join(lacking)}")
    return [(pin, found[pin.name]) for pin in sorted(pins, key=lambda pin: pin.name)]


def _pip(pins: list[Pin], python: str, folder: Path) -> None:
    wanted = folder / "wanted.txt"
    wanted.write_text("".join(f"{pin.text}\n" for pin in pins))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", *_platform_options(python)]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=ends_with_parent(),
    )
    wanted.unlink()
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise _failed(f"pip download ended with status {done.returncode}: {' | '.join(lines[-3:])}")


def _failed(why: str) -> QdcError:
    return QdcError(
        "stage.runtime.download",
        why,
        hint="check that pip reaches its index (pip config list); what was fetched is kept for the next try",
        exit_code=COULD_NOT,
    )
