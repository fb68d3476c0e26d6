"""One runner a key, of all that share a remote; and unfinished work that goes from node to node."""

from __future__ import annotations

import os
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_remote import bucket, s3  # noqa: F401

from qdc.run import lease as lease_module
from qdc.run import unfinished
from qdc.run.lease import Lease, holder_of
from qdc.store.remote import Remote
from qdc.store.store import Store

KEY = "1" * 64


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LOST_S", 1.0)
    monkeypatch.setattr(lease_module, "LOOK_S", 0.02)


@pytest.fixture(params=["folder", "memory", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "s3":
        return Remote(str(request.getfixturevalue("bucket")))
    return Remote(f"file://{tmp_path}/remote" if request.param == "folder" else f"memory://{tmp_path.name}")


def take(remote: Remote, holder: str, done: Any = lambda: False) -> bool:
    return Lease(remote, KEY, holder).take(done, lambda: None)


def test_of_many_that_ask_at_once_one_runs_at_a_time(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LOST_S", 60.0)
    running, most, ran = [0], [0], []

    def work(name: str) -> None:
        mine = Lease(remote, KEY, name)
        assert mine.take(lambda: False, lambda: None)
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.05)
        running[0] -= 1
        ran.append(name)
        mine.release()

    threads = [threading.Thread(target=work, args=(f"h{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ran) == [f"h{number}" for number in range(6)] and most[0] == 1


def test_who_waits_stops_waiting_when_another_has_made_it(remote: Remote) -> None:
    assert take(remote, "a")
    looks: list[int] = []
    assert not take(remote, "b", lambda: looks.append(1) or len(looks) > 3)


def test_a_lease_that_is_renewed_is_not_taken_and_one_that_stands_still_is(remote: Remote) -> None:
    first = Lease(remote, KEY, "a")
    assert first.take(lambda: False, lambda: None)
    over = threading.Event()

    def beats() -> None:
        while not over.wait(0.1):
            first.renew()

    thread = threading.Thread(target=beats)
    thread.start()
    until = time.monotonic() + 2.0
    assert not take(remote, "b", lambda: time.monotonic() > until)
    over.set()
    thread.join()
    began = time.monotonic()
    assert take(remote, "b") and time.monotonic() - began >= 0.8


@pytest.mark.parametrize("left", [b"", b"{", b"[1]"])
def test_what_a_killed_writer_left_is_a_lease_that_stands_still(remote: Remote, left: bytes) -> None:
    remote.write(f"leases/{KEY}.json", left)
    assert take(remote, "b")


def test_a_store_need_not_wait_for_itself(remote: Remote, tmp_path: Path) -> None:
    name = holder_of(tmp_path)
    assert holder_of(tmp_path) == name and holder_of(tmp_path / "two") != name
    assert take(remote, name)
    began = time.monotonic()
    assert take(remote, name) and time.monotonic() - began < 0.9


def partial(folder: Path, name: str, text: str) -> Path:
    place = Store(folder).partial(KEY)
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)
    return place


def test_the_newer_of_two_works_is_gone_on_with(remote: Remote, tmp_path: Path) -> None:
    one = partial(tmp_path / "one", "state-1/log", "first")
    (one / ".state-2").mkdir()
    (one / ".state-2" / "log").write_text("being written")
    assert unfinished.send(remote, KEY, one, unfinished.files(one))
    two = Store(tmp_path / "two").partial(KEY)
    assert unfinished.fetch(remote, KEY, two)
    assert unfinished.files(two) == unfinished.files(one) == {"state-1/log": max(unfinished.files(one).values())}
    assert not unfinished.fetch(remote, KEY, two), "it has that already"
    (two / "state-1" / "log").rename(two / "state-1" / "log2")
    os.utime(two / "state-1" / "log2", ns=(2 * 10**18, 2 * 10**18))
    assert unfinished.send(remote, KEY, two, unfinished.files(two))
    assert len(remote.listed(f"partial/{KEY}")) == 1
    assert unfinished.fetch(remote, KEY, one) and list(unfinished.files(one)) == ["state-1/log2"]
    unfinished.forget(remote, KEY)
    assert not remote.listed(f"partial/{KEY}")
    assert not unfinished.fetch(remote, KEY, Store(tmp_path / "three").partial(KEY))


def test_a_file_that_goes_while_it_is_sent_sends_nothing(remote: Remote, tmp_path: Path) -> None:
    one = partial(tmp_path, "a", "x")
    listed = unfinished.files(one)
    (one / "a").unlink()
    assert not unfinished.send(remote, KEY, one, listed) and not remote.listed(f"partial/{KEY}")


def test_a_tar_that_is_damaged_or_leaves_its_folder_is_no_work(remote: Remote, tmp_path: Path) -> None:
    two = partial(tmp_path / "two", "mine", "x")
    (tmp_path / "evil").write_text("evil")
    with tarfile.open(tmp_path / "tar", "w") as tar:
        tar.add(tmp_path / "evil", "../../evil")
    for data in (b"no tar", (tmp_path / "tar").read_bytes()):
        remote.write(f"partial/{KEY}/{3 * 10**18}.tar", data)
        assert not unfinished.fetch(remote, KEY, two) and (two / "mine").read_text() == "x"
    assert not list(tmp_path.rglob("*/evil"))
