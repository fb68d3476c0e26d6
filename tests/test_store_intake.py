"""Bytes come into the store in one pass, once, whatever their size; what changes meanwhile is noticed."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.core.errors import QdcError
from qdc.store import copying, intake
from qdc.store.memo import REMEMBERED
from qdc.store.seal import sealed
from qdc.store.store import Store

MB = 1 << 20


def read_bytes() -> int:
    """Bytes that this process has read so far, from files or their cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def aged(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder whose files are older than a clock tick."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    time.sleep(0.12)
    return folder


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5 * 8192).flatmap(lambda size: st.sampled_from([size, size // 4096 * 4096])), st.booleans())
def test_a_copy_is_the_file_and_the_digest_is_of_it(tmp_path_factory: Any, size: int, direct: bool) -> None:
    """At every distance from a block's end, with and without a way past the page cache."""
    folder = tmp_path_factory.mktemp("c")
    data = os.urandom(size)
    (folder / "a").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK", 8192)
        patch.setattr(copying, "SLICE", 4096)
        if not direct:
            patch.setattr(os, "O_DIRECT", 0)
        with (folder / "a").open("rb") as stream:
            assert copying.copy_hashed(stream.fileno(), folder / "b") == hashlib.sha256(data).hexdigest()
    assert (folder / "b").read_bytes() == data
    assert (folder / "b").stat().st_mode & 0o777 == 0o444


def test_a_write_that_stops_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, data = os.pwrite, os.urandom(100_000)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, block, offset: real(descriptor, block[:5000], offset))
    (tmp_path / "a").write_bytes(data)
    with (tmp_path / "a").open("rb") as stream:
        assert copying.copy_hashed(stream.fileno(), tmp_path / "b") == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "b").read_bytes() == data


def test_a_clone_is_hashed_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a file system that shares blocks, played by one that copies when it is asked to share."""

    def clone(writing: int, request: int, reading: int) -> None:
        assert request == copying.FICLONE
        os.truncate(writing, len(data))
        os.copy_file_range(reading, writing, len(data), 0, 0)

    data = os.urandom(MB)
    (tmp_path / "a").write_bytes(data)
    monkeypatch.setattr("fcntl.ioctl", clone)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
    with (tmp_path / "a").open("rb") as stream:
        made = copying.copy_hashed(stream.fileno(), tmp_path / "b")
    assert made == hashlib.sha256(data).hexdigest() and (tmp_path / "b").read_bytes() == data
    assert sealed((tmp_path / "b").stat())


def test_ingest_reads_each_byte_once_also_for_its_use_and_the_second_time_none(tmp_path: Path) -> None:
    folder = aged(tmp_path / "in", {name: os.urandom(4 * MB) for name in "abc"})
    store = Store(tmp_path / "store")
    before = read_bytes()
    tree = store.ingest(folder)
    store.link_out(tree.digest, tmp_path / "linked")
    assert read_bytes() - before < 12.5 * MB
    assert store.verify() == []
    before = read_bytes()
    assert Store(store.root).ingest(folder) == tree
    assert read_bytes() - before < MB / 4


def test_publish_reads_each_byte_once_and_so_does_using_it_at_once(tmp_path: Path) -> None:
    folder = aged(tmp_path / "out", {name: os.urandom(4 * MB) for name in "abc"})
    store = Store(tmp_path / "store")
    before = read_bytes()
    tree = store.publish(folder)
    store.link_out(tree.digest, tmp_path / "linked")
    assert read_bytes() - before < 12.5 * MB
    assert store.verify() == []


@pytest.mark.parametrize("reset", [False, True])
def test_an_object_that_is_written_to_after_it_was_published_is_read_again(tmp_path: Path, reset: bool) -> None:
    """At once too, for a write cannot have the mtime that publishing left; with it set back, a tick later."""
    store = Store(tmp_path / "store")
    tree = store.publish(aged(tmp_path / "out", {"x": b"good"}))
    path = store.object_path(tree.entries[0].sha256)
    status = path.stat()
    time.sleep(0.06 if reset else 0.0)
    path.chmod(0o644)
    path.write_bytes(b"evil")
    if reset:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(QdcError, match="is damaged and was removed"):
        store.link_out(tree.digest, tmp_path / "linked")


@pytest.mark.parametrize("content", [b"evil", b"evil" * (REMEMBERED // 4)], ids=["small", "large"])
def test_a_look_without_use_shows_an_object_that_was_written_to(tmp_path: Path, content: bytes) -> None:
    """At once: a write cannot leave the seal's mtime. Set back, only use or `verify` can tell."""
    good = bytes(len(content))
    store = Store(tmp_path / "store")
    tree = store.publish(aged(tmp_path / "out", {"x": good}))
    path = store.object_path(tree.entries[0].sha256)
    status = path.stat()
    path.chmod(0o644)
    path.write_bytes(content)
    assert not store.has_tree(tree.digest) and not Store(store.root).has_tree(tree.digest)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.has_tree(tree.digest) and store.verify() == [path.name]
    os.utime(path)
    assert store.publish(aged(tmp_path / "again", {"x": good})) == tree
    assert store.has_tree(tree.digest) and store.verify() == [] and path.read_bytes() == good


@pytest.mark.parametrize("size", [5, REMEMBERED])
def test_a_copy_of_a_store_without_its_times_is_read_once(tmp_path: Path, size: int) -> None:
    store = Store(tmp_path / "store")
    tree = store.publish(aged(tmp_path / "out", {"x": bytes(size)}))
    shutil.copytree(store.root, tmp_path / "copy", copy_function=shutil.copyfile)
    copy = Store(tmp_path / "copy")
    path = copy.object_path(tree.entries[0].sha256)
    came = int(path.stat().st_mtime)
    assert not sealed(path.stat()) and copy.has_tree(tree.digest)
    assert sealed(path.stat()) and int(path.stat().st_mtime) == came
    path.chmod(0o644)
    with path.open("r+b") as stream:
        stream.write(b"X")
    assert not copy.has_tree(tree.digest)


@pytest.mark.parametrize("change", ["append", "rewrite", "replace", "remove"])
def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder, store = aged(tmp_path / "in", {"a": b"1" * 9000, "b": b"2"}), Store(tmp_path / "store")
    real = copying.copy_hashed

    def meanwhile(descriptor: int, place: Path) -> str:
        made, path = real(descriptor, place), folder / "a"
        if change == "append":
            path.write_bytes(path.read_bytes() + b"3")
        elif change == "rewrite":
            path.write_bytes(b"4" * 9000)
        else:
            path.unlink()
            if change == "replace":
                path.write_bytes(b"1" * 9000)
        return made

    monkeypatch.setattr(intake, "copy_hashed", meanwhile)
    with pytest.raises((QdcError, FileNotFoundError)) as caught:
        store.ingest(folder)
    assert "a" in str(caught.value)
    assert list((tmp_path / "store" / "staging").iterdir()) == []
    monkeypatch.undo()
    if change != "remove":
        tree = store.ingest(folder)
        assert tree.find("a").sha256 == hashlib.sha256((folder / "a").read_bytes()).hexdigest()  # type: ignore[union-attr]
        assert store.verify() == []


def test_an_object_that_is_passed_on_is_neither_read_nor_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    given = store.ingest(aged(tmp_path / "in", {"w": os.urandom(4 * MB), "c": b"{}"}))
    store.link_out(given.digest, tmp_path / "input")
    held, before = written(store.root / "objects"), read_bytes()
    output = tmp_path / "output"
    (output / "sub").mkdir(parents=True)
    (output / "sub" / "v").symlink_to((tmp_path / "input" / "w").resolve())
    (output / "new").write_bytes(b"new")
    tree = store.publish(output)
    assert read_bytes() - before < MB / 4
    assert written(store.root / "objects") == held + 3
    assert {entry.path: entry.sha256 for entry in tree.entries} == {
        "sub/v": given.find("w").sha256,  # type: ignore[union-attr]
        "new": hashlib.sha256(b"new").hexdigest(),
    }
    assert [entry.mode for entry in tree.entries] == [0o644, 0o644]


def test_only_a_sound_object_of_this_store_is_passed_on(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "store"), Store(tmp_path / "other")
    folder = aged(tmp_path / "in", {"x": b"good"})
    sha256 = store.ingest(folder).entries[0].sha256
    other.ingest(folder)

    def output(name: str, target: Path) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").symlink_to(target)
        return tmp_path / name

    with pytest.raises(QdcError, match="a link, but not to an object"):
        store.publish(output("foreign", other.object_path(sha256)))
    path = store.object_path(sha256)
    path.chmod(0o644)
    path.write_bytes(b"evil")
    with pytest.raises(QdcError, match="is damaged and was removed"):
        store.publish(output("damaged", path))


def test_what_a_failed_ingest_has_taken_is_kept(tmp_path: Path) -> None:
    """The first of several failures is told; what became an object stays one."""
    folder, store = aged(tmp_path / "in", {"a": b"1", "b": b"2", "c": b"3"}), Store(tmp_path / "store")
    with pytest.MonkeyPatch.context() as patch:
        real = copying.copy_hashed
        patch.setattr(
            intake, "copy_hashed", lambda descriptor, place: real(descriptor, place) if place.name == "0" else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            store.ingest(folder)
    assert store.verify() == []
    assert len(store.ingest(folder).entries) == 3
