"""`qdc build RECIPE`: run what is stale, and name the image. A second build runs nothing and says so."""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdc.cli.common import add_executor, answer, note, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.plan import Stage
from qdc.run.build import Build, Ran, artifact_json, save_build
from qdc.run.front import Front, front, require_bytes, require_lock
from qdc.run.records import build_document, last_recipe, measurements
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
    if read.missing:
        raise _unsupported(read.missing)
    require_lock(read, given.recipe, given.sets)
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
        _log(store, given.recipe, read, build, started, None, error)
        raise
    finally:
        shown.close()
        for text in build.notes:
            note(text)
    if only is not None:
        _log(store, given.recipe, read, build, started, None)
        return _partial_answer(given.json, stages)
    output = next(stage.output for stage in stages if stage.name == "image")
    facts = artifact_json(store, output, "image.json")
    image = {"name": facts["name"], "id": facts["id"], "artifact": output}
    rows, tests = measurements(store, stages)
    previous = _same_build(store, given.recipe, read.recipe, image, stages)
    if previous is None:
        id = save_build(store, build_document(store, read, given.recipe, stages, image, started))
        _log(store, given.recipe, read, build, started, id)
    else:
        id = previous
    if given.json:
        answer(
            {
                "build": id,
                "stages": [stage.as_json() for stage in stages],
                "image": {"name": image["name"], "id": image["id"]},
            }
        )
    else:
        _print(id, stages, image, rows, tests, time.time() - started)
    return 0


def _log(
    store: Store,
    recipe: Path,
    read: Front,
    build: Build,
    started: float,
    id: str | None,
    error: BaseException | None = None,
) -> None:
    """Keep what was decided; a log that cannot be written is no reason to fail."""
    if build.decisions is None or not build.decisions.acted:
        return
    from qdc.run.edits import edits
    from qdc.run.log import write_log

    result = "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    outcome = {"result": result, "build": id, "error": str(error)[:500] if result == "failed" else None}
    changed = edits(last_recipe(store, recipe, id), read.recipe, read.origins)
    with contextlib.suppress(OSError, QdcError):
        write_log(store, started, str(recipe.resolve()), read.recipe["name"], changed, build.decisions, outcome)


def _unsupported(missing: list[tuple[str, str]]) -> QdcError:
    listed = "".join(f"\n  {path}: {what}" for path, what in missing)
    return QdcError(
        "build.unsupported",
        f"this recipe can be checked and planned, but its image cannot be built yet; no stage makes:{listed}",
        exit_code=COULD_NOT,
        hint="`qdc plan` shows what it would be",
    )


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


def _same_build(
    store: Store, file: Path, recipe: dict[str, Any], image: dict[str, Any], stages: list[Ran]
) -> str | None:
    """The latest build, if nothing ran since and it is of this recipe with these outputs: then it is this build."""
    ids = store.builds()
    if not ids or any(stage.ran for stage in stages):
        return None
    last = store.build(ids[-1])
    same = (
        last is not None
        and (last["recipe_file"], last["recipe"], last["image"]) == (str(file.resolve()), recipe, image)
        and {stage["name"]: stage["output"] for stage in last["stages"]}
        == {stage.name: stage.output for stage in stages}
    )
    return ids[-1] if same else None


def _print(
    id: str, stages: list[Any], image: dict[str, Any], rows: list[Any], tests: list[Any], seconds: float
) -> None:
    from qdc.report.text import measurement_table, test_lines

    ran, fetched = [stage for stage in stages if stage.ran], sum(stage.fetched for stage in stages)
    if ran or fetched:
        more = f" and fetched {fetched}" if fetched else ""
        print(f"ran {len(ran)}{more} of {len(stages)} stages in {seconds:.1f} s")
    else:
        print(f"nothing to do: all {len(stages)} stages are fresh")
    if rows and (ran or fetched):
        print()
        print(measurement_table(rows))
        for line in test_lines(tests):
            print(line)
        print()
    print(f"build {id}")
    print(f"image {image['name']}")
    print(f"  image ID {image['id']}")
