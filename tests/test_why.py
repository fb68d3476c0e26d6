"""Why a stage is what it is, for now and for past builds; and the records that a person answers for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from micro import Micro, qdc

from qdc.core.errors import QdcError
from qdc.graph.instances import Instance
from qdc.graph.plan import Plan, plan
from qdc.report.why import LINES, why_now, why_then
from qdc.run.edits import edits, named
from qdc.run.keep import choose, import_output, keep
from qdc.run.log import Decisions, log_of_build, logs, read_log, write_log
from qdc.store.store import Store

CODE_A, CODE_B = "a" * 64, "b" * 64


def chain(**params: Any) -> list[Instance]:
    """Three stages in a row: prompts -> base -> quantize."""
    code = params.pop("code", CODE_A)
    make: Callable[..., Instance] = lambda name, inputs: Instance(  # noqa: E731
        name, name, {"lr": 1.0, **params.get(name, {})}, inputs, code, {"torch": "1"}, "seeded", "train", "compute"
    )
    return [make("prompts", {}), make("base", {"text": "prompts"}), make("quantize", {"base": "base"})]


class World:
    """A store in which stages are run by writing what they depend on, or a text that a test gives."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)

    def plan(self, instances: list[Instance]) -> Plan:
        return plan(instances, self.store.record, self.store.latest, lambda digest: {"stages/x.py": digest})

    def build(self, instances: list[Instance], **outputs: str) -> list[str]:
        ran = []
        while True:
            made = self.plan(instances)
            stage = next((stage for stage in made.stages if stage.state == "stale"), None)
            if stage is None:
                return ran
            name = stage.instance.name
            with self.store.staging() as work:
                text = outputs.get(name, json.dumps([name, stage.instance.params, stage.inputs]))
                (work / "out").mkdir()
                (work / "out" / "file").write_text(text)
                tree = self.store.publish(work / "out")
            record = {"instance": name, "stage": name, "determinism": "seeded", "output": tree.digest, "seconds": 1.0}
            components = stage.instance.components(stage.inputs)
            self.store.add_record(str(stage.key), {**record, "components": components, "finished": "yesterday"})
            ran.append(name)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


def test_a_stale_stage_names_the_recipes_value_and_its_line(world: World) -> None:
    world.build(chain())
    made = world.plan(chain(base={"lr": 2.0}))
    recipe = {"target": {"base": {"lr": 2.0}}, "drafter": {"lr": 2.0}}
    before = {"target": {"base": {"lr": 1.0}}, "drafter": {"lr": 2.0}}
    origins = {"target.base.lr": "r.yaml:7", "drafter.lr": "r.yaml:9"}
    changed = edits(before, recipe, origins)
    assert changed == [{"path": "target.base.lr", "was": 1.0, "now": 2.0, "where": "r.yaml:7"}]
    reason = named(made["base"].reasons[0], changed, recipe, origins)
    assert (reason["path"], reason["where"]) == ("target.base.lr", "r.yaml:7")


def test_a_waiting_stage_names_the_stale_one_behind_it_and_the_way(world: World) -> None:
    world.build(chain())
    lines = why_now(world.plan(chain(prompts={"lr": 2.0})), "quantize", None, [])
    assert lines[0].startswith("quantize is waiting")
    assert lines[1:] == ["  prompts is stale:", "    lr: 1.0 -> 2.0", "    prompts -> base -> quantize"]


def test_a_fresh_stage_says_what_it_does_not_depend_on(world: World) -> None:
    world.build(chain())
    made = world.plan(chain(quantize={"lr": 2.0}))
    changed = [{"path": "target.quantization.bits", "was": 4, "now": 8, "where": None}]
    record = world.store.record(str(made["base"].key))
    lines = why_now(made, "base", record, changed)
    assert "  nothing that its key covers has changed since yesterday" in lines
    assert "  does not depend on what changed: target.quantization.bits 4 -> 8" in lines


def test_changed_code_is_named_by_file(world: World) -> None:
    world.build(chain())
    lines = why_now(world.plan(chain(code=CODE_B)), "prompts", None, [])
    assert lines == ["prompts is stale: a build runs it", "  the code changed: stages/x.py"]


def test_an_answer_has_fewer_than_twelve_lines(world: World) -> None:
    many = {str(number): number for number in range(40)}
    world.build(chain())
    made = world.plan(chain(prompts=many))
    assert len(why_now(made, "prompts", None, [])) <= LINES == 11
    decisions = Decisions(made)
    log = {"stages": decisions.stages, "recipe_name": "r", "started": "now", "edits": [], "error": None}
    lines = why_then(log, "prompts")
    assert len(lines) <= LINES and "  and 28 more" in lines


def test_an_old_output_kept_after_a_refactoring_makes_all_behind_it_fresh(world: World) -> None:
    world.build(chain())
    now = chain(code=CODE_B)
    assert world.plan(now).names("stale") == ["prompts"]
    kept = keep(world.store, lambda: world.plan(now), [item.name for item in now], "renamed a helper")
    assert kept == ["prompts", "base", "quantize"]
    made = world.plan(now)
    assert made.fresh and world.build(now) == []
    record = world.store.record(str(made["base"].key))
    assert record is not None and record["kept"]["because"] == "renamed a helper"
    lines = why_now(made, "base", record, [])
    assert lines[1].startswith("  kept: renamed a helper (made under key ")


