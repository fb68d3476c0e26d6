"""The artifact that is to be uploaded: opened for reading, weighed, audited, and as the bytes that an engine loads.

A file (`docker save`, also gzip), an OCI layout, or an image of the engine (read through `docker save`). Nothing of
it is unpacked or executed here.
"""

from __future__ import annotations

import contextlib
import gzip
import shlex
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdc.audit.audit import audit
from qdc.audit.images import open_image
from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError
from qdc.formats import ranges
from qdc.formats.oci import Image
from qdc.gate.container import NoEngine, docker_errors
from qdc.gate.contracts import Contract
from qdc.gate.report import Check

MANIFEST = "opt/qdc/manifest.json"
BLOCK, BUFFER = 512, 1 << 20
GZIP = b"\x1f\x8b"
Report = Callable[[int, int, str], None]


@dataclass
class Artifact:
    """`path`: a file or an OCI layout; `shown`: as the user named it; `manifest`: the content manifest's bytes."""

    shown: str
    path: Path
    image: Image
    manifest: bytes | None

    @property
    def is_file(self) -> bool:
        return self.path.is_file()

    @property
    def packed(self) -> bool:
        """Whether it is a file that is compressed as a whole."""
        if not self.is_file:
            return False
        with self.path.open("rb") as stream:
            return stream.read(2) == GZIP


@contextlib.contextmanager
def open_artifact(path: Path, shown: str) -> Iterator[Artifact]:
    """Raises QdcError `image.*`, `tar.*` or `bytes.*` when it is no image, or not a whole one."""
    with open_image("oci" if path.is_dir() else "archive", str(path), shown=shown) as image:
        if len(image.diff_ids) != len(image.layers):
            why = f"its configuration names {len(image.diff_ids)} layers, {len(image.layers)} are there"
            raise QdcError("image.layers", why, exit_code=COULD_NOT)
        image.files()
        yield Artifact(shown, path, image, image.read(MANIFEST) if image.find(MANIFEST) else None)


@contextlib.contextmanager
def saved(engine: Any, name: str, report: Report) -> Iterator[Path]:
    """`docker save NAME` in a temporary file."""
    with tempfile.TemporaryDirectory(prefix="qdc-gate-") as folder:
        archive, done = Path(folder, "image.tar"), 0
        with docker_errors(f"saving {name}"), archive.open("wb") as stream:
            for chunk in engine.images.get(name).save(named=True):
                done += len(chunk)
                try:
                    stream.write(chunk)
                except OSError as error:
                    why = f"{name} does not fit into {folder}: {error.strerror}; TMPDIR names another folder"
                    raise NoEngine("gate.space", why, exit_code=COULD_NOT) from error
                report(done >> 20, 0, "MiB saved")
        yield archive


def check_size(artifact: Artifact, contract: Contract, report: Report) -> Check:
    """What the contract weighs, against its limit. A compressed size is measured only where it could be too large."""
    limit = contract.size_limit
    if limit is None:
        raw = _raw_size(artifact)
        return Check("size", "pass", raw, f"{raw / 1e9:.3f} GB as `docker save` writes it; the contract sets no limit")
    allowed, of = int(float(limit["bytes"])), limit["of"]
    said, more = of, ""
    if of == "docker-save-gzip" and artifact.packed:
        size = artifact.path.stat().st_size
    else:
        size = _raw_size(artifact)
        if of == "docker-save-gzip" and size <= allowed:
            said = f"{of}: less than this, which is the archive before compression"
        elif of == "docker-save-gzip":
            size = _compressed(artifact, allowed, report)
            more = " at least" if size > allowed else ""
    why = f"{size / 1e9:.3f} GB{more} of {allowed / 1e9:.3f} GB allowed ({said})"
    return Check("size", "pass" if size <= allowed else "fail", size, why)


def _raw_size(artifact: Artifact) -> int:
    """Bytes of the uncompressed archive."""
    if artifact.packed:
        with gzip.open(artifact.path) as stream:
            return sum(map(len, iter(lambda: stream.read(BUFFER), b"")))
    if artifact.is_file:
        return artifact.path.stat().st_size
    return sum(len(part) if isinstance(part, bytes) else part for part in _parts(artifact.image, unpacked=True))


def _compressed(artifact: Artifact, enough: int, report: Report) -> int:
    """Bytes of the archive under gzip's usual level; stops once they are more than `enough`."""
    state, size, done = zlib.compressobj(6, wbits=31), 0, 0
    for chunk in archive_chunks(artifact):
        size += len(state.compress(chunk))
        done += len(chunk)
        report(done >> 20, 0, "MiB compressed, to weigh it")
        if size > enough:
            return size
    return size + len(state.flush())


