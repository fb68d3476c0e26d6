"""`qdc export IMAGE DEST`: write an image of the store.

DEST: `oci:DIR`, `archive:FILE` (compressed: FILE.gz), `docker:` or `registry:REF`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdc.cli.common import answer, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import COULD_NOT, QdcError
from qdc.run.references import refer
from qdc.store.use import in_use

if TYPE_CHECKING:
    from qdc.image.gzipped import Written
    from qdc.image.layers import VirtualImage
    from qdc.store.store import Store

DESTINATIONS = ("oci", "archive", "docker", "registry")


def main(arguments: list[str]) -> int:
    options = parser("export", __doc__ or "")
    options.add_argument("image", help="a build id, @1, or a recipe path")
    options.add_argument("destination", help="oci:DIR, archive:FILE, docker: or registry:HOST/NAME[:TAG]")
    given = options.parse_args(arguments)
    near = Path(given.image) if given.image.endswith((".yaml", ".yml")) else None
    store = open_store(given.store, near)
    build = refer(given.image, store).build
    if build is None:
        raise QdcError(
            "export.source",
            f"`{given.image}` is not an image of the store",
            hint="give a build id, @1, or a recipe path",
        )
    kind, _, name = given.destination.partition(":")
    if kind not in DESTINATIONS or (kind != "docker" and not name):
        raise QdcError(
            "export.destination",
            f"`{given.destination}` is no destination",
            hint="give oci:DIR, archive:FILE, docker: or registry:HOST/NAME[:TAG]",
        )
    shown = listener(given.quiet)
    compressed: Written | None = None

    def progress(done: int, total: int) -> None:
        shown.progress("export", done >> 20, total >> 20, "MiB")

    shown.started("export")
    try:
        with in_use(store.root), store.staging() as work:
            folder = work / "image"
            store.link_out(build["image"]["artifact"], folder)
            if kind == "archive" and name.endswith((".gz", ".tgz")):
                compressed = _compress(store, folder, Path(name).absolute(), given.quiet, progress)
                image, pushed = compressed.image, None
            else:
                image, pushed = _write(kind, name, folder, store, progress)
    finally:
        shown.close()
    weighed = _weighed(build, Path(name).absolute(), compressed) if kind == "archive" else None
    if given.json:
        written = {"name": image.name, "id": f"sha256:{image.id}"}
        answer(
            {
                "image": written,
                "destination": given.destination,
                "compressed": _compressed_json(compressed) if compressed else None,
                "weighed": weighed,
                "pushed": pushed,
            }
        )
    else:
        place = f"registry:{pushed['reference']}" if pushed else given.destination
        print(f"{image.name}\n  image ID sha256:{image.id}\n  written to {place}")
        for line in _archive_lines(compressed, weighed):
            print(f"  {line}")
        if pushed:
            print(f"  manifest {pushed['digest']}\n  sent {pushed['sent']:,} bytes ({pushed['blobs']} blobs)")
    return 1 if weighed and not weighed["fits"] else 0


def _compress(store: Store, folder: Path, file: Path, quiet: bool, progress: Any) -> Written:
    """Write the compressed archive; says its size before, and keeps what was sampled for the next plan."""
    from qdc.image import gzipped
    from qdc.image.layers import read_image
    from qdc.measure.compressed import remember

    image = read_image(folder)
    samples = gzipped.predicted(image, store.resolve)
    remember(store, {layer.diff_id: samples[layer.diff_id].bytes / layer.size for layer in image.layers if layer.size})
    size, margin = gzipped.expected(image, samples)
    if not quiet:
        print(f"export: about {size:,} bytes, give or take {margin:,} ({gzipped.METHOD})", file=sys.stderr)
    return gzipped.export_gzip(folder, store.resolve, file, progress, samples)


def _compressed_json(made: Written) -> dict[str, Any]:
    from qdc.image.gzipped import METHOD

    return {"bytes": made.bytes, "predicted": made.predicted, "margin": made.margin, "method": METHOD}


def _weighed(build: Any, file: Path, compressed: Written | None) -> dict[str, Any] | None:
    """The archive against the recipe's limit or its contract's, where that weighs an archive of this form."""
    from qdc.measure.size import size_limit

    limit = size_limit(build["recipe"]["deploy"])
    if limit is None or (limit.of == "docker-save-gzip" and compressed is None):
        return None
    size = compressed.raw if compressed and limit.of == "docker-save" else file.stat().st_size
    return {"bytes": size, "of": limit.of, "limit": limit.bytes, "fits": size <= limit.bytes}


def _archive_lines(compressed: Written | None, weighed: dict[str, Any] | None) -> list[str]:
    lines = []
    if compressed:
        off = compressed.bytes / compressed.predicted - 1
        lines.append(f"{compressed.bytes:,} bytes compressed; {compressed.predicted:,} predicted ({off:+.1%})")
    if weighed:
        verdict = "fits" if weighed["fits"] else "does NOT fit"
        lines.append(f"{weighed['bytes']:,} bytes as {weighed['of']} of {weighed['limit']:,.0f}: {verdict}")
    return lines


def _write(
    kind: str, name: str, folder: Path, store: Store, progress: Any
) -> tuple[VirtualImage, dict[str, Any] | None]:
    """Write it; returns the image and, of a registry, what was sent."""
    from qdc.image import export

    if kind == "oci":
        return export.export_oci(folder, store.resolve, Path(name).absolute(), progress), None
    if kind == "archive":
        return export.export_archive(folder, store.resolve, Path(name).absolute(), progress), None
    if kind == "docker":
        return export.export_docker(folder, store.resolve, docker_client(), progress), None
    from qdc.image.push import push
    from qdc.image.registry import connect, parse

    with connect(parse(name)) as registry:
        done = push(folder, store.resolve, registry, progress)
    sent = {"reference": str(done.reference), "digest": done.digest, "blobs": done.blobs, "sent": done.sent}
    return done.image, sent


def docker_client() -> object:
    """A client of the engine that DOCKER_HOST (or the default socket) names."""
    import docker
    import docker.errors

    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException as error:
        raise QdcError(
            "docker.engine",
            f"no Docker engine answers: {error}",
            exit_code=COULD_NOT,
            hint="start one (`scripts/docker-engine start DIR`) and set DOCKER_HOST",
        ) from None
    return client
