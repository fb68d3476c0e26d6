"""Who reruns what: qdc, DVC, Snakemake, redun and doit on one project, judged by the oracle of the tests.

Writes docs/results/freshness.md; every word of its table is of this run. `--quick` prints a few scenarios and writes
nothing. The histories of tests/test_adversary.py are run too, so many as `--histories` says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

import machine  # noqa: E402
from adversary.oracle import KIND  # noqa: E402
from contestants import CONTESTANTS, Qdc  # noqa: E402
from scenarios import QUICK, SCENARIOS, Contestant, Memory, NotExpressible, Stand  # noqa: E402

PAGE = ROOT / "docs" / "results" / "freshness.md"


@dataclass
class Verdict:
    """`word`: right, wrongly fresh, wrongly stale, refuses, or not expressible. `why`: the stages that it is about."""

    word: str
    why: str = ""
    ran: list[str] = field(default_factory=list)

    def cell(self) -> str:
        if self.word in ("right", "not expressible"):
            return self.word
        return f"**{self.word}**: {self.why}"


def judge(tool: Contestant, act: Callable[[Stand], object]) -> Verdict:
    stand = Stand(tool)
    try:
        act(stand)
    except NotExpressible:
        return Verdict("not expressible")
    expected = stand.expect()
    lossless = Memory()
    must = set(stand.oracle.expect(stand.meaning, lossless).must.values())
    may = set(expected.must.values())
    outcome = stand.outcome or tool.build()
    ran = sorted(outcome.ran, key=list(KIND).index)
    if outcome.refused:
        return Verdict("refuses", f"`{outcome.refused.replace('|', '/')}`", ran)
    if missing := sorted(must - set(ran), key=list(KIND).index):
        return Verdict("wrongly fresh", f"{', '.join(missing)} did not run", ran)
    if wrong := tool.wrong_outputs(expected):
        return Verdict("wrongly fresh", f"the output of {', '.join(wrong)} is wrong", ran)
    if extra := sorted(set(ran) - may, key=list(KIND).index):
        return Verdict("wrongly stale", f"{', '.join(extra)} ran", ran)
    if twice := sorted({stage for stage in ran if ran.count(stage) > 1}, key=list(KIND).index):
        return Verdict("wrongly stale", f"{', '.join(twice)} ran twice", ran)
    return Verdict("right", "", ran)


def expected_of(act: Callable[[Stand], object]) -> str:
    """What must run, by the oracle alone (on qdc's world)."""
    tool = Qdc(Path())
    stand = Stand(tool)
    act(stand)
    must = set(stand.expect().must.values())
    tool.close()
    return ", ".join(sorted(must, key=list(KIND).index)) or "nothing"


@contextlib.contextmanager
def histories(count: int) -> Iterator[Callable[[], dict[str, object]]]:
    """The recorded run of the tests' histories, beside the scenarios; what is given waits for its report."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        more = {"PYTHONPATH": str(ROOT / "compiler"), "QDC_HISTORIES": str(count), "QDC_HISTORIES_REPORT": str(report)}
        command = [sys.executable, "-m", "pytest", "-q", "tests/test_adversary.py", "-k", "no_history"]
        running = subprocess.Popen(command, cwd=ROOT, env=os.environ | more, stdout=subprocess.PIPE, text=True)

        def found() -> dict[str, object]:
            said, _ = running.communicate()
            if running.returncode != 0:
                print(said, file=sys.stderr)
            return dict(json.loads(report.read_text()))

        try:
            yield found
        finally:
            running.kill()
            running.wait()


def head(tools: Sequence[Contestant], measured: str, arguments: list[str]) -> list[str]:
    return [
        "# Who reruns what",
        "",
        f"Written by `python benchmarks/freshness.py{''.join(f' {part}' for part in arguments)}`; every word of the",
        "tables is of that one run.",
        "",
        *machine.lines(measured=measured),
        *(f"- {tool.name} {tool.version}" for tool in tools),
        "",
        "One project of six stages (`draw` reads a folder; `left` and `right` read `draw`; `join` reads both, in",
        "roles; `toss` reads nothing; `pack` reads `join` and `toss`) in each tool's own form. Every tool is told the",
        "same of every stage: the files of its code and of all that this imports, its data files, its input files, its",
        "parameters, and the versions of the packages that matter to it. Peers run as a user runs them, in a process",
        "of their own, each scenario on the project as it was after a first build; qdc's front end, keys, plan,",
        "executor and store are the real ones, with the stages' code run in their process (benchmarks/contestants.py).",
        "Numbers are read by the tool's own YAML reader in DVC and Snakemake, and by the project's Python in redun and",
        "doit.",
        "",
        "The judge is the oracle of the tests: it knows what each stage computes from what, and shares no code with",
        "any tool. *Wrongly fresh*: a stage did not run that must, or an output is not what it should be. *Wrongly",
        "stale*: a stage ran that need not. An output that a tool restores from a cache is as good as one made again;",
        "one that is missing or damaged after a build is wrong, also where what was made from it is whole. Before",
        "every scenario a build with nothing to do has seen the project. All files are small: what a tool does",
        "otherwise for large ones does not show here.",
        "A file's name and executable bit are part of a folder's content; comments, docstrings and formatting are no",
        "part of what code means.",
        "",
    ]


def table(tools: Sequence[Contestant], rows: list[tuple[str, str, list[Verdict]]]) -> list[str]:
    """Scenario x tool, and how often each word was said."""

    def line(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    names = [tool.name for tool in tools]
    lines = [line("scenario", "must run", *names), "|---" * (len(tools) + 2) + "|"]
    lines += [line(name, must, *(verdict.cell() for verdict in verdicts)) for name, must, verdicts in rows]
    lines += ["", line("in all", *names), "|---" + "|---:" * len(tools) + "|"]
    for word in ("right", "wrongly fresh", "wrongly stale", "refuses", "not expressible"):
        counts = [sum(verdicts[index].word == word for *_, verdicts in rows) for index in range(len(tools))]
        lines.append(line(word, *map(str, counts)))
    return lines


def history_lines(found: dict[str, object]) -> list[str]:
    wrong: dict[str, int] = found["wrong"]  # type: ignore[assignment]
    left_out: dict[str, str] = found["left_out"]  # type: ignore[assignment]
    kinds: dict[str, int] = found["steps"]  # type: ignore[assignment]
    done = (
        f"{found['histories']} of {found['asked']} histories of {len(kinds)} kinds of step, {found['builds']} builds,"
    )
    said = "zero wrong decisions."
    if wrong:
        said = f"the next history was {', '.join(wrong)}, and the run stopped there."
    lines = [
        "## qdc's histories",
        "",
        f"tests/test_adversary.py with `QDC_HISTORIES={found['asked']}`: {done}",
        f"{found['decisions']} decisions ({found['reran']} stages ran), in {found['seconds']} s: {said}",
        "",
    ]
    for told in found["first_wrong"]:  # type: ignore[attr-defined]
        lines += ["```text", *str(told).splitlines(), "```", ""]
    if left_out:
        lines += ["Left out, because qdc is known to err there:", ""]
        lines += [f"- {name}: {why}" for name, why in left_out.items()]
        lines += [""]
    return lines


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a few scenarios and histories; prints, writes nothing")
    options.add_argument("--histories", type=int, default=10_000)
    options.add_argument("--only", nargs="*", help="scenarios by the beginning of their names; prints, writes nothing")
    given = options.parse_args()
    chosen = [s for s in SCENARIOS if not given.quick or s.name in QUICK]
    chosen = [s for s in chosen if not given.only or s.name.startswith(tuple(given.only))]
    count = 100 if given.quick or given.only else given.histories
    measured = machine.commit()
    with histories(count) as found, tempfile.TemporaryDirectory() as place:
        tools = [make(Path(place)) for make in CONTESTANTS]
        rows = []
        for item in chosen:
            verdicts = [judge(tool, item.act) for tool in tools]
            rows.append((item.name, expected_of(item.act), verdicts))
            print(item.name, file=sys.stderr)
            for tool, verdict in zip(tools, verdicts, strict=True):
                print(f"  {tool.name}: {verdict.word} {verdict.why} {verdict.ran}", file=sys.stderr, flush=True)
        for tool in tools:
            tool.close()
        lines = [*head(tools, measured, sys.argv[1:]), *table(tools, rows), "", *history_lines(found())]
    page = "\n".join(lines)
    if given.quick or given.only:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
