"""`qdc explain [ID]`: the page of a finding: what fires it, why it matters, how to fix it; without ID, the list."""

from __future__ import annotations

import dataclasses

from qdc.cli.common import answer, parser
from qdc.core.errors import QdcError


def main(arguments: list[str]) -> int:
    options = parser("explain", __doc__ or "")
    options.add_argument("id", nargs="?", help="a rule's id as findings show it, e.g. DRF01; nothing lists all")
    given = options.parse_args(arguments)
    from qdc.rules.check import PAGES
    from qdc.rules.pages import page

    if given.id is None:
        if given.json:
            answer({"rules": [dataclasses.asdict(item) for item in PAGES.values()]})
            return 0
        width = max(len(item.severity) for item in PAGES.values())
        for item in PAGES.values():
            print(f"{item.id}  {item.severity.ljust(width)}  {item.summary}")
        return 0
    id = given.id.upper()
    if id not in PAGES:
        from qdc.core.spelling import nearest

        near = nearest(id, PAGES)
        hint = f"did you mean `{near}`? " if near else ""
        raise QdcError("explain.id", f"there is no rule `{given.id}`", hint=f"{hint}`qdc explain` lists all")
    if given.json:
        answer({"rule": dataclasses.asdict(PAGES[id])})
    else:
        print(page(PAGES[id]), end="")
    return 0
