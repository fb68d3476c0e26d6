"""What fixtures are made of: layers of files, image configuration, history; written as a layout, archive or folder."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Content = bytes | str | None
"""A file's bytes, a symbolic link's target, or None for a folder."""
Files = dict[str, Content]
DATE = "2026-05-14T00:00:00Z"
EXECUTABLE = (".sh", "/serve", "/python3", "/python3.12", "/busybox")


def tar_of(files: Files) -> bytes:
    """A deterministic tar; scripts and programs may be run."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755 if name.endswith(EXECUTABLE) or content is None else 0o644
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Fixture:
    """An image. `settings`: its `config` object; `top`: more fields of the configuration; `blobs`: a last edit of

    the layout's files (relative path -> bytes), for images that were tampered with after they were written.
    """

    layers: list[Files]
    settings: dict[str, Any] = field(default_factory=dict)
    tag: str | None = None
    history: list[dict[str, Any]] | None = None
    top: dict[str, Any] = field(default_factory=dict)
    blobs: Callable[[dict[str, bytes]], None] | None = None

    def tars(self) -> list[bytes]:
        return [tar_of(files) for files in self.layers]

    def configuration(self) -> bytes:
        tars = self.tars()
        history = self.history
        if history is None:
            history = [{"created": DATE, "created_by": f"COPY layer{n} /"} for n in range(len(tars))]
        value = {
            "architecture": "amd64",
            "os": "linux",
            "created": DATE,
            "config": self.settings,
            "history": history,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(tar)}" for tar in tars]},
            **self.top,
        }
        return json.dumps(value, sort_keys=True).encode()

    @property
    def id(self) -> str:
        return f"sha256:{sha(self.configuration())}"

    def layout(self) -> dict[str, bytes]:
        """The files of an OCI layout that `docker save` of today would write: also a docker archive."""
        config, tars = self.configuration(), self.tars()

        def descriptor(kind: str, data: bytes) -> dict[str, Any]:
            media = f"application/vnd.oci.image.{kind}"
            return {"mediaType": media, "digest": f"sha256:{sha(data)}", "size": len(data)}

        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("config.v1+json", config),
            "layers": [descriptor("layer.v1.tar", tar) for tar in tars],
        }
        stored = json.dumps(manifest).encode()
        entry = descriptor("manifest.v1+json", stored)
        if self.tag:
            entry["annotations"] = {"org.opencontainers.image.ref.name": self.tag}
        files = {f"blobs/sha256/{sha(data)}": data for data in (config, stored, *tars)}
        files["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
        files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        described = {
            "Config": f"blobs/sha256/{sha(config)}",
            "RepoTags": [self.tag] if self.tag else None,
            "Layers": [f"blobs/sha256/{sha(tar)}" for tar in tars],
        }
        files["manifest.json"] = json.dumps([described]).encode()
        if self.blobs is not None:
            self.blobs(files)
        return files

    def write(self, folder: Path, form: str = "oci") -> str:
        """Write it below `folder`; the reference that `qdc audit` takes. `form`: oci or archive."""
        files = self.layout()
        if form == "archive":
            path = folder / "image.tar"
            path.write_bytes(tar_of(dict(sorted(files.items(), key=lambda item: item[0] != "manifest.json"))))
            return f"archive:{path}"
        for name, data in files.items():
            path = folder / "image" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return f"oci:{folder / 'image'}"


@dataclass
class Folder:
    """A plain model folder."""

    files: dict[str, bytes]

    def write(self, folder: Path, form: str = "folder") -> str:
        for name, data in self.files.items():
            path = folder / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return f"folder:{folder / 'model'}"


def under(prefix: str, files: dict[str, bytes]) -> Files:
    """The same files below a folder of an image."""
    return {f"{prefix}/{name}": data for name, data in files.items()}


def pretty(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
