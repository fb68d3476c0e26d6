"""The compressed archive: one gzip stream of the very tar, the same on any day, and as large as was said before."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_store import make_image, stored_image

from qdc.cli import main
from qdc.core.errors import QdcError
from qdc.core.files import sha256_file
from qdc.image import export, gzipped
from qdc.image.assemble import write_image
from qdc.image.layers import digested, read_image, small_layer
from qdc.image.virtual import layer_range
from qdc.measure.past import past
from qdc.report.answers import Export


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=5000), cuts=st.lists(st.integers(1, 700)), threads=st.integers(1, 3))
def test_any_bytes_come_back_whatever_the_chunks_and_threads(data: bytes, cuts: list[int], threads: int) -> None:
    chunks, at = [], 0
    for cut in [*cuts, len(data)]:
        chunks.append(data[at : at + cut])
        at += cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gzipped, "PIECE", 512)
        made = b"".join(gzipped.gzipped(iter(chunks), threads))
        assert made == b"".join(gzipped.gzipped(iter((data,)), 1))
    assert gzip.decompress(made) == data
    assert made[:10] == gzipped.HEADER, "no time, no name, no system"


def test_the_compressed_archive_is_the_archive(tmp_path: Path) -> None:
    folder, contents = make_image(tmp_path)
    seen: list[tuple[int, int]] = []
    done = gzipped.export_gzip(folder, contents.__getitem__, tmp_path / "image.tar.gz", lambda *at: seen.append(at))
    image = export.export_archive(folder, contents.__getitem__, tmp_path / "image.tar")
    with gzip.open(tmp_path / "image.tar.gz") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == sha256_file(tmp_path / "image.tar")  # type: ignore[arg-type]
    assert done.image.id == image.id and done.bytes == (tmp_path / "image.tar.gz").stat().st_size
    assert seen[-1][0] == seen[-1][1] == (tmp_path / "image.tar").stat().st_size
    before = sha256_file(tmp_path / "image.tar.gz")
    gzipped.export_gzip(folder, contents.__getitem__, tmp_path / "image.tar.gz")
    assert sha256_file(tmp_path / "image.tar.gz") == before
    subprocess.run(["gzip", "--test", tmp_path / "image.tar.gz"], check=True)
    with tarfile.open(tmp_path / "image.tar.gz") as tar:
        assert {"manifest.json", "oci-layout", "index.json"} <= set(tar.getnames())


def mixed_image(folder: Path) -> tuple[Path, dict[str, Path]]:
    """An image of layers that compress very differently, larger than what is sampled of them."""
    source, image = folder / "source", folder / "image"
    source.mkdir()
    image.mkdir()
    chance, size = random.Random(1), 4 << 20
    (source / "noise.safetensors").write_bytes(chance.randbytes(size))
    four = bytes(a | b << 4 for a in range(12) for b in range(12))
    (source / "codes.safetensors").write_bytes(bytes(chance.choices(four, k=size)))
    (source / "text.safetensors").write_bytes(b"".join(b"tensor %d of many\n" % i for i in range(size // 20)))
    layers = [digested({f"opt/{name}": source / name}, name) for name in sorted(p.name for p in source.iterdir())]
    last = small_layer({"opt/qdc/serve.json": b"{}" * 5000}, "config", image, "layers/04.tar")
    write_image(image, "demo", "x", [*layers, last], {})
    return image, {sha256_file(path): path for path in source.iterdir()}


def test_the_size_is_said_before_and_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzipped, "SAMPLE", 1 << 16)
    folder, contents = mixed_image(tmp_path)
    image = read_image(folder)
    samples = gzipped.predicted(image, contents.__getitem__)
    noise, codes, text = (
        samples[layer.diff_id].bytes / layer.size for layer in (image.layers[1], *image.layers[0:3:2])
    )
    assert noise == pytest.approx(1, abs=0.01) and 0.7 < codes < 0.95 and text < 0.4
    done = gzipped.export_gzip(folder, contents.__getitem__, tmp_path / "image.tar.gz", samples=samples)
    assert done.predicted == pytest.approx(done.bytes, rel=0.02)
    assert samples[image.layers[3].diff_id].margin == 0, "small layers are read whole"


def test_samples_are_bytes_of_the_layer(tmp_path: Path) -> None:
    folder, contents = make_image(tmp_path)
    image = read_image(folder)
    for layer in image.layers:
        whole = b"".join(image.chunks(layer, contents.__getitem__))
        for start, length in ((0, len(whole)), (0, 10), (500, 600), (513, 511), (len(whole) - 700, 700)):
            found = layer_range(image, layer, contents.__getitem__).read(start, length)
            assert found == whole[start : start + length], (layer.role, start)


def test_damage_and_a_full_disk_leave_no_compressed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, contents = make_image(tmp_path)
    with (tmp_path / "source/model.safetensors").open("r+b") as stream:
        stream.seek(777)
        stream.write(b"\xff\xff")
    with pytest.raises(QdcError) as error:
        gzipped.export_gzip(folder, contents.__getitem__, tmp_path / "image.tar.gz")
    assert error.value.id == "image.content" and error.value.exit_code == 4

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_pour", full)
    with pytest.raises(QdcError) as error:
        gzipped.export_gzip(folder, contents.__getitem__, tmp_path / "image.tar.gz")
    assert error.value.id == "export.disk-full"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "source"]


def test_the_command_compresses_weighs_and_tells_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, build = stored_image(tmp_path)
    words = ["export", build, f"archive:{tmp_path / 'image.tar.gz'}", "--store", str(tmp_path / "store"), "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    Export.model_validate(said)
    size = (tmp_path / "image.tar.gz").stat().st_size
    assert said["compressed"]["bytes"] == size == said["weighed"]["bytes"]
    assert said["compressed"]["predicted"] == pytest.approx(size, rel=0.1)
    assert "40 pieces" in said["compressed"]["method"]
    assert said["weighed"] == {"bytes": size, "of": "docker-save-gzip", "limit": 20e9, "fits": True}
    record = store.build(build)
    assert record is not None
    found = past(store, record["recipe"], {})
    assert set(found.compressed) == {"base", "target weights", "config"}
    assert 0 < found.compressed["target weights"] < 0.2
    assert main([word for word in words if word != "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"{size:,} bytes as docker-save-gzip of 20,000,000,000: fits" in out and "export: about " in err


def test_an_archive_over_the_limit_is_said_and_ends_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, build = stored_image(tmp_path, {"bytes": 1000, "of": "docker-save"})
    words = ["export", build, f"archive:{tmp_path / 'image.tar'}", "--store", str(tmp_path / "store"), "--quiet"]
    assert main(words) == 1
    assert "as docker-save of 1,000: does NOT fit" in capsys.readouterr().out
