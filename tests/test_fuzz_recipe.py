"""Recipes changed at random are read or refused, with places: never another exception, never without an end.

300 examples; `QDC_FUZZ=10000` for more, and `QDC_FUZZ_REPORT=FILE` for what came of them.
"""

from __future__ import annotations

import atexit
import cProfile
import json
import os
import re
import shutil
import tempfile
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_facts
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid
from qdc.recipe.load import load
from qdc.rules.check import check, deferred
from qdc.sources.facts import attach

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*.yaml"))}
EXAMPLES = int(os.environ.get("QDC_FUZZ", "300"))
STEPS = 20_000_000
"""Function calls that one recipe may take; a real one takes under 500,000."""
FOUND: Counter[str] = Counter()
MOST = {"calls": 0}

NASTY = [
    "\t", "\0", "\r", "\x85", "\u2028", "\ufeff", "\ud83d", "\u202e", "é", "层", "\U0001f469\u200d", "  ", "\n",
    "&a ", "*a", "&a [*a]", "<<: *a", "<<: {k: 1}", "? ", "- ", ": ", ":", ",", "#", "|\n", ">-\n", "%YAML 1.1\n", "!",
    "!!str ", "!!python/object/apply:os.system [id]", "@", "`", "---\n", "...\n", "{", "}", "[", "]", '"', "'", "\\",
    '"\\ud800"', "<<<<<<< a\n", "=======\n", ">>>>>>> b\n", "||||||| c\n", "9" * 5000, "-1", "1e999", "-.inf", ".nan",
    "0x" + "f" * 5000, "0o17", "0644", "1_000", "12:30", "2026-01-01", "no", "Yes", "~", "null", "true", "[" * 3000,
    "{a: " * 200, "[" * 80 + "]" * 80, "hf_" + "a" * 30, "extends: tiny.yaml\n", "extends: micro.yaml\n",
    "accept: [{rule: DRF02, because: measured here}]\n",
]  # fmt: skip

