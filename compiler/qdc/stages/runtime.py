"""`runtime`: the engine's Python packages as one layer: hash-pinned wheels unpacked into /opt/qdc/site."""

from __future__ import annotations

from qdc.core.files import sha256_file, write_json
from qdc.core.stage import Context
from qdc.image.download import download
from qdc.image.layers import Layer, write_layer_json
from qdc.image.wheels import distribution, write_wheels

SITE = "opt/qdc/site"


def run(context: Context) -> None:
    """Params `{lock: text, python: "3.11"}` -> layer.tar, layer.json, packages.json.

    Wheels stay in the partial folder until the layer is written, so that a broken download is resumed.
    """
    folder = context.partial / "wheels"
    pairs = download(context.params["lock"], str(context.params["python"]), folder, context.report)

    def progress(done: int, total: int) -> None:
        context.report(done, total, "unpack wheels into the layer")

    with (context.output / "layer.tar").open("wb", buffering=1 << 20) as out:
        digest, size = write_wheels([wheel for _, wheel in pairs], SITE, out, progress)
    packages = []
    for pin, wheel in pairs:
        _, version = distribution(wheel)
        packages.append({"name": pin.name, "version": version, "wheel": wheel.name, "sha256": sha256_file(wheel)})
    write_json(context.output / "packages.json", packages)
    write_layer_json(context.output, Layer("runtime", digest, size, None, "layer.tar"))
