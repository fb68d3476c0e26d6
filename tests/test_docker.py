"""The archive against real engines: Docker loads and runs it with the same image ID; so do podman and skopeo.

Starts its own engine and fails, never skips, where it cannot: an image that no engine took is not tested.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import image_fixtures as fixtures
import pytest
import test_audit_images as audited

from qdc.audit.audit import audit
from qdc.audit.images import open_image
from qdc.core.errors import QdcError
from qdc.core.files import sha256_file
from qdc.image import export
from qdc.image.assemble import write_image
from qdc.image.layers import Layer, VirtualImage, digested, read_image, small_layer
from qdc.stages import base_image

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "docker-engine"
LAUNCHER = """\
import json, os, ssl, sqlite3, sys
serve = json.load(open("/opt/qdc/serve.json"))
print(json.dumps([sys.argv[1:], serve["k"], os.getuid(), os.path.getsize("/opt/models/target/model.safetensors")]))
"""


def command(*words: str | Path, **options: Any) -> str:
    """Run a program; fail with what it said."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{words[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """A docker client of a private engine without images."""
    folder = Path(tempfile.mkdtemp(prefix="qdc-e-"))
    try:
        line = command(SCRIPT, "start", folder).strip()
        assert line.startswith("DOCKER_HOST=unix://")
        client = docker.DockerClient(base_url=line.removeprefix("DOCKER_HOST="), timeout=300)
        yield client
        client.close()
    finally:
        command(SCRIPT, "stop", folder)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Debian base as the stage makes it."""
    return fixtures.run(base_image, tmp_path_factory.mktemp("base"), {}, {"debian": "bookworm", "packages": []})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, dict[str, Path]]:
    """An image on that base whose launcher prints what it sees, and where its contents are."""
    folder = tmp_path_factory.mktemp("made")
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(range(256)) * 40_000)
    image = folder / "image"
    image.mkdir()
    held = json.loads((base / "layer.json").read_bytes())
    layers = [
        Layer("base", held["diff_id"].removeprefix("sha256:"), held["size"], None, "layer.tar"),
        digested({"opt/models/target/model.safetensors": weights}, "target weights"),
        small_layer(
            {"opt/qdc/serving/launcher.py": LAUNCHER.encode(), "opt/qdc/serve.json": b'{"k": 7}'},
            "configuration", image, "layers/03-configuration.tar",
        ),
    ]  # fmt: skip
    write_image(image, "demo", "w4g32-k7", layers, {"io.qdc.k": "7", "io.qdc.note": 'a "b" $c \\d'})
    return image, {sha256_file(path): path for path in (weights, base / "layer.tar")}


@pytest.fixture(scope="module")
def archive(made: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VirtualImage]:
    file = tmp_path_factory.mktemp("archive") / "image.tar"
    return file, export.export_archive(made[0], made[1].__getitem__, file)


def forget(engine: Any) -> None:
    for image in engine.images.list():
        engine.images.remove(image.id, force=True)
    assert engine.images.list() == []


def check_run(engine: Any, name: str) -> None:
    printed = engine.containers.run(name, network_mode="none", remove=True)
    assert json.loads(printed) == [["serve"], 7, 0, 10_240_000]


def test_the_base_is_small_whole_and_names_no_machine(base: Path) -> None:
    packages = {package["name"]: package["version"] for package in json.loads((base / "packages.json").read_bytes())}
    assert {"python3", "ca-certificates", "libgomp1", "libnuma1", "libstdc++6", "dpkg"} <= set(packages)
    with tarfile.open(base / "layer.tar") as tar:
        members = {member.name: member for member in tar}
    assert list(members) == sorted(members)
    for name in ("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list", "etc/machine-id"):
        assert name not in members
    assert not [
        name for name in members if name.startswith(("dev/", "var/log/", "var/cache/")) or "__pycache__" in name
    ]
    assert members["usr/bin/passwd"].mode & 0o4000, "set-user-ID bits stay"
    assert members["etc/shadow"].gid == 42 and members["tmp"].mode == 0o1777
    assert {member.mtime for member in members.values()} == {1577836800}
    assert "usr/share/doc/python3/copyright" in members or "usr/share/doc/python3-minimal/copyright" in members


def test_docker_loads_the_archive_with_the_same_id_and_runs_it(engine: Any, archive: tuple[Path, VirtualImage]) -> None:
    forget(engine)
    file, image = archive
    with file.open("rb") as stream:
        loaded = engine.images.load(stream)
    assert [(found.id, found.tags) for found in loaded] == [(f"sha256:{image.id}", [image.name])]
    assert loaded[0].attrs["RootFS"]["Layers"] == [f"sha256:{layer.diff_id}" for layer in image.layers]
    assert loaded[0].attrs["Config"]["Labels"] == {"io.qdc.k": "7", "io.qdc.note": 'a "b" $c \\d'}
    check_run(engine, image.name)


