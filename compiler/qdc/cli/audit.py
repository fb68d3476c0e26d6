"""`qdc audit IMAGE`: each claim of an image, proved or refuted from its own bytes.

Exit 0 when nothing is refuted, 1 when something is, 3 when something could not be read.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from qdc.cli.common import answer, open_store, parser
from qdc.core.errors import QdcError
from qdc.run.references import refer
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("audit", __doc__ or "")
    options.add_argument("image", help="archive:FILE, oci:DIR, docker:NAME, a build id, @1, or a recipe path")
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
    options.add_argument("--expect", metavar="IMAGE_ID", help="the image ID that it must have (sha256:...)")
    given = options.parse_args(arguments)
    near = Path(given.image) if given.image.endswith((".yaml", ".yml")) else None
    store = open_store(given.store, near)
    recipe = None
    if given.recipe is not None:
        from qdc.recipe.load import load

        recipe = load(given.recipe).data
    for requirement in given.require:
        if "=" not in requirement:
            raise QdcError("audit.require", f"`{requirement}` has no `=`", hint="write --require serve.k=15")
    reference = refer(given.image, store)
    from qdc.audit.audit import audit, exit_code
    from qdc.audit.images import open_image
    from qdc.audit.text import render_text

    def check(place: str, name: str, expect: str | None, **shown: str) -> dict[str, object]:
        with open_image(place, name, **shown) as reader:
            return audit(reader, recipe=recipe, require=given.require, expect=expect, run=given.run)

    if reference.build is None:
        report = check(str(reference.place), reference.name, given.expect)
    else:
        from qdc.image.export import export_archive

        id, archive = reference.build["build"], "/tmp/qdc-image.tar"
        prints = f"qdc export {id} archive:{archive} --store {shlex.quote(str(store.root))} >/dev/null && cat {archive}"
        with in_use(store.root), store.staging() as work:
            store.link_out(reference.build["image"]["artifact"], work / "image")
            export_archive(work / "image", store.resolve, work / "image.tar")
            expect = given.expect or reference.build["image"]["id"]
            report = check("archive", str(work / "image.tar"), expect, shown=f"build {id}", prints=prints)
    if given.json:
        answer(report)
    else:
        print(render_text(report))
    return exit_code(report)
