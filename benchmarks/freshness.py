"""Who reruns what: qdc, DVC, Snakemake, redun and doit on one project, judged by the oracle of the tests.

Writes docs/results/freshness.md; every word of its table is of this run. `--quick` prints a few scenarios and writes
nothing. The histories of tests/test_adversary.py are run too, so many as `--histories` says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

from adversary import edits  # noqa: E402
from adversary.oracle import KIND, Disk, Expected, Oracle, sha  # noqa: E402
from contestants import CONTESTANTS, Outcome, Peer, Qdc  # noqa: E402

PAGE = ROOT / "docs" / "results" / "freshness.md"
Contestant = Peer | Qdc


class Memory(Disk):
    """A store that has everything but what is `lost`."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.lost: set[str] = set()
        self.flipped: set[str] = set()

    def has(self, content: bytes) -> bool:
        return sha(content) not in self.lost

    def damaged(self) -> set[str]:
        return self.flipped


class Stand:
    """One scenario with one tool: the tool's project, and the oracle's ledger of what was made in it."""

    def __init__(self, tool: Contestant) -> None:
        tool.reset()
        if isinstance(tool, Peer):
            tool.build()
        self.tool, self.oracle, self.disk = tool, Oracle(), Memory()
        self.outcome: Outcome | None = None
        self.settle(self.expect())

    @property
    def world(self) -> edits.World:
        return self.tool.world

    @property
    def meaning(self) -> edits.Meaning:
        return self.tool.world.meaning

    def expect(self) -> Expected:
        return self.oracle.expect(self.meaning, self.disk)

    def settle(self, expected: Expected) -> None:
        for stage, key in expected.senses.items():
            self.oracle.made(key, expected.outputs[stage])
        self.disk.lost.clear()
        self.disk.flipped.clear()

    def between(self) -> None:
        """A build that is not judged."""
        expected = self.expect()
        self.tool.build()
        self.settle(expected)
        time.sleep(0 if isinstance(self.tool, Qdc) else 1.1)

    def content(self, stage: str) -> str:
        return sha(next(content for path, _, content in self.expect().outputs[stage] if path == "value"))


class NotExpressible(Exception):
    """The tool has no word for it."""


@dataclass(frozen=True)
class Scenario:
    """`act` brings the project to the point where the judged build begins; it may do that build itself."""

    name: str
    act: Callable[[Stand], None]


SCENARIOS: list[Scenario] = []


def scenario(name: str) -> Callable[[Callable[[Stand], None]], None]:
    def keep(act: Callable[[Stand], None]) -> None:
        SCENARIOS.append(Scenario(name, act))

    return keep


def code(module: str) -> Callable[[Stand], None]:
    return lambda stand: (edits.constant(stand, module), None)[1]  # type: ignore[arg-type,func-returns-value]


def words(module: str, part: int) -> Callable[[Stand], None]:
    return lambda stand: edits.note(stand, module, part)  # type: ignore[arg-type]


def _recipe(stand: Stand, **values: object) -> None:
    for name, value in values.items():
        setattr(stand.meaning if hasattr(stand.meaning, name) else stand.world, name, value)
    stand.world.write_recipe()


def _touch(stand: Stand) -> None:
    for path in edits.files(stand):  # type: ignore[arg-type]
        if {"recipes", "stages", "methods", "serving"} & set(path.parts):
            os.utime(path)


def _package(name: str) -> Callable[[Stand], None]:
    def act(stand: Stand) -> None:
        stand.meaning.packages[name] = "9.0.0"
        stand.world.write_lock()

    return act


