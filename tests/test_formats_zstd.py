"""zstd streams by range: what is read is what was packed; damage, bombs and what asks for too much are errors."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_images import layout_blobs, make_config, make_tar, write_layout, zstd

from qdc.core.errors import QdcError
from qdc.formats import oci, ranges
from qdc.formats.packed import ZSTD, PackedRange, packing, unpack
from qdc.formats.ranges import Allowance, BytesRange
from qdc.image.base import open_given, read_given

SKIPPED = struct.pack("<II", 0x184D2A53, 5) + b"notes"


def block(kind: int, size: int, data: bytes, last: bool = False) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + data


def frame(*blocks: bytes, window: int = 0x50) -> bytes:
    """A frame without sizes and checksums; `window` is its descriptor's byte (0x50: one MiB)."""
    return b"\x28\xb5\x2f\xfd" + bytes([0, window]) + b"".join(blocks)


def opened(data: bytes, **options: Any) -> PackedRange:
    return PackedRange(BytesRange(data), ZSTD, "layer 3", **options)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=300_000), max_size=4), data=st.data())
def test_every_range_of_every_form_is_what_was_packed(parts: list[bytes], data: st.DataObject) -> None:
    level = data.draw(st.integers(1, 5))
    forms: list[Callable[[bytes], bytes]] = [
        zstd,
        zstandard.ZstdCompressor(level=level).compress,
        zstandard.ZstdCompressor(level=level, write_checksum=True).compress,
    ]
    whole = b"".join(parts)
    stored = SKIPPED.join(data.draw(st.sampled_from(forms))(part) for part in parts) + SKIPPED
    reader = opened(stored, checkpoints=4)
    for _ in range(4):
        offset = data.draw(st.integers(0, len(whole)))
        length = data.draw(st.integers(0, len(whole) - offset))
        assert reader.read(offset, length) == whole[offset : offset + length]
    assert reader.size == len(whole)
    assert b"".join(reader.stream()) == whole
    size = data.draw(st.integers(1, 5000))
    pieces = (stored[at : at + size] for at in range(0, len(stored), size))
    assert b"".join(unpack(ZSTD, pieces, "x", Allowance(0))) == whole


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_that_names_the_stream_and_never_other_bytes(data: st.DataObject) -> None:
    plain = b"".join(b"%d " % number for number in range(20_000))
    stored = bytearray(zstd(plain))  # With a checksum.
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        stored = stored[:at]
    else:
        stored[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = b"".join(opened(bytes(stored)).stream())
    except QdcError as error:
        assert error.id == "bytes.zstd" and "layer 3" in error.message
    else:
        assert found in (plain, b"")  # Cut to nothing, or a bit that says nothing of the numbers.


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (frame(block(3, 1, b"x", True)), "no known kind"),
        (frame(block(0, 1, b"x", True))[:-1], "ends early"),
        (frame(block(0, 1, b"x")), "ends early"),
        (frame(block(0, 1, b"x", True)) + b"\0\0\0\0", "other bytes"),
        (frame(block(0, 1, b"x", True)) + b"\0", "behind its end"),
        (b"\x28\xb5\x2f\xfd\x01\x50\x07" + block(0, 1, b"x", True), "dictionary"),
        (frame(block(0, 1, b"x", True), window=0x88), "window"),
        (SKIPPED[:-1], "ends early"),
    ],
)
def test_what_is_no_stream_is_said(stored: bytes, why: str) -> None:
    with pytest.raises(QdcError, match=why):
        b"".join(opened(stored).stream())


def test_a_bomb_is_stopped_by_the_allowance_and_unpacked_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allowance, "FREE", 1 << 20)
    bomb = frame(*[block(1, 1 << 17, b"a")] * 20_000, block(1, 1, b"a", True))  # 80 kB that are 2.6 GB
    reader = opened(bomb, allowance=Allowance(len(bomb)))
    seen, largest = 0, 0
    with pytest.raises(QdcError, match="not read on"):
        for chunk in reader.stream():
            seen, largest = seen + len(chunk), max(largest, len(chunk))
    assert seen <= (1 << 20) + 100 * len(bomb) and largest <= 1 << 17


def test_blocks_that_hold_nothing_do_not_keep_a_reader_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    from qdc.formats import zstd as reader

    monkeypatch.setattr(reader, "_FREE", 1000)
    for stored in (frame(*[block(0, 0, b"")] * 5000), SKIPPED * 5000, frame(block(0, 0, b"", True)) * 5000):
        with pytest.raises(QdcError, match="next to nothing"):
            b"".join(opened(stored).stream())


def test_reading_backwards_goes_on_from_the_last_frame_and_what_was_read_is_remembered() -> None:
    parts = [bytes([number]) * 6_000_000 for number in range(5)]
    reader = opened(b"".join(map(zstd, parts)), checkpoints=64)
    unpacked = 0
    step = reader._step

    def counted() -> bool:
        nonlocal unpacked
        more = step()
        unpacked += len(reader._window)
        return more

    reader._step = counted  # type: ignore[method-assign]
    assert reader.size == 30_000_000
    before = unpacked
    assert reader.read(24_000_001, 10) == bytes([4]) * 10
    assert unpacked - before < 2_000_000
    before = unpacked
    assert reader.read(24_000_001, 10) == bytes([4]) * 10
    assert unpacked == before


def test_of_an_images_streams_one_holds_a_decompressor() -> None:
    allowance = Allowance(1 << 20)
    data = b"".join(b"%d" % number for number in range(200_000))
    readers = [opened(zstd(data), allowance=allowance) for _ in range(5)]
    for reader, offset in itertools.product(readers, (0, 500_000, 100)):
        assert reader.read(offset, 50) == data[offset : offset + 50]
    assert sum(reader._live._machine is not None for reader in readers) == 1  # type: ignore[attr-defined]


def test_the_first_bytes_tell() -> None:
    assert packing(zstd(b"x")) == packing(SKIPPED) == "zstd"
    assert packing(b"\x1f\x8b\x08\0") == "gzip"
    assert packing(b"") is packing(b"PK\3\4") is None


def test_the_command_that_prints_a_layer_unpacks_it(tmp_path: Path) -> None:
    layer = make_tar({"etc/name": b"one\n"})
    image = oci.open_image(write_layout(tmp_path, layout_blobs(make_config([layer]), [layer], pack="zstd")))
    assert ranges.sha256(image.open("etc/name")) and image.command(0).endswith("| zstd -dc")


def test_a_given_base_of_zstd_is_refused_with_what_to_type(tmp_path: Path) -> None:
    layer = make_tar({"usr/bin/python3": b"#!\n"})
    write_layout(tmp_path, layout_blobs(make_config([layer]), [layer], pack="zstd"))
    image = open_given(tmp_path)
    image.config |= {"os": "linux", "architecture": "amd64"}
    with pytest.raises(QdcError, match="zstd") as caught:
        read_given(image, lambda *_: None)
    assert "skopeo" in str(caught.value.hint)
