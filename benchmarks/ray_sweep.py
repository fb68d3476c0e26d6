"""Measures the Ray executor beside the local one, in one run, and writes docs/results/ray.md.

What a stage costs more on a cluster; a sweep of 12 variants of micro on one and two workers, beside 12 builds one after
another; how soon a stage goes on whose worker was killed. The clusters are on this machine's loopback, a CPU a worker.
`--quick` prints a small run (4 variants are made of micro's prompts alone) and writes nothing. Needs `qdc[ray]`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from ray_nodes import Nodes, probes  # noqa: E402

from qdc.cli.progress import Quiet  # noqa: E402
from qdc.graph.instances import Instance  # noqa: E402
from qdc.graph.signature import package_signature  # noqa: E402
from qdc.graph.table import KINDS, Kind  # noqa: E402
from qdc.run import process  # noqa: E402
from qdc.run.build import Build  # noqa: E402
from qdc.run.cluster import Cluster, Need  # noqa: E402
from qdc.run.front import front  # noqa: E402
from qdc.run.settings import Settings  # noqa: E402
from qdc.store.store import Store  # noqa: E402

PAGE = ROOT / "docs" / "results" / "ray.md"
RECIPE = ROOT / "recipes" / "micro.yaml"
SCRATCH = ("--set", "image.base={scratch: true}")
AXES = {"drafter.ptq.method": ["rtn", "gptq"], "serve.k": ["4", "5", "7"], "serve.max_num_seqs": ["2", "4"]}
STEPS, STEP_S, KILL_AT = 60, 0.1, 30
WORK = f"""
done = len(list(context.partial.glob('step-*')))
for step in range(done, {STEPS}):
    time.sleep({STEP_S})
    (context.partial / f'step-{{step}}').write_text(f'{{os.getppid()}} {{time.time()}}')
    if not done and step == {KILL_AT} and context.params['killed']:
        os.kill(os.getppid(), 9)
        time.sleep(60)
