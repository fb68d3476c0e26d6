"""How much memory a container took at most, seen from the host, and how full the card was.

The kernel's own peak counts page cache, which it gives back when asked; so beside it what cannot be given back
(`anon` and shared memory) is sampled while the checks run. Knows cgroups of both versions and `nvidia-smi`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdc.gate.report import Check

FULL = 0.9
"""Part of the limit above which there is no head-room."""
CARD_FULL = 0.98
EVERY_S = 0.5
ROOT = Path("/sys/fs/cgroup")


@dataclass
class Watched:
    """`folder`: the container's memory cgroup on this machine, None where it cannot be read. Figures in bytes."""

    folder: Path | None
    held: int = 0
    """Most that could not be given back, as sampled."""
    stopped: threading.Event = field(default_factory=threading.Event)

    def peak(self) -> int | None:
        """The kernel's highest figure, page cache included."""
        return self._number("memory.peak", "memory.max_usage_in_bytes")

    def limit(self) -> int | None:
        return self._number("memory.max", "memory.limit_in_bytes")

    def sample(self) -> None:
        if self.folder is None:
            return
        with contextlib.suppress(OSError, ValueError):
            rows = dict(line.split()[:2] for line in (self.folder / "memory.stat").read_text().splitlines() if line)
            names = ("anon", "shmem") if "anon" in rows else ("total_rss", "total_shmem")
            self.held = max(self.held, sum(int(rows.get(name, 0)) for name in names))

    def _number(self, *names: str) -> int | None:
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                if self.folder is not None:
                    return int((self.folder / name).read_text())
        return None


@contextlib.contextmanager
def watched(pid: int | None, root: Path = ROOT, proc: Path = Path("/proc")) -> Iterator[Watched]:
    """Samples the memory of the container whose first process is `pid` while the context lasts."""
    found = Watched(cgroup(pid, root, proc))

    def keep_looking() -> None:
        while not found.stopped.wait(EVERY_S):
            found.sample()

    looking = threading.Thread(target=keep_looking, daemon=True)
    looking.start()
    try:
        yield found
    finally:
        found.stopped.set()
        looking.join()


def cgroup(pid: int | None, root: Path = ROOT, proc: Path = Path("/proc")) -> Path | None:
    """The folder of the memory cgroup of a process, of either version; None if there is none to read."""
    if pid is None:
        return None
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = root / ("memory" if controllers else "") / path.lstrip("/")
            if controllers in ("", "memory") and (folder / "memory.stat").is_file() and path != "/":
                return folder
    return None


def check_memory(seen: Watched, machine: int | None, gpus: bool) -> Check:
    """Peak against the least of the container's own limit and the machine's memory; the card by nvidia-smi."""
    seen.sample()
    peak, own = seen.peak(), seen.limit()
    limits = [value for value in (own, machine) if value]
    figure: dict[str, Any] = {}
    if gpus:
        card = card_memory()
        if card is None:
            return Check("memory", "not-run", None, "no nvidia-smi on this machine: the card's memory was not seen")
        name, used, total = card
        figure["card"] = f"{name}, {used} of {total} MiB"
        if used > CARD_FULL * total:
            return Check("memory", "fail", figure, f"the card is full to {used / total:.1%}")
    if peak is None or not limits:
        why = "the container's cgroup cannot be read from here: its engine is on another machine, or hides it"
        return Check("memory", "not-run", figure or None, why)
    limit = min(limits)
    figure |= {"peak GiB": round(peak / 2**30, 2), "held GiB": round(seen.held / 2**30, 2)}
    figure["of GiB"] = round(limit / 2**30, 1)
    if peak <= FULL * limit:
        return Check("memory", "pass", figure, f"peak is {peak / limit:.0%} of what there is")
    if seen.held <= FULL * limit:
        return Check(
            "memory", "pass", figure, f"{seen.held / limit:.0%} without page cache, which the kernel gives back"
        )
    return Check("memory", "fail", figure, f"{seen.held / limit:.0%} of what there is: under {1 - FULL:.0%} is left")


def card_memory() -> tuple[str, int, int] | None:
    """(name, used, total in MiB) of the fullest card; None without nvidia-smi or a card."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        rows = [line.rsplit(",", 2) for line in lines if line.strip()]
        if rows:
            return max(((name.strip(), int(used), int(total)) for name, used, total in rows), key=lambda row: row[1])
    return None
