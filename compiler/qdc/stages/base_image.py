"""`base-image`: the first layer, a small Debian with Python, or nothing at all (`scratch`, for tests).

Debian's archive moves: `packages.json` and the layer's digest pin what was installed.
"""

from __future__ import annotations

from qdc.core.errors import COULD_NOT, QdcError
from qdc.core.files import write_json
from qdc.core.stage import Context
from qdc.image import debian
from qdc.image.layers import Layer, small_layer, write_layer_json


def run(context: Context) -> None:
    """`{debian: suite, packages: [..], digest?: "sha256:.."}` or `{scratch: true}` -> layer.tar, layer.json,
    packages.json. Raises QdcError `stage.base-image.moved` when the archive gives another base than `digest`."""
    if context.params.get("scratch"):
        write_layer_json(context.output, small_layer({}, "base", context.output, "layer.tar"))
        write_json(context.output / "packages.json", [])
        return
    suite = context.params.get("debian")
    if not isinstance(suite, str):
        raise QdcError(
            "stage.base-image.kind",
            "this version makes a base from `debian: SUITE` or `scratch: true` only",
            hint="image: {base: {debian: bookworm}}",
            exit_code=COULD_NOT,
        )
    wanted = sorted(context.params.get("packages") or debian.PACKAGES)
    context.partial.mkdir(parents=True, exist_ok=True)
    made = context.partial / "mmdebstrap.tar"
    context.report(0, 3, f"mmdebstrap {suite}")
    debian.bootstrap(suite, wanted, made, context.partial / "mmdebstrap.log")
    context.report(1, 3, "write the layer")
    with (context.output / "layer.tar").open("wb") as out:
        digest, size = debian.rewrite(made, out)
    if (wanted_digest := context.params.get("digest")) not in (None, f"sha256:{digest}"):
        raise QdcError(
            "stage.base-image.moved",
            f"Debian's archive has moved: {suite} now makes the base sha256:{digest}, and the recipe asks for "
            f"{wanted_digest}",
            hint="fetch the old base (`qdc store pull`), set QDC_DEBIAN_MIRROR to an archive of that day, or write the "
            "new digest into image.base.digest",
            exit_code=COULD_NOT,
        )
    context.report(2, 3, "list packages")
    installed = debian.packages(made)
    missing = set(wanted) - {package["name"] for package in installed}
    if missing:
        raise QdcError(
            "stage.base-image.packages",
            f"the base lacks {', '.join(sorted(missing))}",
            exit_code=COULD_NOT,
        )
    write_json(context.output / "packages.json", installed)
    write_layer_json(context.output, Layer("base", digest, size, None, "layer.tar"))
    made.unlink()
    context.report(3, 3, "done")
