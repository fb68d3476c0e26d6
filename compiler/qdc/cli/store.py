"""`qdc store verify | gc | push | pull`: read all of the store, let go of what no build needs, share it.

`verify` names what is damaged and what depends on it, and removes it. `gc` says what it would remove, and removes it
with `--yes`. `push` and `pull` copy builds to and from the remote (`--remote URL`, QDC_REMOTE, config.yaml).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdc.cli.common import answer, note, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import COULD_NOT, QdcError

if TYPE_CHECKING:
    from qdc.cli.common import Parser
    from qdc.store.gc import Decision
    from qdc.store.store import Store
    from qdc.store.transfer import Transfer
    from qdc.store.verify import Finding

ACTIONS = {
    "verify": "read every object and document; damage is named and removed (exit 1 if there was any)",
    "gc": "forget old builds and remove what no kept build names; says so first, does it with --yes",
    "push": "copy a build (the latest, if none is named) to the remote",
    "pull": "fetch a build, or whatever the remote has of a recipe's stages",
}
SHOWN = 20
"""Lines about one finding's dependents, or about builds, before `and so many more`."""


def main(arguments: list[str]) -> int:
    action = next((word for word in arguments if word in ACTIONS), None)
    if action is None:
        if {"-h", "--help"} & set(arguments):
            lines = [f"  {name.ljust(8)}{what}" for name, what in ACTIONS.items()]
            print("\n".join(["usage: qdc store ACTION ...   (qdc store ACTION --help)", "", *lines]))
            return 0
        from qdc.core.spelling import suggestion

        given = next((word for word in arguments if not word.startswith("-")), "")
        raise QdcError("store.action", f"there is no action `{given}`", hint=suggestion(given, ACTIONS, "actions"))
    rest = list(arguments)
    rest.remove(action)
    run: dict[str, Callable[[list[str]], int]] = {"verify": _verify, "gc": _gc, "push": _push, "pull": _pull}
    return run[action](rest)


