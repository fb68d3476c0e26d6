"""`qdc import STAGE RECIPE DIR --because TEXT`: take a folder made elsewhere as a stage's output.

Its class is `imported` in every build record; nothing proves that it is what the stage would have made.
"""

from __future__ import annotations

from pathlib import Path

from qdc.cli.common import answer, open_store, parser
from qdc.graph.plan import plan
from qdc.run.front import front
from qdc.run.keep import import_output
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("import", __doc__ or "", sets=True)
    options.add_argument("stage")
    options.add_argument("recipe", type=Path)
    options.add_argument("folder", type=Path, metavar="DIR")
    options.add_argument("--because", required=True, metavar="TEXT", help="kept in the record and in every build's")
    given = options.parse_args(arguments)
    store = open_store(given.store, given.recipe)
    made = plan(front(given.recipe, given.sets, store).instances, store.record, store.latest)
    with in_use(store.root):
        record = import_output(store, made, given.stage, given.folder, given.because)
    if given.json:
        answer({"stage": given.stage, "key": record["key"], "output": record["output"]})
    else:
        print(f"imported {given.stage}: output {record['output'][:12]} under key {record['key'][:12]}")
    return 0