def archive_chunks(artifact: Artifact) -> Iterator[bytes]:
    """The bytes for `docker load`: the file itself, or an archive made of the layout's own blobs."""
    if artifact.is_file:
        yield from ranges.chunks(ranges.FileRange(artifact.path))
        return
    for part in _parts(artifact.image, unpacked=False):
        assert isinstance(part, bytes)
        yield part


def _parts(image: Image, *, unpacked: bool) -> Iterator[bytes | int]:
    """A `docker save` archive of `image`, piece by piece; with `unpacked`, each layer's uncompressed size instead."""
    names = [f"{number:03}/layer.tar" for number in range(len(image.layers))]
    config = f"{image.image_id.removeprefix('sha256:')}.json"
    tags = [tag for tag in image.tags if ":" in tag]
    listing = canonical.dumps([{"Config": config, "RepoTags": tags or None, "Layers": names}])
    for name, data in ((config, image.config_bytes), ("manifest.json", listing)):
        yield from (_header(name, len(data)), data, bytes(-len(data) % BLOCK))
    for name, layer in zip(names, image.layers, strict=True):
        content = layer.content if unpacked else layer.blob
        yield _header(name, content.size)
        if unpacked:
            yield content.size
        else:
            yield from ranges.chunks(content)
        yield bytes(-content.size % BLOCK)
    yield bytes(2 * BLOCK)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def audited(
    artifact: Artifact, expect: str | None, require: tuple[str, ...] = (), command: Sequence[str] = ()
) -> tuple[Check, Check, list[dict[str, Any]]]:
    """Checks `image` and `claims`: the audit's verdicts on the image's own bytes and on what is said of it; and these
    verdicts. `command`: what is typed after the image's name when it is started."""
    run = f"IMAGE {shlex.join(command)}" if command else None
    report = audit(artifact.image, expect=expect, require=require, run=run)
    own = [row for row in report["verdicts"] if row["claim"].startswith("image.")]
    said = [row for row in report["verdicts"] if not row["claim"].startswith("image.") or row["claim"] == "image.tag"]
    own = [row for row in own if row["claim"] != "image.tag"]
    wrong = [row for row in own if row["verdict"] == "refuted"]
    unread = [row for row in own if row["verdict"] == "unread"]
    size = len(artifact.image.layers)
    if wrong:
        whole = Check("image", "fail", artifact.image.image_id, "; ".join(map(_words, wrong[:3])))
    elif unread:
        whole = Check("image", "undecided", artifact.image.image_id, "; ".join(map(_words, unread[:3])))
    else:
        whole = Check("image", "pass", artifact.image.image_id, f"{size} layers, each with the digest that names it")
    return whole, _claims(said), report["verdicts"]


def _claims(rows: list[Mapping[str, Any]]) -> Check:
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("proved", "refuted", "recorded", "unread")}
    wrong = [row for row in rows if row["verdict"] == "refuted"]
    unread = [row for row in rows if row["verdict"] == "unread"]
    if wrong:
        return Check("claims", "fail", counts, "; ".join(map(_words, wrong[:3])))
    if unread:
        return Check(
            "claims", "undecided", counts, f"cannot be told from the bytes: {'; '.join(map(_words, unread[:3]))}"
        )
    if not counts["proved"]:
        return Check("claims", "undecided", counts, "neither tag nor labels nor a manifest say what it serves")
    return Check("claims", "pass", counts, "what tag, labels and manifest say is what the bytes are")


def _words(row: Mapping[str, Any]) -> str:
    """A verdict in one line: the claim, what speaks against it, and in which file that was seen."""
    texts = [item["text"] for item in row["evidence"] if item.get("text")]
    against = [text for text in texts if " claims " in text]
    files = [f"{item['path']}: {item['text']}" for item in row["evidence"] if item.get("layer")]
    seen = f" ({'; '.join(files[:2])})" if against and files else ""
    return f"{row['claim']}: {'; '.join((against or texts[-1:])[:2])}{seen}" if texts else str(row["claim"])


def given_path(text: str) -> tuple[str, str] | None:
    """(place, name) for the path of a file or an OCI layout given as such; None for anything else."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return None
    if path.is_file():
        return "archive", text
    return ("oci", text) if (path / "oci-layout").is_file() else None
