"""What `qdc gate` takes and what it stops, in a private Docker engine: writes docs/results/gate.md.

    python benchmarks/gate.py [--store DIR] [--build ID] [--patience S] [--quick]

Three parts: seconds of each check on a build of tiny (from `--store`, by default this checkout's; without one, on the
tests' stand-in image); each of the tests' faulty images with its outcome and reason; export and load throughput beside
the disk's own. `--quick` prints instead of writing. Needs root and a Docker engine's program, as `make test-slow` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import machine

from qdc.core.errors import QdcError
from qdc.gate import Options, exit_code, gate
from qdc.image.export import export_archive
from qdc.run.references import refer
from qdc.store.store import Store
from qdc.store.use import in_use

sys.path.insert(0, str(machine.ROOT / "tests"))
import gate_images as images

PAGE = machine.ROOT / "docs" / "results" / "gate.md"
ENGINE = machine.ROOT / "scripts" / "docker-engine"
PROBE_MIB = 1024
HOW = """\
Both servers start at once on CPU, with and without speculation; a
check's seconds hold what was asked for it, so `ping` holds a start and `lossless` the second server's answers.
Asked are the gate's built-in questions, which are outside of what tiny was trained on, so that its logits tie
more often than on the held-out prompts that `make demo` gates it with; `lossless` counts ties and allows 2 %."""


@dataclass
class Timed:
    """A gate's report, and the seconds that passed before each check was done."""

    report: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)


def timed(image: str, options: Options) -> Timed:
    """One gate. A check's seconds include what was asked for it beforehand."""
    seconds: dict[str, float] = {}
    last = time.monotonic()

    def report(done: int, total: int, words: str) -> None:
        nonlocal last
        id, mark, _ = words.partition(": ")
        if mark and id.isalpha():
            now = time.monotonic()
            seconds.setdefault(id, 0.0)
            seconds[id] += now - last
            last = now

    return Timed(gate(image, None, None, options, report), seconds)


@contextlib.contextmanager
def private_engine(folder: Path) -> Iterator[Any]:
    """A docker client of an empty engine, which DOCKER_HOST names meanwhile."""
    made = subprocess.run([ENGINE, "start", folder], capture_output=True, text=True, check=True).stdout.strip()
    os.environ["DOCKER_HOST"] = made.removeprefix("DOCKER_HOST=")
    client = docker.from_env(timeout=600)
    try:
        yield client
    finally:
        client.close()
        subprocess.run([ENGINE, "stop", folder], check=True)


def disk(folder: Path, mib: int) -> tuple[float, float]:
    """MB/s of writing with fsync, and of reading what the page cache has let go."""
    path, block = folder / "probe", os.urandom(1 << 20)
    started = time.monotonic()
    with path.open("wb") as stream:
        for _ in range(mib):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    written = time.monotonic() - started
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.monotonic()
        while stream.read(1 << 20):
            pass
    read = time.monotonic() - started
    path.unlink()
    return mib * 1.048576 / written, mib * 1.048576 / read


def exported(store: Store, build: str, folder: Path) -> tuple[Path, dict[str, Any], float]:
    """The archive of a build, its record, and the seconds of writing it."""
    record = refer(build, store).build
    assert record is not None
    archive = folder / "image.tar"
    with in_use(store.root), store.staging() as work:
        store.link_out(record["image"]["artifact"], work / "image")
        started = time.monotonic()
        export_archive(work / "image", store.resolve, archive)
        return archive, record, time.monotonic() - started


def stand_in(folder: Path) -> tuple[Path, float]:
    """An image of 512 MiB of random bytes and a stand-in engine, and the seconds of writing it."""
    made = images.stub(more={"opt/weights": (0o644, os.urandom(512 << 20))}, tag="stand-in:1")
    started = time.monotonic()
    return made.archive(folder / "image.tar"), time.monotonic() - started


