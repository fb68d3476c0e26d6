"""What a page of figures says of the machine, and the wait for a quiet one."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.5
"""Load a core at which timing may begin."""
PATIENCE = 300.0
"""Seconds to wait for it."""


def commit() -> str:
    """`, commit <12 hex>` of what is measured, and whether a folder that matters differs from it; empty outside git."""
    name = _git("rev-parse", "HEAD")[:12]
    changed = _git("status", "--porcelain", "--", "compiler", "tests", "benchmarks", "recipes")
    return (f", commit {name}" if name else "") + (" with uncommitted changes" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def lines(*more: str, measured: str | None = None) -> list[str]:
    """The machine, then what a page adds, then Python and what is measured (as `commit` says it), as list items."""
    info = Path("/proc/cpuinfo").read_text()
    model = (re.search(r"model name\s*: (.*)", info) or ["", platform.machine()])[1]
    memory = int((re.search(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text()) or ["", "0"])[1]) / 1e6
    return [
        f"- machine: {os.cpu_count()} cores, {model}, {memory:.0f} GB, {platform.system()} {platform.release()}",
        *(f"- {line}" for line in more),
        f"- Python {platform.python_version()}{commit() if measured is None else measured}",
    ]


def quiet(patience: float = PATIENCE) -> str:
    """Wait until the machine is idle, for so many seconds at most; returns the load then, as a sentence."""
    limit, start = QUIET * (os.cpu_count() or 1), time.monotonic()
    while os.getloadavg()[0] > limit and time.monotonic() - start < patience:
        time.sleep(10)
    load = os.getloadavg()
    busy = "" if load[0] <= limit else "; the machine was busy, so times are too long and rates too low"
    return f"Load average when timing began: {load[0]:.2f} {load[1]:.2f} {load[2]:.2f}{busy}."
