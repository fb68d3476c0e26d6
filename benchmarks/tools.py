"""The three checkers of a recipe that are compared, each as a cold process, and what their answers say.

qdc from the environment that runs this; check-jsonschema and plain pydantic from one of their own. Knows no case and no
figure.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from peers import peer, versions

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "schema" / "recipe.schema.json"
_HEADER = re.compile(r"^(?:(.*?):(\d+):(\d+): |(.*?): )?(error|warning|note)(?:\[(\w+)\])?: (.*)$")
_PLACE = re.compile(r"line (\d+), column (\d+)")


@dataclass(frozen=True)
class Answer:
    """`code`: exit status; `said`: messages with their help, one an entry; `places`: (line, column) of each entry."""

    code: int
    said: tuple[str, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    traceback: bool

    def beyond(self, usual: Answer) -> Answer:
        """What this answer says and `usual` does not."""
        new = [(said, places) for said, places in zip(self.said, self.places, strict=True) if said not in usual.said]
        return Answer(self.code, tuple(said for said, _ in new), tuple(places for _, places in new), self.traceback)


@dataclass(frozen=True)
class Tool:
    """`command`: without the recipe; `own`: it knows `--set` and `extends`."""

    name: str
    command: tuple[str, ...]
    versions: str
    own: bool = False

    def arguments(self, recipe: Path, sets: list[str]) -> list[str]:
        return [*self.command, str(recipe), *(part for given in sets for part in ("--set", given))]

    def answer(self, recipe: Path, sets: list[str], environment: dict[str, str]) -> Answer:
        """Run it once on a recipe."""
        done = subprocess.run(
            self.arguments(recipe, sets),
            capture_output=True,
            text=True,
            errors="replace",
            cwd=recipe.parent,
            env=clean_environment() | environment,
        )
        text = (done.stdout + done.stderr).replace(str(recipe.parent) + "/", "")
        said, places = _of_qdc(text) if self.own else _of_peer(text)
        return Answer(done.returncode, said, places, "Traceback (most recent call last)" in text)


def clean_environment() -> dict[str, str]:
    """The environment without settings of qdc, and without colour."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QDC_")}
    return kept | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT / "compiler")}


def tools() -> list[Tool]:
    """qdc, check-jsonschema and plain pydantic; installs the last two where they are missing."""
    qdc = Path(sys.executable).with_name("qdc")
    same = {name: importlib.metadata.version(name) for name in ("pydantic", "PyYAML")}
    python = peer("frontend", ["check-jsonschema==0.39.0", *(f"{name}=={version}" for name, version in same.items())])
    found = versions(python)
    check_versions = f"check-jsonschema {found['check-jsonschema']}, jsonschema {found['jsonschema']}"
    own = f"qdc {importlib.metadata.version('qdc')}"
    own += "".join(f", {name} {version}" for name, version in same.items())
    plain = f"pydantic {found['pydantic']}, PyYAML {found['pyyaml']}"
    check = (str(python.with_name("check-jsonschema")), "--verbose", "--schemafile", str(SCHEMA))
    return [
        Tool("qdc", (str(qdc), "validate"), own, own=True),
        Tool("check-jsonschema", check, check_versions),
        Tool("plain pydantic", (str(python), str(ROOT / "benchmarks" / "plain_pydantic.py")), plain),
    ]


def _of_qdc(text: str) -> tuple[tuple[str, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """Findings with their help, and the places that are named or underlined; not what is shown of the recipe."""
    said: list[str] = []
    places: list[list[tuple[int, int]]] = []
    number = 0
    for line in text.split("\n"):
        if (head := _HEADER.match(line)) is not None:
            said.append(head[7])
            places.append([(int(head[2]), int(head[3]))] if head[2] else [])
        elif said and line.startswith("help: "):
            said[-1] += f" {line}"
        elif said and (shown := re.match(r"( *\d+) \| ", line)) is not None:
            number = int(shown[1])
        elif said and (under := re.match(r"( +\| )( *)-+", line)) is not None:
            places[-1].append((number, len(under[2]) + 1))
    for index, entry in enumerate(said):
        places[index] += [(int(line), int(column)) for line, column in _PLACE.findall(entry)]
    return tuple(said), tuple(map(tuple, places))


def _of_peer(text: str) -> tuple[tuple[str, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """Lines, each with the places in it. Mappings printed whole and source lines name nothing, and are cut."""
    said, places = [], []
    lines = text.split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        told = _without_mappings(line).strip()
        if told and told != "^" and not following.strip().startswith("^"):
            said.append(told)
            places.append(tuple((int(row), int(column)) for row, column in _PLACE.findall(line)))
    return tuple(said), tuple(places)


def _without_mappings(line: str) -> str:
    """The line without what stands in braces, at any depth."""
    while (cut := re.sub(r"\{[^{}]*\}", "", line)) != line:
        line = cut
    return re.sub(r"\{[^{}]*(?=\[type=|$)", "", line)
