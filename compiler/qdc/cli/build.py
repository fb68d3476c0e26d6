"""`qdc build RECIPE`: run what is stale, and name the image. A second build runs nothing and says so."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdc.cli.common import add_executor, answer, note, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import QdcError
from qdc.graph.plan import Stage
from qdc.run.build import Build, Ran
from qdc.run.front import front, require_bytes
from qdc.run.outcome import Outcome, keep_log, keep_outcome, require_buildable
from qdc.store.store import Store
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("build", __doc__ or "", sets=True)
    options.add_argument("recipe", type=Path)
    options.add_argument(
        "--until", metavar="STAGE", action="append", default=[], help="build only what this stage needs (repeatable)"
    )
    options.add_argument(
        "--remote", metavar="URL", help="fetch outputs that this store has (default: QDC_REMOTE; `none`: do not)"
    )
    add_executor(options)
    given = options.parse_args(arguments)
    store = open_store(given.store, given.recipe)
    with in_use(store.root, lambda: note("waiting for `qdc store gc` to end")):
        return _build(given, store)


def _build(given: argparse.Namespace, store: Store) -> int:
    started = time.time()
    read = front(given.recipe, given.sets, store)
    for warning in read.warnings:
        note(warning)
    require_buildable(read, given.recipe, given.sets)
    from qdc.run.settings import remote, settings

    only = _needed(read.instances, given.until) if given.until else None
    shown = listener(given.quiet)
    asked = replace(settings(given.executor, given.address), remote=remote(given.remote))

    def before(stage: Stage) -> None:
        require_bytes(read, given.recipe, store, [stage])

    build = Build(store, asked, read.instances, shown, before, read.signature)
    try:
        if read.locked and asked.remote is None:
            require_bytes(read, given.recipe, store, build.plan().stages)
        stages = build.run(only)
    except BaseException as error:
        keep_log(store, given.recipe, read, build.decisions, started, None, error)
        raise
    finally:
        shown.close()
        for text in build.notes:
            note(text)
    if only is not None:
        keep_log(store, given.recipe, read, build.decisions, started, None)
        return _partial_answer(given.json, stages)
    made, new = keep_outcome(store, given.recipe, read, stages, started)
    if new:
        keep_log(store, given.recipe, read, build.decisions, started, made.build)
    if given.json:
        answer(
            {
                "build": made.build,
                "stages": [stage.as_json() for stage in stages],
                "image": {"name": made.image["name"], "id": made.image["id"]},
            }
        )
    else:
        _print(made, stages, time.time() - started)
    return 0


def _needed(instances: list[Any], wanted: list[str]) -> set[str]:
    """The wanted instances and all that they need."""
    from qdc.core.spelling import suggestion

    by_name = {instance.name: instance for instance in instances}
    front_, needed = list(wanted), set()
    while front_:
        name = front_.pop()
        if name not in by_name:
            raise QdcError("build.until", f"the recipe has no stage `{name}`", hint=suggestion(name, by_name, "stages"))
        if name not in needed:
            needed.add(name)
            front_ += [source for source in by_name[name].inputs.values() if not source.startswith("tree:")]
    return needed


def _partial_answer(as_json: bool, stages: list[Any]) -> int:
    ran = [stage for stage in stages if stage.ran]
    if as_json:
        answer({"build": None, "stages": [stage.as_json() for stage in stages], "image": None})
    else:
        print(f"{len(stages)} stages are fresh; {len(ran)} ran")
    return 0


def _print(made: Outcome, stages: list[Ran], seconds: float) -> None:
    from qdc.report.text import measurement_table, test_lines

    ran, fetched = [stage for stage in stages if stage.ran], sum(stage.fetched for stage in stages)
    if ran or fetched:
        more = f" and fetched {fetched}" if fetched else ""
        print(f"ran {len(ran)}{more} of {len(stages)} stages in {seconds:.1f} s")
    else:
        print(f"nothing to do: all {len(stages)} stages are fresh")
    if made.rows and (ran or fetched):
        print()
        print(measurement_table(made.rows))
        for line in test_lines(made.tests):
            print(line)
        print()
    print(f"build {made.build}")
    print(f"image {made.image['name']}")
    print(f"  image ID {made.image['id']}")
