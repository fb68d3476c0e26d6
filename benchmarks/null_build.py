"""A build with nothing to do, as a cold process, beside DVC, Snakemake, redun and doit on the same graph.

The graph is that of a recipe of seven stages on a given checkpoint; each tool depends on the same large file. qdc's
stages are real; the peers' write a line, for only the decision that nothing is to be done is timed. Used by
benchmarks/store.py, which writes the page; run alone, it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from peers import cache, peer, versions

ROOT = Path(__file__).resolve().parents[1]
BUDGET, STRETCH = 80, 30
GRAPH = {
    "base": ["weights"],
    "quantize": ["base"],
    "pack-target": ["base", "quantize"],
    "base-image": [],
    "runtime": [],
    "layer": ["pack-target"],
    "image": ["base-image", "runtime", "layer", "pack-target"],
}
"""Stage -> what it reads. Every stage reads the file `recipe` too: to some tools a stage that reads nothing is never
up to date."""
STEP = """import sys, zlib
out, *given = sys.argv[1:]
crc = 0
for name in given:
    with open(name, "rb") as stream:
        crc = zlib.crc32(stream.read(4096), crc)
with open(out, "w") as stream:
    stream.write(f"{out} {crc}\\n")
"""


@dataclass(frozen=True)
class Tool:
    """`command` in `folder` is a null build when it has run there before; `made`: files that it must leave alone."""

    name: str
    version: str
    folder: Path
    command: list[str]
    made: list[Path]


def environment() -> dict[str, str]:
    """Without settings of qdc and of Python: compiled modules are kept, as they are for a user."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QDC_", "PYTHON"))}
    return kept | {"NO_COLOR": "1", "DVC_NO_ANALYTICS": "1", "DO_NOT_TRACK": "1"}


def peers(place: Path, weights: Path) -> list[Tool]:
    """Each peer's form of the graph, in a folder of its own below `place`, run once."""
    made = [_doit, _dvc, _snakemake, _redun]
    found = []
    for make in made:
        name = make.__name__[1:]
        python = peer(name, [name])
        folder = place / name
        folder.mkdir()
        (folder / "recipe").write_text("seven stages\n")
        (folder / "step.py").write_text(STEP)
        command = make(folder, weights, python)
        found.append(Tool(name, versions(python)[name], folder, command, [folder / f"{stage}.out" for stage in GRAPH]))
    return found


def qdc(recipe: Path, store: Path) -> Tool:
    """qdc on the recipe, whose outputs are in the store: a copy of this code, which nobody edits meanwhile."""
    code = recipe.parent / "code"
    for part in ("compiler", "templates"):
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    script = code / "qdc"
    path = str(code / "compiler")
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {path!r})\nfrom qdc.cli import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    command = [str(script), "build", recipe.name, "--store", str(store)]
    version = subprocess.run([script, "--version"], capture_output=True, text=True).stdout.split()[1]
    return Tool("qdc", version, recipe.parent, command, [store / "builds"])


def times(tools: list[Tool], rounds: int) -> dict[str, list[float]]:
    """Tool -> milliseconds of each cold process, in turns; a process that does something is an error."""
    idle = Tool("a Python that does nothing", "", ROOT, [sys.executable, "-c", "pass"], [])
    for tool in tools:
        _run(tool)
        _run(tool)
    before = {tool.name: _state(tool) for tool in tools}
    taken: dict[str, list[float]] = {tool.name: [] for tool in [*tools, idle]}
    for _ in range(rounds):
        for tool in [*tools, idle]:
            start = time.perf_counter()
            _run(tool)
            taken[tool.name].append((time.perf_counter() - start) * 1000)
    for tool in tools:
        if _state(tool) != before[tool.name]:
            raise SystemExit(f"{tool.name} did something")
    return taken


def section(tools: list[Tool], weights: Path, rounds: int, load: str) -> list[str]:
    taken = times(tools, rounds)
    lines = [
        "## A build with nothing to do",
        "",
        f"Seven stages on a checkpoint of {weights.stat().st_size / (1 << 30):.2f} GiB; {rounds} cold processes of",
        "each tool, in turns; files are in the disk's cache. Every tool depends on the same file and says that nothing",
        "is to be done.",
        f"qdc's budget: {BUDGET} ms, stretch {STRETCH} ms.",
        load,
        "",
        "| tool | version | median ms | 5 % to 95 % | times qdc |",
        "|---|---|---:|---:|---:|",
    ]
    own = statistics.median(taken["qdc"])
    named = {tool.name: tool.version for tool in tools}
    for name, values in taken.items():
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        median = statistics.median(values)
        spread = f"{cuts[0]:.0f} to {cuts[-1]:.0f}"
        lines.append(f"| {name} | {named.get(name, '')} | {median:.0f} | {spread} | {median / own:.1f} |")
    return [*lines, ""]


