"""`qdc gate IMAGE`: start the very artifact that is to be uploaded and check that it answers, is lossless and fits.

IMAGE is archive:FILE or docker:NAME, or a build id, `@1` or a recipe path (then an archive is written first).
Exit 0 when all passed, 1 when something failed, 3 when something could not be decided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdc.cli.common import answer, note, open_store, parser
from qdc.cli.progress import Quiet, listener
from qdc.core.errors import QdcError
from qdc.report.text import figure, measurement_table, table
from qdc.run.references import Reference, refer
from qdc.store.store import Store
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("gate", __doc__ or "")
    options.add_argument("image", help="archive:FILE, docker:NAME, a build id, @1, or a recipe path")
    options.add_argument("--recipe", type=Path, help="where its build record is looked for: the store near this recipe")
    options.add_argument("--no-replay", action="store_true", help="do not replay the drafter for comparison")
    given = options.parse_args(arguments)
    near = given.recipe or (Path(given.image) if given.image.endswith((".yaml", ".yml")) else None)
    store = open_store(given.store, near)
    reference = refer(given.image, store)
    if reference.place == "oci":
        raise QdcError(
            "gate.place", "an engine does not load an OCI folder", hint="export to archive:FILE and gate that"
        )
    shown = listener(given.quiet)
    try:
        if reference.build is not None:
            with in_use(store.root), store.staging() as work:
                archive = _export(store, reference.build, work, shown)
                report = _gate(f"archive:{archive}", reference.build, store, shown, given.no_replay)
                report["image"] = reference.build["image"]["name"]
        else:
            report = _gate(given.image, _record(store, reference), store, shown, given.no_replay)
    finally:
        shown.close()
    if given.json:
        answer({key: report[key] for key in ("image", "checks")})
    else:
        _print(report)
    from qdc.gate import exit_code

    return exit_code(report)


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
    """The build record of an archive, by the image ID in it; None when the store has none."""
    if reference.place != "archive":
        return None
    from qdc.audit.images import open_image

    with open_image("archive", reference.name) as image:
        id = f"sha256:{image.image_id.removeprefix('sha256:')}"
    found = [build for name in store.builds() if (build := store.build(name)) and build["image"]["id"] == id]
    return found[-1] if found else None


def _gate(image: str, record: dict[str, Any] | None, store: Store, shown: Quiet, no_replay: bool) -> dict[str, Any]:
    from qdc.gate import gate

    prompts, rows = None, []
    if record is not None and not no_replay:
        from qdc.run.replay import replay_served
        from qdc.run.settings import settings

        replay = replay_served(store, settings(), record, shown)
        if replay is not None:
            rows, prompts = replay[0]["rows"], replay[1]
    elif record is None:
        note("no build record of this image is in the store: nothing is compared with a replay")
    shown.started("gate")
    report = gate(image, record, prompts, report=lambda done, total, words: shown.progress("gate", done, total, words))
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
    print(f"gate of {report['image']}\n")
    rows = []
    for check in report["checks"]:
        shown = check["figure"]
        if isinstance(shown, dict):
            shown = ", ".join(
                f"{key} {figure(value) if not isinstance(value, str) else value}" for key, value in shown.items()
            )
        rows.append([check["id"], check["outcome"], str(shown if shown is not None else ""), check["why"] or ""])
    print(table(["check", "outcome", "figure", "why"], rows))
    if report["rows"]:
        print()
        print(measurement_table(report["rows"]))
