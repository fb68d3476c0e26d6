"""Overlays and image files: the visible file system, its bytes, hostile images. Also small image writers."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.formats import oci, tar
from qdc.formats.overlay import Overlay
from qdc.formats.ranges import BytesRange

Content = bytes | str | None
"""A file's bytes, a symbolic link's target, or None for a folder. `=path` as text is a hard link."""


def make_tar(files: dict[str, Content]) -> bytes:
    """A deterministic tar of `files` in the given order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, str):
                info.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                info.linkname = content.removeprefix("=")
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_config(layers: list[bytes], settings_: dict[str, Any] | None = None) -> bytes:
    """OCI configuration bytes for uncompressed `layers`."""
    value = {
        "architecture": "amd64",
        "os": "linux",
        "config": settings_ or {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(layer)}" for layer in layers]},
    }
    return json.dumps(value, sort_keys=True).encode()


def packed(data: bytes, pack: bool | str) -> bytes:
    """`data` compressed: by gzip if `pack` is true, by zstd if it is `zstd`."""
    if pack == "zstd":
        return zstd(data)
    return gzip.compress(data, 1, mtime=0) if pack else data


def zstd(data: bytes) -> bytes:
    """As tools for images write it: a stream, whose frame does not say its size."""
    stream = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=False).compressobj()
    return bytes(stream.compress(data) + stream.flush())


