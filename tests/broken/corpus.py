"""The broken recipes: real ones with one small edit each, and what must be said about them.

One YAML file a topic beside this module. A case:

    id:      what a person did
    recipe:  the real recipe that is edited (default micro)
    replace: {old: new}, the first occurrence each; `text`: the whole file; `append`: at its end
    files:   {other recipe: {replace: ...}}, edits of files that are not the one checked
    encoding, newline: how the file is saved (latin-1, utf-16, utf-8-sig; crlf, cr)
    bytes:   {old: base64}, where text cannot say it; `pad`: blanks up to so many bytes
    place:   `missing` or `folder`, what is there in place of the file
    set:     arguments of --set
    facts:   {recipe path: parts merged into the headers of its checkpoint}; then a lock lies beside the recipe
    environment: user settings
    rule, severity (default error): what must be found
    at:      the line's text with the token between « and »; `start` is the first column of the first line; without
             it no place in a file is expected. `nth`: which of several such lines; `in`: the file where that is not
             the one checked
    cause:   patterns of which a message that names the cause has one; without it, the token or its key
    report:  the public report of somebody who met it; `pitfall`: what it is, where no report is public
    misses:  why the product does not say it yet

Knows the product only through the lock that it writes for headers.
"""

from __future__ import annotations

import base64
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hub_facts
import yaml

from qdc.recipe.load import load
from qdc.sources.lock import Locked, lockable, write_lock

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
OPEN, CLOSE = "«", "»"


@dataclass(frozen=True)
class Case:
    """One broken recipe; `edit` holds the keys of a case that are not fields here."""

    topic: str
    id: str
    rule: str
    edit: dict[str, Any]
    recipe: str = "micro"
    severity: str = "error"
    at: str | None = None
    nth: int | None = None
    file: str | None = None
    cause: tuple[str, ...] = ()
    report: str | None = None
    misses: str | None = None

    @property
    def sets(self) -> list[str]:
        return list(self.edit.get("set", []))

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.edit.get("environment", {}))


@dataclass(frozen=True)
class Place:
    """Where the token is: `line` and `column` from 1; `file` as findings name it."""

    file: str
    line: int
    column: int
    token: str | None


def cases() -> list[Case]:
    """All cases, in the order of their files. Raises AssertionError where two have one id."""
    found: list[Case] = []
    for path in sorted(HERE.glob("*.yaml")):
        for given in yaml.safe_load(path.read_text(encoding="utf-8")):
            given.pop("pitfall", None)
            names = ("id", "rule", "recipe", "severity", "at", "nth", "report", "misses")
            own = {name: given.pop(name) for name in names if name in given}
            cause = tuple(given.pop("cause", ()))
            found.append(Case(path.stem, file=given.pop("in", None), edit=given, cause=cause, **own))
    assert len({case.id for case in found}) == len(found), "two cases have one id"
    return found


def copy_recipes(folder: Path) -> Path:
    """The recipes of the checkout in `folder`, without any lock."""
    return Path(shutil.copytree(RECIPES, folder, ignore=shutil.ignore_patterns("*.lock")))


def write(case: Case, folder: Path) -> Path:
    """Edit the recipes in `folder` (see `copy_recipes`) as the case says; returns the path of the recipe to check."""
    path = folder / f"{case.recipe}.yaml"
    for name, edit in case.edit.get("files", {}).items():
        _save(folder / name, edit)
    if place := case.edit.get("place"):
        path.unlink()
        if place == "folder":
            path.mkdir()
        return path
    _save(path, case.edit)
    if "facts" in case.edit:
        lock(path, case.edit["facts"], case.sets)
    return path


def lock(path: Path, edits: dict[str, Any], sets: list[str]) -> None:
    """Write the lock of the recipe: the headers of published checkpoints, with `edits` merged into them."""
    loaded = load(path, sets)
    facts = hub_facts.edited(hub_facts.facts_for(loaded), edits)
    wanted = lockable(loaded.model)
    found = {place: facts[place] for place in wanted if place in facts}
    write_lock(
        path,
        {
            place: Locked(
                identity,
                {"README.md": (0, "0" * 64)},
                found[place].as_json() if place in found else None,
                found[place].licence if place in found else "apache-2.0",
            )
            for place, identity in wanted.items()
        },
    )


def expected(case: Case, path: Path) -> Place | None:
    """The place of the token; None where no place in a file is expected. Raises AssertionError where the text of `at`
    is not in exactly one line."""
    if case.at is None:
        return None
    file = path if case.file is None else path.with_name(case.file)
    if case.at == "start":
        return Place(str(file), 1, 1, None)
    before, _, rest = case.at.partition(OPEN)
    token, mark, after = rest.partition(CLOSE)
    assert mark, f"{case.id}: `at` marks no token"
    wanted = before + token + after
    for given in case.sets:
        if wanted in given:
            return Place(f"--set {given.partition('=')[0]}", 1, given.index(wanted) + len(before) + 1, token)
    lines = lines_of(file)
    found = [number for number, line in enumerate(lines, 1) if line == wanted]
    found = found or [number for number, line in enumerate(lines, 1) if wanted in line]
    assert case.nth or len(found) == 1, f"{case.id}: `{wanted}` is in {len(found)} lines"
    number = found[(case.nth or 1) - 1]
    column = lines[number - 1].index(wanted) + len(before) + 1
    return Place(str(file), number, column, token)


def lines_of(file: Path) -> list[str]:
    """The lines of a file as an editor counts them; bytes that are not UTF-8 as U+FFFD."""
    text = file.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _save(path: Path, edit: dict[str, Any]) -> None:
    """Write the edited text with its encoding and line ends."""
    text = edit["text"] if "text" in edit else path.read_text(encoding="utf-8")
    for old, new in edit.get("replace", {}).items():
        assert old in text, f"`{old}` is not in {path.name}"
        text = text.replace(old, new, 1)
    text += edit.get("append", "")
    ends = {"crlf": "\r\n", "cr": "\r"}.get(edit.get("newline", ""), "\n")
    raw = text.replace("\n", ends).encode(edit.get("encoding", "utf-8"))
    for old, new in edit.get("bytes", {}).items():
        assert old.encode() in raw, f"`{old}` is not in {path.name}"
        raw = raw.replace(old.encode(), base64.b64decode(new), 1)
    path.write_bytes(raw + b" " * max(0, edit.get("pad", 0) - len(raw)))
