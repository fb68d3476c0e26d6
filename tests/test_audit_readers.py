"""One image in every place that an audit can read gives one answer; what is fetched, and what stays unread."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_server import OCI_INDEX, OCI_MANIFEST, Fake, serving
from test_audit_images import (
    DRAFTER,
    TARGET,
    Built,
    drafter_json,
    drafter_weights,
    named,
    recipe,
    row,
    target_config,
    target_weights,
    untouched,
)
from test_formats_images import (
    Content,
    layout_blobs,
    make_config,
    make_tar,
    overlay,
    packed,
    sha,
    shown,
    write_archive,
    write_layout,
)

from qdc.audit import remote
from qdc.audit.audit import audit, exit_code
from qdc.audit.images import open_image, read_manifest
from qdc.core.errors import QdcError
from qdc.formats import gzip as gzip_reader
from qdc.formats import oci, safetensors
from qdc.formats import zstd as zstd_reader
from qdc.run.references import refer

LOCAL = ("oci", "oci-gzip", "oci-zstd", "oci-tar", "oci-tar-gzip", "archive", "archive-gzip", "archive-zstd",
         "archive-of-gzip", "archive-of-zstd", "docker", "docker-of-zstd")  # fmt: skip


def noise_of(count: int) -> bytes:
    """32 bytes each that do not compress."""
    return b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(count))


def place_of(form: str, built: Built, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Put an image somewhere; the place and the name by which an audit finds it."""
    config, tars = built.config(), built.tars()
    path = folder / "image"
    how: bool | str = "zstd" if form.endswith("zstd") else form.endswith("gzip")
    if form in ("oci", "oci-gzip", "oci-zstd"):
        return "oci", str(write_layout(path, layout_blobs(config, tars, built.tag, how)))
    if form.startswith("oci-tar"):
        data = make_tar(dict(layout_blobs(config, tars, built.tag)))
    elif "-of-" in form:
        blobs = layout_blobs(config, tars, built.tag, how)
        layers = [f"blobs/sha256/{sha(packed(layer, how))}" for layer in tars]
        entry = {"Config": f"blobs/sha256/{sha(config)}", "RepoTags": None, "Layers": layers}
        data = make_tar({**blobs, "manifest.json": json.dumps([entry]).encode()})
    else:
        data = write_archive(path, config, tars, built.tag).read_bytes()
    path.write_bytes(packed(data, how) if form != "archive-of-zstd" else data)
    if form.startswith("docker"):
        engine(monkeypatch, data)
        return "docker", "tiny:1"
    return ("oci" if form.startswith("oci") else "archive"), str(path)


def engine(monkeypatch: pytest.MonkeyPatch, archive: bytes) -> None:
    """A container engine that holds one image and sends it in pieces."""
    pieces = [archive[at : at + 1000] for at in range(0, len(archive), 1000)]
    image = SimpleNamespace(attrs={"Size": len(archive)}, save=lambda named: iter(pieces))
    client = SimpleNamespace(images=SimpleNamespace(get=lambda name: image))
    monkeypatch.setattr("docker.from_env", lambda: client)


