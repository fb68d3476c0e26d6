"""What image code reads may be hostile: archives of a base, wheels. Nothing leaves its root, nothing swells."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zipfile
from pathlib import Path

import image_fixtures as fixtures
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.image import debian, wheels
from qdc.image.wheels import write_wheels
from qdc.stages import base_image

STATUS = b"".join(
    f"Package: {name}\nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n\n".encode()
    for name in debian.PACKAGES
)


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, len(data), link, 0o755
    return info, data


def tar_of(place: Path, *members: Member) -> Path:
    """A tar with `members` beside what every Debian base has."""
    usual = [member("./usr/bin/python3", data=b"#!"), member("./var/lib/dpkg/status", data=STATUS)]
    with tarfile.open(place, "w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in (*usual, *members):
            tar.addfile(info, io.BytesIO(data))
    return place


def names_of(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {info.name: info for info in tar}


@pytest.mark.parametrize(
    "hostile",
    [
        member("../outside", data=b"x"),
        member("./usr/../../outside", data=b"x"),
        member("/etc/passwd", data=b"x"),
        member("./usr//bin/x", data=b"x"),
        member("./usr/.wh.bin", data=b"x"),
        member("./usr/bin/linked", tarfile.LNKTYPE, link="../../../etc/passwd"),
        member("./usr/bin/linked", tarfile.LNKTYPE, link="/etc/shadow"),
        member("./usr/bin/linked", tarfile.LNKTYPE, link="./dev/sda"),
        member("./usr/bin/python3/below-a-file", data=b"x"),
    ],
    ids=lambda given: given[0].name + (f" -> {given[0].linkname}" if given[0].linkname else ""),
)
def test_a_base_with_a_path_that_leaves_its_root_is_refused(tmp_path: Path, hostile: Member) -> None:
    out = io.BytesIO()
    with pytest.raises(QdcError) as error:
        debian.rewrite(tar_of(tmp_path / "base.tar", hostile), out)
    assert error.value.id == "image.path" and error.value.exit_code == 4


def test_devices_sockets_and_what_names_the_machine_are_left_out_of_a_base(tmp_path: Path) -> None:
    odd = [member("./usr/lib/disk", tarfile.BLKTYPE), member("./usr/lib/pipe", tarfile.FIFOTYPE)]
    own = [member("./etc/hostname", data=b"build-host"), member("./etc/apt/sources.list", data=b"deb http://u:p@host/")]
    links = [member("./bin", tarfile.SYMTYPE, link="usr/bin"), member("./etc/out", tarfile.SYMTYPE, link="../../../x")]
    out = io.BytesIO()
    debian.rewrite(tar_of(tmp_path / "base.tar", *odd, *own, *links), out)
    found = names_of(out.getvalue())
    assert set(found) == {"bin", "etc/out", "usr/bin/python3", "var/lib/dpkg/status"}
    assert found["etc/out"].issym(), "a link is kept as it is: nothing here follows it"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_base_is_an_error_or_a_whole_layer(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(tar_of(tmp_path / "base.tar", member("./etc/x", data=b"y" * 600)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    del raw[data.draw(st.integers(1, len(raw))) :]
    (tmp_path / "base.tar").write_bytes(raw)
    out = io.BytesIO()
    try:
        _, size = debian.rewrite(tmp_path / "base.tar", out)
    except QdcError as error:
        assert error.exit_code == 4
    else:
        assert size == len(out.getvalue())
        assert all(not name.startswith("/") and ".." not in name.split("/") for name in names_of(out.getvalue()))


# Wheels


def test_a_wheel_that_swells_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = tmp_path / "alpha-1.0-py3-none-any.whl"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("alpha/zeros.bin", bytes(30 << 20))
        archive.writestr("alpha-1.0.dist-info/RECORD", "alpha/zeros.bin,,\nalpha-1.0.dist-info/RECORD,,\n")
    assert bomb.stat().st_size < 200_000
    out = io.BytesIO()
    with pytest.raises(QdcError, match="more than 200 times its own size"):
        write_wheels([bomb], "site", out, lambda *_: None)
    assert out.getvalue() == b""


def test_a_wheel_whose_member_is_longer_than_it_claims_is_refused(tmp_path: Path) -> None:
    honest = fixtures.wheel(tmp_path, "alpha", "1.0", {"alpha/a.bin": bytes(1000)})
    raw = bytearray(honest.read_bytes())
    for mark, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = raw.index(mark) + at
        raw[place : place + 4] = struct.pack("<I", 10)
    honest.write_bytes(raw)
    with pytest.raises(QdcError) as error:
        write_wheels([honest], "site", io.BytesIO(), lambda *_: None)
    assert error.value.id == "image.wheel"


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_wheel_is_an_error_or_what_its_record_says(tmp_path: Path, data: st.DataObject) -> None:
    files = {"alpha/__init__.py": b"WORD = 1\n", "alpha/big.bin": bytes(range(256)) * 8}
    place = fixtures.wheel(tmp_path, "alpha", "1.0", files)
    raw = bytearray(place.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    del raw[data.draw(st.integers(1, len(raw))) :]
    place.write_bytes(raw)
    out = io.BytesIO()
    try:
        write_wheels([place], "site", out, lambda *_: None)
    except QdcError as error:
        assert error.exit_code == 4
        return
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        for info in tar:
            assert info.name == "site" or info.name.startswith("site/")
            if info.name in {f"site/{name}" for name in files} and (stream := tar.extractfile(info)):
                assert stream.read() == files[info.name.removeprefix("site/")]


def test_links_and_programs_in_a_wheel_are_plain_files(tmp_path: Path) -> None:
    place = fixtures.wheel(tmp_path, "alpha", "1.0", {"alpha/link": b"/etc/passwd"})
    with zipfile.ZipFile(place) as source:
        held = [(info, source.read(info)) for info in source.infolist()]
    with zipfile.ZipFile(place, "w") as copy:
        for info, data in held:
            info.external_attr = 0o120777 << 16
            copy.writestr(info, data)
    out = io.BytesIO()
    write_wheels([place], "site", out, lambda *_: None)
    assert all(info.isreg() or info.isdir() for info in names_of(out.getvalue()).values())
    assert wheels.MOST > 10


# A base that is not what it was


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian archive of one tar, and an mmdebstrap that copies it."""
    tool, made = tmp_path / "bin/mmdebstrap", tar_of(tmp_path / "archive.tar")
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nfor word in "$@"; do place="$word"; done\ncp {made} "$place"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("QDC_DEBIAN_MIRROR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return made


def test_a_base_is_held_to_its_digest_and_a_moved_archive_stops_the_build(tmp_path: Path, archive: Path) -> None:
    wanted = {"debian": "bookworm", "packages": []}
    made = fixtures.run(base_image, tmp_path / "first", {}, wanted)
    digest = fixtures.json.loads((made / "layer.json").read_bytes())["diff_id"]
    again = fixtures.run(base_image, tmp_path / "again", {}, {**wanted, "digest": digest})
    assert (again / "layer.tar").read_bytes() == (made / "layer.tar").read_bytes()
    tar_of(archive, member("./usr/share/doc/newer/copyright", data=b"2"))
    with pytest.raises(QdcError, match="Debian's archive has moved") as error:
        fixtures.run(base_image, tmp_path / "moved", {}, {**wanted, "digest": digest})
    assert error.value.id == "stage.base-image.moved" and error.value.exit_code == 4
    assert digest in error.value.message and "image.base.digest" in str(error.value.hint)
    assert not (tmp_path / "moved/output/layer.json").exists()