def layout_blobs(
    config: bytes, layers: list[bytes], tag: str | None = None, pack: bool | str = False
) -> dict[str, bytes]:
    """The files of an OCI layout: relative path -> bytes. `pack` compresses the layers."""
    stored = [packed(layer, pack) for layer in layers]
    kind = "" if not pack else "+gzip" if pack is True else f"+{pack}"

    def descriptor(kind: str, data: bytes) -> dict[str, Any]:
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{sha(data)}",
            "size": len(data),
        }

    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": descriptor("config.v1+json", config),
            "layers": [descriptor(f"layer.v1.tar{kind}", layer) for layer in stored],
        }
    ).encode()
    entry = descriptor("manifest.v1+json", manifest)
    if tag:
        entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    files = {f"blobs/sha256/{sha(data)}": data for data in (config, manifest, *stored)}
    files["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return files


def write_layout(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_archive(path: Path, config: bytes, layers: list[bytes], tag: str | None = None, dual: bool = True) -> Path:
    """A docker archive; `dual`: also an OCI layout."""
    files = layout_blobs(config, layers, tag)
    described = [
        {
            "Config": f"blobs/sha256/{sha(config)}",
            "RepoTags": [tag] if tag else None,
            "Layers": [f"blobs/sha256/{sha(layer)}" for layer in layers],
        }
    ]
    if not dual:
        del files["index.json"], files["oci-layout"]
    files["manifest.json"] = json.dumps(described).encode()
    path.write_bytes(make_tar(dict(files)))
    return path


def overlay(*layers: dict[str, Content]) -> Overlay:
    result = Overlay()
    for number, files in enumerate(layers):
        result.add(number, tar.members(BytesRange(make_tar(files))))
    return result


def shown(result: Overlay) -> dict[str, int]:
    return {path: entry.layer for path, entry in result.entries.items() if entry.type != "dir"}


def test_a_later_layer_replaces_a_file_and_the_old_one_stays_as_evidence() -> None:
    result = overlay({"a/x": b"old", "a/y": b"keep"}, {"a/x": b"new!"})
    assert shown(result) == {"a/x": 1, "a/y": 0}
    (hidden,) = result.hidden
    assert (hidden.entry.path, hidden.entry.layer, hidden.entry.size, hidden.by_layer) == ("a/x", 0, 3, 1)


def test_whiteouts_hide_files_folders_and_opaque_contents_of_lower_layers_only() -> None:
    lower: dict[str, Content] = {"a": None, "a/x": b"1", "a/d/y": b"2", "b": None, "b/z": b"3", "c": b"4"}
    result = overlay(lower, {"a/.wh.d": b"", "a/d/new": b"5", "b/fresh": b"6", "b/.wh..wh..opq": b"", ".wh.c": b""})
    assert shown(result) == {"a/x": 0, "a/d/new": 1, "b/fresh": 1}
    assert sorted(item.entry.path for item in result.hidden) == ["a/d/y", "b/z", "c"]
    assert {item.by for item in result.hidden} == {"a/.wh.d", "b/.wh..wh..opq", ".wh.c"}


def test_a_file_in_the_place_of_a_folder_hides_the_folder() -> None:
    assert shown(overlay({"a/x": b"1", "a/y/z": b"2"}, {"a": b"file"})) == {"a": 1}


def test_entries_below_a_linked_folder_land_where_the_link_points() -> None:
    result = overlay({"usr/lib": None, "lib": "usr/lib", "usr/lib/x": b"1"}, {"lib/x": b"2"})
    assert shown(result) == {"lib": 0, "usr/lib/x": 1}
    entry = result.resolve("lib/x")
    assert entry is not None and entry.layer == 1


def test_links_are_followed_inside_the_image_only() -> None:
    result = overlay({"etc/passwd": b"image", "a/up": "../../../../etc/passwd", "b": "/etc/passwd", "c": "/nowhere"})
    for path in ("a/up", "b", "/etc/passwd"):
        entry = result.resolve(path)
        assert entry is not None and entry.path == "etc/passwd"
    assert result.resolve("c") is None
    with pytest.raises(QdcError, match="too many links"):
        overlay({"a": "b", "b": "a"}).resolve("a")


def test_a_hard_link_shows_the_bytes_of_its_source() -> None:
    result = overlay({"a": b"data"}, {"b": "=a"})
    entry = result.entries["b"]
    assert (entry.type, entry.layer, entry.size) == ("file", 0, 4)
    with pytest.raises(QdcError, match="not there"):
        overlay({"b": "=a"})


LAYERS: list[bytes] = [
    make_tar({"etc": None, "etc/name": b"one", "data": b"x" * 2000}),
    make_tar({"etc/name": b"two", "sh": "etc/name"}),
]


@pytest.mark.parametrize("form", ["layout", "layout-gzip", "layout-tar", "dual", "docker", "dual-gzip"])
def test_every_form_reads_the_same(form: str, tmp_path: Path) -> None:
    config = make_config(LAYERS, {"Labels": {"a": "b"}})
    if form.startswith("layout"):
        blobs = layout_blobs(config, LAYERS, "n:t", pack=form == "layout-gzip")
        if form == "layout-tar":
            path = tmp_path / "image.tar"
            path.write_bytes(make_tar(dict(blobs)))
        else:
            path = write_layout(tmp_path / "image", blobs)
    else:
        path = write_archive(tmp_path / "image.tar", config, LAYERS, "n:t", dual=form != "docker")
        if form == "dual-gzip":
            path.write_bytes(gzip.compress(path.read_bytes()))
    image = oci.open_image(path)
    assert image.image_id == f"sha256:{sha(config)}"
    assert image.config_bytes == config
    assert image.tags == ("n:t",)
    assert image.labels == {"a": "b"}
    assert sorted(image.files()) == ["data", "etc/name"]
    assert image.read("/etc/name") == image.read("sh") == b"two"
    assert image.read("data", 5, 3) == b"xxx"
    entry = image.find("etc/name")
    assert entry is not None
    assert LAYERS[1][entry.offset : entry.offset + entry.size] == b"two"
    assert [layer.diff_id for layer in image.layers] == [f"sha256:{sha(layer)}" for layer in LAYERS]
    assert [hidden.entry.path for hidden in image.hidden] == ["etc/name"]
    assert all(oci.ranges.sha256(item.blob) == item.digest[7:] for item in image.declared)
    with pytest.raises(QdcError, match="no file"):
        image.read("absent")


def test_two_descriptions_of_different_images_in_one_archive_are_refused(tmp_path: Path) -> None:
    config, other = make_config(LAYERS), make_config(LAYERS, {"Cmd": ["x"]})
    files = layout_blobs(other, LAYERS) | layout_blobs(config, LAYERS)
    layout = layout_blobs(other, LAYERS)
    files["index.json"] = layout["index.json"]
    names = [f"blobs/sha256/{sha(layer)}" for layer in LAYERS]
    files["manifest.json"] = json.dumps(
        [{"Config": f"blobs/sha256/{sha(config)}", "RepoTags": [], "Layers": names}]
    ).encode()
    path = tmp_path / "image.tar"
    path.write_bytes(make_tar(dict(files)))
    with pytest.raises(QdcError, match="different images"):
        oci.open_image(path)


def test_a_digest_cannot_name_a_path(tmp_path: Path) -> None:
    files = layout_blobs(make_config([]), [])
    files["index.json"] = files["index.json"].replace(b"sha256:", b"../../:")
    with pytest.raises(QdcError, match="no sha256 digest"):
        oci.open_image(write_layout(tmp_path, files))


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
def test_missing_or_broken_documents_are_named(name: str, tmp_path: Path) -> None:
    files = layout_blobs(make_config([]), [])
    write_layout(tmp_path, files)
    for broken in (
        b"[]",
        b"\xff",
        b'{"a":1,"a":2}',
        b"NaN",
        b"[" * 5000,
        b"[" * 99 + b"]" * 99,
        b'{"a":1e999}',
        b'["\\ud800"]',
    ):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(QdcError):
            oci.open_image(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(QdcError, match=name):
        oci.open_image(tmp_path)


def test_a_linked_blob_is_not_followed_out_of_a_layout(tmp_path: Path) -> None:
    files = layout_blobs(make_config([]), [])
    write_layout(tmp_path / "image", files)
    secret = tmp_path / "secret"
    secret.write_bytes(files["index.json"])
    (tmp_path / "image/index.json").unlink()
    (tmp_path / "image/index.json").symlink_to(secret)
    with pytest.raises(QdcError, match="missing"):
        oci.open_image(tmp_path / "image")


def test_a_damaged_zstd_layer_is_named(tmp_path: Path) -> None:
    layer = b"\x28\xb5\x2f\xfd" + bytes(20)
    path = write_layout(tmp_path, layout_blobs(make_config([layer]), [layer]))
    image = oci.open_image(path)
    assert image.files() == {}
    assert [(cut.layer, "zstd" in cut.why, image.layers[0].name in cut.why) for cut in image.cuts] == [(0, True, True)]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_archive_never_crashes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "image.tar"
    write_archive(path, make_config(LAYERS), LAYERS, "n:t")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        image = oci.open_image(path)
        for name in image.files():
            image.read(name)
    except QdcError:
        pass
