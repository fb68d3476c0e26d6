"""Ranges, tars, INT4 words, safetensors headers: what is read is what was written; bad bytes are errors."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.formats import int4, ranges, safetensors, tar
from qdc.formats.packed import PackedRange
from qdc.formats.ranges import BytesRange, FileRange, SubRange

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def test_int4_golden_words() -> None:
    assert int4.pack(range(-8, 0)) == [1985229328]
    assert int4.pack(range(8)) == [-19088744]
    assert int4.unpack([1985229328, -19088744], 16) == list(range(-8, 8))


@given(st.lists(st.integers(-8, 7), max_size=70))
def test_int4_round_trip(codes: list[int]) -> None:
    words = int4.pack(codes)
    assert int4.unpack(words, len(codes)) == codes
    assert int4.unpack_bytes(struct.pack(f"<{len(words)}i", *words), len(codes)) == codes


def test_int4_refuses_what_does_not_fit() -> None:
    with pytest.raises(QdcError, match="outside"):
        int4.pack([8])
    with pytest.raises(QdcError, match="fewer"):
        int4.unpack([0], 9)


def test_bf16_values() -> None:
    assert int4.bf16(bytes([0x80, 0x3F, 0x00, 0xC0])) == [1.0, -2.0]


@given(st.binary(max_size=4000), st.data())
def test_every_range_reads_the_same_bytes(data: bytes, draw: st.DataObject) -> None:
    offset = draw.draw(st.integers(0, len(data)))
    length = draw.draw(st.integers(0, len(data) - offset))
    half = len(data) // 2
    members = gzip.compress(data[:half]) + gzip.compress(data[half:])
    for reader in (
        BytesRange(data),
        SubRange(BytesRange(b"x" + data + b"y"), 1, len(data)),
        PackedRange(BytesRange(gzip.compress(data))),
        PackedRange(BytesRange(members + b"\0" * 7)),
    ):
        assert reader.size == len(data)
        assert reader.read(offset, length) == data[offset : offset + length]
        assert ranges.sha256(reader) == hashlib.sha256(data).hexdigest()
        with pytest.raises(QdcError):
            reader.read(offset, len(data) - offset + 1)


def test_gzip_reads_backwards_across_checkpoints() -> None:
    data = b"".join(struct.pack("<I", number) for number in range(1 << 20))
    reader = PackedRange(BytesRange(gzip.compress(data, 1)), checkpoints=4)
    reader._spacing = 1 << 16
    assert reader.size == len(data)
    assert 1 < len(reader._states) <= 5
    for offset in (4_000_000, 12, 3_999_996, 2_000_000, 0):
        assert reader.read(offset, 8) == data[offset : offset + 8]


@given(st.binary(min_size=30, max_size=300), st.data())
def test_damaged_gzip_is_an_error_or_the_same_bytes(data: bytes, draw: st.DataObject) -> None:
    packed = bytearray(gzip.compress(data))
    packed[draw.draw(st.integers(0, len(packed) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        reader = PackedRange(BytesRange(bytes(packed)))
        assert reader.read(0, reader.size) == data
    except QdcError:
        pass


@given(st.binary(max_size=3000), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=5))
def test_digests_of_parts_in_one_pass(data: bytes, spans: list[tuple[int, int]]) -> None:
    parts = {str(i): (o, min(n, len(data) - o)) for i, (o, n) in enumerate(spans) if o <= len(data)}
    whole, found = ranges.digests(BytesRange(data), parts)
    assert whole == hashlib.sha256(data).hexdigest()
    assert found == {name: hashlib.sha256(data[o : o + n]).hexdigest() for name, (o, n) in parts.items()}


def test_digests_refuse_a_part_beyond_the_end() -> None:
    with pytest.raises(QdcError):
        ranges.digests(BytesRange(b"abc"), {"x": (1, 3)})
    with pytest.raises(QdcError):
        ranges.digests(BytesRange(b"abc"), {"x": (9, 1)})


def test_file_range_reads_and_reports_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    assert FileRange(tmp_path / "a").read(1, 3) == b"ell"
    with pytest.raises(QdcError, match="cannot open"):
        FileRange(tmp_path / "b")


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0\\"), min_size=1, max_size=120).filter(
    lambda name: name not in (".", "..")
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=5, unique_by=lambda pair: pair[0]),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_tar_agrees_with_an_independent_writer(files: list[tuple[str, bytes]], form: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in files:
            info = tarfile.TarInfo("folder/" + name)
            info.size, info.mode = len(data), 0o640
            try:
                archive.addfile(info, io.BytesIO(data))
            except ValueError:
                return
    raw = buffer.getvalue()
    found = tar.members(BytesRange(raw))
    assert [(member.path, raw[member.offset : member.offset + member.size]) for member in found] == [
        ("folder/" + name, data) for name, data in files
    ]
    assert all(member.type == "file" and member.mode == 0o640 for member in found)


def one_member(**fields: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("x")
        for name, value in fields.items():
            setattr(info, name, value)
        archive.addfile(info)
    return buffer.getvalue()


def test_tar_links_devices_and_folders() -> None:
    kinds = {
        tarfile.SYMTYPE: "symlink",
        tarfile.LNKTYPE: "hardlink",
        tarfile.DIRTYPE: "dir",
        tarfile.FIFOTYPE: "device",
    }
    for kind, word in kinds.items():
        (member,) = tar.members(BytesRange(one_member(type=kind, linkname="/etc/target")))
        assert member.type == word
        if word == "symlink":
            assert member.link == "/etc/target"
        if word == "hardlink":
            assert member.link == "etc/target"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a/.."])
def test_tar_that_leaves_its_root_is_refused(name: str) -> None:
    with pytest.raises(QdcError, match="leaves its root"):
        tar.members(BytesRange(one_member(name=name)))


def test_absolute_names_are_relative_to_the_image() -> None:
    (member,) = tar.members(BytesRange(one_member(name="/etc//./passwd")))
    assert member.path == "etc/passwd"


def test_tar_of_a_huge_file_uses_its_real_size() -> None:
    with pytest.raises(QdcError, match=r"needs 9663676416 bytes"):
        tar.members(BytesRange(_header_only(9 << 30)))


def _header_only(size: int) -> bytes:
    info = tarfile.TarInfo("big")
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def test_tar_with_a_giant_extension_header_is_refused() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    with pytest.raises(QdcError, match="extension header"):
        tar.members(BytesRange(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_tar_never_crashes(draw: st.DataObject) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("short", "é" * 80):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    raw = bytearray(buffer.getvalue()[:4096])
    for _ in range(draw.draw(st.integers(1, 4))):
        raw[draw.draw(st.integers(0, len(raw) - 1))] = draw.draw(st.integers(0, 255))
    end = draw.draw(st.integers(0, len(raw)))
    try:
        for member in tar.members(BytesRange(bytes(raw[:end]))):
            assert member.offset + member.size <= end
    except QdcError:
        pass


@settings(max_examples=200)
@given(st.binary(max_size=1200))
def test_any_bytes_as_tar_or_safetensors(data: bytes) -> None:
    for read in (tar.members, safetensors.read_header):
        try:
            read(BytesRange(data))
        except QdcError:
            continue


DTYPES = st.sampled_from([("I32", 4), ("BF16", 2), ("U8", 1), ("I64", 8)])


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
def test_safetensors_round_trip(table: dict[str, tuple[tuple[str, int], list[int]]]) -> None:
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    for index, (name, ((dtype, width), shape)) in enumerate(table.items()):
        count = width
        for dimension in shape:
            count *= dimension
        tensors[name] = (dtype, shape, bytes([index + 1]) * count)
    data = safetensors.dumps(tensors, {"format": "pt"})
    reader = BytesRange(data)
    header = safetensors.read_header(reader)
    assert header.metadata == {"format": "pt"}
    assert header.length % 8 == 0
    for name, (dtype, shape, payload) in tensors.items():
        tensor = header.tensors[name]
        assert (tensor.dtype, list(tensor.shape)) == (dtype, shape)
        assert safetensors.read_tensor(reader, header, name) == payload


def test_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    safetensors.write(tmp_path / "m.safetensors", {"b": ("BF16", [2], b"\x80\x3f\0\xc0"), "a": ("U8", [1], b"\7")})
    loaded = library.load_file(tmp_path / "m.safetensors")
    assert loaded["b"].tolist() == [1.0, -2.0]
    assert loaded["a"].tolist() == [7]
    library.save_file(loaded, tmp_path / "n.safetensors")
    again = safetensors.read_header(tmp_path / "n.safetensors")
    assert {name: tensor.dtype for name, tensor in again.tensors.items()} == {"a": "U8", "b": "BF16"}


def raw_safetensors(header: Any, payload: bytes) -> BytesRange:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return BytesRange(struct.pack("<Q", len(text)) + text + payload)


def entry(start: int, end: int, shape: Any = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "payload", "why"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "overlaps"),
        ({"a": entry(0, 4), "b": entry(5, 6)}, bytes(6), "hole"),
        ({"a": entry(1, 4)}, bytes(4), "hole"),
        ({"a": entry(0, 4)}, bytes(3), "end at"),
        ({"a": entry(0, 4)}, bytes(5), "end at"),
        ({"a": entry(0, 4, [5])}, bytes(4), "does not fit"),
        ({"a": entry(0, 4, [1], "Q4")}, bytes(4), "dtype"),
        ({"a": entry(0, 4, [-4])}, bytes(4), "malformed"),
        ({"a": entry(0, 4, [True] * 2)}, bytes(4), "malformed"),
        ({"a": {"dtype": "U8", "shape": [0]}}, b"", "needs exactly"),
        (b'{"a": 1, "a": 2}', b"", "duplicate"),
        (b"[]", b"", "object"),
        (b"\xff", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        ({"__metadata__": {"a": 1}}, b"", "metadata"),
    ],
)
def test_malformed_safetensors_say_why(header: Any, payload: bytes, why: str) -> None:
    with pytest.raises(QdcError, match=why):
        safetensors.read_header(raw_safetensors(header, payload))


def test_safetensors_header_length_is_bounded() -> None:
    with pytest.raises(QdcError, match="claims"):
        safetensors.read_header(BytesRange(struct.pack("<Q", 1 << 60) + bytes(100)))
    with pytest.raises(QdcError, match="no safetensors"):
        safetensors.read_header(BytesRange(b"abc"))
