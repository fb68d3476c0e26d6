"""`qdc sweep RECIPE --set PATH=VALUE,VALUE ...`: build every combination, what they share once, and compare them.

A value with a comma in it stands in quotes, brackets or braces: `--set drafter.architecture.taps=[0,1],[0,1,2]` is two
values, `--set name='"a,b"'` is one. A variant that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdc.cli.common import add_executor, answer, note, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import COULD_NOT, QdcError
from qdc.graph.plan import Stage
from qdc.run.build import Build, Ran
from qdc.run.front import require_bytes
from qdc.run.outcome import Outcome, keep_log, keep_outcome
from qdc.run.settings import remote, settings
from qdc.run.sweep import Variant, cause, read_all, stages_of, union, variants
from qdc.store.store import Store
from qdc.store.use import in_use

if TYPE_CHECKING:
    from qdc.measure.predict import Predictions


def main(arguments: list[str]) -> int:
    options = parser("sweep", __doc__ or "", sets=True)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("recipe", type=Path)
    options.add_argument("--remote", metavar="URL", help="fetch outputs that this store has (default: QDC_REMOTE)")
    add_executor(options)
    given = options.parse_args(arguments)
    found = variants(given.sets)
    store = open_store(given.store, given.recipe)
    with in_use(store.root, lambda: note("waiting for `qdc store gc` to end")):
        return _sweep(given, store, found)


def _sweep(given: argparse.Namespace, store: Store, found: list[Variant]) -> int:
    started = time.time()
    read_all(store, given.recipe, found)
    good = [variant for variant in found if variant.error is None]
    if not good:
        assert found[0].error is not None
        raise found[0].error
    for warning in dict.fromkeys(text for variant in good if variant.read for text in variant.read.warnings):
        note(warning)
    instances, real = union(found)
    asked = replace(settings(given.executor, given.address), remote=remote(given.remote))

    def before(stage: Stage) -> None:
        for variant in good:
            if variant.read is not None and stage.instance.name in variant.names.values():
                require_bytes(variant.read, given.recipe, store, [stage])

    assert good[0].read is not None
    shown = listener(given.quiet)
    build = Build(store, asked, instances, shown, before, good[0].read.signature, real, going=True)
    predicted = _predictions(store, good, build)
    if not given.quiet:
        note(f"{len(found)} variants, {len(instances)} different stages")
    try:
        ran = {stage.name: stage for stage in build.run()}
    except BaseException as error:
        for variant in good:
            _log(store, given.recipe, variant, build, started, None, error)
        raise
    finally:
        shown.close()
        for text in build.notes:
            note(text)
    made = _outcomes(store, given.recipe, good, build, ran, started)
    if given.json:
        answer(_answer(found, made, predicted, len(instances), build))
    else:
        _print(found, made, predicted, len(instances), build, time.time() - started)
    return max((variant.error.exit_code for variant in found if variant.error is not None), default=0)


Made = dict[int, tuple[list[Ran], Outcome | None]]
"""Number of a variant -> its stages that are there, and its build."""


def _outcomes(
    store: Store, recipe: Path, good: list[Variant], build: Build, ran: dict[str, Ran], started: float
) -> Made:
    """Keep a record and a log for each variant that has an image, a log for each other."""
    made: Made = {}
    told: set[str] = set()
    for variant in good:
        stages, outcome = stages_of(variant, ran, told), None
        assert variant.read is not None
        if len(stages) == len(variant.names):
            outcome, new = keep_outcome(store, recipe, variant.read, stages, started, among=len(good))
            if new:
                _log(store, recipe, variant, build, started, outcome.build)
        else:
            variant.error = cause(variant, build) or _unfinished()
            _log(store, recipe, variant, build, started, None, variant.error)
        made[variant.number] = (stages, outcome)
    return made


def _unfinished() -> QdcError:
    return QdcError("sweep.unfinished", "a stage that it needs was not made", exit_code=COULD_NOT)


def _log(
    store: Store,
    recipe: Path,
    variant: Variant,
    build: Build,
    started: float,
    id: str | None,
    error: BaseException | None = None,
) -> None:
    if build.decisions is not None and variant.read is not None:
        keep_log(store, recipe, variant.read, build.decisions.of(variant.names), started, id, error)


def _predictions(store: Store, good: list[Variant], build: Build) -> dict[int, Predictions]:
    """What each variant will cost and give, as a plan says it."""
    from qdc.formats.checkpoint import ModelFacts
    from qdc.measure.past import past
    from qdc.measure.predict import predict
    from qdc.run.machine import hardware
    from qdc.run.settings import training_bytes

    states = {stage.instance.name: stage.state for stage in build.plan().stages}
    found = {}
    for variant in good:
        read = variant.read
        assert read is not None
        fresh = {name for name, shared in variant.names.items() if states[shared] == "fresh"}
        found[variant.number] = predict(
            read.recipe,
            {place: ModelFacts.from_json(value) for place, value in read.facts.items()},
            past(store, read.recipe, hardware()),
            fresh=fresh,
            stale=[name for name in variant.names if name not in fresh],
            training_bytes=training_bytes(),
        )
    return found


def _answer(
    found: list[Variant], made: Made, predicted: dict[int, Predictions], different: int, build: Build
) -> dict[str, Any]:
    first = next(variant.read for variant in found if variant.read is not None)
    return {
        "recipe": first.recipe["name"],
        "varied": list(found[0].set),
        "stages": different,
        "ran": len(build.seconds),
        "variants": [_row(variant, *made.get(variant.number, ([], None)), predicted) for variant in found],
    }


def _row(
    variant: Variant, stages: list[Ran], outcome: Outcome | None, predicted: dict[int, Predictions]
) -> dict[str, Any]:
    made = predicted.get(variant.number)
    return {
        "number": variant.number,
        "set": variant.set,
        "error": variant.error.as_json() if variant.error is not None else None,
        "build": outcome.build if outcome else None,
        "image": {"name": outcome.image["name"], "id": outcome.image["id"]} if outcome else None,
        "bytes": outcome.bytes if outcome else None,
        "stages": [stage.as_json() for stage in stages],
        "predictions": made.as_json() if made else None,
        "measurements": outcome.rows if outcome else [],
    }


def _print(
    found: list[Variant], made: Made, predicted: dict[int, Predictions], different: int, build: Build, seconds: float
) -> None:
    from qdc.report.sweep import Row, sweep_lines

    rows = []
    for variant in found:
        _, outcome = made.get(variant.number, ([], None))
        error = variant.error.message if variant.error is not None else None
        rows.append(
            Row(
                variant.number,
                variant.set,
                outcome.build if outcome else None,
                outcome.bytes if outcome else None,
                outcome.rows if outcome else [],
                predicted.get(variant.number),
                error,
            )
        )
    print(f"ran {len(build.seconds)} of {different} different stages in {seconds:.1f} s\n")
    print("\n".join(sweep_lines(rows)))
