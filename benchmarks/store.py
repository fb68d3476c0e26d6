"""Measures the store beside its peers, in one run, and writes docs/results/store.md.

A build with nothing to do; a change of K with gigabytes of weights in the store; what weights cost on disk; taking
files in. Every figure of the page is of this run. `--quick` prints a small run and writes nothing. Data lies in the
user's cache folder, about 9 GB at a time, and is removed at the end.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine
import null_build
from checkpoint import given_project
from peers import cache, peer, versions

from qdc.core.files import sha256_file
from qdc.store.store import Store

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "store.md"
INGEST_BUDGET = 0.8
EDIT_MS, EDIT_BYTES = 1000, 200_000
GIB = 1 << 30
DISK = "the disk alone: as many bytes written past its cache"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="small files and few rounds; prints, writes nothing")
    options.add_argument(
        "--patience", type=float, default=machine.PATIENCE, help="seconds to wait for a quiet machine, each time"
    )
    given = options.parse_args()
    size, rounds, file_size, turns = (3_000_000, 3, 32 << 20, 1) if given.quick else (2 * GIB, 21, GIB, 3)
    cache().mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="store-", dir=cache()))
    patience = 0.0 if given.quick else given.patience
    try:
        taken_in = ingest_section(place / "ingest", file_size, turns, patience)
        built = built_sections(place / "built", size, rounds, patience)
    finally:
        shutil.rmtree(place)
    page = "\n".join([*head(), *built, *taken_in])
    if given.quick:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    return 0


def head() -> list[str]:
    """Machine, versions and command."""
    disk = subprocess.run(["stat", "-f", "-c", "%T", str(cache())], capture_output=True, text=True).stdout.strip()
    return [
        "# The store, measured",
        "",
        "Written by `python benchmarks/store.py`; every figure is of that one run. Peers run on the same machine in",
        "the same run, in turns.",
        "",
        *machine.lines(f"file system: {disk}"),
        "",
    ]


# -- what is built ----------------------------------------------------------------------------------------------------


def built_sections(place: Path, size: int, rounds: int, patience: float) -> list[str]:
    """A real build of seven stages; micro beside it in the same store, for its K."""
    recipe, store = given_project(place / "qdc", size), Store(place / "store")
    weights = recipe.parent / "base" / "model.safetensors"
    tool = null_build.qdc(recipe, store.root)
    build = place / "build.log"
    with build.open("w") as log:
        subprocess.run(tool.command, cwd=tool.folder, env=null_build.environment(), stdout=log, stderr=log, check=True)
    once = once_section(store, recipe)
    tools = [tool, *null_build.peers(place, weights)]
    null = null_build.section(tools, weights, rounds, machine.quiet(patience))
    return [*null, *edit_section(place, tool, store, 1 if rounds < 10 else 3, patience), *once]


def once_section(store: Store, recipe: Path) -> list[str]:
    """Bytes of the objects against those of the input and of the stages' outputs."""
    base = recipe.parent / "base"
    given = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
    records = (store.record(path.name) for path in (store.root / "records").iterdir())
    trees = {record["instance"]: store.tree(record["output"]) for record in records if record}
    outputs = {name: tree for name, tree in trees.items() if tree}
    objects = sum(path.stat().st_size for path in (store.root / "objects").rglob("*") if path.is_file())
    named = sum(tree.size for tree in outputs.values())
    return [
        "## Weights are kept once",
        "",
        "The same build. `base` checks the given checkpoint and passes it on; its output is the input's objects.",
        "",
        "| what | bytes |",
        "|---|---:|",
        f"| the given folder | {given:,} |",
        *(f"| output of `{name}` | {tree.size:,} |" for name, tree in sorted(outputs.items())),
        f"| all of these | {given + named:,} |",
        f"| objects in the store | {objects:,} |",
        "",
        f"The objects are {given + named - objects:,} bytes fewer than what they stand for.",
        "",
    ]


def edit_section(place: Path, tool: null_build.Tool, store: Store, series: int, patience: float) -> list[str]:
    """K of micro, built in the same store; each build is of a K that the store has not seen."""
    folder = place / "micro"
    shutil.copytree(ROOT / "recipes", folder)
    command = [tool.command[0], "build", "micro.yaml", "--store", str(store.root)]
    command += ["--quiet", "--set", "image.base={scratch: true}"]
    held = _bytes(store.root / "objects")
    _build(command, folder)
    load = machine.quiet(patience)
    seconds, grown, blocks = [], [], []
    for requests in range(1, series + 1):
        fixed = [*command, "--set", f"serve.max_num_seqs={requests}"]
        _build([*fixed, "--set", "serve.k=7"], folder)
        for k in range(6, 0, -1):
            before, usage = _bytes(store.root), resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
            start = time.perf_counter()
            _build([*fixed, "--set", f"serve.k={k}"], folder)
            seconds.append((time.perf_counter() - start) * 1000)
            grown.append(_bytes(store.root) - before)
            blocks.append((resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock - usage) * 512)
    return [
        "## A change of K",
        "",
        f"`qdc build` of micro with another K, in a store with {held / 1e9:.1f} GB of objects of the build above;",
        f"{len(seconds)} cold processes, each with a K that the store has not seen. Only `image` runs.",
        load,
        "",
        "| what | median | most | budget |",
        "|---|---:|---:|---:|",
        f"| ms | {statistics.median(seconds):.0f} | {max(seconds):.0f} | {EDIT_MS} |",
        f"| bytes by which the store grows | {statistics.median(grown):,.0f} | {max(grown):,} | {EDIT_BYTES:,} |",
        f"| bytes given to the disk, in its blocks | {statistics.median(blocks):,.0f} | {max(blocks):,} | |",
        "",
    ]


