"""What a stage is given. A stage module defines `run(context)` and nothing else that others call.

A stage knows neither the recipe, nor the store, nor its key: named read-only input folders, parameters,
one empty output folder to fill, a place for partial work, and a way to say how far it is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Report = Callable[[int, int, str], None]


def silent(done: int, total: int, note: str) -> None:
    """A report that nobody listens to."""


@dataclass(frozen=True)
class Context:
    """`inputs`: role -> read-only folder. `digests`: role -> that folder's tree digest (64 hex).

    `params`: JSON values, resolved (no defaults are left to the stage). `output`: an empty folder.
    `partial`: a folder that survives a failed or killed attempt and is offered again to the same key only.
    `threads`: CPU threads the stage may use; `device`: where its models go, as torch names it (both execution details,
    never in a key). `rank` of `processes`: which of the processes of one training this is (torchrun's); rank 0 alone
    reports and writes the output.
    """

    inputs: dict[str, Path]
    digests: dict[str, str]
    params: dict[str, Any]
    output: Path
    partial: Path
    threads: int = 1
    report: Report = field(default=silent)
    rank: int = 0
    processes: int = 1
    device: str = "cpu"

    def pass_on(self, file: Path) -> None:
        """Put a file of an input into the output as it is: a link, which is published as the same object."""
        (self.output / file.name).symlink_to(file.resolve())


def pipe_report(descriptor: int, interval_s: float = 0.2) -> Report:
    """A report that writes one JSON line an `interval_s` (and the last) to an open file descriptor."""
    last = 0.0

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < interval_s:
            return
        last = now
        os.write(descriptor, (json.dumps({"done": done, "total": total, "note": note}) + "\n").encode())

    return report