rows = [(context.partial / f'step-{{step}}').read_text() for step in range({STEPS})]
(output / 'x').write_text('\\n'.join(rows))
"""


@contextmanager
def workers(folder: Path, count: int, site: Path) -> Iterator[str]:
    """The address of a cluster of so many workers of one CPU, each with a store of its own."""
    folder.mkdir()
    made = Nodes(folder, site, cpus=1)
    try:
        for _ in range(count - 1):
            made.add(num_cpus=1)
        yield made.address
    finally:
        made.close()


def settings(address: str | None, remote: Path) -> Settings:
    there = Cluster(address, needs={"default": Need(1, 0, 1e8)})
    url = f"file://{remote}" if address else None
    return Settings(sys.executable, 1, 1, remote=url, executor="ray" if address else "local", cluster=there)


def build(store: Path, instances: list[Instance], wanted: Settings) -> float:
    """Seconds of a build of these instances in an empty store, one at a time."""
    started = time.monotonic()
    Build(Store(store), wanted, instances, Quiet(), signature=package_signature()).run()
    return time.monotonic() - started


# -- what a stage costs ------------------------------------------------------------------------------------------------


def overhead(place: Path, address: str, one: Instance, many: int, patience: float) -> list[str]:
    def alike(count: int, base: int) -> list[Instance]:
        made = []
        for number in range(count):
            params = json.loads(json.dumps(one.params).replace('"seed": 9', f'"seed": {base + number}'))
            made.append(replace(one, name=f"prompts:p{number}", params=params))
        assert len({json.dumps(item.params) for item in made}) == count
        return made

    load = machine.quiet(patience)
    times = {}
    for name, there in (("here", None), ("on one worker", address)):
        wanted = settings(there, place / "remote")
        first = build(place / f"first {name}", alike(1, 5000), wanted)
        total = build(place / f"all {name}", alike(many, 1000), wanted)
        times[name] = (first, (total - first) / (many - 1))
    more = times["on one worker"][1] - times["here"][1]
    rows = [f"| {name} | {first:.2f} | {each:.3f} |" for name, (first, each) in times.items()]
    return [
        "## What a stage costs more",
        "",
        f"{many} stages of kind `prompts` (64 problems each), one at a time. The first column is a build of one stage:",
        "on the cluster it joins, holds every node against this qdc, and starts a worker. The second is each further",
        "stage: start, inputs and output through the remote (a folder), record, and their bytes fetched.",
        load,
        "",
        "| where | a build of one, s | each further stage, s |",
        "|---|---:|---:|",
        *rows,
        "",
        f"A stage on the cluster costs {more:.3f} s more than here.",
        "",
    ]


# -- a sweep -----------------------------------------------------------------------------------------------------------


def command(*arguments: str | Path) -> tuple[float, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QDC_")}
    environment |= {"PYTHONPATH": str(ROOT / "compiler"), "XDG_CONFIG_HOME": "/nowhere"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "qdc", *map(str, arguments), *SCRATCH, "--json", "--quiet"],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        sys.exit(f"{arguments}: {done.stdout}{done.stderr}")
    return time.monotonic() - started, done.stdout


def sweeps(place: Path, site: Path, axes: dict[str, list[str]], patience: float) -> list[str]:
    sets = [word for path, found in axes.items() for word in ("--set", f"{path}={','.join(found)}")]
    members = list(itertools.product(*axes.values()))
    rows, images = [], {}
    for count in (1, 2):
        with workers(place / f"w{count}", count, site) as address:
            load = machine.quiet(patience)
            there = ("--executor", "ray", "--address", address, "--remote", f"file://{place}/remote{count}")
            seconds, said = command("sweep", RECIPE, "--store", place / f"swept{count}", *sets, *there)
        answer = json.loads(said)
        images[f"ray {count}"] = [row["image"]["id"] for row in answer["variants"]]
        name = f"`qdc sweep --executor ray`, {count} worker{'s' if count > 1 else ''}"
        rows.append((name, answer["ran"], seconds, load))
    load = machine.quiet(patience)
    each = []
    for member in members:
        chosen = [word for path, value in zip(axes, member, strict=True) for word in ("--set", f"{path}={value}")]
        seconds, said = command("build", RECIPE, "--store", place / "built", *chosen)
        answer = json.loads(said)
        each.append((seconds, sum(stage["ran"] for stage in answer["stages"])))
        images.setdefault("builds", []).append(answer["image"]["id"])
    rows.append((f"{len(members)} builds here, one after another", sum(ran for _, ran in each),
                 sum(seconds for seconds, _ in each), load))  # fmt: skip
    same = len({json.dumps(found) for found in images.values()}) == 1
    alone = each[0][0] * len(members)
    return [
        f"## A sweep of {len(members)} variants of micro",
        "",
        "`" + " ".join(["qdc sweep recipes/micro.yaml", *sets]) + "`,",
        "from an empty store, with `image.base={scratch: true}`. A worker has one CPU; both are on this machine. The",
        "builds here run two stages at a time (`jobs`), and find in their store what the ones before have made.",
        "",
        "| how | stages run | s | load |",
        "|---|---:|---:|---|",
        *(
            f"| {name} | {ran} | {seconds:.0f} | {load.split('; ')[0].rstrip('.')} |"
            for name, ran, seconds, load in rows
        ),
        "",
        f"The first of the builds, with everything to do, took {each[0][0]:.0f} s; {len(members)} of them in stores of",
        f"their own would take {alone:.0f} s (computed, not run).",
        f"The {len(members)} image IDs are {'the same all three ways' if same else 'NOT the same all three ways'}.",
        "",
    ]


# -- a killed worker ---------------------------------------------------------------------------------------------------


def recovery(place: Path, address: str, turns: int, patience: float) -> list[str]:
    load = machine.quiet(patience)
    whole, killed, pauses, repeated = [], [], [], []
    for turn in range(turns):
        for kills, times in ((False, whole), (True, killed)):
            params = {"name": "work", "code": WORK, "trace": None, "killed": kills, "turn": turn}
            one = Instance("work", "probe", params, {}, "code", {}, "exact", "train", "compute")
            store = place / f"k{turn}{kills}"
            times.append(build(store, [one], settings(address, place / f"r{turn}{kills}")))
            record = Store(store).record(one.key({}))
            assert record is not None
            steps = [row.split() for row in Store(store).read(record["output"], "x").decode().split("\n")]
            gaps = [float(b) - float(a) for (_, a), (_, b) in itertools.pairwise(steps)]
            if kills:
                pauses.append(max(gaps) - STEP_S)
                # A step that is done again is written again, by the second worker.
                repeated.append(sum(worker != steps[0][0] for worker, _ in steps[: KILL_AT + 1]))
                assert len({worker for worker, _ in steps}) == 2
    return [
        "## A worker that is killed",
        "",
        f"A stage of {STEPS} steps of {STEP_S} s that keeps each; at step {KILL_AT} its Ray worker gets SIGKILL.",
        f"Median of {turns}. {load}",
        "",
        "| what | s |",
        "|---|---:|",
        f"| the build, nothing killed | {statistics.median(whole):.2f} |",
        f"| the build, the worker killed once | {statistics.median(killed):.2f} |",
        f"| from the last step before to the first after, less a step | {statistics.median(pauses):.2f} |",
        "",
        f"Steps that were done twice: {max(repeated)}.",
        "",
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="few stages and variants; prints, writes nothing")
    options.add_argument("--patience", type=float, default=machine.PATIENCE, help="seconds to wait for a quiet machine")
    given = options.parse_args()
    os.environ["XDG_CONFIG_HOME"] = "/nowhere"
    place = Path(tempfile.mkdtemp(prefix="qdc-ray-"))
    try:
        read = front(RECIPE, list(SCRATCH[1:]), Store(place / "front"))
        one = next(item for item in read.instances if item.name == "prompts:heldout")
        site = probes(place / "site")
        KINDS["probe"] = Kind("probe", "train", "exact", parallel=True)
        process.SOURCE_ROOT = f"{process.SOURCE_ROOT}{os.pathsep}{site}"  # type: ignore[assignment]
        patience = 0.0 if given.quick else given.patience
        with workers(place / "w", 1, site) as address:
            page = overhead(place, address, one, 4 if given.quick else 20, patience)
            lost = recovery(place, address, 1 if given.quick else 3, patience)
        axes = {"serve.k": ["5", "7"]} if given.quick else AXES
        page += sweeps(place, site, axes, patience) + lost
    finally:
        shutil.rmtree(place, ignore_errors=True)
    import ray

    head = [
        "# The Ray executor, measured",
        "",
        "Written by `python benchmarks/ray_sweep.py`; every figure is of that one run.",
        "",
        *machine.lines(f"ray {ray.__version__}; clusters of this machine, on loopback"),
        "",
    ]
    text = "\n".join([*head, *page]).rstrip() + "\n"
    if given.quick:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
