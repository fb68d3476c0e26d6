"""Images that stand on a given one: by reference, by OCI layout, by archive; and what is refused of them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_fixtures as fixtures
import pytest
import registry_server
from given_bases import ENGINE, Base, system, tar_of
from micro import Micro, qdc
from registry_server import Fake, digest_of

from qdc.core.errors import QdcError
from qdc.formats import oci
from qdc.image import export
from qdc.image.base import read_base
from qdc.image.layers import read_image
from qdc.stages import given_base

Json = dict[str, Any]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with registry_server.serving() as found:
        yield found


def taken(folder: Path, base: Base, form: str = "layout") -> Path:
    """The output of the stage for `base`, handed over as a layout or an archive."""
    source = folder / "source"
    if form == "layout":
        base.layout(source)
    else:
        source.mkdir(parents=True)
        base.archive(source / "file")
    return fixtures.run(given_base, folder, {"source": source}, {})


# The stage


def test_a_layout_and_an_archive_of_the_same_image_are_the_same_base(tmp_path: Path) -> None:
    base = Base()
    found = [taken(tmp_path / form, base, form) for form in ("layout", "archive")]
    assert read_base(found[0]) == read_base(found[1])
    described = read_base(found[0])
    assert [f"sha256:{layer.diff_id}" for layer in described.layers] == [digest_of(tar) for tar in base.tars]
    assert [layer.size for layer in described.layers] == [len(tar) for tar in base.tars]
    assert [f"sha256:{layer.stored[0]}" for layer in described.layers] == [digest_of(data) for data in base.stored]
    assert [layer.gzip is not None for layer in described.layers] == [True, False]
    for folder in found:
        for layer, data in zip(described.layers, base.stored, strict=True):
            assert (folder / layer.stored[0]).read_bytes() == data
        packages = json.loads((folder / "packages.json").read_bytes())
        assert packages == [
            {"architecture": "amd64", "name": "base-files", "version": "12.4"},
            {"name": "vllm", "version": f"{ENGINE}+cpu"},
        ]


def test_an_archive_that_is_compressed_as_a_whole_is_the_same_base(tmp_path: Path) -> None:
    plain = taken(tmp_path / "plain", Base(), "archive")
    source = tmp_path / "packed/source"
    source.mkdir(parents=True)
    (source / "file").write_bytes(gzip.compress((tmp_path / "plain/source/file").read_bytes()))
    assert read_base(fixtures.run(given_base, tmp_path / "packed", {"source": source}, {})) == read_base(plain)


def refused(folder: Path, base: Base, id: str, form: str = "layout") -> QdcError:
    with pytest.raises(QdcError) as error:
        taken(folder, base, form)
    assert error.value.id == id and error.value.exit_code == 4 and len(str(error.value)) < 500
    return error.value


def test_another_platform_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, Base(platform=("linux", "arm64")), "base.platform")
    assert "linux/arm64" in error.message and "linux/amd64" in error.message


@pytest.mark.parametrize("form", ["layout", "archive"])
def test_a_tar_of_another_diff_id_is_refused(tmp_path: Path, form: str) -> None:
    base = Base(diff_ids=[digest_of(b"one"), digest_of(b"two")])
    assert "the tar of layer 0" in refused(tmp_path, base, "base.digest", form).message


@pytest.mark.parametrize("what", ["layer", "config", "manifest"])
def test_moved_bytes_are_refused(tmp_path: Path, what: str) -> None:
    base = Base()
    source = base.layout(tmp_path / "source")
    data = {"layer": base.stored[1], "config": base.config, "manifest": base.manifest}[what]
    place = source / "blobs/sha256" / digest_of(data)[7:]
    for old, new in ((b"vllm-", b"vlln-"), (b"NVIDIA", b"nvidia"), (b"schemaVersion", b"schemaversion")):
        data = data.replace(old, new)
    place.write_bytes(data)
    with pytest.raises(QdcError) as error:
        fixtures.run(given_base, tmp_path, {"source": source}, {})
    assert error.value.id == "base.digest" and error.value.exit_code == 4 and error.value.hint


def test_a_blob_that_is_missing_cut_or_damaged_is_refused(tmp_path: Path) -> None:
    base = Base()
    for number, (change, id) in enumerate(
        [(lambda place: place.unlink(), "image.missing"), (lambda place: os.truncate(place, 90), "base.digest")]
    ):
        source = base.layout(tmp_path / f"{number}/source")
        change(source / "blobs/sha256" / digest_of(base.stored[0])[7:])
        with pytest.raises(QdcError) as error:
            fixtures.run(given_base, tmp_path / str(number), {"source": source}, {})
        assert error.value.id == id
    bad = Base()
    cut = gzip.compress(bad.tars[0], mtime=0)[:-20]
    with pytest.raises(QdcError) as error:
        taken(tmp_path / "cut", _Stored(bad, [cut, bad.tars[1]]))
    assert error.value.id == "bytes.gzip"


class _Stored(Base):
    """A base whose stored layers are given."""

    def __init__(self, base: Base, stored: list[bytes]) -> None:
        super().__init__(base.tars, base.packed)
        self.__dict__["stored"] = stored


@pytest.mark.parametrize(
    ("files", "id"),
    [
        ({"usr/bin/python3": None}, "base.python"),
        ({"usr/bin/python3": "/nowhere"}, "base.python"),
        ({"opt/qdc/serving/launcher.py": b"old"}, "base.taken"),
        ({"opt/models/target/model.safetensors": b"old"}, "base.taken"),
        ({"../../etc/passwd": b"root"}, "tar.traversal"),
        ({"usr/lib/../../x": b"root"}, "tar.traversal"),
    ],
)
def test_a_base_that_cannot_carry_the_product_is_refused(tmp_path: Path, files: Json, id: str) -> None:
    layers = system()
    layers[0].update(files)
    layers[0] = {name: content for name, content in layers[0].items() if content is not None}
    refused(tmp_path, Base([tar_of(layer) for layer in layers]), id)


def test_a_python_that_a_later_layer_takes_away_is_missed(tmp_path: Path) -> None:
    layers = [*system(), {"usr/bin/.wh.python3.11": b""}]
    refused(tmp_path, Base([tar_of(layer) for layer in layers], (True, True, True)), "base.python")


@pytest.mark.parametrize("settings", [{"Env": ["no mark"]}, {"Env": "A=1"}, {"Env": ["A=1\nB=2"]}, {"User": "a b"}])
def test_settings_that_are_none_are_refused(tmp_path: Path, settings: Json) -> None:
    with pytest.raises(QdcError, match=r"image\.base: its configuration"):
        taken(tmp_path, Base(settings=settings))


# The image on it


def test_an_image_inherits_what_it_must_and_decides_how_it_starts(tmp_path: Path) -> None:
    base = Base()
    pieces = fixtures.Pieces(tmp_path / "pieces", taken(tmp_path / "base", base))
    recipe = {**fixtures.product(), "image": {"base": {"ref": "h.io/team/base@sha256:" + "ab" * 32}}}
    folder = pieces.image("image", recipe)
    image = read_image(folder)
    assert [layer.role for layer in image.layers[:3]] == ["base", "base", "runtime packages"]
    config = json.loads(image.config)
    assert config["rootfs"]["diff_ids"][:2] == [digest_of(tar) for tar in base.tars]
    settings = config["config"]
    assert settings["Env"] == ["PATH=/usr/local/cuda/bin:/usr/bin", "NVIDIA_VISIBLE_DEVICES=all", "LANG=C.UTF-8"]
    assert settings["User"] == "1000:1000" and settings["WorkingDir"] == "/"
    assert settings["Entrypoint"] == ["/usr/bin/python3", "/opt/qdc/serving/launcher.py"]
    assert settings["Cmd"] == ["serve"] and settings["Labels"]["io.qdc.k"] == "7"
    assert settings["Labels"]["org.opencontainers.image.base.digest"] == "sha256:" + "ab" * 32
    assert settings["Labels"]["org.opencontainers.image.base.name"] == "h.io/team/base"
    contents = pieces.contents()
    export.export_archive(folder, contents.__getitem__, tmp_path / "image.tar")
    export.export_oci(folder, contents.__getitem__, tmp_path / "oci")
    assert "USER 1000:1000" in (tmp_path / "oci/Dockerfile").read_text()
    for place in (tmp_path / "image.tar", tmp_path / "oci"):
        written = oci.open_image(place)
        for said in written.declared:
            assert said.digest == digest_of(said.blob.read(0, said.blob.size)), said.what
        for layer in written.layers:
            tar = layer.content.read(0, layer.content.size)
            assert layer.diff_id == digest_of(tar)
        assert written.layers[0].digest == digest_of(base.stored[0]), "the base's layer is the one that it was"
        assert written.find("usr/bin/python3") is not None and written.find("etc/motd") is None


@pytest.mark.parametrize("there", ["0.22.0", ""])
def test_a_base_with_another_engine_or_none_is_refused(tmp_path: Path, there: str) -> None:
    layers = system(there) if there else system()[:1]
    base = Base([tar_of(layer) for layer in layers], tuple(True for _ in layers))
    pieces = fixtures.Pieces(tmp_path / "pieces", taken(tmp_path / "base", base))
    with pytest.raises(QdcError, match=r"vLLM 0\.32\.0, and the base holds") as error:
        pieces.image("image", {**fixtures.product(), "image": {"base": {"tree": "0" * 64}}})
    assert error.value.id == "stage.image.engine" and (f"vLLM {there}" if there else "none") in error.value.message


# Recipe, lock and build


@pytest.fixture
def project(micro: Micro, fake: Fake, tmp_path: Path) -> Iterator[tuple[Path, Base]]:
    """Micro on a base of the registry, in micro's own store."""
    base = Base()
    recipe = micro.folder / "recipes" / "based.yaml"
    recipe.write_text(f"extends: micro.yaml\nname: based\nimage: {{base: {{debian: null, ref: {base.serve(fake)}}}}}\n")
    yield recipe, base
    for path in recipe.parent.glob("based*"):
        path.unlink()


