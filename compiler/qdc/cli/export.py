"""`qdc export IMAGE DEST`: write an image of the store: `oci:DIR`, `archive:FILE`, `docker:`, `registry:REF`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdc.cli.common import answer, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import COULD_NOT, QdcError
from qdc.run.references import refer
from qdc.store.use import in_use

if TYPE_CHECKING:
    from qdc.image.layers import VirtualImage
    from qdc.image.tar import Resolve

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

    def progress(done: int, total: int) -> None:
        shown.progress("export", done >> 20, total >> 20, "MiB")

    shown.started("export")
    try:
        with in_use(store.root), store.staging() as work:
            folder = work / "image"
            store.link_out(build["image"]["artifact"], folder)
            image, pushed = _write(kind, name, folder, store.resolve, progress)
    finally:
        shown.close()
    if given.json:
        written = {"name": image.name, "id": f"sha256:{image.id}"}
        answer({"image": written, "destination": given.destination, "pushed": pushed})
    else:
        place = f"registry:{pushed['reference']}" if pushed else given.destination
        print(f"{image.name}\n  image ID sha256:{image.id}\n  written to {place}")
        if pushed:
            print(f"  manifest {pushed['digest']}\n  sent {pushed['sent']:,} bytes ({pushed['blobs']} blobs)")
    return 0


def _write(
    kind: str, name: str, folder: Path, resolve: Resolve, progress: Any
) -> tuple[VirtualImage, dict[str, Any] | None]:
    """Write it; returns the image and, of a registry, what was sent."""
    from qdc.image import export

    if kind == "oci":
        return export.export_oci(folder, resolve, Path(name).absolute(), progress), None
    if kind == "archive":
        return export.export_archive(folder, resolve, Path(name).absolute(), progress), None
    if kind == "docker":
        return export.export_docker(folder, resolve, docker_client(), progress), None
    from qdc.image.push import push
    from qdc.image.registry import connect, parse

    with connect(parse(name)) as registry:
        done = push(folder, resolve, registry, progress)
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
