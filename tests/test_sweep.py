"""Sweeps: values, the union of plans, members that fail, and what each leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from micro import SCRATCH, Micro, qdc
from test_run import WRITE, Scripts, made, scripts  # noqa: F401

from qdc.cli.progress import Quiet
from qdc.core.errors import QdcError
from qdc.graph.instances import Instance
from qdc.run.build import Build
from qdc.run.front import Front
from qdc.run.settings import Settings
from qdc.run.sweep import Variant, cause, stages_of, union, values, variants
from qdc.store.store import Store

# Values


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rtn,gptq", ["rtn", "gptq"]),
        ("4, 7", ["4", "7"]),
        ("4", ["4"]),
        ("", [""]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("[1,2]", ["[1,2]"]),
        ("{a: [1, 2], b: {c: 1}},null", ["{a: [1, 2], b: {c: 1}}", "null"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("'it''s, so',x", ["'it''s, so'", "x"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ('["]",2],3', ['["]",2]', "3"]),
        ("don't,won't", ["don't", "won't"]),
        ("re:.*in_proj_[ab]$", ["re:.*in_proj_[ab]$"]),
    ],
)
def test_values_are_split_at_commas_outside_of_quotes_and_brackets(text: str, found: list[str]) -> None:
    assert values(text, "x") == found


@pytest.mark.parametrize("text", ["[1,2", "a,{b", '"a,b', "'a", "1,,2", "1,", ",", "1,1", "4,7,4"])
def test_values_that_are_none_are_wrong_use(text: str) -> None:
    with pytest.raises(QdcError) as caught:
        values(text, "serve.k")
    assert caught.value.exit_code == 2 and caught.value.hint and "serve.k" in caught.value.message


@given(st.lists(st.recursive(st.integers() | st.text() | st.booleans(), st.lists, max_leaves=5), unique_by=json.dumps))
def test_values_in_json_come_out_as_they_went_in(items: list[Any]) -> None:
    """JSON is YAML's flow form: whatever is in it, the commas between are found."""
    texts = [json.dumps(item) for item in items]
    assert values(", ".join(texts), "x") == (texts or [""])


@given(st.text())
def test_any_text_is_split_or_refused_in_words(text: str) -> None:
    try:
        assert values(text, "x")
    except QdcError as error:
        assert error.exit_code == 2


def test_variants_are_all_combinations() -> None:
    found = variants(["a=1,2", "b.c=x", "d=[1,2],3"])
    assert [variant.sets for variant in found] == [
        ["a=1", "b.c=x", "d=[1,2]"],
        ["a=1", "b.c=x", "d=3"],
        ["a=2", "b.c=x", "d=[1,2]"],
        ["a=2", "b.c=x", "d=3"],
    ]
    assert found[2].set == {"a": "2", "d": "[1,2]"} and [variant.number for variant in found] == [1, 2, 3, 4]
    assert [variant.sets for variant in variants([])] == [[]]
    for bad in (["a"], ["=1"], ["a=1,2", "a=3"], [f"a{n}=1,2,3,4" for n in range(5)]):
        with pytest.raises(QdcError):
            variants(bad)


# The union of plans


def read(*instances: Instance) -> Front:
    return Front({}, "", list(instances), [], {}, [], {})


def members(*reads: Front) -> list[Variant]:
    return [Variant(number, {}, [], one) for number, one in enumerate(reads, 1)]


def run(store: Store, found: list[Variant]) -> tuple[Build, dict[int, list[tuple[str, bool]]]]:
    """A build of the union, and of each variant its stages with whether they ran."""
    instances, real = union(found)
    build = Build(store, Settings(sys.executable, 1, 1), instances, Quiet(), names=real, going=True)
    ran = {row.name: row for row in build.run()}
    told: set[str] = set()
    return build, {one.number: [(row.name, row.ran) for row in stages_of(one, ran, told)] for one in found}


def test_what_variants_share_runs_once_and_each_has_all_of_its_stages(
    tmp_path: Path,
    made: Scripts,  # noqa: F811
) -> None:
    shared, one, two = made.instance("a"), made.instance("b", f"{WRITE} # 1"), made.instance("b", f"{WRITE} # 2")
    ends = [made.instance("c", f"{WRITE}; print(job['inputs'])", x="b") for _ in range(2)]
    found = members(read(shared, one, ends[0]), read(shared, two, ends[1]), read(shared, one, ends[0]))
    build, rows = run(Store(tmp_path / "store"), found)
    assert found[1].names == {"a": "a", "b": "b#2", "c": "c#2"} and found[2].names == found[0].names
    # Both b's write the same, so that one c is made, whichever variant asks first.
    assert sorted(made.ran()) == ["a", "b", "b", "c"]
    assert rows[1] == [("a", True), ("b", True), ("c", True)]
    assert rows[2][:2] == [("a", False), ("b", True)] and len(rows[2]) == 3
    assert rows[3] == [("a", False), ("b", False), ("c", False)]
    store = build.store
    record = store.record(two.key({}))
    assert record is not None and record["instance"] == "b", "records know no variants"
    assert build.decisions is not None and build.decisions.of(found[1].names).stages["b"]["state"] == "ran"
    again, rows = run(store, found)
    assert not again.seconds and all(not ran for row in rows.values() for _, ran in row)


