"""Micro, built once for all tests that need a real build, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from qdc.report.answers import checked

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ["--set", "image.base={scratch: true}"]
"""No Debian base and no runtime packages: an image of data, built in seconds."""


def qdc(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line; an answer in JSON must have the shape that `qdc.report.answers` gives its verb."""
    done = subprocess.run(
        [sys.executable, "-m", "qdc", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler"), **environment},
    )
    if "--json" in arguments and done.stdout:
        value = json.loads(done.stdout)
        checked("error" if "error" in value else str(arguments[0]), value)
    return done


class Micro:
    """A folder with recipes and a store; `first` is the answer of the first build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipes" / "micro.yaml"
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        self.store = folder / "artifacts"
        self.first = self.build()

    def build(self, *more: str, json_: bool = True, **environment: str) -> Any:
        arguments = ["build", str(self.recipe), "--store", str(self.store), *SCRATCH, *more]
        done = qdc(*arguments, *(["--json"] if json_ else []), cwd=self.folder, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if json_ else done.stdout

    def export(self, build: str, file: Path) -> Path:
        done = qdc("export", build, f"archive:{file}", "--store", str(self.store))
        assert done.returncode == 0, done.stderr
        return file

    def written(self) -> int:
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())
