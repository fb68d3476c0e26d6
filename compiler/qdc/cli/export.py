"""`qdc export IMAGE DEST`: write an image of the store as `oci:DIR`, `archive:FILE` or into `docker:`."""

from __future__ import annotations

from pathlib import Path

from qdc.cli.common import answer, open_store, parser
from qdc.cli.progress import listener
from qdc.core.errors import COULD_NOT, QdcError
from qdc.run.references import refer
from qdc.store.use import in_use


def main(arguments: list[str]) -> int:
    options = parser("export", __doc__ or "")
    options.add_argument("image", help="a build id, @1, or a recipe path")
    options.add_argument("destination", help="oci:DIR, archive:FILE or docker:")
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
    if kind not in ("oci", "archive", "docker") or (kind != "docker" and not name):
        raise QdcError(
            "export.destination",
            f"`{given.destination}` is no destination",
            hint="give oci:DIR, archive:FILE or docker:",
        )
    from qdc.image import export

    shown = listener(given.quiet)

    def progress(done: int, total: int) -> None:
        shown.progress("export", done >> 20, total >> 20, "MiB")

    shown.started("export")
    try:
        with in_use(store.root), store.staging() as work:
            folder = work / "image"
            store.link_out(build["image"]["artifact"], folder)
            if kind == "oci":
                image = export.export_oci(folder, store.resolve, Path(name).absolute(), progress)
            elif kind == "archive":
                image = export.export_archive(folder, store.resolve, Path(name).absolute(), progress)
            else:
                image = export.export_docker(folder, store.resolve, docker_client(), progress)
    finally:
        shown.close()
    if given.json:
        answer({"image": {"name": image.name, "id": f"sha256:{image.id}"}, "destination": given.destination})
    else:
        print(f"{image.name}\n  image ID sha256:{image.id}\n  written to {given.destination}")
    return 0


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
