"""`qdc gate IMAGE`: run the contract against the very artifact that is to be uploaded, and say whether it holds.

IMAGE is a file of `docker save` (also gzip), archive:FILE, oci:DIR, docker:NAME, or a build id, `@1` or a recipe path
(then an archive is written first). What the bytes alone show comes first, and nothing is started where that is wrong;
then the image runs in a container engine as the harness runs it. It leaves no container behind.
Exit 0 when all passed, 1 when something failed, 3 when something could not be decided or was not run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
from pathlib import Path
from typing import Any, NoReturn

from qdc.cli.common import answer, note, open_store, parser
from qdc.cli.progress import Quiet, listener
from qdc.core.errors import QdcError
from qdc.formats.chats import messages
from qdc.report.text import figure, measurement_table, table
from qdc.run.references import Reference, refer
from qdc.store.store import Store
from qdc.store.use import in_use

WIDEST = 100
STOPPED = "stopped by `"


def main(arguments: list[str]) -> int:
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        return _main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _main(arguments: list[str]) -> int:
    given = _options().parse_args(arguments)
    _writable(given.report)
    asked = None if given.ask is None else _conversations(given.ask)
    _asked_for(given)
    near = given.recipe or (Path(given.image) if given.image.endswith((".yaml", ".yml")) else None)
    store = open_store(given.store, near)
    from qdc.gate import exit_code
    from qdc.gate.artifact import given_path
    from qdc.gate.image_gate import PLACES

    place = given_path(given.image)
    reference = refer(given.image, store) if place is None else Reference(*place)
    if reference.build is None and reference.place not in PLACES:
        raise QdcError(
            "gate.image",
            f"`{given.image}` cannot be started here",
            hint="give a file of `docker save`, archive:FILE, oci:DIR or docker:NAME; `qdc audit` reads others",
        )
    shown = listener(given.quiet)
    try:
        if reference.build is not None:
            with in_use(store.root), store.staging() as work:
                archive = _export(store, reference.build, work, shown)
                report = _gate(f"archive:{archive}", reference.build, store, shown, given, asked)
                report["artifact"] = f"build {reference.build['build']}, as exported"
        else:
            image = f"{reference.place}:{reference.name}"
            report = _gate(image, _record(store, reference), store, shown, given, asked)
    finally:
        shown.close()
    code = exit_code(report)
    kept = {key: report[key] for key in ("image", "artifact", "contract", "checks")}
    if given.report is not None:
        from qdc.core import canonical
        from qdc.core.files import write_atomic

        write_atomic(given.report, canonical.pretty({"schema": 1, **kept, "exit": code}))
    if given.json:
        answer(kept)
    else:
        _print(report)
    return code


def _asked_for(given: argparse.Namespace) -> None:
    """What cannot be meant is said before the work, not after a replay."""
    from qdc.gate.contracts import named

    for requirement in given.require:
        if "=" not in requirement:
            raise QdcError("audit.require", f"`{requirement}` has no `=`", hint="write --require deploy.hardware=a10g")
    if given.contract is not None:
        named(given.contract)
    if given.expect is not None and not re.fullmatch("sha256:[0-9a-f]{64}", given.expect):
        raise QdcError("gate.expect", f"`{given.expect}` is no image ID", hint="write sha256: and its 64 hex digits")


def _options() -> argparse.ArgumentParser:
    options = parser("gate", __doc__ or "")
    options.add_argument("image", help="FILE, archive:FILE, oci:DIR, docker:NAME, a build id, @1, or a recipe path")
    options.add_argument("--recipe", type=Path, help="where its build record is looked for: the store near this recipe")
    options.add_argument("--no-replay", action="store_true", help="do not replay the drafter for comparison")
    options.add_argument("--report", type=Path, metavar="FILE", help="write the report there, as JSON")
    options.add_argument(
        "--contract", metavar="NAME", help="adaptfm, sagemaker or openai (default: what the image says)"
    )
    options.add_argument("--expect", metavar="IMAGE_ID", help="the image ID that it must have (sha256:...)")
    options.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="a claim that the bytes must not refute, e.g. deploy.hardware=a10g (repeatable)",
    )
    options.add_argument("--floor", type=positive, metavar="X", help="least acceptance length (default: the recipe's)")
    options.add_argument(
        "--without-drafter",
        metavar="WORDS",
        type=shlex.split,
        help="what starts an image that qdc did not build without speculation, for comparison",
    )
    options.add_argument("--start-limit", type=positive, metavar="S", help="seconds to start, for the contract's")
    options.add_argument("--answer-limit", type=positive, metavar="S", help="seconds for an answer, for the contract's")
    options.add_argument(
        "--ask",
        type=Path,
        metavar="FILE",
        help="ask these conversations (JSON lines with `messages`), for the build's own",
    )
    options.add_argument("--prompts", type=count, default=200, metavar="N", help="greedy answers to compare (200)")
    cards = options.add_mutually_exclusive_group()
    cards.add_argument("--gpus", action="store_true", default=None, help="give the container the machine's cards")
    cards.add_argument("--no-gpus", action="store_false", dest="gpus", help="do not")
    return options


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _writable(path: Path | None) -> None:
    """A report that could not be written is said before the work, not after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        hint = "name a file in a folder that exists"
        raise QdcError("gate.report", "the report cannot be written here", file=path, hint=hint)


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _export(store: Store, build: dict[str, Any], work: Path, shown: Quiet) -> Path:
    from qdc.image.export import export_archive

    store.link_out(build["image"]["artifact"], work / "image")
    archive = work / "image.tar"
    shown.started("export")
    export_archive(
        work / "image",
        store.resolve,
        archive,
        lambda done, total: shown.progress("export", done >> 20, total >> 20, "MiB"),
    )
    return archive