ROUGH = ["drop", "double", "swap", "insert", "insert", "flip", "indent", "halves", "value", "value"]
GENTLE = ["number", "number", "word", "drop"]
NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "8",
    "15",
    "16",
    "17",
    "31",
    "33",
    "64",
    "96",
    "128",
    "257",
    "4096",
    "262144",
    "-1",
    "0.5",
]
WORDS = sorted(
    {word for text in TEXTS.values() for word in re.findall(r"(?<=[ :\[{,])[A-Za-z][\w.-]+(?=[,}\]\n])", text)}
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        [0, 1, -1, 2**31, 2**63, 10**300, "", "no", "1", "re:(", "re:" + "(a*)*" * 8 + "b", "../x", "/", "0.32.0"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def recipe_bytes(draw: st.DrawFn, name: str) -> bytes:
    """The text of a real recipe, changed in one to four ways: gently, so that rules are reached, or at random."""
    text, gently = TEXTS[name], draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        text = _changed(draw, text, GENTLE if gently else ROUGH)
    raw = text.encode("utf-8", errors="surrogatepass")
    ending = "as it is" if gently else draw(st.sampled_from(["as it is", "as it is", "cut", "bytes", "crlf", "utf-16"]))
    if ending == "cut":
        return raw[: draw(st.integers(0, len(raw)))]
    if ending == "bytes":
        at = draw(st.integers(0, len(raw)))
        return raw[:at] + draw(st.binary(max_size=12)) + raw[at:]
    if ending == "utf-16":
        return text.encode("utf-16", errors="surrogatepass")
    return raw.replace(b"\n", b"\r\n") if ending == "crlf" else raw


def _changed(draw: st.DrawFn, text: str, kinds: list[str]) -> str:
    kind = draw(st.sampled_from(kinds))
    lines = text.split("\n")
    first, second = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    if kind in ("number", "word"):
        pattern = r"(?<=[ \[])[0-9][0-9.e]*(?=[,}\]\n])" if kind == "number" else r"(?<=: )[A-Za-z][\w.-]+(?=[,}\n])"
        return _replaced(draw, text, pattern, NUMBERS if kind == "number" else WORDS)
    if kind == "value":
        return _with_value(draw, text)
    if kind in ("insert", "flip"):
        at = draw(st.integers(0, len(text)))
        given = draw(st.sampled_from(NASTY) | st.text(max_size=6))
        return text[:at] + given + text[at + (kind == "flip") :]
    if kind == "drop":
        del lines[first]
    elif kind == "double":
        lines.insert(second, lines[first])
    elif kind == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    elif kind == "indent":
        lines[first] = draw(st.sampled_from([" ", "    ", "\t"])) + lines[first].lstrip(
            draw(st.sampled_from(["", " "]))
        )
    elif kind == "halves":
        other = TEXTS[draw(st.sampled_from(sorted(TEXTS)))].split("\n")
        lines = lines[:first] + other[draw(st.integers(0, len(other))) :]
    return "\n".join(lines)


def _replaced(draw: st.DrawFn, text: str, pattern: str, others: list[str]) -> str:
    """The text with one match of the pattern replaced by one of the others."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return text
    match = draw(st.sampled_from(matches))
    return text[: match.start()] + draw(st.sampled_from(others)) + text[match.end() :]


def _with_value(draw: st.DrawFn, text: str) -> str:
    """The recipe with a random value at a random path, written as JSON; the text itself where it is no mapping."""
    try:
        data = yaml.safe_load(text)
        _put(draw, data, draw(values))
        return json.dumps(data, indent=1, ensure_ascii=draw(st.booleans()))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError, AttributeError):
        return text


def _put(draw: st.DrawFn, node: Any, value: Any) -> None:
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return
        place = draw(st.sampled_from(places))
        if not isinstance(node[place], dict | list) or not node[place] or draw(st.integers(0, 4)) == 0:
            if draw(st.integers(0, 5)) == 0 and isinstance(node, dict):
                place = draw(st.text(max_size=6))
            node[place] = value
            return
        node = node[place]


@st.composite
def assignments(draw: st.DrawFn, name: str) -> list[str]:
    """Arguments of --set: paths of the recipe, with mistakes, and values."""
    given = []
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        node, parts = yaml.safe_load(TEXTS[name]), list[str]()
        while isinstance(node, dict | list) and node and (not parts or draw(st.integers(0, 4))):
            place = draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
            parts, node = [*parts, str(place)], node[place]
        if draw(st.integers(0, 3)) == 0:
            parts.insert(
                draw(st.integers(0, len(parts))), draw(st.text(max_size=4) | st.sampled_from(["0", "-1", "٣", "k"]))
            )
        text = draw(st.sampled_from(NASTY) | st.text(max_size=10) | values.map(lambda value: json.dumps(value)))
        argument = f"{'.'.join(parts)}{draw(st.sampled_from(['=', '=', '=', '==', '']))}{text}"
        given.append(argument.replace("\ud83d", "\udcff"))  # As Python gives an argument's byte that is not UTF-8.
    return given


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, bytes, list[str]]:
    """A recipe's name, its changed bytes, and arguments of --set."""
    name = draw(st.sampled_from(sorted(TEXTS)))
    return name, draw(recipe_bytes(name)), draw(assignments(name))


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(ROOT / "recipes", Path(place) / "recipes", ignore=shutil.ignore_patterns("*.lock")))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="QDC_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(changed())
def test_a_changed_recipe_is_checked_or_refused_with_places(folder: Path, given: tuple[str, bytes, list[str]]) -> None:
    name, raw, sets = given
    path = folder / name
    path.write_bytes(raw)
    profile = cProfile.Profile()
    profile.enable()
    try:
        outcome = outcome_of(path, sets)
    finally:
        profile.disable()
        path.write_text(TEXTS[name], encoding="utf-8")
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < STEPS
    FOUND[outcome] += 1
    MOST["calls"] = max(MOST["calls"], calls)


def outcome_of(path: Path, sets: list[str]) -> str:
    """Read and check a recipe as `validate` does, and again with the headers of all that it names."""
    try:
        loaded = attach(load(path, sets))
        found = check(loaded)
        assert all(id and needs for id, needs in deferred(loaded))
        facts = hub_facts.facts_for(loaded) | loaded.facts
        found += check(replace(loaded, facts=facts))
        canonical.dumps(loaded.data)
    except RecipeInvalid as invalid:
        return _judged(invalid.diagnostics, "refused by text or shape")
    except QdcError as error:
        assert error.id.startswith("set.") and sets and error.message, repr(error)
        return "refused as an argument of --set"
    if not any(item.severity == "error" for item in found):
        return _judged(found, "valid")
    return _judged(found, "refused by rules")


def moves(letter: str) -> bool:
    """Whether a letter could move a terminal's cursor or change its state."""
    return unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _judged(found: list[Diagnostic], outcome: str) -> str:
    for item in found:
        assert item.file and item.message and item.severity in ("error", "warning", "note", "accepted"), item
        assert item.line and item.column and item.line > 0 and item.column > 0, item
        assert not [letter for letter in str(item) if letter not in "\n\u200d" and moves(letter)], repr(str(item))
        json.dumps(item.as_json()).encode()
        FOUND[f"rule {item.rule}"] += 1
    return outcome


@atexit.register
def _report() -> None:
    place = os.environ.get("QDC_FUZZ_REPORT")
    if place:
        outcomes = {key: count for key, count in sorted(FOUND.items()) if not key.startswith("rule ")}
        rules = sorted(key.removeprefix("rule ") for key in FOUND if key.startswith("rule "))
        report = {"asked": EXAMPLES, "outcomes": outcomes, "rules": rules, "most_calls": MOST["calls"]}
        Path(place).write_text(json.dumps(report), encoding="utf-8")