def _build(command: list[str], folder: Path) -> None:
    environment = null_build.environment()
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise SystemExit(f"the build answered {done.returncode}:\n{done.stdout.decode()[-2000:]}")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- taking files in --------------------------------------------------------------------------------------------------


def ingest_section(place: Path, file_size: int, turns: int, patience: float) -> list[str]:
    """Four files into a store, beside hashing them and beside copying them."""
    files = _random_files(place / "files", file_size)
    folder = files[0].parent
    python = peer("dvc", ["dvc"])
    os.sync()
    for path in files:
        sha256_file(path)
    load = machine.quiet(patience)
    total, made = 4 * file_size, place / "made"
    ways: dict[str, Callable[[], object]] = {
        "hashlib SHA-256, one thread": lambda: [sha256_file(path) for path in files],
        "hashlib SHA-256, two threads": lambda: _two(files),
        "`sha256sum`, two processes": lambda: _two_sums(files),
        DISK: lambda: _disk(made, file_size),
        "`qdc` ingest": lambda: Store(made).ingest(folder),
        "`qdc` ingest, known by stat": lambda: Store(made).ingest(folder),
        "`cp`, then `sync`": lambda: _cp(folder, made),
        "`dvc add`": lambda: _dvc(folder, made, python),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    worked: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            if "known" not in name:
                shutil.rmtree(made, ignore_errors=True)
                os.sync()
            start, before = time.perf_counter(), sum(os.times()[:4])
            way()
            taken[name].append(time.perf_counter() - start)
            worked[name].append(sum(os.times()[:4]) - before)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    work = {name: statistics.median(values) for name, values in worked.items()}
    own, hashing = seconds["`qdc` ingest"], seconds["hashlib SHA-256, two threads"]
    shutil.rmtree(place)
    return [
        "## Taking files in",
        "",
        f"Four files of {file_size / GIB:.2f} GiB of random bytes, in the disk's cache; median of {turns}, in turns.",
        "`qdc` reads each byte once, hashes it, and has it on the disk at the end; `cp` and `sync` have it there",
        f"without a digest; DVC {versions(python)['dvc']} takes MD5 and does not sync.",
        load,
        "",
        "| way | GB/s | s | processor s |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {total / seconds[name] / 1e9:.2f} | {seconds[name]:.2f} | {work[name]:.2f} |" for name in ways),
        "",
        f"Ingest goes at {hashing / own:.0%} of SHA-256's own rate on two threads (budget {INGEST_BUDGET:.0%}), and at",
        f"{seconds[DISK] / own:.0%} of the rate at which the disk takes as many bytes.",
        *_in_memory(file_size // 2, turns),
        f"Hashing is {work['hashlib SHA-256, two threads'] / work['`qdc` ingest']:.0%} of its processor time.",
        "",
    ]


def _random_files(folder: Path, size: int) -> list[Path]:
    folder.mkdir(parents=True)
    files = [folder / name for name in ("a", "b", "c", "d")]
    for path in files:
        with path.open("wb") as stream:
            for _ in range(size >> 22):
                stream.write(os.urandom(1 << 22))
    return files


def _in_memory(file_size: int, turns: int) -> list[str]:
    """The same where no disk is in the way: what the store itself costs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        files, made = _random_files(Path(name) / "files", file_size), Path(name) / "made"
        hashing, taking = [], []
        for _ in range(turns):
            shutil.rmtree(made, ignore_errors=True)
            for took, way in ((hashing, lambda: _two(files)), (taking, lambda: Store(made).ingest(files[0].parent))):
                start = time.perf_counter()
                way()
                took.append(time.perf_counter() - start)
    rate = statistics.median(hashing) / statistics.median(taking)
    return [
        f"Of files half as large in a file system in memory, where no disk is in the way, ingest goes at {rate:.0%} of",
        "SHA-256's own rate on two threads.",
    ]


def _two(files: list[Path]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sha256_file, files))


def _two_sums(files: list[Path]) -> None:
    halves = [files[::2], files[1::2]]
    running = [subprocess.Popen(["sha256sum", *half], stdout=subprocess.DEVNULL) for half in halves]
    if any(process.wait() for process in running):
        raise SystemExit("sha256sum failed")


def _disk(made: Path, file_size: int) -> None:
    """Two files at a time, as ingest writes them; the bytes are the same block again and again."""
    made.mkdir()
    block = mmap.mmap(-1, 1 << 22)
    block.write(os.urandom(1 << 22))

    def write(name: str) -> None:
        descriptor = os.open(made / name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        for offset in range(0, file_size, 1 << 22):
            os.pwrite(descriptor, block, offset)
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, "abcd"))


def _cp(folder: Path, made: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=auto", str(folder), str(made)], check=True)
    subprocess.run(["sync", *(str(path) for path in made.iterdir())], check=True)


def _dvc(folder: Path, made: Path, python: Path) -> None:
    """A project whose data is the folder, which stays where it is; copied into DVC's cache."""
    binary, environment = str(python.with_name("dvc")), null_build.environment()
    made.mkdir()
    (made / "files").mkdir()
    for path in folder.iterdir():
        os.link(path, made / "files" / path.name)
    for command in (["init", "-q", "--no-scm"], ["config", "cache.type", "copy"], ["add", "-q", "files"]):
        subprocess.run([binary, *command], cwd=made, env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
