"""Starts and watches worker processes. Knows nothing of keys, recipes or which stage is next."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from qdc.core.errors import COULD_NOT, QdcError

SOURCE_ROOT = Path(__file__).resolve().parents[2]
Progress = Callable[[int, int, str], None]


@dataclass
class Worker:
    """A running stage: its process, its report pipe, what it said of its failure."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    log: Path
    started: float
    progress: Progress
    error: dict[str, Any] | None = None
    buffer: bytes = b""
    seconds: float = 0.0

    def read(self) -> bool:
        """Take in what the worker has said; False at the end of its report."""
        chunk = os.read(self.pipe.fileno(), 65536)
        self.buffer += chunk
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            value = json.loads(line)
            if "error" in value:
                self.error = self.error or value["error"]  # of several processes the first to fail knows why
            else:
                self.progress(value["done"], value["total"], value["note"])
        return bool(chunk)

    def failure(self, code: int) -> QdcError:
        """Why it ended with `code`, as an error for the user."""
        said = self.error or {}
        if said:
            message = said["message"]
        elif code < 0:
            message = f"the stage was ended by signal {-code} ({signal.strsignal(-code) or 'unknown'})"
            if -code == signal.SIGKILL:
                message += "; the machine may be out of memory"
        else:
            message = f"the stage ended with exit code {code}"
        hint = said.get("hint") or (
            "what it printed is in the log; finished stages are kept, and partial work of "
            "this one: run the same command again to go on"
        )
        return QdcError(
            said.get("id", "stage.died"), f"stage {self.name}: {message}", file=self.log, hint=hint, exit_code=COULD_NOT
        )


def start(
    name: str, python: str, job: dict[str, Any], work: Path, log: Path, progress: Progress, keep: tuple[int, ...] = ()
) -> Worker:
    """Start `python -m qdc.run.worker` on `job` in its own session; `work` is its folder for the job file.

    The user's locale, time zone and umask do not reach it: they must not reach what it makes. Credentials of hubs and
    remotes do not either.

    `keep`: open files that stay open until the worker ends too, such as the lock on its key.
    """
    reading, writing = os.pipe()
    job = {**job, "report": writing, "parent": os.getpid()}
    path = work / "job.json"
    path.write_text(json.dumps(job))
    kept_out = ("VLLM_", "HF_", "AWS_", "FSSPEC_", "QDC_REMOTE", "RANK")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(kept_out)}
    environment |= {
        "PYTHONPATH": str(SOURCE_ROOT),
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(job["threads"]),
        "GOMP_SPINCOUNT": "10000",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    try:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [python, "-m", "qdc.run.worker", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=[writing, *keep],
                env=environment,
                cwd=work,
                umask=0o022,
                start_new_session=True,
            )
    except OSError as error:
        os.close(reading)
        raise QdcError(
            "environment.python",
            f"cannot start `{python}`: {error.strerror}",
            exit_code=COULD_NOT,
            hint="set QDC_TRAIN_PYTHON to an interpreter with the packages of train.lock",
        ) from None
    finally:
        os.close(writing)
    return Worker(name, process, os.fdopen(reading, "rb", buffering=0), log, time.monotonic(), progress)


def wait_any(workers: list[Worker], limit_s: float | None = None) -> Worker | None:
    """Serve all reports until one worker has ended (its process is reaped) or `limit_s` has passed (None)."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        while True:
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            for item, _ in selector.select(max(left, 0.0)):
                if not item.data.read():
                    time.sleep(0.01)
            for worker in workers:
                if worker.process.poll() is not None:
                    _drain(worker)
                    worker.seconds = time.monotonic() - worker.started
                    return worker
            if deadline is not None and time.monotonic() >= deadline:
                return None


def _drain(worker: Worker) -> None:
    os.set_blocking(worker.pipe.fileno(), False)
    with contextlib.suppress(BlockingIOError, OSError):
        while worker.read():
            pass
    worker.pipe.close()


def stop(workers: list[Worker], grace_s: float = 2.0) -> None:
    """End the workers' own process groups: a request first, then force."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        worker.pipe.close()