def _state(tool: Tool) -> list[tuple[int, int]]:
    statuses = [os.stat(path) for path in tool.made]
    return [(status.st_ino, status.st_mtime_ns) for status in statuses]


def _run(tool: Tool) -> None:
    done = subprocess.run(
        tool.command, cwd=tool.folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise SystemExit(f"{tool.name} answered {done.returncode}:\n{done.stdout.decode()[-2000:]}")


def _given(stage: str, weights: Path) -> list[str]:
    """The files that a stage reads, by name."""
    return ["recipe", *(str(weights) if name == "weights" else f"{name}.out" for name in GRAPH[stage])]


def _shell(stage: str, weights: Path) -> str:
    return f"{sys.executable} -S step.py {stage}.out {' '.join(_given(stage, weights))}"


def _doit(folder: Path, weights: Path, python: Path) -> list[str]:
    tasks = {
        stage: {
            "actions": [_shell(stage, weights)],
            "file_dep": _given(stage, weights),
            "targets": [f"{stage}.out"],
        }
        for stage in GRAPH
    }
    lines = [f"TASKS = {tasks!r}", "def task_chain():", "    for name, task in TASKS.items():"]
    lines.append("        yield {'name': name, **task}")
    (folder / "dodo.py").write_text("\n".join(lines) + "\n")
    return [str(python.with_name("doit"))]


def _dvc(folder: Path, weights: Path, python: Path) -> list[str]:
    binary = str(python.with_name("dvc"))
    subprocess.run([binary, "init", "-q", "--no-scm"], cwd=folder, env=environment(), check=True)
    subprocess.run([binary, "config", "core.analytics", "false"], cwd=folder, env=environment(), check=True)
    stages = {
        stage: {"cmd": _shell(stage, weights), "deps": _given(stage, weights), "outs": [f"{stage}.out"]}
        for stage in GRAPH
    }
    (folder / "dvc.yaml").write_text(json.dumps({"stages": stages}, indent=1))
    return [binary, "repro"]


def _snakemake(folder: Path, weights: Path, python: Path) -> list[str]:
    rules = ['rule all:\n    input: "image.out"\n']
    for stage in GRAPH:
        given = ", ".join(json.dumps(name) for name in _given(stage, weights))
        rules.append(
            f'rule {stage.replace("-", "_")}:\n    input: {given}\n    output: "{stage}.out"\n'
            f"    shell: {json.dumps(_shell(stage, weights))}\n"
        )
    (folder / "Snakefile").write_text("\n".join(rules))
    return [str(python.with_name("snakemake")), "--cores", "1"]


def _redun(folder: Path, weights: Path, python: Path) -> list[str]:
    lines = ["import subprocess", "from redun import File, task", "redun_namespace = 'chain'", ""]
    for stage in GRAPH:
        name = stage.replace("-", "_")
        lines += [
            "@task()",
            f"def {name}(given):",
            f"    subprocess.run({_shell(stage, weights)!r}, shell=True, check=True)",
            f"    return File({f'{stage}.out'!r})",
            "",
        ]
    lines += ["@task()", "def main():", "    recipe = File('recipe')", f"    weights = File({str(weights)!r})"]
    for stage, inputs in GRAPH.items():
        given = ", ".join(["recipe", *(name.replace("-", "_") + "_" * (name != "weights") for name in inputs)])
        lines.append(f"    {stage.replace('-', '_')}_ = {stage.replace('-', '_')}([{given}])")
    lines.append("    return image_")
    (folder / "workflow.py").write_text("\n".join(lines) + "\n")
    return [str(python.with_name("redun")), "run", "workflow.py", "main"]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--size", type=float, default=1e8, help="bytes of the checkpoint")
    given = options.parse_args()
    from checkpoint import given_project

    cache().mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="null-build-", dir=cache()))
    try:
        recipe = given_project(place / "qdc", int(given.size))
        weights = recipe.parent / "base" / "model.safetensors"
        tools = [qdc(recipe, place / "store"), *peers(place, weights)]
        print("\n".join(section(tools, weights, given.rounds, f"Load average: {os.getloadavg()[0]:.2f}.")))
    finally:
        shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
