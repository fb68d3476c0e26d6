"""Programs that stages start: they end with the stage, however it ends.

A worker may be killed at any instant; a child that went on writing would meddle with the next attempt.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ends_with_parent() -> Callable[[], None]:
    """A `preexec_fn` that asks Linux to send SIGTERM to the child when the thread that started it is gone."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
