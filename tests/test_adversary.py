"""Never wrongly fresh, never wrongly stale: histories of edits and troubles, judged by an oracle.

Each kind of step has a row with its right decision; random histories mix them; and a broken engine must be caught.
250 histories; `QDC_HISTORIES=10000` for more, and `QDC_HISTORIES_REPORT=FILE` for what came of them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent))

from adversary.breaks import BREAKS
from adversary.edits import constant
from adversary.faults import Fault
from adversary.histories import CHOICES, STEPS, Taken, at_random, tell
from adversary.trial import Count, Trial, Wrong
from adversary.troubles import killed_for_real, struck

HISTORIES = int(os.environ.get("QDC_HISTORIES", "250"))
COUNT = Count()
FIRST: list[str] = []
"""The first wrong history, as it was told."""
STARTED = time.monotonic()
ALL_BUT_TOSS = "draw left right join pack"
BROKEN_TRIES = 20

Row = tuple[str, int, int, str]
TABLE: list[Row] = [
    ("touch", 0, 0, ""),
    ("touch", 1, 1, ""),
    ("input or recipe edited again within one tick", 0, 0, "pack"),
    ("input or recipe edited again within one tick", 1, 1, ALL_BUT_TOSS),
    ("code or data edited again within one tick", 0, 0, "pack"),
    ("code or data edited again within one tick", 1, 3, "toss pack"),
    ("swap the roles of two inputs", 0, 0, "join pack"),
    ("swap the contents of two input files", 2, 3, "draw"),
    ("chmod +x", 1, 1, "draw"),
    ("chmod that changes nothing", 1, 1, ""),
    ("rename an input file", 0, 0, "draw"),
    ("add or remove an input file", 0, 0, ALL_BUT_TOSS),
    ("add or remove an input file", 1, 1, ALL_BUT_TOSS),
    ("comment, docstring or formatting", 2, 0, ""),
    ("comment, docstring or formatting", 10, 1, ""),
    ("comment, docstring or formatting", 5, 2, ""),
    ("comment in an empty package file", 1, 1, ""),
    ("constant of a stage", 1, 1, "left right join pack"),
    ("constant of a stage", 3, 2, "toss pack"),
    ("constant of a helper", 0, 0, ALL_BUT_TOSS),
    ("constant of a helper", 2, 3, "join pack"),
    ("constant of a helper", 3, 2, "pack"),
    ("constant that no stage imports", 0, 0, ""),
    ("constant that no stage imports", 1, 1, ""),
    ("template, engine row or launcher", 0, 0, "pack"),
    ("template, engine row or launcher", 1, 1, "pack"),
    ("version of a package that matters", 0, 0, "left right"),
    ("version of a package that matters", 1, 1, "draw"),
    ("version of a package that does not matter", 0, 0, ""),
    ("another spelling of the same number", 1, 1, ""),
    ("order of fields", 3, 0, ""),
    ("value of a parameter", 0, 1, "left right join pack"),
    ("value of a parameter", 2, 3, "pack"),
    ("clock going back", 0, 0, ALL_BUT_TOSS),
    ("clock going back", 1, 1, ALL_BUT_TOSS),
    ("same size and restored mtime", 0, 0, ALL_BUT_TOSS),
    ("same size and restored mtime", 1, 1, ALL_BUT_TOSS),
    ("README", 0, 0, ""),
    ("README", 2, 0, ""),
    ("qdc's own version and command line", 0, 0, ""),
    ("code edited before a stage is loaded", 1, 1, ALL_BUT_TOSS),
    ("code edited before a stage is loaded", 2, 3, ALL_BUT_TOSS),
    ("data edited while the stage that reads it runs", 0, 0, ALL_BUT_TOSS),
    ("kill at a step of publishing", 0, 0, ALL_BUT_TOSS),
    ("kill at a step of publishing", 2, 3, "join pack"),
    ("disk full", 2, 3, "join pack"),
    ("read-only store", 0, 0, ALL_BUT_TOSS),
    ("read-only store of another checkout", 2, 0, "join pack"),
    ("two builders at once", 0, 0, ALL_BUT_TOSS),
    ("store moved", 0, 0, ""),
    ("memo lost or damaged", 0, 0, ""),
    ("memo lost or damaged", 1, 1, ""),
    ("object gone or of another size", 0, 0, "pack"),
    ("object gone or of another size", 1, 1, "toss"),
    ("object gone or of another size", 2, 3, "left"),
    ("object with a flipped bit", 3, 2, "right join pack"),
    ("flipped bit that no stat shows", 0, 0, "pack"),
    ("flipped bit that no stat shows", 2, 3, "left"),
    ("record truncated", 0, 0, "draw"),
    ("tree deleted", 1, 1, "join"),
    ("sampled stage that differs on rerun", 2, 2, ""),
    ("sampled stage that differs on rerun", 2, 3, "toss pack"),
    ("choose among reruns", 0, 0, ""),
    ("keep", 0, 0, ""),
    ("keep", 1, 1, ""),
    ("keep after a try that was taken back", 1, 0, "join pack"),
    ("import", 1, 1, "pack"),
    ("gc", 0, 0, ""),
    ("gc", 1, 1, "left right"),
    ("gc killed", 2, 3, ""),
]
"""Step, the two numbers that it chooses by, and the stages that run in it."""

PATHS: list[tuple[str, list[Taken], str]] = [
    (
        "of two whole reruns the one that was chosen counts",
        [
            ("sampled stage that differs on rerun", 1, 1),
            ("value of a parameter", 3, 4),
            ("value of a parameter", 3, 5),
            ("choose among reruns", 1, 0),
        ],
        "toss pack",
    ),
    (
        "a choice outlives the record that it is about",
        [("choose among reruns", 0, 0), ("record truncated", 3, 2), ("constant of a stage", 3, 2)],
        "toss pack",
    ),
    (
        "a rerun whose first output was lost is kept",
        [("sampled stage that differs on rerun", 6, 1), ("keep", 2, 0)],
        "toss pack",
    ),
    (
        "a lost output that comes back as another stage's does not count again",
        [
            ("import", 11, 2),
            ("sampled stage that differs on rerun", 0, 5),
            ("add or remove an input file", 0, 1),
            ("value of a parameter", 7, 0),
        ],
        "draw left right join toss pack",
    ),
]
"""Histories that were wrong once, and the stages that run in them."""

OPEN: dict[str, str] = {}
"""Kinds of step that the engine gets wrong, and why."""
UNSURE: tuple[str, ...] = ()
"""Kinds that it gets wrong for the same reasons, after some histories."""


SHOWN: dict[str, list[Taken]] = {"which record counts is not kept": PATHS[-1][1]}
"""Breaks that random steps seldom show, with a history that does."""


def row(case: Row) -> object:
    wrong = OPEN.get(case[0])
    marks = [pytest.mark.xfail(strict=True, reason=wrong, raises=Wrong)] if wrong else []
    return pytest.param(*case, id=f"{case[0]} {case[1]},{case[2]}", marks=marks)


@pytest.mark.parametrize(("name", "a", "b", "runs"), [row(case) for case in TABLE])
def test_each_kind_of_step_runs_what_it_must_and_no_more(name: str, a: int, b: int, runs: str) -> None:
    assert ran([(name, a, b)]) == set(runs.split())


@pytest.mark.parametrize(("history", "runs"), [pytest.param(h, r, id=name) for name, h, r in PATHS])
def test_what_was_wrong_once_is_right(history: list[Taken], runs: str) -> None:
    assert ran(history) == set(runs.split())


def ran(history: list[Taken]) -> set[str]:
    """The stages that run in a history, after its first build."""
    runs: list[str] = []
    tell(history, runs=runs)
    return set(runs)


def test_every_kind_of_step_has_its_row() -> None:
    assert {name for name, *_ in TABLE} == set(STEPS)


def calls_of_a_build() -> int:
    """How many calls change the store in the build that follows an edit of what all but one stage depend on."""
    trial = prepared()
    fault = Fault("count")
    struck(trial, fault)
    trial.close()
    return fault.calls


def prepared() -> Trial:
    trial = Trial()
    trial.settle()
    trial.clock.advance()
    constant(trial, "methods/deep")
    return trial


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_call_leaves_what_it_had_finished(every: int) -> None:
    """SIGKILL of a whole process: what it had recorded stays, what it had not runs again, to the same bytes."""
    calls = calls_of_a_build()
    assert calls > 60
    for at in [0, *range(1, calls - 1, every)]:
        trial = prepared()
        try:
            killed_for_real(trial, at)
        finally:
            trial.close()


steps = st.tuples(
    st.sampled_from([name for name in STEPS if name not in OPEN and name not in UNSURE]),
    st.integers(0, CHOICES - 1),
    st.integers(0, CHOICES - 1),
)


@settings(
    max_examples=HISTORIES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.lists(steps, min_size=1, max_size=8))
def test_no_history_ends_in_a_wrong_decision(history: list[Taken]) -> None:
    """What is told again to make a wrong history smaller is not counted."""
    if COUNT.wrong:
        tell(history)
        return
    try:
        tell(history, COUNT)
    except Wrong as wrong:
        FIRST.append(str(wrong))
        raise


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_engine_is_caught(name: str) -> None:
    """The oracle can fail: a break is seen for what it is."""
    broken = BREAKS[name]
    histories = [SHOWN[name]] if name in SHOWN else [at_random(seed, broken.shown) for seed in range(BROKEN_TRIES)]
    with broken.change():
        found = (judged(history) for history in histories)
        assert broken.kind in (wrong.kind for wrong in found if wrong is not None)


def judged(history: list[Taken]) -> Wrong | None:
    try:
        tell(history)
    except Wrong as wrong:
        return wrong
    return None


@atexit.register
def _report() -> None:
    place = os.environ.get("QDC_HISTORIES_REPORT")
    if place:
        report = {
            "asked": HISTORIES,
            "histories": COUNT.histories,
            "first_wrong": FIRST,
            "steps": dict(COUNT.steps),
            "builds": COUNT.builds,
            "decisions": COUNT.decisions,
            "reran": COUNT.reran,
            "wrong": dict(COUNT.wrong),
            "left_out": OPEN | dict.fromkeys(UNSURE, "after some of the others"),
            "seconds": round(time.monotonic() - STARTED, 1),
        }
        Path(place).write_text(json.dumps(report, indent=2), encoding="utf-8")
