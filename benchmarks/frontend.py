"""Measures the front end beside its peers, in one run, and writes docs/results/frontend.md: `make bench`.

Cold-process times of validate and plan; the broken recipes of tests/broken through qdc, check-jsonschema and plain
pydantic; the fuzz of tests/test_fuzz_recipe.py. Every figure of the page is of this run. `--quick` prints a small run
and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

import machine  # noqa: E402
from broken.corpus import Case, Place, cases, copy_recipes, expected, lock, write  # noqa: E402
from tools import Answer, Tool, clean_environment, tools  # noqa: E402

PAGE = ROOT / "docs" / "results" / "frontend.md"
BUDGETS = {"validate": 250, "plan": 300}
FUZZ = "## Fuzz"
OWN_TOPICS = ("extends", "set")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="few processes and examples; prints, writes nothing")
    options.add_argument("--fuzz", action="store_true", help="the fuzz alone: replaces that part of the page")
    given = options.parse_args()
    if given.fuzz:
        kept = PAGE.read_text(encoding="utf-8").partition(FUZZ)[0]
        PAGE.write_text(kept + "\n".join(fuzz_section(10_000)), encoding="utf-8")
        return 0
    rounds, examples = (3, 100) if given.quick else (30, 10_000)
    compared = tools()
    load = machine.quiet(0.0 if given.quick else machine.PATIENCE)
    timing = timing_section(compared, rounds, load)
    broken = corpus_section(compared)
    fuzz = fuzz_section(examples)
    page = "\n".join([*head(compared), *timing, *broken, *fuzz])
    if given.quick:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    return 0


def head(compared: list[Tool]) -> list[str]:
    """Machine, versions and command."""
    return [
        "# The front end, measured",
        "",
        "Written by `make bench` (benchmarks/frontend.py); every figure is of that one run. Peers run on the same",
        "machine in the same run.",
        "",
        *machine.lines(),
        *(f"- {tool.name}: {tool.versions}" for tool in compared),
        "",
    ]


# -- times ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """One row: `fresh` is a folder that is removed before each process, `edited` a recipe that gets another name;
    `codes` are right answers."""

    what: str
    on: str
    command: list[str]
    codes: tuple[int, ...]
    budget: int | None = None
    fresh: Path | None = None
    edited: Path | None = None


def timing_section(compared: list[Tool], rounds: int, load: str) -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        rows = list(_timed(compared, Path(place)))
        times = [[_milliseconds(row) for row in rows] for _ in range(rounds)]
    load += f" When it ended: {os.getloadavg()[0]:.2f} (1 and less is this benchmark alone)."
    lines = [
        "## Times",
        "",
        f"Wall time of a whole process, {rounds} of each, one after the other in turns; files are in the disk's cache.",
        "The largest recipe has a lock beside it, so that all of its rules are decided. `first` is the first plan of a",
        "new store, which reads all code that keys cover; `edited` follows an edit of the recipe; `again` none.",
        load,
        "",
        "| what | recipe | median ms | 5 % to 95 % | budget ms |",
        "|---|---|---:|---:|---:|",
    ]
    for index, row in enumerate(rows):
        taken = sorted(line[index] for line in times)
        cuts = statistics.quantiles(taken, n=20, method="inclusive")
        budget = "" if row.budget is None else str(row.budget)
        spread = f"{cuts[0]:.0f} to {cuts[-1]:.0f}"
        lines.append(f"| {row.what} | {row.on} | {statistics.median(taken):.0f} | {spread} | {budget} |")
    return [*lines, ""]


def _timed(compared: list[Tool], place: Path) -> Iterator[Timed]:
    """The rows, in a copy of the recipes with locks."""
    folder = copy_recipes(place / "recipes")
    largest = max(folder.glob("*.yaml"), key=lambda path: path.stat().st_size)
    unlocked = copy_recipes(place / "unlocked") / largest.name
    lock(largest, {}, [])
    qdc, check, plain = compared
    binary = qdc.command[0]
    yield Timed(
        "`qdc validate`, without the lock", largest.name, qdc.arguments(unlocked, []), (0,), BUDGETS["validate"]
    )
    for path in (largest, folder / "tiny.yaml"):
        on = path.name
        yield Timed("`qdc validate`", on, qdc.arguments(path, []), (0,), BUDGETS["validate"])
        new, used, other = place / "new", place / "used", folder / f"edited-{on}"
        shutil.copy(path, other)
        if path.with_suffix(".lock").exists():
            shutil.copy(path.with_suffix(".lock"), other.with_suffix(".lock"))
        plan, budget = [binary, "plan", "--store"], BUDGETS["plan"]
        yield Timed("`qdc plan`, first", on, [*plan, str(new), str(path)], (0, 1), budget, fresh=new)
        yield Timed("`qdc plan`, edited", on, [*plan, str(used), str(other)], (0, 1), budget, edited=other)
        yield Timed("`qdc plan`, again", on, [*plan, str(used), str(path)], (0, 1), budget)
        yield Timed(check.name, on, check.arguments(path, []), (0, 1))
        yield Timed(plain.name, on, plain.arguments(path, []), (0, 1))
    yield Timed("a Python that does nothing", "none", [sys.executable, "-c", "pass"], (0,))


def _milliseconds(row: Timed) -> float:
    if row.fresh is not None:
        shutil.rmtree(row.fresh, ignore_errors=True)
    if row.edited is not None:
        text = row.edited.read_text()
        row.edited.write_text(re.sub(r"(?m)^name: \S+", f"name: n{time.monotonic_ns()}", text))
    start = time.perf_counter()
    done = subprocess.run(row.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean_environment())
    taken = (time.perf_counter() - start) * 1000
    if done.returncode not in row.codes:
        raise SystemExit(f"{row.what} on {row.on} answered {done.returncode}:\n{done.stdout.decode()[-2000:]}")
    return taken


# -- the broken recipes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """How a tool did on one case: it says something that it does not say of the recipe as it is; that names the cause;
    that has the line; that has line and column."""

    noticed: bool
    cause: bool
    line: bool
    token: bool
    traceback: bool


def corpus_section(compared: list[Tool]) -> list[str]:
    found = cases()
    usual = _usual(compared, found)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda case: _case(compared, case, usual), found))
    topics = sorted({case.topic for case in found}, key=lambda topic: (topic in OWN_TOPICS, topic))
    lines = [
        "## Broken recipes",
        "",
        f"{len(found)} real recipes with one small edit each (tests/broken). A cell counts: noticed / cause named /",
        "right line / right line and column. Noticed: the tool says something that it does not say of the recipe",
        "before the edit. Cause: the message has the token or its key, or, where the token is not itself the cause,",
        "one of the words that the case gives (printed mappings and source lines do not count). Place: any",
        "`line, column` that is printed or underlined. check-jsonschema runs with `--verbose`. It and plain pydantic",
        "name a field by its path, without a line, except where the text is no YAML. They have no `--set` and no",
        "`extends`, and read no lock.",
        "",
        "| topic | recipes | " + " | ".join(tool.name for tool in compared) + " |",
        "|---|---:|" + "---|" * len(compared),
    ]
    for topic in topics:
        lines.append(_row(topic, [r for case, r in zip(found, results, strict=True) if case.topic == topic]))
    shared = [r for case, r in zip(found, results, strict=True) if case.topic not in OWN_TOPICS]
    lines += [_row("all that peers can be asked", shared), _row("all", results)]
    missed = [
        f"{case.topic}/{case.id}"
        for case, (own, *_) in zip(found, results, strict=True)
        if own is not None and not (own.cause and own.token)
    ]
    whole = sum(own is not None and own.cause and own.token for own, *_ in results)
    lines += ["", f"qdc names the cause at the right token in {whole} of {len(found)} ({whole / len(found):.1%})."]
    lines.append(f"Not in: {', '.join(missed)}." if missed else "")
    for index, tool in enumerate(compared):
        crashed = sum(result[index] is not None and result[index].traceback for result in results)
        refused = sorted(name for (name, locked), answers in usual.items() if not locked and answers[index].code)
        told = f"{len(refused)}: {', '.join(refused)}" if refused else "none"
        lines.append(f"- {tool.name}: tracebacks {crashed}; real recipes that it refuses: {told}")
    return [*lines, ""]


Usual = dict[tuple[str, bool], list[Answer]]


def _usual(compared: list[Tool], found: list[Case]) -> Usual:
    """What each tool says of each recipe as it is, without and with its lock."""
    names = {(path.stem, False) for path in (ROOT / "recipes").glob("*.yaml")}
    names |= {(case.recipe, "facts" in case.edit) for case in found}
    made: Usual = {}
    for name, locked in sorted(names):
        with tempfile.TemporaryDirectory() as place:
            path = copy_recipes(Path(place) / "recipes") / f"{name}.yaml"
            if locked:
                lock(path, {}, [])
            made[name, locked] = [tool.answer(path, [], {}) for tool in compared]
    return made


def _case(compared: list[Tool], case: Case, usual: Usual) -> list[Judged | None]:
    with tempfile.TemporaryDirectory() as folder:
        path = write(case, copy_recipes(Path(folder) / "recipes"))
        place, answers = expected(case, path), list[Judged | None]()
        for tool, before in zip(compared, usual[case.recipe, "facts" in case.edit], strict=True):
            if case.topic in OWN_TOPICS and not tool.own:
                answers.append(None)
                continue
            answer = tool.answer(path, case.sets, case.environment)
            answers.append(_judged(answer, answer.beyond(before), case, place))
        return answers


def _judged(answer: Answer, new: Answer, case: Case, place: Place | None) -> Judged:
    noticed = bool(new.said) and (answer.code != 0 or case.severity != "error")
    text = "\n".join(new.said)
    cause = noticed and any(re.search(pattern, text) for pattern in case.cause or _words(case))
    shown = {at for places in new.places for at in places}
    if place is None:
        return Judged(noticed, cause, noticed and not shown, noticed and not shown, answer.traceback)
    line = noticed and any(at[0] == place.line for at in shown)
    return Judged(noticed, cause, line, noticed and (place.line, place.column) in shown, answer.traceback)


def _words(case: Case) -> list[str]:
    """Patterns for the token of a case, and for its key."""
    before, _, rest = (case.at or "").partition("«")
    token = rest.partition("»")[0].strip("\"'")
    keys = re.findall(r"([\w.-]+)[:=]", before)[-1:]
    words = [token, *keys, *(key.rpartition(".")[2] for key in keys)]
    return [rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words if word]


def _row(name: str, results: list[list[Judged | None]]) -> str:
    cells = []
    for column in zip(*results, strict=True):
        asked = [judged for judged in column if judged is not None]
        parts = [(j.noticed, j.cause, j.line, j.token) for j in asked]
        cells.append(" / ".join(str(sum(part)) for part in zip(*parts, strict=True)) if asked else "-")
    return f"| {name} | {len(results)} | " + " | ".join(cells) + " |"


# -- the fuzz ---------------------------------------------------------------------------------------------------------


def fuzz_section(examples: int) -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        environment = clean_environment() | {"QDC_FUZZ": str(examples), "QDC_FUZZ_REPORT": str(report)}
        command = [sys.executable, "-m", "pytest", "-q", "tests/test_fuzz_recipe.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        told = json.loads(report.read_text()) if report.is_file() else {"outcomes": {}, "rules": [], "most_calls": 0}
    verdict = "none ended in another exception" if done.returncode == 0 else "FAILED, see below"
    lines = [
        FUZZ,
        "",
        f"`QDC_FUZZ={examples} pytest tests/test_fuzz_recipe.py`: {sum(told['outcomes'].values())} changed recipes of",
        f"{examples} asked; {verdict}; every finding has file, line, column and message.",
        f"{len(told['rules'])} different rules fired. The most calls of functions that one recipe took:",
        f"{told['most_calls']:,}. Measured{machine.commit().removeprefix(',')}.",
        "",
        "| outcome | recipes |",
        "|---|---:|",
        *(f"| {outcome} | {count} |" for outcome, count in told["outcomes"].items()),
        "",
    ]
    return lines if done.returncode == 0 else [*lines, "```", done.stdout[-3000:], "```", ""]


if __name__ == "__main__":
    sys.exit(main())
