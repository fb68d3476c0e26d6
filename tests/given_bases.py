"""Small images to stand on: as an OCI layout, as an archive of `docker save`'s form, and in a stand-in registry."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry_server import OCI_CONFIG, OCI_INDEX, OCI_MANIFEST, Fake, digest_of

GZIP_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
RAW_LAYER = "application/vnd.oci.image.layer.v1.tar"
ENGINE = "0.32.0"
STATUS = "Package: base-files\nStatus: install ok installed\nVersion: 12.4\nArchitecture: amd64\n"
ENVIRONMENT = ["PATH=/usr/local/cuda/bin:/usr/bin", "NVIDIA_VISIBLE_DEVICES=all", "VLLM_PORT=1", "PYTHONPATH=/evil"]


def tar_of(files: dict[str, bytes | str]) -> bytes:
    """A tar; a text is a symbolic link's target. Programs below usr/bin may be run."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755 if name.startswith("usr/bin/") else 0o644
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def system(engine: str = ENGINE) -> list[dict[str, bytes | str]]:
    """Files of two layers: a Python, and an engine on it, with a file of the first taken away."""
    return [
        {"usr/bin/python3.11": b"#!/bin/sh\n", "usr/bin/python3": "python3.11", "var/lib/dpkg/status": STATUS.encode(),
         "etc/motd": b"hello" * 40_000},
        {"etc/.wh.motd": b"", f"usr/lib/python3/dist-packages/vllm-{engine}+cpu.dist-info/METADATA": b"Name: vllm\n"},
    ]  # fmt: skip


@dataclass
class Base:
    """`tars`: raw layers; `packed`: which of them are kept as gzip; `settings`: the `config` object."""

    tars: list[bytes] = field(default_factory=lambda: [tar_of(files) for files in system()])
    packed: tuple[bool, ...] = (True, False)
    platform: tuple[str, str] = ("linux", "amd64")
    settings: dict[str, Any] = field(
        default_factory=lambda: {"Env": ENVIRONMENT, "User": "1000:1000", "Entrypoint": ["vllm"], "Cmd": ["serve"],
                                 "WorkingDir": "/work", "Labels": {"io.qdc.k": "99"}}
    )  # fmt: skip
    diff_ids: list[str] | None = None

    @property
    def config(self) -> bytes:
        ids = self.diff_ids or [digest_of(tar) for tar in self.tars]
        value = {"os": self.platform[0], "architecture": self.platform[1], "config": self.settings}
        return json.dumps({**value, "rootfs": {"type": "layers", "diff_ids": ids}}).encode()

    @property
    def stored(self) -> list[bytes]:
        pairs = zip(self.tars, self.packed, strict=True)
        return [gzip.compress(tar, mtime=0) if packed else tar for tar, packed in pairs]

    @property
    def manifest(self) -> bytes:
        layers = [
            {"mediaType": GZIP_LAYER if packed else RAW_LAYER, "digest": digest_of(data), "size": len(data)}
            for data, packed in zip(self.stored, self.packed, strict=True)
        ]
        config = {"mediaType": OCI_CONFIG, "digest": digest_of(self.config), "size": len(self.config)}
        return json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers}).encode()

    def layout(self, folder: Path) -> Path:
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        entry = {"mediaType": OCI_MANIFEST, "digest": digest_of(self.manifest), "size": len(self.manifest)}
        (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        for data in (self.manifest, self.config, *self.stored):
            (folder / "blobs/sha256" / digest_of(data)[7:]).write_bytes(data)
        return folder

    def archive(self, file: Path) -> Path:
        files: dict[str, bytes] = {f"{digest_of(self.config)[7:]}.json": self.config}
        names = []
        for number, data in enumerate(self.stored):
            names.append(f"layer{number}/layer.tar")
            files[names[-1]] = data
        listed = {"Config": f"{digest_of(self.config)[7:]}.json", "RepoTags": ["base:1"], "Layers": names}
        files["manifest.json"] = json.dumps([listed]).encode()
        file.write_bytes(tar_of(dict(files)))
        return file

    def serve(self, fake: Fake, repository: str = "team/base") -> str:
        """Keep it in a registry, below an index of two platforms; returns its reference by the index's digest."""
        for data in (self.config, *self.stored):
            fake.add(data)
        digest = digest_of(self.manifest)
        fake.manifests[repository, digest] = (OCI_MANIFEST, self.manifest)
        entries = [
            {"mediaType": OCI_MANIFEST, "digest": digest, "size": 1, "platform": {"os": "linux", "architecture": part}}
            for part in (self.platform[1], "riscv64")
        ]
        index = fake.put(repository, "1", {"schemaVersion": 2, "manifests": entries}, OCI_INDEX)
        return f"{fake.host}/{repository}@{index}"
