"""Other tools, each in a virtual environment of its own, for benchmarks that run them beside qdc.

The environments lie in the user's cache folder, outside the repository, and are made once for each list of packages.
Knows no tool and no figure.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path


def cache() -> Path:
    """Where the environments, and other things that benchmarks keep between runs, lie."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "qdc-benchmarks"


def peer(name: str, packages: list[str]) -> Path:
    """The interpreter of an environment that holds `packages` (as pip names them), made here where it is missing.

    `name` begins the folder's name; its commands lie beside the interpreter. Raises CalledProcessError where pip
    fails. Two benchmarks that ask at once share one environment.
    """
    wanted = json.dumps([sys.version, sorted(packages)])
    folder = cache() / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python, ready = folder / "bin" / "python", folder / "ready"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
            subprocess.run(install, check=True)
            ready.touch()
    return python


def versions(python: Path) -> dict[str, str]:
    """Package (as pip lists it, in lower case) -> version of an environment."""
    command = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {item["name"].lower(): item["version"] for item in json.loads(listed)}