def test_a_changed_value_cannot_be_kept(world: World) -> None:
    world.build(chain())
    now = chain(code=CODE_B, prompts={"lr": 3.0})
    with pytest.raises(QdcError, match=r"other values or inputs.*lr"):
        keep(world.store, lambda: world.plan(now), ["prompts"], "renamed a helper")
    with pytest.raises(QdcError, match="waits for prompts"):
        keep(world.store, lambda: world.plan(now), ["base"], "renamed a helper")
    with pytest.raises(QdcError, match="too short"):
        keep(world.store, lambda: world.plan(now), ["prompts"], "x")
    assert keep(world.store, lambda: world.plan(now), ["prompts", "base"], "renamed a helper", all_=True) == []


def test_an_imported_output_is_checked_and_stands_under_the_present_key(world: World, tmp_path: Path) -> None:
    made = world.plan(chain())
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with pytest.raises(QdcError, match=r"lacks prompts\.jsonl, summary\.json"):
        import_output(world.store, made, "prompts", folder, "made on another machine")
    (folder / "prompts.jsonl").write_text("{}\n")
    (folder / "summary.json").write_text("{}")
    record = import_output(world.store, made, "prompts", folder, "made on another machine")
    assert record["determinism"] == "imported"
    after = world.plan(chain())
    assert after["prompts"].state == "fresh" and after["base"].state == "stale"
    assert why_now(after, "prompts", record, [])[1] == "  imported: made on another machine"
    with pytest.raises(QdcError, match="already"):
        import_output(world.store, after, "prompts", folder, "made on another machine")
    with pytest.raises(QdcError, match="waits for base"):
        import_output(world.store, after, "quantize", folder, "made on another machine")


def test_of_reruns_that_differ_the_one_that_replaced_a_lost_output_counts_until_another_is_chosen(world: World) -> None:
    world.build(chain(), prompts="one")
    first = world.plan(chain())["prompts"]
    key, output = str(first.key), str(first.output)
    tree = world.store.tree(output)
    assert tree is not None
    world.store.discard(tree.entries[0].sha256)
    assert world.build(chain(), prompts="two")[0] == "prompts"
    with world.store.staging() as work:
        (work / "again").mkdir()
        (work / "again" / "file").write_text("one")
        world.store.publish(work / "again")
    assert world.store.record_numbers(key) == [1, 2]
    assert world.plan(chain())["prompts"].output != output, "what was lost and came back changes nothing by itself"
    choose(world.store, world.plan(chain()), "prompts", 1, "the first was measured")
    assert world.plan(chain())["prompts"].output == output
    with pytest.raises(QdcError, match="no record 3"):
        choose(world.store, world.plan(chain()), "prompts", 3, "the second has the fix")


def test_a_log_answers_later_and_is_a_few_kilobytes(world: World) -> None:
    made = world.plan(chain())
    decisions = Decisions(made)
    world.build(chain())
    decisions.plan(world.plan(chain()))
    decisions.became("prompts", "ran", "c" * 64)
    id = write_log(world.store, 0.0, "/r.yaml", "r", [], decisions, {"result": "done", "build": "b1", "error": None})
    assert logs(world.store) == [id] and (world.store.root / "log" / f"{id}.json").stat().st_size < 3000
    log = log_of_build(world.store, "b1")
    assert log is not None and log == read_log(world.store, id)
    assert why_then(log, "prompts")[0] == "prompts ran in the build of r at 1970-01-01T00:00:00Z"
    assert "  never built in this store" in why_then(log, "prompts")
    assert why_then(log, "quantize")[0].startswith("quantize was fresh")


def test_past_builds_of_micro_can_be_asked(micro: Micro) -> None:
    store = ("--store", str(micro.store))
    listed = json.loads(qdc("show", "--logs", "--json", *store).stdout)["logs"]
    first = next(log for log in listed if log["build"] == micro.first["build"])
    assert "distill" in first["ran"]
    asked = qdc("why", "distill", micro.first["build"], *store)
    assert asked.returncode == 0 and asked.stdout.startswith("distill ran in the build of micro at ")
    assert qdc("why", "distill", first["log"], *store).stdout == asked.stdout
    size = (micro.store / "log" / f"{first['log']}.json").stat().st_size
    assert size < 16000
    assert qdc("why", "nothing", first["log"], *store).returncode == 2
    assert json.loads(qdc("why", "distill", first["log"], "--json", *store).stdout)["log"]["stage"]["state"] == "ran"


def test_keep_and_import_on_the_command_line(micro: Micro, tmp_path: Path) -> None:
    store = ("--store", str(micro.store))
    changed = ("--set", "target.qad.optimizer.lr=7e-5")
    refused = qdc("keep", "distill", str(micro.recipe), "--because", "nothing has changed", *store, *changed)
    assert refused.returncode == 4 and "other values or inputs" in refused.stderr and "optimizer.lr" in refused.stderr
    fresh = qdc("keep", "all", str(micro.recipe), "--because", "nothing has changed", "--json", *store)
    assert json.loads(fresh.stdout)["kept"] == []
    lacking = qdc("import", "quantize", str(micro.recipe), str(tmp_path), "--because", "made elsewhere", *store,
                  "--set", "target.quantization.scheme.group_size=64")  # fmt: skip
    assert lacking.returncode == 4 and "lacks grid.safetensors, grid.json" in lacking.stderr


def test_an_explanation_compares_with_what_counted_last_not_with_what_was_made_last(world: World) -> None:
    world.build(chain())
    first = world.plan(chain())["prompts"]
    world.build(chain(code=CODE_B), prompts="of a try")
    world.store.counted("prompts", str(first.key))  # as a build does after the try was taken back
    refactored = chain(code="c" * 64)
    assert keep(world.store, lambda: world.plan(refactored), ["prompts"], "renamed a helper") == ["prompts"]
    assert world.plan(refactored)["prompts"].output == first.output
