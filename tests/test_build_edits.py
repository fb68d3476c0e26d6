"""A real archive of micro, edited as a cheat or an accident would: audit refutes it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from micro import Micro, qdc

Edit = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def archive(micro: Micro, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return micro.export(micro.first["build"], tmp_path_factory.mktemp("edits") / "image.tar")


def audit(file: Path, *more: str, ok: int) -> Any:
    done = qdc("audit", f"archive:{file}", "--json", *more)
    assert done.returncode == ok, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def read(tar: bytes) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            found[member.name] = (member, stream.read() if stream else b"")
    return found


def write(members: dict[str, tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for member, data in members.values():
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def edited(archive: Path, path: str, edit: Edit, *, consistent: bool) -> bytes:
    """The archive with one file of one layer changed; `consistent`: every digest above it made to agree again."""
    members = read(archive.read_bytes())
    for name, (member, data) in list(members.items()):
        if not name.startswith("blobs/sha256/") or data[257:262] != b"ustar":
            continue
        layer = read(data)
        if path not in layer:
            continue
        layer[path] = (layer[path][0], edit(layer[path][1]))
        changed = write(layer)
        assert changed != data
        members[name] = (member, changed)
        if not consistent:
            return write(members)
        return renamed(members, name.rpartition("/")[2], hashlib.sha256(changed).hexdigest())
    raise AssertionError(f"no layer has {path}")


def renamed(members: dict[str, tuple[tarfile.TarInfo, bytes]], old: str, new: str) -> bytes:
    """Digests follow: the layer's in the config, the config's and so on in all that name them, to the top."""
    while old != new:
        found = members.pop(f"blobs/sha256/{old}")
        found[0].name = f"blobs/sha256/{new}"
        members[found[0].name] = found
        named = [n for n, (_, data) in members.items() if old.encode() in data and data[257:262] != b"ustar"]
        for name in named:
            member, data = members[name]
            members[name] = (member, data.replace(old.encode(), new.encode()))
        blobs = [name for name in named if name.startswith("blobs/")]
        config = next((name for name in blobs if b'"rootfs"' in members[name][1]), None)
        follow = config or next(iter(blobs), None)
        if follow is None:
            break
        old, new = follow.rpartition("/")[2], hashlib.sha256(members[follow][1]).hexdigest()
        if config is not None and len(blobs) > 1:
            manifest = next(name for name in blobs if name != config)
            return renamed(*_two(members, old, new, manifest))
    return write(members)


def _two(
    members: dict[str, tuple[tarfile.TarInfo, bytes]], old: str, new: str, manifest: str
) -> tuple[dict[str, tuple[tarfile.TarInfo, bytes]], str, str]:
    """Rename the config first; then go on with the manifest, which names it."""
    found = members.pop(f"blobs/sha256/{old}")
    found[0].name = f"blobs/sha256/{new}"
    members[found[0].name] = found
    for name, (member, data) in list(members.items()):
        if data[257:262] != b"ustar":
            members[name] = (member, data.replace(old.encode(), new.encode()))
    return members, manifest.rpartition("/")[2], hashlib.sha256(members[manifest][1]).hexdigest()


def k_five(data: bytes) -> bytes:
    assert data.count(b'\\"num_speculative_tokens\\":7') == 1
    return data.replace(b'\\"num_speculative_tokens\\":7', b'\\"num_speculative_tokens\\":5')


def recipe_k_five(data: bytes) -> bytes:
    document = json.loads(data)
    document["recipe"]["serve"]["k"] = 5
    return (json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


CASES: list[tuple[str, Edit]] = [
    ("opt/qdc/manifest.json", recipe_k_five),
    ("opt/qdc/serve.json", k_five),
    ("opt/models/target/model.safetensors", last_byte),
    ("opt/models/drafter/model.safetensors", last_byte),
]


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize(("path", "edit"), CASES)
def test_an_edited_image_is_refuted(archive: Path, tmp_path: Path, path: str, edit: Edit, consistent: bool) -> None:
    """Also where every digest of the container format was made to agree: the manifest inside still disagrees."""
    file = tmp_path / "edited.tar"
    file.write_bytes(edited(archive, path, edit, consistent=consistent))
    assert audit(file, ok=1)["counts"]["refuted"] >= 1


def test_only_the_image_id_tells_a_whole_other_image(micro: Micro, archive: Path, tmp_path: Path) -> None:
    """An image rebuilt with another K is consistent in itself; `--expect` refutes it as the one asked for."""
    other = micro.export(micro.build("--set", "serve.k=6")["build"], tmp_path / "other.tar")
    assert audit(other, ok=0)["counts"]["refuted"] == 0
    report = audit(other, "--expect", micro.first["image"]["id"], ok=1)
    assert [item["claim"] for item in report["verdicts"] if item["verdict"] == "refuted"] == ["image.id"]