def loaded(client: Any, archive: Path) -> float:
    """Seconds of `docker load` into an engine that lacks it."""
    started = time.monotonic()
    with archive.open("rb") as stream:
        client.images.load(stream)
    return time.monotonic() - started


def check_rows(found: Timed) -> list[str]:
    rows = ["| check | outcome | s | figure |", "|---|---|---|---|"]
    for check in found.report["checks"]:
        figure = check["figure"]
        shown = json.dumps(figure) if isinstance(figure, (dict, list)) else "" if figure is None else str(figure)
        rows.append(f"| {check['id']} | {check['outcome']} | {found.seconds.get(check['id'], 0):.1f} | {shown} |")
    return rows


def fault_rows(client: Any, folder: Path) -> list[str]:
    rows = ["| fault | exit | stopped by | why | s |", "|---|---|---|---|---|"]
    for name, (make, _, _) in images.FAULTS.items():
        file = make(client, folder)
        started = time.monotonic()
        report = gate(f"archive:{file}", None, None, Options(start_s=30))
        took = time.monotonic() - started
        failed = [check for check in report["checks"] if check["outcome"] == "fail"]
        ids, why = ", ".join(check["id"] for check in failed), " ".join(failed[0]["why"].split()) if failed else ""
        rows.append(f"| {name} | {exit_code(report)} | {ids or 'nothing'} | {why[:200]} | {took:.1f} |")
    return rows


def page(store: Store, build: str, quick: bool, patience: float) -> list[str]:
    """The page's lines."""
    load = machine.quiet(patience)
    with tempfile.TemporaryDirectory(prefix="qdc-b-") as name, private_engine(Path(name, "engine")) as client:
        folder = Path(name)
        written, read = disk(folder, 64 if quick else PROBE_MIB)
        try:
            archive, record, export_s = exported(store, build, folder)
            what, how = f"`{record['image']['name']}`, ID `{record['image']['id']}`", "exported from the store"
        except QdcError:
            archive, export_s = stand_in(folder)
            what, how = "a stand-in image of 512 MiB", "written from memory"
        size = archive.stat().st_size / 1e6
        load_s = loaded(client, archive)
        for image in client.images.list():
            client.images.remove(image.id, force=True)
        plain = ("serve", "--without-drafter")
        found = timed(f"archive:{archive}", Options(plain=plain))
        archive.unlink()
        faults = fault_rows(client, folder)
        version = client.version()["Version"]
    return [
        "# The gate, measured",
        "",
        "Made by `benchmarks/gate.py`.",
        "",
        *machine.lines(f"Docker engine {version}, private, overlay2, no network"),
        "",
        load,
        "",
        "## Seconds a check",
        "",
        f"{what},",
        f"{size:.0f} MB as `docker save` writes it. {HOW}",
        f"Exit {exit_code(found.report)}, {sum(found.seconds.values()):.0f} s in all.",
        "",
        *check_rows(found),
        "",
        "## What is stopped",
        "",
        "The faults of five submissions that never answered and of two tags that lied, rebuilt with a stand-in engine",
        "(`tests/gate_images.py`) and gated as files of `docker save`.",
        "",
        *faults,
        "",
        "## Throughput",
        "",
        "| what | MB/s | s |",
        "|---|---|---|",
        f"| disk: write and fsync, 1 MiB blocks | {written:.0f} | |",
        f"| disk: read past the page cache | {read:.0f} | |",
        f"| export to archive:FILE ({how}; hashed, fsynced) | {size / export_s:.0f} | {export_s:.1f} |",
        f"| `docker load` of that file, empty engine | {size / load_s:.0f} | {load_s:.1f} |",
        "",
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--store", type=Path, default=machine.ROOT / "artifacts")
    options.add_argument("--build", default="@1")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--patience", type=float, default=machine.PATIENCE, help="seconds to wait for a quiet machine")
    given = options.parse_args()
    lines = page(Store(given.store.absolute()), given.build, given.quick, 0.0 if given.quick else given.patience)
    if given.quick:
        print("\n".join(lines))
    else:
        PAGE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