def _restored(stand: Stand, change: Callable[[], object], path: Path, back_s: float = 0.0) -> None:
    """`change`, after which the file has the mtime that it had, or an older one."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - int(back_s * 1e9)))


def _swap_contents(stand: Stand) -> None:
    inputs = stand.meaning.inputs
    inputs["one"], inputs["three"] = inputs["three"], inputs["one"]
    for name in ("one", "three"):
        stand.world.write_input(name)


def _executable(stand: Stand) -> None:
    stand.meaning.inputs["one"] = (stand.meaning.inputs["one"][0], True)
    os.chmod(stand.world.inputs / "one", 0o755)


def _rename(stand: Stand) -> None:
    stand.meaning.inputs["zero"] = stand.meaning.inputs.pop("one")
    os.rename(stand.world.inputs / "one", stand.world.inputs / "zero")


def _new_file(stand: Stand) -> None:
    stand.meaning.inputs["sub/new"] = ("44", False)
    stand.world.write_input("sub/new")


def _readme(stand: Stand) -> None:
    stand.world.put(stand.world.root / "README.md", b"Other words.\n")


def _back(stand: Stand) -> None:
    _recipe(stand, count=3)
    stand.between()
    _recipe(stand, count=2)


def _lost(stand: Stand) -> None:
    stand.disk.lost.add(stand.content("join"))
    stand.tool.output("join").unlink()


def _shorter(stand: Stand) -> None:
    stand.disk.lost.add(stand.content("join"))
    path = stand.tool.output("join")
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 1)


def _flipped(stand: Stand) -> None:
    """And then what reads the output must run."""
    stand.disk.flipped.add(stand.content("join"))
    path = stand.tool.output("join")
    path.chmod(0o644)

    def flip() -> None:
        data = path.read_bytes()
        with path.open("r+b") as stream:
            stream.write(b"9" if data[:1] != b"9" else b"8")

    _restored(stand, flip, path)
    edits.constant(stand, "stages/pack")  # type: ignore[arg-type]


def _kill(stand: Stand) -> None:
    """What had ended stays: `join` and what follows must run."""
    edits.constant(stand, "methods/text")  # type: ignore[arg-type]
    expected = stand.expect()
    stand.tool.kill_in("join")
    for stage in ("draw", "left", "right"):
        stand.oracle.made(expected.senses[stage], expected.outputs[stage])


def _two(stand: Stand) -> None:
    edits.constant(stand, "methods/text")  # type: ignore[arg-type]
    stand.outcome = stand.tool.build(at_once=2)


def _keep(stand: Stand) -> None:
    before = stand.expect().outputs["join"]
    words("stages/join", 0)(stand)
    edits.constant(stand, "methods/late")  # type: ignore[arg-type]
    if not stand.tool.keep("join"):
        raise NotExpressible
    stand.oracle.made(stand.expect().senses["join"], before)


def _first_input(stand: Stand) -> Path:
    return stand.world.inputs / "one"


SCENARIOS += [
    Scenario("nothing changed", lambda stand: None),
    Scenario("touch every file", _touch),
    Scenario("input: same size, other content", lambda s: (edits.input_text(s, 0, 0), None)[1]),  # type: ignore
    Scenario(
        "input: same size, mtime restored",
        lambda s: _restored(s, lambda: edits.input_text(s, 0, 0), _first_input(s)),  # type: ignore[arg-type]
    ),
    Scenario(
        "input: clock gone back an hour",
        lambda s: _restored(s, lambda: edits.input_text(s, 0, 0), _first_input(s), 3600.0),  # type: ignore[arg-type]
    ),
    Scenario("two input files swap contents", _swap_contents),
    Scenario("input: renamed", _rename),
    Scenario("input: a file more", _new_file),
    Scenario("input: chmod +x", _executable),
    Scenario("roles of two inputs swapped", lambda s: _recipe(s, roles={"a": "right", "b": "left"})),
    Scenario("stage: a constant", code("stages/shape")),
    Scenario("helper: a constant", code("methods/text")),
    Scenario("helper of a helper: a constant", code("methods/deep")),
    Scenario("module that no stage imports", code("methods/loose")),
    Scenario("stage: a comment", words("stages/shape", 0)),
    Scenario("stage: a docstring", words("stages/shape", 1)),
    Scenario("helper: formatting", words("methods/text", 2)),
    Scenario("template", lambda s: (edits.data(s, "@templates/Dockerfile.j2"), None)[1]),  # type: ignore
    Scenario("engine row", lambda s: (edits.data(s, "serving/engines.json"), None)[1]),  # type: ignore
    Scenario("version of a declared package", _package("torchy")),
    Scenario("version of another package", _package("unused")),
    Scenario("parameter: another value", lambda s: _recipe(s, count=3)),
    Scenario("parameter of the last stage", lambda s: _recipe(s, k=9)),
    Scenario("2e-6 written 0.000002", lambda s: _recipe(s, spelling="0.000002")),
    Scenario("order of the recipe's fields", lambda s: _recipe(s, order=3)),
    Scenario("an edit, a build, taken back", _back),
    Scenario("README", _readme),
    Scenario("project or store moved", lambda s: s.tool.move()),
    Scenario("an output is gone", _lost),
    Scenario("an output is a byte short", _shorter),
    Scenario("a bit of an output flips, mtime restored; then it is read", _flipped),
    Scenario("kill -9 while a stage writes", _kill),
    Scenario("two builders at once", _two),
    Scenario("keep an output after a refactoring", _keep),
]
QUICK = ("nothing changed", "roles of two inputs swapped", "input: chmod +x", "kill -9 while a stage writes")


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


def judge(tool: Contestant, act: Callable[[Stand], None]) -> Verdict:
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


def expected_of(act: Callable[[Stand], None]) -> str:
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
        more = {"QDC_HISTORIES": str(count), "QDC_HISTORIES_REPORT": str(report)}
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


def head(tools: Sequence[Contestant], arguments: list[str]) -> list[str]:
    info = Path("/proc/cpuinfo").read_text()
    model = (re.search(r"model name\s*: (.*)", info) or ["", platform.machine()])[1]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()[:12]
    return [
        "# Who reruns what",
        "",
        f"Written by `python benchmarks/freshness.py{''.join(f' {part}' for part in arguments)}`; every word of the",
        "tables is of that one run.",
        "",
        f"- machine: {os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}",
        f"- Python {platform.python_version()}" + (f", commit {commit}" if commit else ""),
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
    total = sum(wrong.values())
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(wrong.items())) or "none wrong"
    lines = [
        "## qdc's histories",
        "",
        f"tests/test_adversary.py with `QDC_HISTORIES`: {found['histories']} histories of {len(kinds)} kinds of step,",
        f"{found['builds']} builds, {found['decisions']} decisions ({found['reran']} stages ran), in "
        f"{float(str(found['seconds'])):.0f} s: {'zero wrong decisions' if not total else said}.",
        "",
    ]
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
        lines = [*head(tools, sys.argv[1:]), *table(tools, rows), "", *history_lines(found())]
    page = "\n".join(lines)
    if given.quick or given.only:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
