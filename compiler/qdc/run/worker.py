"""One stage in its own process: `python -m qdc.run.worker JOB.json`.

Checks that the environment is what its lock says, then calls the stage's `run`. Says how far it is on the file
descriptor named in the job; exits 0, or 4 with one JSON error line there. A job of several processes becomes torchrun,
which starts this module once for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.stage import Context, pipe_report, silent

PR_SET_PDEATHSIG = 1
RANK = "RANK"
"""Variable in which torchrun numbers its processes."""
LOCAL_RANK = "LOCAL_RANK"
"""The same on one machine."""


def main(arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_bytes())
    descriptor = int(job["report"])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = os.environ.get(RANK)
    if rank is not None:
        # torchrun passes no open files on; it has the report open itself, and ends its processes with itself.
        descriptor = os.open(f"/proc/{os.getppid()}/fd/{descriptor}", os.O_WRONLY)
    elif os.getppid() != job["parent"]:
        message = f"{sys.executable} was started by another program between it and qdc"
        hint = "let QDC_TRAIN_PYTHON name the interpreter itself: a stage must end with its build"
        _say(descriptor, {"error": {"id": "environment.python", "message": message, "hint": hint}})
        return COULD_NOT
    if rank is None and job.get("processes", 1) > 1:
        launch(arguments[0], job)
    try:
        run(job, descriptor, int(rank or 0))
    except QdcError as error:
        _say(descriptor, {"error": {**error.as_json(), "exit": error.exit_code}})
        return error.exit_code
    except MemoryError:
        _say(descriptor, {"error": {"id": "stage.memory", "message": "out of memory"}})
        return COULD_NOT
    except Exception as error:
        traceback.print_exc()
        _say(descriptor, {"error": {"id": "stage.crash", "message": f"{type(error).__name__}: {error}"}})
        return COULD_NOT
    return 0


def launch(path: str, job: dict[str, Any]) -> None:
    """Become torchrun (in this process, which keeps its id, its parent and its open files) for the job at `path`."""
    many = ["--standalone", "--nnodes=1", f"--nproc-per-node={job['processes']}"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *many, "-m", "qdc.run.worker", path])


def run(job: dict[str, Any], descriptor: int, rank: int = 0) -> None:
    """Check the environment and run the stage of `job` (see run.attempt for its fields)."""
    check_environment(job["packages"])
    context = Context(
        inputs={role: Path(path) for role, path in job["inputs"].items()},
        digests=job["digests"],
        params=job["params"],
        output=Path(job["output"]),
        partial=Path(job["partial"]),
        threads=job["threads"],
        report=pipe_report(descriptor) if rank == 0 else silent,
        rank=rank,
        processes=job.get("processes", 1),
        device=device(job.get("device", "cpu")),
    )
    module = importlib.import_module(f"qdc.stages.{job['module']}")
    check_code(job)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(context.threads)
    with together(context):
        module.run(context)
    check_data(job)


def device(asked: str) -> str:
    """Where this process's models go; of several processes each has a card of its own. Raises QdcError."""
    if asked == "cpu":
        return asked
    from qdc.methods.parallel import card

    return card(asked, int(os.environ.get(LOCAL_RANK, "0")))


@contextlib.contextmanager
def together(context: Context) -> Iterator[None]:
    """Inside, the processes of one training can add what each has."""
    if context.processes == 1:
        yield
        return
    from qdc.methods.parallel import joined

    with joined(context.device):
        yield


def check_data(job: dict[str, Any]) -> None:
    """Once the stage has run: as `check_code`, for a kind whose data files are read while it runs."""
    if job["data"]:
        check_code(job)


def check_code(job: dict[str, Any]) -> None:
    """Raise QdcError unless the stage's code, just loaded, means what it meant when its key was made."""
    from qdc.graph.signature import package_signature

    if job["signature"] == package_signature():
        return
    from qdc.graph.code import code_digest, code_files

    if code_digest(code_files(only=job["kind"])[job["kind"]]) != job["code"]:
        raise QdcError(
            "stage.code",
            "qdc's own code was changed while it was building, and a key must name the code that runs",
            hint="run the same command again; finished stages are kept",
            exit_code=COULD_NOT,
        )


def check_environment(packages: dict[str, str]) -> None:
    """Raise QdcError unless each package has the locked version (a local suffix such as +cpu may follow)."""
    wrong = []
    for name, locked in sorted(packages.items()):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        if found != locked and found.split("+")[0] != locked:
            wrong.append(f"{name} {found} (locked: {locked})")
    if wrong:
        raise QdcError(
            "environment.mismatch",
            f"{sys.executable} is not the train environment: {', '.join(wrong)}",
            hint="run `make setup`, or set QDC_TRAIN_PYTHON to an interpreter with the packages of train.lock",
            exit_code=COULD_NOT,
        )


def _say(descriptor: int, value: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, (json.dumps(value) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
