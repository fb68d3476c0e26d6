"""The shapes that audit_fixtures makes by hand are those that Docker and podman make: import, --change, commit.

Starts engines of its own and fails, never skips, where it cannot.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from audit_fixtures import images
from audit_fixtures.pieces import Files, Fixture, tar_of

from qdc.audit.audit import audit
from qdc.audit.images import open_image

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "docker-engine"
CHANGE = 'ENTRYPOINT ["/start.sh"]'
JUDGED = ("image.flattened", "image.hidden")


def command(*words: str | Path, **options: Any) -> str:
    """Run a program; fail with what it said."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{words[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def root_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `export` gives of a small container: busybox, a script, a model's file."""
    busybox = shutil.which("busybox")
    assert busybox, "busybox-static is missing"
    files: Files = {
        "bin/busybox": Path(busybox).read_bytes(),
        "bin/sh": "busybox",
        "start.sh": b"#!/bin/sh\nexec sleep 60\n",
        "models/target/config.json": b'{"block_size": 16}',
    }
    path = tmp_path_factory.mktemp("root") / "root.tar"
    path.write_bytes(tar_of(files))
    return path


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """A docker client of a private engine without images."""
    folder = Path(tempfile.mkdtemp(prefix="qdc-a-"))
    try:
        line = command(SCRIPT, "start", folder).strip()
        client = docker.DockerClient(base_url=line.removeprefix("DOCKER_HOST="), timeout=300)
        yield client
        client.close()
    finally:
        command(SCRIPT, "stop", folder)
        shutil.rmtree(folder)


def configuration(archive: Path) -> dict[str, Any]:
    """The image configuration in what an engine saved."""
    with tarfile.open(archive) as tar:
        described = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        value: dict[str, Any] = json.load(tar.extractfile(described[0]["Config"]))  # type: ignore[arg-type]
    return value


def save(client: Any, name: str, path: Path) -> Path:
    with path.open("wb") as stream:
        for chunk in client.images.get(name).save(named=True):
            stream.write(chunk)
    return path


def words(archive: Path) -> dict[str, Any]:
    """Verdict and value of the claims that a shape decides."""
    with open_image("archive", str(archive)) as reader:
        rows = audit(reader)["verdicts"]
    return {row["claim"]: row["verdict"] for row in rows if row["claim"] in JUDGED}


def by_hand(kind: str, change: bool, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    made = images.flattened(kind, change)
    folder.mkdir()
    made.write(folder, "archive")
    return json.loads(made.configuration()), words(folder / "image.tar")


def compare_shapes(real: dict[str, Any], made: dict[str, Any], change: bool) -> None:
    """What an audit looks at in a configuration: layers, history, comment, settings that are set."""
    assert len(real["rootfs"]["diff_ids"]) == len(made["rootfs"]["diff_ids"]) == 1
    assert len(real["history"]) == len(made["history"]) == 1
    left, right = real["history"][0], made["history"][0]
    assert left.keys() - {"created"} == right.keys() - {"created"}
    assert left["comment"] == right["comment"]
    assert left.get("created_by", "").split(":")[0] == right.get("created_by", "").split(":")[0]
    assert real.get("comment") == made.get("comment")
    held = {name for name, value in (real.get("config") or {}).items() if value not in (None, "", False, [], {})}
    assert held - {"Env"} == ({"Entrypoint"} if change else set())


@pytest.mark.parametrize("change", [False, True])
def test_docker_import(change: bool, engine: Any, root_file: Path, tmp_path: Path) -> None:
    name = f"flat:{'changed' if change else 'plain'}"
    repository, tag = name.split(":")
    changes = [CHANGE] if change else None
    engine.api.import_image_from_data(root_file.read_bytes(), repository=repository, tag=tag, changes=changes)
    real = save(engine, name, tmp_path / "real.tar")
    made, judged = by_hand("docker", change, tmp_path / "made")
    compare_shapes(configuration(real), made, change)
    assert words(real)["image.flattened"] == judged["image.flattened"]


@pytest.mark.parametrize("change", [False, True])
def test_podman_import(change: bool, root_file: Path, tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="qdc-p-"))
    podman = ["podman", "--root", folder / "root", "--runroot", folder / "run", "--storage-driver", "vfs"]
    try:
        more = ["--change", CHANGE] if change else []
        command(*podman, "import", *more, root_file, "localhost/flat:x")
        command(*podman, "save", "--format", "docker-archive", "-o", tmp_path / "real.tar", "localhost/flat:x")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    made, judged = by_hand("podman", change, tmp_path / "made")
    compare_shapes(configuration(tmp_path / "real.tar"), made, change)
    assert words(tmp_path / "real.tar")["image.flattened"] == judged["image.flattened"]


def test_docker_commit(engine: Any, root_file: Path, tmp_path: Path) -> None:
    """A changed container is a layer more and a history entry that names the running command alone."""
    engine.api.import_image_from_data(root_file.read_bytes(), repository="before", tag="x", changes=[CHANGE])
    container = engine.containers.create("before:x", command=["/bin/bash"])
    changed = tar_of({"models/target/config.json": b'{"block_size": 8}'})
    assert container.put_archive("/", changed)
    container.commit(repository="after", tag="x")
    container.remove()
    real = configuration(save(engine, "after:x", tmp_path / "real.tar"))
    made: Fixture = images.committed(drafter=True)
    hand = json.loads(made.configuration())
    assert len(real["rootfs"]["diff_ids"]) == 2 and len(hand["rootfs"]["diff_ids"]) == 4
    assert real["history"][-1].keys() - {"comment"} == hand["history"][-1].keys()
    assert not real["history"][-1].get("comment")
    assert words(tmp_path / "real.tar").get("image.hidden") == "recorded"