def test_a_member_that_fails_stops_no_other_and_its_failure_is_not_repeated(
    tmp_path: Path,
    made: Scripts,  # noqa: F811
) -> None:
    base, bad = made.instance("base"), made.instance("b", "raise SystemExit(3)", x="base")
    good = made.instance("b", x="base")
    tail = made.instance("c", x="b")
    found = members(read(base, bad, tail), read(base, good, tail), read(base, bad, tail))
    build, rows = run(Store(tmp_path / "store"), found)
    assert sorted(made.ran()) == ["b", "b", "base", "c"]
    assert rows[2] == [("base", False), ("b", True), ("c", True)]
    assert rows[1] == [("base", True)] and rows[3] == [("base", False)]
    for variant in (found[0], found[2]):
        error = cause(variant, build)
        assert error is not None and "stage b: the stage ended with exit code 3" in error.message
    assert cause(found[1], build) is None


# Through the command line


def sweep(micro: Micro, *more: str) -> Any:
    return qdc("sweep", micro.recipe, "--store", micro.store, *SCRATCH, *more, cwd=micro.folder)


def test_a_sweep_of_micro_costs_what_differs_and_leaves_a_build_a_member(micro: Micro) -> None:
    several = ["--set", "serve.max_num_seqs=2,3", "--set", "serve.k=6,7,99"]
    done = sweep(micro, *several, "--json")
    assert done.returncode == 2, "two members are invalid"
    answer = json.loads(done.stdout)
    assert (answer["recipe"], answer["varied"]) == ("micro", ["serve.max_num_seqs", "serve.k"])
    good = [row for row in answer["variants"] if row["error"] is None]
    assert [row["set"]["serve.k"] for row in answer["variants"]] == ["6", "7", "99"] * 2 and len(good) == 4
    assert answer["ran"] == sum(stage["ran"] for row in good for stage in row["stages"]) == 4
    assert {stage["name"] for row in good for stage in row["stages"] if stage["ran"]} == {"image"}
    assert len({row["image"]["id"] for row in good}) == 4 == len({row["build"] for row in good})
    assert all(row["bytes"] > 1000 and row["measurements"] and row["predictions"]["image"] for row in good)
    bad = answer["variants"][2]
    assert "K = 99" in bad["error"]["message"] and (bad["build"], bad["predictions"]) == (None, None)
    differs = qdc("diff", good[0]["build"], good[3]["build"], "--store", micro.store)
    assert differs.returncode == 1 and "K 6 -> 7" in differs.stdout
    shown = json.loads(qdc("show", good[0]["build"], "--record", "--json", "--store", micro.store).stdout)["record"]
    assert shown["recipe"]["serve"]["k"] == 6 and shown["origins"]["serve.k"] == "--set"
    why = qdc("why", "image", good[0]["build"], "--store", micro.store)
    assert why.returncode == 0 and "serve.k" in why.stdout, why.stderr
    # Once more: nothing runs, and no further records are made.
    count = len(Store(micro.store).builds())
    again = sweep(micro, *several)
    assert again.returncode == 2 and "ran 0 of" in again.stdout and len(Store(micro.store).builds()) == count
    table = again.stdout.split("\n")
    assert table[2].split()[:2] == ["serve.max_num_seqs", "serve.k"] and "acceptance-length" in table[2]
    assert table[3].split()[:3] == ["1", "2", "6"] and table[3].split()[-1] == good[0]["build"]
    assert table[5].split()[-1] == "invalid" and "variant 3: K = 99" in again.stdout
    built = json.loads(qdc("build", micro.recipe, "--store", micro.store, *SCRATCH, "--set", "serve.max_num_seqs=2",
                           "--set", "serve.k=6", "--json", cwd=micro.folder).stdout)  # fmt: skip
    assert built["image"] == good[0]["image"], "a member is what a build of it is"


def test_a_sweep_of_which_no_member_is_valid_says_why(micro: Micro) -> None:
    done = sweep(micro, "--set", "serve.nosuch=1,2", "--json")
    assert done.returncode == 2 and "nosuch" in json.loads(done.stdout)["error"]["message"]
