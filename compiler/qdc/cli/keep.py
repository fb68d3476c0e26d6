"""`qdc keep STAGE... RECIPE --because TEXT`: an earlier output still stands, although the code that makes it changed.

For a refactoring that changes nothing. `--record N` chooses between reruns of a sampled stage that differ.
"""

from __future__ import annotations

from pathlib import Path

from qdc.cli.common import answer, open_store, parser
from qdc.core.errors import QdcError
from qdc.graph.plan import Plan, plan
from qdc.run.code import files
from qdc.run.front import front
from qdc.run.keep import choose, keep
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("keep", __doc__ or "", sets=True)
    options.add_argument("stages", nargs="+", metavar="STAGE", help="a stage, or `all` that only their code made stale")
    options.add_argument("recipe", type=Path)
    options.add_argument("--because", required=True, metavar="TEXT", help="kept in the record and in every build's")
    options.add_argument("--record", type=int, metavar="N", help="the record that counts, of a stage with several")
    given = options.parse_args(arguments)
    store = open_store(given.store, given.recipe)
    instances = front(given.recipe, given.sets, store).instances

    def decided() -> Plan:
        return plan(instances, store.record, store.latest, files(store))

    with in_use(store.root):
        if given.record is not None:
            if len(given.stages) != 1:
                raise QdcError("keep.record", "--record is about one stage", hint="name one stage")
            choose(store, decided(), given.stages[0], given.record, given.because)
            kept = list(given.stages)
        else:
            names = [item.name for item in instances] if given.stages == ["all"] else given.stages
            kept = keep(store, decided, names, given.because, all_=given.stages == ["all"])
    if given.json:
        answer({"kept": kept})
    else:
        print("\n".join(f"kept {name}" for name in kept) or "nothing to keep: every stage named is fresh")
    return 0
