"""For which GPUs a library holds code: the same answer as NVIDIA's cuobjdump, from headers alone, on any bytes."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.formats import elf, fatbin
from qdc.formats.fatbin import Code, grade, read_images
from qdc.formats.ranges import BytesRange, FileRange

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

FOLDER = Path(__file__).parent / "cuda"
GOLDEN = FOLDER / "cuobjdump.txt"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".so", ".cubin", ".fatbin", ".ptx"))


def cuobjdump_says(text: str) -> dict[str, Counter[str]]:
    """File -> names of code, as cuobjdump.txt has them: `arch = sm_90a` under `Fatbin elf code:` or `ptx`."""
    found: dict[str, Counter[str]] = {}
    name, kind = "", ""
    for line in text.splitlines():
        if line.startswith("== "):
            name = line[3:]
            found[name] = Counter()
        elif match := re.fullmatch(r"Fatbin (elf|ptx) code:", line):
            kind = "sm" if match[1] == "elf" else "compute"
        elif match := re.fullmatch(r"arch = sm_(\w+)", line):
            found[name][f"{kind}_{match[1]}"] += 1
        elif match := re.fullmatch(r"ELF file +\d+: .*\.(sm_\w+)\.cubin", line):
            found[name][match[1]] += 1
    return found


def here(path: Path) -> Counter[str]:
    """The same, by the reader under test; several pieces for one architecture in one fat binary count once."""
    names: Counter[str] = Counter()
    for image, count in read_images(FileRange(path), path.name).items():
        for code in image:
            names[code.name] += count
    return names


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".ptx"], ids=lambda path: path.name)
def test_it_finds_what_cuobjdump_finds(path: Path) -> None:
    golden = cuobjdump_says(GOLDEN.read_text())
    assert set(golden) == {path.name for path in FILES if path.suffix != ".ptx"}
    linkable = {"compute_86": 2} if path.name == "relocatable.so" else {}  # cuobjdump shows it with -all alone
    assert here(path) == golden[path.name] + Counter(linkable)


@pytest.mark.slow
def test_the_golden_file_is_what_cuobjdump_says(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "nvidia-cuda-cuobjdump==13.5.37"], check=True)
    (tool,) = (tmp_path / "venv").glob("lib/python3*/site-packages/nvidia/cu13/bin/cuobjdump")
    text = ""
    for path in FILES:
        if path.suffix != ".ptx":
            words = [str(tool), "--list-elf", path.name] if path.suffix == ".cubin" else [str(tool), path.name]
            answer = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, check=False)
            text += f"== {path.name}\n{answer.stdout}"
    assert cuobjdump_says(text) == cuobjdump_says(GOLDEN.read_text())


def test_ptx_text_names_its_target() -> None:
    assert here(FOLDER / "add.ptx") == {"compute_80": 1}
    assert read_images(BytesRange(b"// .target sm_90\n.version 8.0\n  .target sm_100a, debug\n"), "x") == {
        frozenset([Code(100, "ptx", "a")]): 1
    }


@pytest.mark.parametrize("data", [b"", b"\x7f", b"\x7fEL", b"#!/bin/sh\n", b"\0" * 100])
def test_what_is_no_code_holds_none(data: bytes) -> None:
    assert read_images(BytesRange(data), "x") == {}


@pytest.mark.parametrize(
    ("codes", "card", "expected"),
    [
        (["sm_86"], (8, 6), "native"),
        (["sm_80"], (8, 6), "native"),
        (["sm_89"], (8, 6), "none"),
        (["sm_80"], (9, 0), "none"),
        (["sm_80", "compute_80"], (9, 0), "jit"),
        (["compute_86"], (8, 6), "jit"),
        (["compute_89"], (8, 6), "none"),
        (["compute_75"], (12, 0), "jit"),
        (["sm_90a"], (9, 0), "native"),
        (["sm_90a", "compute_90a"], (10, 0), "none"),
        (["sm_100f"], (10, 3), "native"),
        (["sm_100f"], (11, 0), "none"),
        (["sm_100a"], (10, 3), "none"),
        (["compute_100f"], (10, 3), "jit"),
        (["compute_100f"], (12, 0), "none"),
        (["sm_120"], (12, 1), "native"),
        ([], (8, 6), "none"),
    ],
)
def test_grades_follow_the_rules_of_compatibility(codes: list[str], card: tuple[int, int], expected: str) -> None:
    assert grade([code(name) for name in codes], card) == expected


def code(name: str) -> Code:
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name)
    assert match is not None
    return Code(int(match[2]), "cubin" if match[1] == "sm" else "ptx", match[3])


@given(st.integers(70, 129), st.sampled_from(["", "a", "f"]), st.integers(7, 12), st.integers(0, 9))
def test_machine_code_runs_where_its_ptx_would(sm: int, suffix: str, major: int, minor: int) -> None:
    card = (major, minor)
    cubin, ptx = Code(sm, "cubin", suffix), Code(sm, "ptx", suffix)
    assert ptx.runs_on(card) or not cubin.runs_on(card)
    assert cubin.runs_on(divmod(sm, 10)) and ptx.runs_on(divmod(sm, 10))


class Counting:
    """A range that counts what is read of it."""

    def __init__(self, path: Path) -> None:
        self.inner, self.bytes, self.reads = FileRange(path), 0, 0

    @property
    def size(self) -> int:
        return self.inner.size

    def read(self, offset: int, length: int) -> bytes:
        self.bytes, self.reads = self.bytes + length, self.reads + 1
        return self.inner.read(offset, length)


def large_library(path: Path, pieces: int, payload: int) -> None:
    """A sparse `.so` whose `.nv_fatbin` holds `pieces` fat binaries of one cubin of `payload` bytes each."""
    entry = struct.pack("<HHIQ8xIIQQ", 2, 0x101, 64, payload, 0, 86, 0, 0x11).ljust(64, b"\0")
    step = 16 + 64 + payload
    size, names = pieces * step, b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + size + 64
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1" + bytes(9), 3, 62, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 2
    )
    with path.open("wb") as file:
        file.write(header)
        for number in range(pieces):
            file.seek(64 + number * step)
            file.write(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64 + payload) + entry)
        file.seek(64 + size)
        file.write(names)
        file.seek(table)
        file.write(bytes(64) + struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, 64, size, 0, 0, 8, 0))
        file.write(struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, 64 + size, len(names), 0, 0, 1, 0))


def test_two_gigabytes_are_read_in_a_few_blocks(tmp_path: Path) -> None:
    path = tmp_path / "large.so"
    large_library(path, 64, 32 << 20)
    assert path.stat().st_size > 2 << 30
    reader = Counting(path)
    assert read_images(reader, "large.so") == {frozenset([Code(86, "cubin")]): 64}
    assert reader.bytes < 10 << 20 and reader.reads < 200


def test_zeros_between_fat_binaries_are_passed_over(tmp_path: Path) -> None:
    data = (FOLDER / "both.fatbin").read_bytes()
    gap = bytes(200_000)
    found = read_images(BytesRange(data + bytes(-len(data) % 8) + gap + data), "x")
    assert sum(found.values()) == 2
    words = struct.pack("<Q", 0x1122334455667788) * 9000
    assert sum(read_images(BytesRange(data + bytes(-len(data) % 8) + words + data), "x").values()) == 2


@pytest.mark.parametrize("name", ["two.so", "both.fatbin", "cuda13.sm_90a.cubin"])
def test_a_cut_file_is_an_error_or_shows_less(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    whole = set(read_images(BytesRange(data), name))
    for length in range(0, len(data), max(1, len(data) // 150)):
        try:
            found = read_images(BytesRange(data[:length]), name)
        except QdcError as error:
            assert name in error.message or error.id == "bytes.truncated"
            continue
        assert not found or set(found) == whole or name == "both.fatbin"


@settings(max_examples=400)
@given(st.sampled_from([path for path in FILES if path.suffix != ".ptx"]), st.data())
def test_no_edit_of_a_header_does_more_than_raise(path: Path, data: st.DataObject) -> None:
    changed = bytearray(path.read_bytes())
    frame = elf.read_elf(BytesRange(bytes(changed)), "x")
    places = [(0, 64)]
    if frame is not None:
        places += [(section.offset, 200) for section in frame.named(fatbin.LINKED, fatbin.RELOCATABLE, ".nv.compat")]
        places.append((struct.unpack_from("<Q", changed, 40)[0], 64 * max(1, len(frame.sections))))
    for _ in range(data.draw(st.integers(1, 6))):
        start, length = data.draw(st.sampled_from(places))
        at = start + data.draw(st.integers(0, max(0, min(length, len(changed) - start) - 8)))
        changed[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(NUMBERS)))[: len(changed) - at]
    try:
        read_images(BytesRange(bytes(changed)), path.name)
    except QdcError as error:
        assert error.exit_code == 4


NUMBERS = [0, 1, 7, 64, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]


@settings(max_examples=300)
@given(st.binary(max_size=600))
def test_no_bytes_behind_a_magic_do_more_than_raise(data: bytes) -> None:
    for magic in (b"\x7fELF", b"\x7fELF\2\1\1\0\0", fatbin.MAGIC, fatbin.MAGIC + struct.pack("<HHQ", 1, 16, 64)):
        try:
            read_images(BytesRange(magic + data), "x")
        except QdcError as error:
            assert error.exit_code == 4


def test_pieces_without_end_are_refused() -> None:
    entry = struct.pack("<HHIQ8xIIQQ", 2, 0x101, 48, 0, 0, 86, 0, 0)
    body = entry * (fatbin.MAX_ENTRIES + 10)
    with pytest.raises(QdcError, match="more than"):
        read_images(BytesRange(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body), "bomb")


def test_this_interpreter_holds_no_code() -> None:
    assert read_images(FileRange(Path(os.path.realpath(sys.executable))), "python") == {}