def judged(report: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Verdicts about what an image holds and not about how it is stored."""
    rows = [row for row in report["verdicts"] if not row["claim"].endswith(".digest") or row["claim"][:6] != "image."]
    return {row["claim"]: (row["verdict"], row["value"]) for row in rows if row["claim"] != "image.size"}


@pytest.mark.parametrize("form", LOCAL)
def test_every_place_gives_the_same_verdicts(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = untouched()
    place, name = place_of(form, built, tmp_path, monkeypatch)
    with open_image(place, name) as reader:
        report = audit(reader, expect=built.id)
        assert read_manifest(reader)["name"] == "tiny"
    assert judged(report) == judged(built.audit(tmp_path / "plain", expect=built.id))
    assert exit_code(report) == 0
    assert report["transfer"] == {"bytes": 0, "requests": 0, "unverified": []}


@pytest.mark.parametrize(
    "form",
    ["oci", "oci-gzip", "oci-zstd", "oci-tar-gzip", "archive-gzip", "archive-of-gzip", "archive-of-zstd", "docker"],
)
def test_one_flipped_byte_of_weights_is_found_in_every_place(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Built()
    weights = bytearray(built.read(f"{TARGET}/model.safetensors"))
    weights[-1] ^= 1
    built.put(f"{TARGET}/model.safetensors", bytes(weights))
    with open_image(*place_of(form, built, tmp_path, monkeypatch)) as reader:
        report = audit(reader)
    assert named(report, "refuted") == [f"serve.weights[/{TARGET}/model.safetensors]"]


@pytest.mark.parametrize("form", ["oci-gzip", "oci-zstd", "archive-gzip", "archive-of-gzip", "archive-of-zstd"])
def test_what_is_compressed_is_unpacked_once(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built()
    built.put("opt/models/target/extra.safetensors", bytes(3_000_000))
    unpacked = 0

    def counting(step: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def counted(place: Any) -> bytes:
            nonlocal unpacked
            chunk = step(place)
            unpacked += len(chunk)
            return chunk

        return counted

    for kind in (gzip_reader.Inflater, zstd_reader.Unzstd):
        monkeypatch.setattr(kind, "step", counting(kind.step))
    with open_image(*place_of(form, built, tmp_path, monkeypatch)) as reader:
        audit(reader)
    inside = sum(map(len, built.tars()))
    # In zstd nothing leads back into a frame: files that are not kept are read in one more pass.
    assert unpacked < (2.2 if form.endswith("zstd") else 1.2) * inside


# Registries


@contextmanager
def registry(built: Built, pack: bool | str = False) -> Iterator[tuple[Fake, str]]:
    """A registry that holds an image as `team/tiny:v1`, and its reference."""
    with serving() as fake:
        name = push(fake, built, "v1", pack)
        yield fake, name


def push(fake: Fake, built: Built, tag: str, pack: bool | str = False) -> str:
    blobs = layout_blobs(built.config(), built.tars(), pack=pack)
    fake.blobs |= {f"sha256:{name[13:]}": data for name, data in blobs.items() if name.startswith("blobs/")}
    digest = json.loads(blobs["index.json"])["manifests"][0]["digest"]
    for selector in (tag, digest):
        fake.manifests["team/tiny", selector] = (OCI_MANIFEST, blobs[f"blobs/sha256/{digest[7:]}"])
    return f"{fake.host}/team/tiny:{tag}"


def with_weights(size: int) -> Built:
    """An image whose target has a second file with so many bytes of weights."""
    built = Built()
    weights = {"model.more": ("U8", [size], bytes(range(256)) * (size // 256))}
    built.layers[3][f"{TARGET}/more.safetensors"] = safetensors.dumps(weights)
    return built.again()


@pytest.mark.parametrize("pack", [False, True, "zstd"])
def test_a_registry_is_audited_without_pulling_layers(pack: bool) -> None:
    built = with_weights(4 << 20)
    with registry(built, pack) as (fake, name), open_image("registry", name) as reader:
        report = audit(reader, expect=built.id, require=["serve.k=7", "target.quantization.scheme.group_size=32"])
        asked = [request for request in fake.asked("GET", "/blobs/") if request.range]
    assert report["tags"] == [name]
    for claim in ("image.id", "serve.k", "manifest.digest", "files.unnamed", "serve.start", "serve.engine.vllm"):
        assert row(report, claim)["verdict"] == "proved", claim
    assert named(report, "refuted") == []
    assert exit_code(report) == 3
    whole = ["image.layers[3].diff_id"]
    assert set(whole) <= set(named(report, "unread"))
    assert all(claim in str(report["transfer"]["unverified"]) for claim in whole)
    assert report["transfer"]["bytes"] < (1 << 19) and 5 < report["transfer"]["requests"] < 60
    assert all(request.range and not request.range.endswith("-") for request in asked)
    if not pack:
        assert row(report, "target.quantization.scheme.group_size")["verdict"] == "proved"
        command = row(report, "target.quantization.scheme.group_size")["evidence"][0]["command"]
        assert command.startswith(f"curl -fsSL http://{name.partition('/')[0]}/v2/team/tiny/blobs/sha256:")
        assert " -r " in command


def test_a_registry_is_read_whole_when_asked_to() -> None:
    for pack in (False, True, "zstd"):
        built = with_weights(4 << 20)
        with registry(built, pack) as (_, name), open_image("registry", name, digests=True) as reader:
            report = audit(reader, expect=built.id, digests=True)
        assert exit_code(report) == 0
        assert report["transfer"]["unverified"] == []
        assert pack or report["transfer"]["bytes"] > 4 << 20


@pytest.mark.parametrize("pack", [True, "zstd"])
def test_a_large_compressed_layer_is_stopped_early_and_what_it_could_change_is_unread(
    pack: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LAYER_BYTES", 1 << 18)
    noise = noise_of(40_000)
    built = Built()
    built.layers[3] = {
        **{f"usr/share/{n:04}": noise[n * 1000 : n * 1000 + 1000] for n in range(1200)},
        **built.layers[3],
    }
    built.again()
    with registry(built, pack=pack) as (_, name), open_image("registry", name) as reader:
        report = audit(reader, require=["serve.k=7", "target.quantization.scheme.bits=4"])
    assert row(report, "serve.k")["verdict"] == "proved"  # It is in layers above.
    assert row(report, "image.files")["verdict"] == "unread"
    assert row(report, "target.quantization.scheme.bits")["verdict"] == "unread"
    assert row(report, "files.unnamed")["verdict"] == "unread"
    assert "--digests" in str(report["transfer"]["unverified"])
    assert report["transfer"]["bytes"] < 1 << 20


def test_the_trailer_of_a_compressed_layer_ends_it_and_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = noise_of(200_000)
    built = Built()
    built.layers[4] = {f"{DRAFTER}/model.safetensors": drafter_weights(), f"{DRAFTER}/more.safetensors": noise}
    built.again()
    with registry(built, pack=True) as (_, name), open_image("registry", name) as reader:
        report = audit(reader, require=["serve.k=7"])
        assert reader.cuts == [] and reader.trusted == [4]
    assert report["transfer"]["bytes"] < 1 << 20
    assert any("trailer" in text for text in report["transfer"]["unverified"])
    assert row(report, "files.unnamed")["verdict"] == "proved"


@pytest.mark.parametrize("pack", [False, True])
def test_what_cannot_be_fetched_is_unread_and_never_refuted(pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many requests, none is answered."""
    built, words = with_weights(1 << 20), set()
    with registry(built, pack) as (_, name):
        for limit in range(1, 24):
            left = limit

            def pay(self: Any, length: int) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise QdcError("registry.enough", "no more", exit_code=4)

            monkeypatch.setattr(remote.RemoteBlob, "_pay", pay)
            with open_image("registry", name) as reader:
                report = audit(reader, expect=built.id, require=["serve.k=7"])
            assert named(report, "refuted") == [], limit
            words.add(row(report, "serve.k")["verdict"])
    assert words == {"unread", "proved"}


def test_a_registry_that_sends_a_blob_whole_is_not_listened_to() -> None:
    built = with_weights(4 << 20)
    with registry(built) as (fake, name):
        fake.whole = True
        with pytest.raises(QdcError, match="whole"), open_image("registry", name) as reader:
            audit(reader)
        assert sum(request.sent for request in fake.log) < 1 << 20


def test_a_platform_of_an_index_in_a_registry_can_be_chosen() -> None:
    with serving() as fake:
        other = Built(recipe(serve__k=5))
        entries = []
        for built, architecture in ((untouched(), "amd64"), (other, "arm64")):
            push(fake, built, architecture)
            digest = next(d for (_, d), (_, data) in fake.manifests.items() if d == f"sha256:{sha(data)}" and
                          json.loads(data)["config"]["digest"] == built.id)  # fmt: skip
            entries.append({"digest": digest, "size": 1, "platform": {"os": "linux", "architecture": architecture}})
        entries.append({"digest": f"sha256:{'0' * 64}", "size": 1, "platform": {"os": "unknown", "architecture": "x"}})
        fake.put("team/tiny", "all", {"schemaVersion": 2, "manifests": entries}, OCI_INDEX)
        for choice, k in (("", 7), ("#linux/arm64", 5)):
            with open_image("registry", f"{fake.host}/team/tiny:all{choice}") as reader:
                assert row(audit(reader), "serve.k")["value"] == k
        with (
            pytest.raises(QdcError, match="holds 2 images"),
            open_image("registry", f"{fake.host}/team/tiny:all#linux/riscv64"),
        ):
            pass


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_fetched_windows_give_the_same_bytes(data: st.DataObject) -> None:
    blob = bytes(range(256)) * 2000
    asked = 0

    def ask(start: int, end: int) -> bytes:
        nonlocal asked
        asked += end - start + 1
        assert 0 <= start <= end < len(blob)
        return blob[start : end + 1]

    purse = remote.Purse(whole=data.draw(st.booleans()))
    reader = remote.RemoteBlob(ask, len(blob), "blob", purse)
    for _ in range(data.draw(st.integers(1, 12))):
        offset = data.draw(st.integers(0, len(blob)))
        length = data.draw(st.integers(0, min(100_000, len(blob) - offset)))
        assert reader.read(offset, length) == blob[offset : offset + length]
        if data.draw(st.booleans()):
            purse.windows.clear()  # As when others need the room.
            purse.kept = 0
    with pytest.raises(QdcError):
        reader.read(len(blob), 1)


# Several images in one place


def several(folder: Path, form: str) -> str:
    """Two images with tags n:a and n:b, whose K is 7 and 5."""
    images = [untouched(), Built(recipe(serve__k=5))]
    files: dict[str, bytes] = {}
    entries, listed = [], []
    for built, tag in zip(images, ("n:a", "n:b"), strict=True):
        blobs = layout_blobs(built.config(), built.tars(), tag)
        entries += json.loads(blobs["index.json"])["manifests"]
        layers = [f"blobs/sha256/{sha(layer)}" for layer in built.tars()]
        listed.append({"Config": f"blobs/sha256/{built.id[7:]}", "RepoTags": [tag], "Layers": layers})
        files |= blobs
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    path = folder / "image"
    if form == "oci":
        return str(write_layout(path, files))
    files["manifest.json"] = json.dumps(listed).encode()
    if form == "docker-archive":
        del files["index.json"], files["oci-layout"]
    path.write_bytes(make_tar(dict(files)))
    return str(path)


@pytest.mark.parametrize("form", ["oci", "archive", "docker-archive"])
def test_of_several_images_one_is_chosen_by_its_name(form: str, tmp_path: Path) -> None:
    name, place = several(tmp_path, form), "oci" if form == "oci" else "archive"
    for choice, k in (("n:a", 7), ("b", 5)):
        with open_image(place, f"{name}#{choice}") as reader:
            report = audit(reader)
        assert row(report, "serve.k")["value"] == k
        assert named(report, "refuted") == []
    for wrong in ("", "#c"):
        with pytest.raises(QdcError, match=r"holds 2 images \(n:a, n:b\)") as caught, open_image(place, name + wrong):
            pass
        assert caught.value.hint and "#n:a" in caught.value.hint


# Model folders


def model_folder(root: Path) -> Path:
    return write_layout(
        root,
        {
            "target/config.json": target_config(),
            "target/model.safetensors": target_weights(),
            "drafter/config.json": drafter_json(recipe()),
            "drafter/model.safetensors": drafter_weights(),
        },
    )


def test_a_model_folder_is_audited_without_an_image(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    asked = ["target.quantization.scheme.bits=4", "drafter.swa.window=64", "drafter.kind=dflash"]
    with open_image("folder", str(folder)) as reader:
        report = audit(reader, require=asked)
        assert audit(reader, require=["target.quantization.scheme.bits=8"])["counts"]["refuted"] == 1
    assert report["image"] is None
    for claim in asked:
        found = row(report, claim.partition("=")[0])
        assert found["verdict"] == "proved"
        assert found["evidence"][0]["layer"] is None
    assert exit_code(report) == 0


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_folder_that_is_one_model_is_read(part: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m") / part
    claim = "target.quantization.scheme.bits" if part == "target" else "drafter.ptq.scheme.bits"
    with open_image("folder", str(folder)) as reader:
        report = audit(reader, require=[f"{claim}=4"])
    assert row(report, claim)["verdict"] == "proved"


def test_a_hub_snapshot_is_followed_to_its_blobs_and_nothing_else(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m") / "target"
    snapshot, blobs = tmp_path / "hub/snapshots/abc", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (blobs / name).write_bytes((source / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    with open_image("folder", str(snapshot)) as reader:
        report = audit(reader, require=["target.quantization.scheme.bits=4"])
    assert row(report, "target.quantization.scheme.bits")["verdict"] == "proved"
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "generation_config.json").symlink_to(tmp_path / "secret.json")
    (snapshot / "loop").symlink_to("loop")
    with open_image("folder", str(snapshot)) as reader:
        report = audit(reader)
        assert sorted(reader.files()) == ["config.json", "model.safetensors"]
    assert "generation_config.json" in str(row(report, "image.files")["evidence"])
    assert "out of the folder" in str(report["transfer"]["unverified"])


# Layers


def test_the_same_file_may_become_a_folder_and_a_file_again() -> None:
    assert shown(overlay({"a": b"1"}, {"a/b": b"2"})) == {"a/b": 1}
    assert shown(overlay({"a": b"1"}, {"a": None, "a/b": b"2"}, {"a": b"3"})) == {"a": 2}
    result = overlay({"a": b"1"}, {"a/b": b"2"}, {"a": b"3"})
    assert [(item.entry.path, item.by_layer) for item in result.hidden] == [("a", 1), ("a/b", 2)]


def test_a_whiteout_does_not_touch_its_own_layer_wherever_it_stands() -> None:
    lower: dict[str, Content] = {"a/x": b"1", "a/y": b"1"}
    for upper in ({"a/x": b"2", "a/.wh..wh..opq": b""}, {"a/.wh..wh..opq": b"", "a/x": b"2"},
                  {"a/x": b"2", ".wh.a": b""}):  # fmt: skip
        assert shown(overlay(lower, upper)) == {"a/x": 1}
    kept = overlay({"s": b"1", "d/x": b"2"}, {"d/l": "=s", "d/.wh..wh..opq": b""})
    assert sorted(shown(kept)) == ["d/l", "s"]


NAMES = st.sampled_from(["a", "b", "a/a", "a/b", "a/b/c", "b/c"])
CHANGES = st.one_of(
    st.tuples(NAMES, st.just(b"file")),
    st.tuples(NAMES, st.none()),
    st.tuples(NAMES.map(lambda path: "/".join([*path.split("/")[:-1], f".wh.{path.split('/')[-1]}"])), st.just(b"")),
    st.tuples(NAMES.map(lambda path: f"{path}/.wh..wh..opq"), st.just(b"")),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.dictionaries(NAMES, st.just(b"x"), max_size=0).flatmap(lambda _: st.lists(CHANGES, max_size=6)), max_size=4
    )
)
def test_layers_show_what_unpacking_them_one_after_another_leaves(layers: list[list[tuple[str, Any]]]) -> None:
    tables: list[dict[str, Content]] = [dict(layer) for layer in layers]
    assert shown(overlay(*tables)) == unpacked(tables)


def unpacked(layers: list[dict[str, Content]]) -> dict[str, int]:
    """The plain way: a table of paths, removals of a layer before its files."""
    here: dict[str, int | None] = {}

    def remove(root: str) -> None:
        for path in [path for path in here if path == root or path.startswith(f"{root}/")]:
            del here[path]

    for number, layer in enumerate(layers):
        for path in layer:
            folder, _, name = path.rpartition("/")
            if name == ".wh..wh..opq":
                for child in [child for child in here if child.startswith(f"{folder}/")]:
                    here.pop(child, None)
            elif name.startswith(".wh."):
                remove(f"{folder}/{name[4:]}".strip("/"))
        for path, content in layer.items():
            if path.rpartition("/")[2].startswith(".wh."):
                continue
            parts = path.split("/")
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if here.get(above) is not None:
                    remove(above)
                here.setdefault(above, None)
            if content is not None or here.get(path) is not None:
                remove(path)
            here[path] = None if content is None else number
    return {path: number for path, number in here.items() if number is not None}


def test_a_damaged_layer_leaves_what_lies_above_it_and_doubts_the_rest(tmp_path: Path) -> None:
    built = untouched()
    for number, words in ((0, ("proved", "proved")), (3, ("unread", "proved")), (6, ("unread", "unread"))):
        tars = built.tars()
        tars[number] = tars[number][:512] + b"\xff" * 512 + tars[number][512:] if number else b"\xff" * 2048
        path = write_layout(tmp_path / str(number), layout_blobs(make_config(tars, built.settings), tars))
        report = audit(oci.open_image(path), require=["target.quantization.scheme.bits=4", "serve.max_num_seqs=4"])
        found = (row(report, "target.quantization.scheme.bits"), row(report, "serve.max_num_seqs"))
        assert tuple(item["verdict"] for item in found) == words, number
        assert row(report, "image.files")["verdict"] == "unread"
        assert row(report, f"image.layers[{number}].diff_id")["verdict"] == "proved"


def test_a_quick_look_leaves_digests_unread_and_says_so(tmp_path: Path) -> None:
    built = with_weights(1 << 20)
    path = built.write(tmp_path / "i")
    with open_image("oci", str(path), digests=False) as reader:
        report = audit(reader, digests=False, require=["serve.k=7"])
    assert row(report, "serve.k")["verdict"] == "proved"
    assert row(report, "image.layers[3].diff_id")["verdict"] == "unread"
    assert "--digests" in report["transfer"]["unverified"][0]
    assert exit_code(report) == 3


def test_hidden_settings_are_evidence(tmp_path: Path) -> None:
    layers = [
        make_tar({"app/config.sh": b"K=15", "app/x.txt": b""}),
        make_tar({"app/config.sh": b"K=7", "app/.wh.x.txt": b""}),
    ]
    report = audit(oci.open_image(write_layout(tmp_path, layout_blobs(make_config(layers), layers))))
    found = row(report, "image.hidden")
    assert found["value"] == ["app/config.sh"]
    assert found["evidence"][0]["text"] == "hidden by /app/config.sh in layer 1"


def test_places_are_known_to_references() -> None:
    for text in ("folder:x", "registry:localhost:5000/a:b", "oci:x", "archive:x#n:t", "docker:a:b"):
        found = refer(text, SimpleNamespace(builds=list))  # type: ignore[arg-type]
        assert (found.place, found.name) == tuple(text.split(":", 1))


def test_an_engine_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import docker.errors

    def fails() -> Any:
        raise docker.errors.DockerException("no engine")

    monkeypatch.setattr("docker.from_env", fails)
    with pytest.raises(QdcError, match="no engine"), open_image("docker", "x"):
        pass
