"""Exports: one image gives one file, byte for byte, on any day and in any folder; failures leave nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from image_store import make_image, stored_image

from qdc.cli import main
from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes, sha256_file
from qdc.image import beside, export
from qdc.image.assemble import write_image
from qdc.image.layers import Layer, read_image, small_layer


def test_an_archive_is_an_oci_layout_and_a_docker_archive_of_the_same_blobs(tmp_path: Path) -> None:
    folder, contents = make_image(tmp_path)
    seen: list[tuple[int, int]] = []
    image = export.export_archive(folder, contents.__getitem__, tmp_path / "image.tar", lambda *done: seen.append(done))
    size = (tmp_path / "image.tar").stat().st_size
    assert seen[-1] == (size, size) and seen == sorted(seen)
    with tarfile.open(tmp_path / "image.tar") as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}  # type: ignore[union-attr]
    for name, data in files.items():
        if name.startswith("blobs/sha256/"):
            assert sha256_bytes(data) == name.rpartition("/")[2]
    index = json.loads(files["index.json"])["manifests"][0]
    manifest = json.loads(files["blobs/sha256/" + index["digest"].removeprefix("sha256:")])
    docker = json.loads(files["manifest.json"])[0]
    assert docker["Config"] == "blobs/sha256/" + image.id and docker["RepoTags"] == [image.name]
    assert manifest["config"]["digest"] == f"sha256:{image.id}"
    assert docker["Layers"] == ["blobs/sha256/" + layer["digest"][7:] for layer in manifest["layers"]]
    for described in [manifest["config"], *manifest["layers"]]:
        assert len(files["blobs/sha256/" + described["digest"][7:]]) == described["size"]
    config = json.loads(files[docker["Config"]])
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    with tarfile.open(fileobj=io.BytesIO(files[docker["Layers"][1]])) as layer:
        stream = layer.extractfile("opt/models/target/model.safetensors")
        assert stream is not None and stream.read() == bytes(range(256)) * 5000


def test_the_same_image_exports_to_the_same_bytes_anywhere(tmp_path: Path) -> None:
    script = "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n" + (
        "from pathlib import Path; from image_store import make_image; from qdc.image import export\n"
        "place = Path(sys.argv[3]); folder, contents = make_image(place)\n"
        "export.export_archive(folder, contents.__getitem__, place / 'image.tar')\n"
        "export.export_oci(folder, contents.__getitem__, place / 'oci')\n"
    )
    here = Path(__file__).resolve().parent
    digests = []
    for name, zone, locale, umask in (("a", "UTC", "C", 0o022), ("b/c", "Asia/Tokyo", "C.UTF-8", 0o077)):
        place = tmp_path / name
        place.mkdir(parents=True)
        command = [sys.executable, "-c", script, str(here.parent / "compiler"), str(here), str(place)]
        environment = {**os.environ, "TZ": zone, "LC_ALL": locale, "HOME": str(place), "PYTHONHASHSEED": str(umask)}
        subprocess.run(command, check=True, cwd=place, env=environment, umask=umask)
        layout = {
            p.relative_to(place).as_posix(): sha256_file(p) for p in sorted((place / "oci").rglob("*")) if p.is_file()
        }
        digests.append((sha256_file(place / "image.tar"), layout))
    assert digests[0] == digests[1]


def test_a_changed_k_changes_only_the_last_layer(tmp_path: Path) -> None:
    first, second = (read_image(make_image(tmp_path / str(k), k)[0]) for k in (7, 6))
    assert first.id != second.id and first.name != second.name
    assert [layer.diff_id for layer in first.layers][:-1] == [layer.diff_id for layer in second.layers][:-1]


def test_an_oci_layout_holds_its_dockerfile_and_replaces_only_a_layout(tmp_path: Path) -> None:
    folder, contents = make_image(tmp_path)
    place = tmp_path / "oci"
    image = export.export_oci(folder, contents.__getitem__, place)
    text = (place / "Dockerfile").read_text()
    for layer in image.layers:
        assert f"ADD blobs/sha256/{layer.diff_id} /" in text
        assert sha256_file(place / "blobs/sha256" / layer.diff_id) == layer.diff_id
    assert 'ENTRYPOINT ["/usr/bin/python3", "/opt/qdc/serving/launcher.py"]' in text
    export.export_oci(folder, contents.__getitem__, place)
    other = tmp_path / "mine"
    other.mkdir()
    (other / "letter").write_text("keep me")
    with pytest.raises(QdcError) as error:
        export.export_oci(folder, contents.__getitem__, other)
    assert error.value.id == "export.occupied" and (other / "letter").read_text() == "keep me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "mine", "oci", "source"]


def test_damaged_weights_are_found_and_named_and_no_file_is_left(tmp_path: Path) -> None:
    folder, contents = make_image(tmp_path)
    with (tmp_path / "source/model.safetensors").open("r+b") as stream:
        stream.seek(777)
        stream.write(b"\xff\xff")
    for write, place in ((export.export_archive, "image.tar"), (export.export_oci, "oci")):
        with pytest.raises(QdcError) as error:
            write(folder, contents.__getitem__, tmp_path / place)
        assert error.value.id == "image.content" and error.value.exit_code == 4
        assert "opt/models/target/model.safetensors is damaged" in error.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "source"]


def test_a_tampered_description_is_no_image(tmp_path: Path) -> None:
    folder, _ = make_image(tmp_path)
    value = json.loads((folder / "image.json").read_bytes())
    value["layers"][1]["diff_id"] = "sha256:" + "0" * 64
    (folder / "image.json").write_text(json.dumps(value))
    with pytest.raises(QdcError) as error:
        read_image(folder)
    assert error.value.id == "image.image"


def test_a_disk_that_fills_up_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    make_image(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    script = (
        "import resource, signal, sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from pathlib import Path; from qdc.core.errors import QdcError; from qdc.image import export, gzipped\n"
        "from qdc.core.files import sha256_file\n"
        "place = Path(sys.argv[3]); held = {sha256_file(p): p for p in (place / 'source').iterdir()}\n"
        "limit = int(sys.argv[4]); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "ways = {export.export_archive: 'image.tar', export.export_oci: 'oci', gzipped.export_gzip: 'image.tar.gz'}\n"
        "for write, name in ways.items():\n"
        "    try: write(place / 'image', held.__getitem__, place / name)\n"
        "    except QdcError as error: print(error.id, error.exit_code)\n"
    )
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", script, str(here.parent / "compiler"), str(here), str(tmp_path), "3000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["export.disk-full 4"] * 3
    assert {path.name for path in tmp_path.iterdir()} == before


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, contents = make_image(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(QdcError, match="needs 1,") as error:
        export.export_archive(folder, contents.__getitem__, tmp_path / "image.tar")
    assert error.value.id == "export.disk-full" and "disk" in str(error.value.hint)


def test_a_layer_that_stands_twice_is_one_blob(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    layer = small_layer({"a": b"1"}, "one", image, "layers/01.tar")
    twice = [layer, Layer("two", layer.diff_id, layer.size, None, "layers/01.tar")]
    write_image(image, "demo", "x", twice, {})
    export.export_archive(image, lambda digest: tmp_path / digest, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:
        names = tar.getnames()
    assert len(names) == len(set(names)) and names.count(f"blobs/sha256/{layer.diff_id}") == 1


INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from qdc.cli import main
from qdc.cli.progress import Quiet
Quiet.progress = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.exit(main(["export", "b1", sys.argv[2], "--store", sys.argv[3], "--quiet"]))
"""


