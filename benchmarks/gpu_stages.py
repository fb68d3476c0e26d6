"""Do the stages of a recipe train on a card, and in several processes on several? Every one of them, timed.

    python benchmarks/gpu_stages.py RECIPE --out OUT [--device cuda] [--processes N] [--store DIR]
    python benchmarks/gpu_stages.py --page docs/results/gpu-stages.md OUT/gpu_stages.json ...

Runs each stage that has models as a build does, through its worker, with the interpreter that runs this. Package
versions in keys are those that are installed, and not the lock's: what comes out is measured, never an image.
OUT/gpu_stages.json has seconds, figures and loss of each; OUT/logs what the stages printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "compiler"))

from qdc.cli.progress import Quiet  # noqa: E402
from qdc.core.errors import QdcError  # noqa: E402
from qdc.graph.code import code_digests  # noqa: E402
from qdc.graph.expand import expand  # noqa: E402
from qdc.graph.locks import lock_text, versions  # noqa: E402
from qdc.graph.table import KINDS  # noqa: E402
from qdc.recipe.load import load  # noqa: E402
from qdc.run.build import Build  # noqa: E402
from qdc.run.settings import settings  # noqa: E402
from qdc.store.store import Store  # noqa: E402


class Shown(Quiet):
    """Says which stage ends; of the rest nothing."""

    def finished(self, name: str, seconds: float, output: str) -> None:
        print(f"{name}: {seconds:.1f} s, output {output[:12]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the stages of a recipe on a card.")
    parser.add_argument("recipe", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        write_page(options.page, options.recipe)
    else:
        measure(options.recipe[0], options)


def measure(recipe: Path, options: argparse.Namespace) -> None:
    import torch

    options.out.mkdir(parents=True, exist_ok=True)
    store = Store((options.store or Path(tempfile.mkdtemp(prefix="qdc-gpu-"))).resolve())
    loaded = load(recipe)
    facts = {
        "code": code_digests(),
        "versions": {name: installed(name) for name in versions(lock_text("train"))},
        "chat_template": loaded.chat_template,
        "serve_lock": "", "templates": loaded.templates, "sources": {}, "trees": {}, "pins": {}, "licences": [],
    }  # fmt: skip
    instances = [item for item in expand(loaded.data, facts) if item.environment == "train"]
    many = {kind: options.processes for kind, row in KINDS.items() if row.parallel}
    chosen = replace(settings(), train_python=sys.executable, device=options.device, jobs=1, processes=many)
    began, error = time.monotonic(), None
    try:
        rows = Build(store, chosen, instances, Shown()).run()
    except QdcError as problem:
        rows, error = [], str(problem)
    answer: dict[str, Any] = {
        "recipe": loaded.data["name"],
        "device": options.device,
        "card": torch.cuda.get_device_name() if options.device == "cuda" else "none",
        "cards": torch.cuda.device_count(),
        "processes": options.processes,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "error": error,
        "stages": [stage(store, row) for row in rows],
    }
    (options.out / "gpu_stages.json").write_text(json.dumps(answer, indent=1))
    shutil.copytree(store.root / "logs", options.out / "logs", dirs_exist_ok=True)
    for line in table(answer):
        print(line)


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def stage(store: Store, row: Any) -> dict[str, Any]:
    """Seconds of a stage, and what its output says: measurements, and first and last loss."""
    found: dict[str, Any] = {"name": row.name, "seconds": row.seconds}
    tree = store.tree(row.output)
    paths = {entry.path for entry in tree.entries} if tree else set()
    if "evaluation.json" in paths:
        evaluation = json.loads(store.read(row.output, "evaluation.json"))
        found["rows"] = [
            {key: line[key] for key in ("what", "subject", "metric", "value", "low", "high")}
            for line in evaluation["rows"]
        ]
    if "training.json" in paths:
        training = json.loads(store.read(row.output, "training.json"))
        log = training.get("log") or training["steps"]
        found["loss"] = [log[0]["loss"], log[-1]["loss"]]
    return found


def table(answer: dict[str, Any]) -> list[str]:
    lines = ["| stage | s | loss, first and last |", "|---|---:|---|"]
    for row in answer["stages"]:
        loss = " to ".join(f"{value:.5f}" for value in row.get("loss", []))
        lines.append(f"| {row['name']} | {row['seconds']:.1f} | {loss} |")
    lines += ["", "| measured | of | metric | value | 95 % interval |", "|---|---|---|---:|---|"]
    for row in answer["stages"]:
        for line in row.get("rows", []):
            lines.append(
                f"| {line['what']} | {line['subject']} | {line['metric']} | {line['value']:.5f} "
                f"| {line['low']:.5f} to {line['high']:.5f} |"
            )
    return lines


def write_page(page: Path, answers: list[Path]) -> None:
    lines = [
        "# Stages on a card, measured",
        "",
        "Made by `benchmarks/gpu_stages.py`: every stage of a recipe that has models, through its worker, with the",
        "setting `device: cuda`. The same recipe on two CPU cores is in [tiny.md](tiny.md); there torch is 2.13. Every",
        "stage was a process whose import of torch took about 8 s on that machine. The backward passes of attention",
        "say in the log that they have no kernel that gives the same bits each time.",
    ]
    for place in answers:
        answer = json.loads(place.read_text())
        cards = f"{answer['processes']} processes, a card each, for `distill` and `draft-train`"
        lines += [
            "",
            f"## {answer['recipe']}, {answer['card']}" + (f", {cards}" if answer["processes"] > 1 else ""),
            "",
            f"torch {answer['torch']}; {answer['seconds']} s in all.",
            "",
            *table(answer),
        ]
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
