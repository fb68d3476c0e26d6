"""Layer tars: any tree reads back equal, and the digest depends on nothing but entries and contents."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.image.layers import digested, layer_from_json, small_layer
from qdc.image.tar import EPOCH, Entry, arranged, header, tar_size, write_layer

SEGMENT = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=130).filter(
    lambda text: text not in (".", "..") and not text.startswith(".wh.")
)
PATH = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join)
LINK = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=140)
NODE = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=1100), st.sampled_from([0o644, 0o755])),
    st.tuples(st.just("dir"), st.none(), st.just(0o755)),
    st.tuples(st.just("symlink"), LINK, st.just(0o777)),
)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, tuple[str, object, int]]:
    tree: dict[str, tuple[str, object, int]] = {}
    for path, node in draw(st.dictionaries(PATH, NODE, max_size=8)).items():
        parents = ["/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 1)]
        below = any(other.startswith(path + "/") for other in tree)
        if all(tree.get(parent, ("dir",))[0] == "dir" for parent in parents) and not (below and node[0] != "dir"):
            tree[path] = node
    return tree


def layer_of(tree: dict[str, tuple[str, object, int]], folder: Path) -> tuple[list[Entry], bytes, str]:
    entries = []
    for path, (kind, value, mode) in tree.items():
        if kind == "file":
            assert isinstance(value, bytes)
            digest = sha256_bytes(value)
            (folder / digest).write_bytes(value)
            entries.append(Entry(path, "file", mode, len(value), digest))
        elif kind == "symlink":
            entries.append(Entry(path, "symlink", mode, link=str(value)))
        else:
            entries.append(Entry(path, "dir", mode))
    ready = arranged(entries)
    out = io.BytesIO()
    digest, size = write_layer(ready, lambda sha256: folder / sha256, out)
    assert size == len(out.getvalue()) == tar_size(ready)
    return ready, out.getvalue(), digest


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees())
def test_any_tree_reads_back_equal(tree: dict[str, tuple[str, object, int]], tmp_path: Path) -> None:
    entries, data, digest = layer_of(tree, tmp_path)
    assert digest == hashlib.sha256(data).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", errors="strict") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [entry.path for entry in entries]
        for member, entry in zip(members, entries, strict=True):
            assert (member.mode, member.uid, member.gid, member.uname, member.gname, member.mtime) == (
                entry.mode,
                0,
                0,
                "",
                "",
                EPOCH,
            )
            kind, value, _ = tree.get(entry.path, ("dir", None, 0o755))
            if kind == "file":
                stream = tar.extractfile(member)
                assert member.isreg() and stream is not None and stream.read() == value
            elif kind == "symlink":
                assert member.issym() and member.linkname == value
            else:
                assert member.isdir()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees(), data=st.data())
def test_order_of_entries_does_not_matter(
    tree: dict[str, tuple[str, object, int]], data: st.DataObject, tmp_path: Path
) -> None:
    shuffled = dict(data.draw(st.permutations(list(tree.items()))))
    assert layer_of(tree, tmp_path)[2] == layer_of(shuffled, tmp_path)[2]


@pytest.mark.parametrize("size", [8**11 - 1, 8**11, 10**11])
def test_sizes_around_and_over_8_gib_are_in_the_header(size: int) -> None:
    blocks = header(Entry("opt/models/target/model.safetensors", "file", 0o644, size, "0" * 64))
    with tarfile.open(fileobj=io.BytesIO(blocks), mode="r:") as tar:
        member = tar.next()
    assert member is not None and member.size == size
    assert member.name == "opt/models/target/model.safetensors"
    assert (len(blocks) > 512) == (size >= 8**11), "PAX only where USTAR cannot say the size"


def test_what_follows_a_member_over_8_gib_is_found(tmp_path: Path) -> None:
    size = 8**11 + 12345
    file = tmp_path / "sparse.tar"
    with file.open("wb") as stream:
        stream.write(header(Entry("big", "file", 0o644, size, "0" * 64)))
        stream.seek(size + -size % 512, io.SEEK_CUR)
        stream.write(header(Entry("small", "file", 0o644, 0)) + bytes(1024))
        assert stream.tell() == tar_size([Entry("big", "file", 0o644, size), Entry("small", "file", 0o644)])
    listed = subprocess.run(["tar", "tvf", file], check=True, capture_output=True, text=True, env={"TZ": "UTC"}).stdout
    assert [line.split()[2:] for line in listed.splitlines()] == [
        [str(size), "2020-01-01", "00:00", "big"],
        ["0", "2020-01-01", "00:00", "small"],
    ]
    with tarfile.open(file) as tar:
        assert [(member.name, member.size) for member in tar] == [("big", size), ("small", 0)]


def test_long_ascii_names_need_no_pax_record_while_they_can_be_split() -> None:
    assert len(header(Entry("a" * 150 + "/" + "b" * 100, "file", 0o644))) == 512
    assert len(header(Entry("a" * 101, "file", 0o644))) > 512


@pytest.mark.parametrize("path", ["/a", "a/../b", "..", "a//b", "a/", "", "./a", "a\0b", "a/.wh.b", "\udcff"])
def test_paths_that_leave_the_root_or_mean_something_else_are_refused(path: str) -> None:
    with pytest.raises(QdcError) as error:
        arranged([Entry(path, "file", 0o644)])
    assert error.value.id == "image.path"


def test_a_path_twice_or_below_a_file_is_refused() -> None:
    with pytest.raises(QdcError, match="twice"):
        arranged([Entry("a", "file", 0o644), Entry("a", "dir", 0o755)])
    with pytest.raises(QdcError, match="no folder"):
        arranged([Entry("a", "file", 0o644), Entry("a/b/c", "file", 0o644)])


@pytest.mark.parametrize("change", [b"", b"1234", b"123456"])
def test_a_content_of_another_size_is_an_error(tmp_path: Path, change: bytes) -> None:
    file = tmp_path / "content"
    file.write_bytes(change)
    with pytest.raises(QdcError) as error:
        write_layer([Entry("a", "file", 0o644, 5, "0" * 64)], lambda _: file, io.BytesIO())
    assert error.value.id == "image.content" and error.value.exit_code == 4


def test_a_layer_of_real_files_forgets_times_owners_and_odd_modes(tmp_path: Path) -> None:
    plain, program = tmp_path / "plain", tmp_path / "program"
    plain.write_bytes(b"x" * 3000)
    program.write_bytes(b"#!/bin/sh\n")
    plain.chmod(0o600)
    program.chmod(0o700)
    first = digested({"opt/b": plain, "opt/a": program}, "test")
    os.utime(plain, (1, 1))
    plain.chmod(0o664)
    program.chmod(0o755)
    assert digested({"opt/a": program, "opt/b": plain}, "test") == first
    assert first.entries is not None
    assert [(e.path, e.type, e.mode) for e in first.entries] == [
        ("opt", "dir", 0o755),
        ("opt/a", "file", 0o755),
        ("opt/b", "file", 0o644),
    ]
    out = io.BytesIO()
    contents = {sha256_bytes(f.read_bytes()): f for f in (plain, program)}
    assert write_layer(first.entries, contents.__getitem__, out) == (first.diff_id, first.size)


def test_layer_descriptions_read_back_equal(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    layer = digested({"opt/f": tmp_path / "f"}, "weights")
    assert layer_from_json(layer.as_json()) == layer
    small = small_layer({"opt/x": b"1", "opt/y": b""}, "configuration", tmp_path, "layers/01.tar")
    assert layer_from_json(small.as_json()) == small
    assert small.diff_id == sha256_bytes((tmp_path / "layers/01.tar").read_bytes())
    with pytest.raises(QdcError, match="no layer"):
        layer_from_json({"diff_id": "sha256:00"})