@pytest.mark.parametrize("destination", ["archive:image.tar", "archive:image.tar.gz", "oci:layout"])
def test_an_interrupted_export_leaves_nothing_and_what_was_there(tmp_path: Path, destination: str) -> None:
    store, _ = stored_image(tmp_path)
    place = tmp_path / "out"
    place.mkdir()
    old = place / destination.partition(":")[2]
    if destination.startswith("archive"):
        old.write_text("an older one")
    compiler = Path(__file__).resolve().parent.parent / "compiler"
    command = [sys.executable, "-c", INTERRUPTED, str(compiler), destination, str(store.root)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert [path.name for path in place.iterdir()] == ([old.name] if destination.startswith("archive") else [])
    assert not old.exists() or old.read_text() == "an older one"
    assert not [path for path in (store.root / "staging").iterdir() if path.is_dir() and any(path.iterdir())]


KILLED = INTERRUPTED.replace("signal.SIGINT", "signal.SIGKILL")
STOPPED = INTERRUPTED.replace("signal.SIGINT", "signal.SIGSTOP")


@pytest.mark.parametrize("destination", ["archive:image.tar", "archive:image.tar.gz", "oci:layout"])
def test_what_a_killed_export_left_goes_with_the_next_and_a_living_one_is_not_touched(
    tmp_path: Path, destination: str
) -> None:
    store, _ = stored_image(tmp_path)
    place, name = tmp_path / "out", destination.partition(":")[2]
    place.mkdir()
    foreign = place / f".{name}.notours1.partial.txt"
    foreign.write_text("another's")
    compiler = Path(__file__).resolve().parent.parent / "compiler"

    def command(script: str) -> list[str]:
        return [sys.executable, "-c", script, str(compiler), destination, str(store.root)]

    export_there = ["export", "b1", destination.replace(name, str(place / name)), "--store", str(store.root)]

    def left() -> set[str]:
        return {path.name for path in place.iterdir() if path.name.endswith(".partial")}

    dead = subprocess.run(command(KILLED), cwd=place, capture_output=True)
    assert dead.returncode == -signal.SIGKILL and len(left()) == 1 and not (place / name).exists()
    living = subprocess.Popen(command(STOPPED), cwd=place)
    try:
        assert os.WIFSTOPPED(os.waitpid(living.pid, os.WUNTRACED)[1])
        mine = left()
        assert len(mine) == 1, "the dead one's is gone, the living one's is there"
        assert (
            main(["export", "b1", f"{destination.partition(':')[0]}:{place / name}", "--store", str(store.root)]) == 0
        )
        assert left() == mine and (place / name).exists()
    finally:
        living.kill()
        living.wait()
    assert main(export_there) == 0
    assert {path.name for path in place.iterdir()} == {name, foreign.name}


def test_a_layout_is_replaced_in_one_step_or_where_that_cannot_be_in_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, contents = make_image(tmp_path)
    place, seen = tmp_path / "oci", []
    export.export_oci(folder, contents.__getitem__, place)
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: seen.append(self.name) or rename(self, to))
    (place / "old").write_text("of the layout before")
    export.export_oci(folder, contents.__getitem__, place)
    assert seen == [] and not (place / "old").exists()
    monkeypatch.setattr(beside, "_exchange", lambda new, old: False)
    (place / "old").write_text("of the layout before")
    export.export_oci(folder, contents.__getitem__, place)
    assert len(seen) == 2 and not (place / "old").exists() and (place / "oci-layout").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "oci", "source"]