def _record(store: Store, reference: Reference) -> dict[str, Any] | None:
    """The build record of a file, by the image ID in it; None if the store has none, and for what is no image."""
    if reference.place not in ("archive", "oci") or not store.builds():
        return None
    from qdc.audit.images import open_image

    try:
        with open_image(reference.place, reference.name) as image:
            id = f"sha256:{image.image_id.removeprefix('sha256:')}"
    except QdcError as error:
        if error.id == "image.missing":
            raise
        return None
    found = [build for name in store.builds() if (build := store.build(name)) and build["image"]["id"] == id]
    return found[-1] if found else None


def _conversations(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of conversations. Raises QdcError `gate.ask` at the first line that is none."""
    hint = 'one JSON object a line, {"messages": [{"role": "user", "content": "..."}]}'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QdcError("gate.ask", f"the conversations cannot be read: {error}", file=path) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = messages(line)
        if found is None:
            raise QdcError("gate.ask", "this is no conversation", file=path, line=number, column=1, hint=hint)
        rows.append({"messages": found})
    if not rows:
        raise QdcError("gate.ask", "no conversation is in this file", file=path, hint=hint)
    return rows


def _gate(
    image: str,
    record: dict[str, Any] | None,
    store: Store,
    shown: Quiet,
    given: argparse.Namespace,
    asked: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    from qdc.gate import Options, gate

    prompts, rows = asked, []
    if asked is not None:
        note("the given conversations are asked: nothing is compared with a replay")
    elif record is not None and not given.no_replay:
        from qdc.run.replay import replay_served
        from qdc.run.settings import settings

        replay = replay_served(store, settings(), record, shown)
        if replay is not None:
            rows, prompts = replay[0]["rows"], replay[1]
    elif record is None:
        note("no build record of this image is in the store: nothing is compared with a replay")
    shown.started("gate")
    options = Options(
        contract=given.contract,
        start_s=given.start_limit,
        answer_s=given.answer_limit,
        lossless_prompts=given.prompts,
        image_id=given.expect,
        floor=given.floor,
        plain=tuple(given.without_drafter) if given.without_drafter else None,
        gpus=given.gpus,
        require=tuple(given.require),
    )

    def progress(done: int, total: int, words: str) -> None:
        shown.progress("gate", done, total, words)

    report = gate(image, record, prompts, options, progress)
    report["rows"] = _rows(report, rows)
    if record is not None and report["rows"]:
        from qdc.run.records import add_measurements

        add_measurements(store, record["build"], [{**row, "image": record["image"]["id"]} for row in report["rows"]])
    return report


def _rows(report: dict[str, Any], replayed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Served acceptance as a row of the measurement table, after the replay that it is compared with."""
    check = next((item for item in report["checks"] if item["id"] == "acceptance"), None)
    if check is None or not check["figure"] or "served" not in check["figure"]:
        return []
    rows = [{**row, "subject": f"{row['subject']}, as served"} for row in replayed]
    rows.append(
        {
            "what": rows[0]["what"] if rows else "drafter",
            "subject": "engine's counters",
            "metric": "acceptance-length",
            "value": check["figure"]["served"],
            "low": None,
            "high": None,
            "n": check["figure"]["prompts"],
            "against": "replay" if rows else None,
            "method": "(accepted + drafts) / drafts by the engine's counters",
        }
    )
    return rows


def _print(report: dict[str, Any]) -> None:
    print(f"gate of {report['artifact']}, contract {report['contract']}\nimage {report['image'] or 'not known'}\n")
    rows, more = [], []
    for check in report["checks"]:
        shown = check["figure"]
        if isinstance(shown, dict):
            shown = ", ".join(
                f"{key} {figure(value) if not isinstance(value, str) else value}" for key, value in shown.items()
            )
        elif isinstance(shown, list):
            shown = " ".join(map(str, shown))
        why = check["why"] or ""
        if why.startswith(STOPPED):
            why = why.partition(": ")[0]  # the check that stopped the rest says it
        line = why.partition("\n")[0]
        if line != why or len(line) > WIDEST:
            line = f"{line[:WIDEST]} ..."
            more.append(f"{check['id']}: {why}")
        rows.append([check["id"], check["outcome"], str("" if shown is None else shown)[:WIDEST], line])
    print(table(["check", "outcome", "figure", "why"], rows))
    for text in more:
        print(f"\n{text}")
    if report["rows"]:
        print()
        print(measurement_table(report["rows"]))