def run(micro: Micro, verb: str, recipe: Path, *more: str, code: int = 0, **environment: str) -> Json:
    done = qdc(verb, recipe, "--store", micro.store, "--json", *more, cwd=micro.folder, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    found: Json = json.loads(done.stdout)
    return found


def test_micro_on_a_base_of_a_registry_from_lock_to_audit(
    micro: Micro, project: tuple[Path, Base], fake: Fake, tmp_path: Path
) -> None:
    recipe, base = project
    assert run(micro, "build", recipe, code=2)["error"]["id"] == "recipe.SRC04"
    locked = run(micro, "lock", recipe)["sources"]
    assert [row["path"] for row in locked] == ["image.base"] and locked[0]["files"] == 6 and locked[0]["missing"] == []
    lock = json.loads(recipe.with_suffix(".lock").read_bytes())
    assert f"blobs/sha256/{digest_of(base.stored[0])[7:]}" in lock["sources"]["image.base"]["files"]
    asked = len(fake.log)
    predicted = run(micro, "plan", recipe, code=1)["predictions"]["image"]["layers"][0]
    assert predicted["assumed"] and predicted["value"] == pytest.approx(2.4 * locked[0]["bytes"], rel=0.01)
    built = run(micro, "build", recipe)
    assert sorted(stage["name"] for stage in built["stages"] if stage["ran"]) == ["base-image", "image"]
    assert len(fake.log) == asked, "after the lock nothing is asked of the registry"
    again = run(micro, "build", recipe)
    assert [stage["name"] for stage in again["stages"] if stage["ran"]] == []
    file = micro.export(built["build"], tmp_path / "image.tar")
    image = oci.open_image(file)
    assert image.layers[0].digest == digest_of(base.stored[0])
    assert image.image_id == built["image"]["id"]
    audited = qdc("audit", f"archive:{file}", "--require", "serve.k=7", "--json")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    same = qdc("diff", built["build"], f"archive:{file}", "--store", micro.store)
    assert same.returncode == 0, same.stdout + same.stderr
    sizes = run(micro, "plan", recipe)["predictions"]["image"]["layers"][0]
    assert sizes["value"] == sum(map(len, base.tars)) and not sizes["assumed"]
    name = f"{fake.host}/team/product"
    before = dict(fake.blobs)
    pushed = qdc("export", built["build"], f"registry:{name}", "--store", micro.store, "--json")
    assert pushed.returncode == 0, pushed.stderr
    sent = json.loads(pushed.stdout)["pushed"]
    assert sent["digest"] == digest_of(fake.manifests["team/product", sent["reference"].rpartition(":")[2]][1])
    assert sent["blobs"] == len(set(fake.blobs) - set(before))
    assert sent["blobs"] <= len(image.layers) + 1 - 2, "the base's layers are there already"


def test_micro_on_an_archive_and_on_a_layout_is_the_same_product(
    micro: Micro, project: tuple[Path, Base], tmp_path: Path
) -> None:
    recipe, base = project
    base.archive(recipe.parent / "based.tar")
    base.layout(recipe.parent / "layout")
    try:
        builds = []
        for given in ("{debian: null, archive: based.tar}", "{debian: null, oci: layout}"):
            recipe.write_text(f"extends: micro.yaml\nname: based\nimage: {{base: {given}}}\n")
            builds.append(run(micro, "build", recipe))
            assert run(micro, "build", recipe)["image"] == builds[-1]["image"]
        layers = []
        for build in builds:
            file = micro.export(build["build"], tmp_path / "image.tar")
            layers.append([layer.digest for layer in oci.open_image(file).layers])
        assert layers[0][:-1] == layers[1][:-1]
        (recipe.parent / "layout/blobs/sha256" / digest_of(base.stored[1])[7:]).write_bytes(b"moved")
        error = run(micro, "build", recipe, code=4)["error"]
        assert error["id"] == "base.digest"
    finally:
        for path in sorted((recipe.parent / "layout").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (recipe.parent / "layout").rmdir()


def test_a_lock_goes_on_where_it_stopped(micro: Micro, project: tuple[Path, Base], fake: Fake, tmp_path: Path) -> None:
    recipe, base = project
    store = tmp_path / "store"
    digest = digest_of(base.stored[1])
    fake.breaks[digest] = [2000, 0, 0, 0, 0]
    error = json.loads(qdc("lock", recipe, "--store", store, "--json", cwd=micro.folder).stdout)["error"]
    assert error["id"] == "registry.dropped" and error["line"] == 3 and error["file"].endswith("based.yaml")
    assert not recipe.with_suffix(".lock").exists()
    done = qdc("lock", recipe, "--store", store, "--json", cwd=micro.folder)
    assert done.returncode == 0, done.stderr
    assert [r.range for r in fake.asked("GET", digest)][-1] == "bytes=2000-"
    assert len(fake.asked("GET", digest_of(base.stored[0]))) == 1


def test_what_a_registry_changed_or_hides_is_said_at_its_place(
    micro: Micro, project: tuple[Path, Base], fake: Fake, tmp_path: Path
) -> None:
    recipe, base = project

    def error(code: int = 4) -> Json:
        done = qdc("lock", recipe, "--store", tmp_path / "store", "--json", cwd=micro.folder)
        assert done.returncode == code, done.stdout + done.stderr
        found: Json = json.loads(done.stdout)["error"]
        assert found["line"] == 3 and found["column"] and found["hint"] and not recipe.with_suffix(".lock").exists()
        return found

    fake.serves[digest_of(base.stored[0])] = base.stored[0][:-1] + b"x"
    assert error()["id"] == "registry.digest"
    fake.serves.clear()
    kept = dict(fake.manifests)
    for key, (media_type, data) in kept.items():
        fake.manifests[key] = (media_type, data.replace(b"riscv64", b"riscv65"))
    assert error()["id"] == "registry.digest"
    fake.manifests.clear()
    assert error()["id"] == "registry.absent"
    fake.auth = "basic"
    assert error()["id"] == "registry.denied"
    fake.auth = ""
    other = Base(platform=("linux", "arm64"))
    recipe.write_text(
        f"extends: micro.yaml\nname: based\nimage: {{base: {{debian: null, ref: {other.serve(fake)}}}}}\n"
    )
    found = error()
    assert found["id"] == "registry.platform" and "linux/arm64" in found["message"]
    zeros = f"{fake.host}/team/base@sha256:{'0' * 64}"
    recipe.write_text(f"extends: micro.yaml\nname: based\nimage: {{base: {{debian: null, ref: {zeros}}}}}\n")
    assert error(2)["id"] == "recipe.SRC13"


def test_a_base_that_is_not_there_is_an_error_of_the_recipe(micro: Micro, project: tuple[Path, Base]) -> None:
    recipe, _ = project
    for given in (
        "{debian: null, archive: none.tar}",
        "{debian: null, oci: none}",
        "{debian: null, oci: templates}",
        "{debian: null, archive: templates}",
    ):
        recipe.write_text(f"extends: micro.yaml\nname: based\nimage: {{base: {given}}}\n")
        found = run(micro, "validate", recipe, code=2)["diagnostics"]
        assert [item["rule"] for item in found if item["severity"] == "error"] == ["SRC08"]
        assert found[0]["line"] == 3 and found[0]["hint"]


def test_headers_only_leaves_the_layers_in_the_registry(
    micro: Micro, project: tuple[Path, Base], fake: Fake, tmp_path: Path
) -> None:
    recipe, base = project
    done = qdc("lock", recipe, "--headers-only", "--store", tmp_path / "store", "--json", cwd=micro.folder)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["sources"][0]
    assert len(row["missing"]) == 2 and row["bytes"] > sum(map(len, base.stored))
    assert not [r for data in base.stored for r in fake.asked("GET", digest_of(data))]
    whole = qdc("lock", recipe, "--store", tmp_path / "store", "--json", cwd=micro.folder)
    assert json.loads(whole.stdout)["sources"][0]["missing"] == []
