"""What records say of the machine that a stage or a build ran on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """What the build record says of this machine: architecture, cores, processor model."""
    import platform

    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"machine": platform.machine(), "cores": os.cpu_count(), "processor": model}