def _verify(arguments: list[str]) -> int:
    from qdc.store.use import in_use
    from qdc.store.verify import remove, verify

    given = parser("store verify", ACTIONS["verify"]).parse_args(arguments)
    store = open_store(given.store)
    shown = listener(given.quiet or not _long(store.root))
    try:
        with in_use(store.root, _waits):
            found = verify(store.root, lambda done, all_: shown.progress("verify", done // 10**6, all_ // 10**6, "MB"))
            remove(found)
    finally:
        shown.close()
    if given.json:
        answer({"verify": {"found": [item.as_json() for item in found]}})
    else:
        for item in found:
            print("\n".join(_lines(item)))
        print(f"{len(found)} findings; `qdc build RECIPE` makes only that anew" if found else f"{store.root}: whole")
    return 1 if found else 0


def _long(root: Path) -> bool:
    """Whether reading the store takes a while: more than a GB."""
    total = 0
    for path in (root / "objects").glob("*/*/*"):
        total += path.stat().st_size
        if total > 10**9:
            return True
    return False


def _lines(item: Finding) -> list[str]:
    """A finding for a person: what it is, and what depends on it."""
    end = "removed" if item.removed else "kept: it says what to make anew" if item.stays else "could not be removed"
    lines = [f"{item.kind} {item.name}: {item.problem}; {end}"]
    held = [f"{path} in tree {digest[:12]}" for digest, paths in item.trees.items() for path in paths]
    held += [f"output of {row['instance']}, key {row['key'][:12]} (record {row['n']})" for row in item.stages]
    held += [f"build {id}" for id in item.builds]
    more = [f"... and {len(held) - SHOWN} more (--json lists them)"] if len(held) > SHOWN else []
    return lines + [f"  {line}" for line in (*held[:SHOWN], *more)]


def _gc(arguments: list[str]) -> int:
    from qdc.store.gc import Policy, decide, holdings

    options = parser("store gc", ACTIONS["gc"])
    options.add_argument("--keep-builds", type=int, default=3, metavar="N", help="newest builds of each recipe (3)")
    options.add_argument("--older-than", default="30d", metavar="AGE", help="forget others at this age (30d)")
    options.add_argument("--max-size", metavar="SIZE", help="forget more, oldest first, to get under this size (50GB)")
    options.add_argument("--yes", action="store_true", help="do it")
    given = options.parse_args(arguments)
    if given.keep_builds < 0:
        raise QdcError("store.gc", f"--keep-builds {given.keep_builds} is less than none", hint="--keep-builds 3")
    policy = Policy(given.keep_builds, _seconds(given.older_than), _bytes(given.max_size) if given.max_size else None)
    store = open_store(given.store)
    if given.yes:
        from qdc.store.sweep import sweep

        made = sweep(store, policy, time.time())
    else:
        made = decide(holdings(store.root), policy, time.time())
    if given.json:
        answer({"gc": {"removed": given.yes, **made.as_json()}})
    else:
        _print_gc(made, given.yes)
    return 0


def _print_gc(made: Decision, done: bool) -> None:
    from qdc.cli.lock import size_text

    if made.empty:
        print(f"nothing to remove; {size_text(made.stays)} stay")
    else:
        for id, file in made.builds[:SHOWN]:
            print(f"{'forgot' if done else 'would forget'} build {id} of {file}")
        if len(made.builds) > SHOWN:
            print(f"... and {len(made.builds) - SHOWN} more builds (--json lists them)")
        counts = f"{len(made.records)} records, {len(made.trees)} trees, {len(made.objects)} objects"
        print(f"{'removed' if done else 'would remove'} {counts}, {len(made.rest)} logs, partial works and memos")
        print(f"{size_text(made.bytes)} {'are free' if done else 'would be free'}; {size_text(made.stays)} stay")
    if made.unreached:
        print(f"{size_text(made.unreached)} over --max-size: what is left is young or of builds that always stay")
    if not done and not made.empty:
        print("nothing was removed: say --yes to do it")


def _seconds(text: str) -> float:
    """`30d`, `12h`, `90m` or `45s` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(w|d|h|m|s)", text)
    if match is None:
        raise QdcError("store.age", f"`{text}` is no age", hint="write 30d, 12h or 90m")
    return float(match[1]) * {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}[match[2]]


def _bytes(text: str) -> int:
    """`50GB` or `1.5TiB` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text)
    if match is None:
        raise QdcError("store.size", f"`{text}` is no size", hint="write 50GB or 500MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


def _waits() -> None:
    note("waiting for `qdc store gc` to end")


def _push(arguments: list[str]) -> int:
    options = _remote_parser("push")
    options.add_argument(
        "what", nargs="?", metavar="BUILD|RECIPE", help="a build id, @1, or a recipe (its latest build)"
    )
    options.add_argument("--all", action="store_true", help="every build, and every record that has its output")
    given = options.parse_args(arguments)
    if given.all and given.what:
        raise QdcError("store.push", "say either a build or --all", hint="qdc store push --all")
    from qdc.run.references import refer

    store = open_store(given.store, _near(given.what))
    if given.all:
        ids = store.builds()
    else:
        found = refer(given.what or "@1", store).build
        if found is None:
            raise QdcError("store.push", f"`{given.what}` is no build of {store.root}", hint="`qdc show` lists them")
        ids = [found["build"]]
    builds = [build for id in ids if (build := store.build(id)) is not None]

    def work(transfer: Transfer) -> dict[str, str]:
        for build in builds:
            transfer.push_build(build)
        if given.all:
            transfer.push_records(sorted(path.name for path in (store.root / "records").glob("*")))
        return {}

    return _transfer("push", given, store, work)


def _pull(arguments: list[str]) -> int:
    options = _remote_parser("pull")
    options.add_argument(
        "what", nargs="?", metavar="BUILD|RECIPE", help="a build id, @1 (the remote's latest), or a recipe"
    )
    given = options.parse_args(arguments)
    near = _near(given.what)
    store = open_store(given.store, near)

    def work(transfer: Transfer) -> dict[str, str]:
        if near is not None:
            return _pull_recipe(transfer, store, near, given.sets)
        ids = transfer.remote.builds()
        if given.what is None and not ids:
            raise QdcError("remote.unknown", f"{transfer.remote.name} has no builds", exit_code=COULD_NOT)
        latest = re.fullmatch(r"@([1-9]\d*)", given.what or "@1")
        if latest is not None and int(latest[1]) <= len(ids):
            transfer.pull_build(ids[-int(latest[1])])
        else:
            transfer.pull_build(given.what)
        return {}

    return _transfer("pull", given, store, work)


def _pull_recipe(transfer: Transfer, store: Store, recipe: Path, sets: list[str]) -> dict[str, str]:
    from qdc.graph.plan import plan
    from qdc.run.front import front
    from qdc.run.through import fetch_recipe

    read = front(recipe, sets, store)
    return fetch_recipe(transfer, lambda: plan(read.instances, store.record))


def _remote_parser(action: str) -> Parser:
    options = parser(f"store {action}", ACTIONS[action], sets=action == "pull")
    options.add_argument(
        "--remote", metavar="URL", help="s3://bucket/folder, file:///folder, ... (default: QDC_REMOTE)"
    )
    return options


def _near(what: str | None) -> Path | None:
    """The recipe that `what` is, if it is one."""
    return Path(what) if what and what.endswith((".yaml", ".yml")) else None


def _transfer(action: str, given: Any, store: Store, work: Callable[[Transfer], dict[str, str]]) -> int:
    from qdc.run.settings import remote
    from qdc.store.remote import Remote
    from qdc.store.transfer import Transfer
    from qdc.store.use import in_use

    url = remote(given.remote)
    if url is None:
        raise QdcError(
            "remote.none", "no remote is named", hint="--remote URL, QDC_REMOTE, or `remote: URL` in config.yaml"
        )
    other, shown = Remote(url), listener(given.quiet)

    def told(done: int, total: int) -> None:
        shown.progress(action, done // 10**6, total // 10**6, "MB")

    transfer = Transfer(store, other, told)
    try:
        with in_use(store.root, _waits):
            stages = work(transfer)
    finally:
        shown.close()
    moved = transfer.moved
    if given.json:
        answer({action: {"remote": other.name, **moved.as_json(), "stages": stages}})
        return 0
    from qdc.cli.lock import size_text

    for text in moved.refused:
        note(text)
    for name, output in stages.items():
        print(f"fetched {name}, output {output[:12]}")
    for id in moved.builds:
        print(f"{'pushed' if action == 'push' else 'pulled'} build {id}")
    print(f"{other.name}: {moved.objects} objects ({size_text(moved.bytes)}) moved, {moved.there} were there")
    return 0
