"""The runtime layer: wheels as pip would lay them out, found by hash, the same bytes each time."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import image_fixtures as fixtures
import pytest

from qdc.core.errors import QdcError
from qdc.core.files import sha256_file
from qdc.image import download
from qdc.image.download import read_lock
from qdc.image.wheels import write_wheels
from qdc.stages import runtime

SITE = "opt/qdc/site"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two wheels in a folder that pip takes as its only source."""
    folder = tmp_path / "index"
    first = fixtures.wheel(
        folder,
        "alpha",
        "1.0",
        {
            "alpha/__init__.py": b"WORD = 'alpha'\n",
            "alpha/__pycache__/__init__.cpython-311.pyc": b"compiled",
            "alpha/tool": b"\x7fELF",
            "alpha-1.0.data/purelib/alpha_pure.py": b"PURE = 1\n",
            "alpha-1.0.data/platlib/alpha_plat.py": b"PLAT = 1\n",
            "alpha-1.0.data/scripts/alpha-run": b"#!python\nprint(1)\n",
            "alpha-1.0.data/data/share/alpha.txt": b"data",
        },
        executable=("alpha/tool",),
    )
    second = fixtures.wheel(folder, "beta_b", "2.1", {"beta_b/__init__.py": b"import alpha\n"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return [first, second]


def read(layer: Path) -> dict[str, tuple[int, bytes]]:
    with tarfile.open(layer) as tar:
        return {m.name: (m.mode, tar.extractfile(m).read()) for m in tar if m.isreg()}  # type: ignore[union-attr]


def test_wheels_are_laid_out_as_pip_would(wheels: list[Path], tmp_path: Path) -> None:
    output = fixtures.run(runtime, tmp_path / "stage", {}, {"lock": fixtures.lock_of(*wheels), "python": "3.11"})
    found = read(output / "layer.tar")
    assert {path: mode for path, (mode, _) in found.items()} == {
        f"{SITE}/alpha/__init__.py": 0o644,
        f"{SITE}/alpha/tool": 0o755,
        f"{SITE}/alpha_pure.py": 0o644,
        f"{SITE}/alpha_plat.py": 0o644,
        f"{SITE}/bin/alpha-run": 0o755,
        f"{SITE}/share/alpha.txt": 0o644,
        f"{SITE}/beta_b/__init__.py": 0o644,
        **{
            f"{SITE}/{name}.dist-info/{file}": 0o644
            for name in ("alpha-1.0", "beta_b-2.1")
            for file in ("METADATA", "RECORD", "WHEEL")
        },
    }
    assert found[f"{SITE}/bin/alpha-run"][1] == b"#!/usr/bin/python3\nprint(1)\n"
    recorded = list(csv.reader(io.StringIO(found[f"{SITE}/alpha-1.0.dist-info/RECORD"][1].decode())))
    assert sorted(f"{SITE}/{row[0]}" for row in recorded) == sorted(p for p in found if "beta" not in p)
    packages = json.loads((output / "packages.json").read_bytes())
    assert [(package["name"], package["version"]) for package in packages] == [("alpha", "1.0"), ("beta-b", "2.1")]
    assert packages[0]["sha256"] == sha256_file(wheels[0])
    described = json.loads((output / "layer.json").read_bytes())
    assert described["diff_id"] == "sha256:" + sha256_file(output / "layer.tar")
    assert described["size"] == (output / "layer.tar").stat().st_size and described["tar"] == "layer.tar"


def test_the_rewritten_record_has_true_hashes(wheels: list[Path], tmp_path: Path) -> None:
    output = fixtures.run(runtime, tmp_path / "stage", {}, {"lock": fixtures.lock_of(*wheels), "python": "3.11"})
    found = read(output / "layer.tar")
    rows = list(csv.reader(io.StringIO(found[f"{SITE}/alpha-1.0.dist-info/RECORD"][1].decode())))
    hashed = [row for row in rows if row[1]]
    assert len(hashed) == len(rows) - 1
    for path, digest, size in hashed:
        data = found[f"{SITE}/{path}"][1]
        encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={encoded}", len(data)), path


def test_the_unpacked_packages_can_be_imported(wheels: list[Path], tmp_path: Path) -> None:
    output = fixtures.run(runtime, tmp_path / "stage", {}, {"lock": fixtures.lock_of(*wheels), "python": "3.11"})
    with tarfile.open(output / "layer.tar") as tar:
        tar.extractall(tmp_path / "root", filter="data")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import beta_b, alpha_plat, importlib.metadata\n"
        "print(importlib.metadata.version('beta-b'))"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "root" / SITE)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "2.1\n"


def test_the_layer_does_not_depend_on_order_names_or_times_of_files(wheels: list[Path], tmp_path: Path) -> None:
    def digest(paths: list[Path]) -> tuple[str, int]:
        return write_wheels(paths, SITE, io.BytesIO(), lambda done, total: None)

    again = [fixtures.wheel(tmp_path / "other", "beta_b", "2.1", {"beta_b/__init__.py": b"import alpha\n"})]
    assert digest(wheels) == digest([*again, wheels[0]])


def test_wheels_that_are_there_are_not_asked_for_again(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, folder = fixtures.lock_of(*wheels), tmp_path / "partial"
    folder.mkdir()
    (folder / wheels[0].name).write_bytes(wheels[0].read_bytes())
    (folder / wheels[1].name).write_bytes(b"half of a whe")
    asked: list[str] = []
    original = download._pip

    def listen(pins: list[download.Pin], python: str, place: Path) -> None:
        asked.extend(pin.name for pin in pins)
        original(pins, python, place)

    monkeypatch.setattr(download, "_pip", listen)
    pairs = download.download(lock, "3.11", folder, lambda *_: None)
    assert asked == ["beta-b"]
    assert [(pin.name, sha256_file(path)) for pin, path in pairs] == [
        ("alpha", sha256_file(wheels[0])),
        ("beta-b", sha256_file(wheels[1])),
    ]
    download.download(lock, "3.11", folder, lambda *_: None)
    assert asked == ["beta-b"]


def test_a_wheel_with_another_hash_is_refused(wheels: list[Path], tmp_path: Path) -> None:
    lock = fixtures.lock_of(*wheels).replace(sha256_file(wheels[1]), "0" * 64)
    with pytest.raises(QdcError) as error:
        fixtures.run(runtime, tmp_path / "stage", {}, {"lock": lock, "python": "3.11"})
    assert error.value.id == "stage.runtime.download" and error.value.exit_code == 4
    assert not (tmp_path / "stage/output/layer.tar").exists()


def test_a_member_that_its_record_denies_is_refused(wheels: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "alpha-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheels[0]) as source, zipfile.ZipFile(bad, "w") as copy:
        for info in source.infolist():
            data = source.read(info)
            copy.writestr(info, b"WORD = 'omega'\n" if info.filename == "alpha/__init__.py" else data)
    with pytest.raises(QdcError, match="not what its RECORD says"):
        write_wheels([bad], SITE, io.BytesIO(), lambda done, total: None)


@pytest.mark.parametrize("path", ["../evil.py", "/etc/passwd", "alpha/../../evil.py", "alpha-1.0.data/odd/x"])
def test_members_that_leave_the_site_folder_are_refused(tmp_path: Path, path: str) -> None:
    bad = fixtures.wheel(tmp_path, "alpha", "1.0", {path: b"1"})
    with pytest.raises(QdcError):
        write_wheels([bad], SITE, io.BytesIO(), lambda done, total: None)


def test_two_wheels_may_share_a_file_only_if_it_is_the_same(tmp_path: Path) -> None:
    same = [fixtures.wheel(tmp_path, name, "1", {"shared/__init__.py": b"1"}) for name in ("a", "b")]
    write_wheels(same, SITE, io.BytesIO(), lambda done, total: None)
    other = fixtures.wheel(tmp_path, "c", "1", {"shared/__init__.py": b"2"})
    with pytest.raises(QdcError, match="differs from the one in"):
        write_wheels([*same, other], SITE, io.BytesIO(), lambda done, total: None)


def test_locks_are_read_in_both_forms_and_unpinned_lines_refused() -> None:
    digest = "ab" * 32
    text = (
        f"# comment\nOne_Two==1.0 --hash=sha256:{digest}  # why\n"
        f"three[extra]==2.0+cpu ; python_version >= '3.11' \\\n    --hash=sha256:{digest} \\\n"
        f"    --hash=sha256:{'cd' * 32}\n"
    )
    pins = read_lock(text)
    assert [(pin.name, pin.version, len(pin.hashes)) for pin in pins] == [
        ("one-two", "1.0", 1),
        ("three", "2.0+cpu", 2),
    ]
    for line in (
        "numpy",
        "numpy==1.0",
        f"numpy>=1 --hash=sha256:{digest}",
        "--index-url x",
        f"git+x --hash=sha256:{digest}",
    ):
        with pytest.raises(QdcError, match="line 1 of the lock"):
            read_lock(line)
    with pytest.raises(QdcError, match="twice"):
        read_lock(f"a==1 --hash=sha256:{digest}\nA==2 --hash=sha256:{digest}")