def test_docker_takes_the_image_from_a_stream(engine: Any, made: tuple[Path, dict[str, Path]]) -> None:
    forget(engine)
    seen: list[tuple[int, int]] = []
    image = export.export_docker(made[0], made[1].__getitem__, engine, lambda *done: seen.append(done))
    assert engine.images.get(image.name).id == f"sha256:{image.id}"
    assert seen[-1][0] == seen[-1][1] > image.size
    check_run(engine, image.name)


def test_damaged_contents_never_become_an_image(
    engine: Any, made: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    forget(engine)
    image = read_image(made[0])
    assert image.layers[1].entries is not None
    digest = image.layers[1].entries[-1].sha256
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\1" + made[1][str(digest)].read_bytes()[1:])
    contents = {**made[1], str(digest): damaged}
    with pytest.raises(QdcError) as error:
        export.export_docker(made[0], contents.__getitem__, engine)
    assert error.value.exit_code == 4
    assert engine.images.list() == []


def test_the_dockerfile_builds_the_same_files_from_the_layout(
    engine: Any, made: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    forget(engine)
    export.export_oci(made[0], made[1].__getitem__, tmp_path / "oci")
    built, _ = engine.images.build(path=str(tmp_path / "oci"), tag="built:x", network_mode="none", rm=True)
    image = export.export_docker(made[0], made[1].__getitem__, engine)
    ours = engine.images.get(image.name).attrs["Config"]
    theirs = built.attrs["Config"]
    for field in ("Entrypoint", "Cmd", "Env", "Labels", "ExposedPorts", "WorkingDir"):
        assert theirs[field] == ours[field], field
    check_run(engine, "built:x")
    digests = []
    for name in ("built:x", image.name):
        container = engine.containers.create(name)
        try:
            with tempfile.TemporaryFile() as file:
                for chunk in container.export():
                    file.write(chunk)
                file.seek(0)
                digests.append(_tree(file))
        finally:
            container.remove()
    assert digests[0] == digests[1]


def _tree(stream: Any) -> dict[str, tuple[Any, ...]]:
    """Path -> what a file is, without times (`docker build` stamps folders with its own)."""
    found: dict[str, tuple[Any, ...]] = {}
    with tarfile.open(fileobj=stream) as tar:
        for member in tar:
            data = tar.extractfile(member) if member.isreg() else None
            digest = hashlib.sha256(data.read()).hexdigest() if data else None
            found[member.name] = (member.type, member.mode, member.uid, member.gid, member.linkname, digest)
    return found


def test_skopeo_reads_it_as_both_kinds_of_archive(archive: tuple[Path, VirtualImage], tmp_path: Path) -> None:
    file, image = archive
    for kind in ("oci-archive", "docker-archive"):
        raw = command("skopeo", "inspect", "--config", "--raw", f"{kind}:{file}")
        assert hashlib.sha256(raw.encode()).hexdigest() == image.id, kind
        layout = tmp_path / kind
        command("skopeo", "--insecure-policy", "copy", f"{kind}:{file}", f"oci:{layout}:x")
        digest = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"]
        manifest = json.loads((layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes())
        config = json.loads(
            (layout / "blobs/sha256" / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes()
        )
        assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.diff_id}" for layer in image.layers], kind
        if kind == "oci-archive":  # from a docker-archive skopeo writes a config of its own
            assert manifest["config"]["digest"] == f"sha256:{image.id}"


def test_podman_loads_and_runs_it(archive: tuple[Path, VirtualImage]) -> None:
    file, image = archive
    folder = Path(tempfile.mkdtemp(prefix="qdc-p-"))
    podman = ["podman", "--root", folder / "root", "--runroot", folder / "run", "--runtime", "runc"]
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    try:
        command(*podman, "load", "-i", file)
        names = json.loads(command(*podman, "image", "inspect", image.name))
        assert names[0]["Id"] == image.id
        printed = command(*podman, "run", "--rm", "--network", "none", *limits, image.name)
        assert json.loads(printed) == [["serve"], 7, 0, 10_240_000]
    finally:
        command(*podman, "rmi", "--all", "--force")
        subprocess.run(["umount", "-R", str(folder / "root/overlay")], capture_output=True, check=False)
        shutil.rmtree(folder)


def test_an_audit_reads_what_the_engine_sends(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = audited.untouched()
    file = audited.write_archive(tmp_path / "image.tar", built.config(), built.tars(), "audited:1")
    engine.images.load(file.read_bytes())
    monkeypatch.setattr(docker, "from_env", lambda: engine)
    with open_image("docker", "audited:1") as reader:
        report = audit(reader, expect=built.id)
    assert report["tags"] == ["audited:1"]
    assert report["counts"]["refuted"] == report["counts"]["unread"] == 0
    assert audited.row(report, "serve.k")["verdict"] == "proved"
    with pytest.raises(QdcError, match="docker cannot give nothing:1"), open_image("docker", "nothing:1"):
        pass
    forget(engine)
