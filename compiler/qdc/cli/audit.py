"""`qdc audit IMAGE...`: each claim of an image, proved or refuted from its own bytes.

Exit 0 when nothing is refuted, 1 when something is, 3 when something could not be read; of several images the worst:
1, then 4 (an image could not be opened), then 3, then 0. An image that cannot be opened does not stop the others.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.cli.common import answer, fail, open_store, parser
from qdc.core.errors import COULD_NOT, QdcError
from qdc.run.references import Reference, refer
from qdc.store.store import Store
from qdc.store.use import in_use

WORST = (1, COULD_NOT, 3, 0)
"""Exit codes of single images, the worst first. A name that names nothing is an image that could not be opened."""


@dataclass(frozen=True)
class Asked:
    """What every image is asked. `expect`: the ID of each, in order, or of none; `digests`, `run`: see `audit`."""

    recipe: dict[str, Any] | None
    require: list[str]
    expect: list[str]
    digests: bool | None
    run: str | None


def main(arguments: list[str]) -> int:
    options = parser("audit", __doc__ or "")
    options.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="archive:FILE, oci:DIR, docker:NAME, registry:REF, folder:DIR (a model), a build id, @1, or a recipe path;"
        " #TAG or #linux/arm64 behind a place names one of several images",
    )
    options.add_argument("--recipe", type=Path, help="claims to check: the product fields of this recipe")
    options.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="a claim to check, e.g. serve.k=15 (repeatable)",
    )
    options.add_argument(
        "--run", metavar="ARGUMENTS", help='what follows `docker run`, e.g. --run "-e K=4 IMAGE serve" (default: none)'
    )
    options.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="IMAGE_ID",
        help="the image ID that it must have (sha256:...); with several images one for each, in their order",
    )
    options.add_argument(
        "--digests",
        action=argparse.BooleanOptionalAction,
        help="read every layer whole and check its digest (the default, but for registry:, of which parts are fetched)",
    )
    given = options.parse_args(arguments)
    asked = _asked(given)
    near = next((Path(text) for text in given.images if text.endswith((".yaml", ".yml"))), None)
    store = open_store(given.store, near)
    codes = []
    for number, text in enumerate(given.images):
        try:
            report = _audit(text, store, asked, number)
        except BrokenPipeError:
            raise
        except (QdcError, OSError) as error:
            if len(given.images) == 1:
                raise
            codes.append(COULD_NOT)
            fail(_told(error), given.json, reference=text)
            continue
        codes.append(_print(report, given.json, blank=number > 0))
    return next(code for code in WORST if code in codes)


def _told(error: QdcError | OSError) -> QdcError:
    if isinstance(error, QdcError):
        return error
    return QdcError("disk", error.strerror or str(error), file=error.filename, exit_code=COULD_NOT)


def _asked(given: argparse.Namespace) -> Asked:
    """Checked before any image is opened. Raises QdcError on wrong use."""
    from qdc.audit.claims import requirement
    from qdc.audit.container import run_arguments

    for text in given.require:
        requirement(text)
    if given.run is not None:
        run_arguments(given.run)
    if given.expect and len(given.expect) != len(given.images):
        raise QdcError(
            "audit.expect",
            f"{len(given.expect)} image IDs are expected of {len(given.images)} images",
            hint="give --expect once for each image, in their order, or not at all",
        )
    recipe = None
    if given.recipe is not None:
        from qdc.core.files import sha256_bytes
        from qdc.manifest.content import product_fields
        from qdc.recipe.load import load

        loaded = load(given.recipe)
        recipe = product_fields(loaded.data, sha256_bytes(loaded.chat_template.encode()))
    return Asked(recipe, given.require, given.expect, given.digests, given.run)


def _print(report: Mapping[str, Any], as_json: bool, blank: bool) -> int:
    from qdc.audit.audit import exit_code
    from qdc.audit.text import render_text

    if as_json:
        answer(dict(report))
    else:
        print(("\n" if blank else "") + render_text(report))
    return exit_code(report)


def _audit(text: str, store: Store, asked: Asked, number: int) -> dict[str, Any]:
    """The report on one image, with `reference`: the image as it was named. Raises QdcError."""
    reference = refer(text, store)
    expect = asked.expect[number] if asked.expect else None
    if reference.build is None:
        return {"reference": text, **_check(reference, asked, expect)}
    from qdc.image.export import export_archive

    build, archive = reference.build, "/tmp/qdc-image.tar"
    prints = f"qdc export {build['build']} archive:{archive} --store {shlex.quote(str(store.root))} >/dev/null"
    with in_use(store.root), store.staging() as work:
        store.link_out(build["image"]["artifact"], work / "image")
        export_archive(work / "image", store.resolve, work / "image.tar")
        exported = Reference("archive", str(work / "image.tar"))
        shown = {"shown": f"build {build['build']}", "prints": f"{prints} && cat {archive}"}
        return {"reference": text, **_check(exported, asked, expect or build["image"]["id"], **shown)}


def _check(reference: Reference, asked: Asked, expect: str | None, **shown: Any) -> dict[str, Any]:
    from qdc.audit.audit import audit
    from qdc.audit.images import open_image

    place, name = str(reference.place), reference.name
    with open_image(place, name, digests=asked.digests, **shown) as reader:
        return audit(
            reader,
            recipe=asked.recipe,
            require=asked.require,
            expect=expect,
            digests=asked.digests,
            run=asked.run,
        )
