"""`qdc store verify`: read every object in the store; damaged ones are named and removed. Exit 1 if there were any."""

from __future__ import annotations

from qdc.cli.common import answer, open_store, parser


def main(arguments: list[str]) -> int:
    options = parser("store", __doc__ or "")
    options.add_argument("action", choices=["verify"])
    given = options.parse_args(arguments)
    store = open_store(given.store)
    bad = store.verify()
    for sha256 in bad:
        store.discard(sha256)
    if given.json:
        answer({"damaged": bad})
    else:
        for sha256 in bad:
            print(f"damaged and removed: {sha256}")
        print(f"{len(bad)} damaged objects; `qdc build` makes them anew" if bad else f"{store.root}: whole")
    return 1 if bad else 0
