"""Small images that start, for the gate: a root with a shell and Python, and a stand-in engine, good or faulty.

Made here from this machine's busybox and Debian Python, as files of `docker save`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

STUB = Path(__file__).with_name("stub_engine.py")
PYTHON = Path("/usr/bin/python3")
LEFT_OUT = re.compile(
    r"(__pycache__|test|tests|idlelib|lib2to3|distutils|ensurepip|pydoc_data|tkinter|turtledemo|unittest|sqlite3|"
    r"asyncio|config-.*|dist-packages|site-packages|curses|dbm|wsgiref|xml|xmlrpc|ctypes|lib-dynload)"
)
START = '#!/bin/sh\nexec python3 /srv/engine.py "$@"\n'
ENTRYPOINT = ["/srv/start"]
ENV = ["PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"]

Tree = dict[str, tuple[int, bytes | str]]
"""Path -> mode and bytes, or mode and the target of a symbolic link."""


@cache
def root() -> bytes:
    """The tar of a root with /bin/sh and /usr/bin/python3; fails where this machine has no Debian Python."""
    tree: Tree = {"bin/busybox": (0o755, Path("/usr/bin/busybox").read_bytes()), "bin/sh": (0o777, "busybox")}
    tree |= {f"bin/{name}": (0o777, "busybox") for name in ("cat", "sleep", "echo", "nc", "env")}
    real = PYTHON.resolve()
    assert re.fullmatch(r"python3\.\d+", real.name), f"{PYTHON} is no Debian Python"
    tree |= {f"usr/bin/{real.name}": (0o755, real.read_bytes()), "usr/bin/python3": (0o777, real.name)}
    for line in subprocess.run(["ldd", str(real)], capture_output=True, text=True, check=True).stdout.splitlines():
        found = re.search(r"(/\S+) \(", line)
        if found:
            tree[found[1].lstrip("/")] = (0o755, Path(found[1]).resolve().read_bytes())
    library = Path("/usr/lib") / real.name
    for path in sorted(library.rglob("*.py")):
        if not any(LEFT_OUT.fullmatch(part) for part in path.relative_to(library).parts):
            tree[str(path).lstrip("/")] = (0o644, path.read_bytes())
    return pack(tree)


@cache
def shell_root() -> bytes:
    """The tar of a root with /bin/sh alone."""
    names = ("sh", "cat", "sleep", "echo", "nc", "env")
    tree: Tree = {"bin/busybox": (0o755, Path("/usr/bin/busybox").read_bytes())}
    return pack(tree | {f"bin/{name}": (0o777, "busybox") for name in names})


def pack(tree: Tree) -> bytes:
    """A tar with the folders that it needs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder in sorted({str(parent) for path in tree for parent in Path(path).parents} - {"."}):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for path, (mode, content) in sorted(tree.items()):
            info = tarfile.TarInfo(path)
            info.mode = mode
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@dataclass
class Stub:
    """An image: layers from the lowest, settings, and the tag under which it is saved."""

    layers: list[bytes]
    settings: dict[str, Any] = field(default_factory=dict)
    tag: str = "stub:1"
    architecture: str = "amd64"
    history: list[dict[str, Any]] | None = None

    @property
    def config(self) -> bytes:
        value = {
            "architecture": self.architecture,
            "os": "linux",
            "config": self.settings,
            "history": self.history or [{"created_by": f"layer {number}"} for number in range(len(self.layers))],
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(layer)}" for layer in self.layers]},
        }
        return json.dumps(value, sort_keys=True).encode()

    @property
    def id(self) -> str:
        return f"sha256:{sha(self.config)}"

    def archive(self, file: Path) -> Path:
        """`docker save` of it; compressed where the file's name ends in .gz."""
        names = [f"{sha(layer)}.tar" for layer in self.layers]
        name = f"{sha(self.config)}.json"
        listing = [{"Config": name, "RepoTags": [self.tag], "Layers": names}]
        tree: Tree = {name: (0o644, self.config), "manifest.json": (0o644, json.dumps(listing).encode())}
        tree |= {path: (0o644, layer) for path, layer in zip(names, self.layers, strict=True)}
        data = pack(tree)
        file.write_bytes(gzip.compress(data, 1) if file.suffix == ".gz" else data)
        return file

    def layout(self, folder: Path) -> Path:
        """An OCI layout of it."""
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)

        def put(data: bytes, kind: str) -> dict[str, Any]:
            (blobs / sha(data)).write_bytes(data)
            media = f"application/vnd.oci.image.{kind}"
            return {"mediaType": media, "digest": f"sha256:{sha(data)}", "size": len(data)}

        layers = [put(layer, "layer.v1.tar") for layer in self.layers]
        manifest = {"schemaVersion": 2, "config": put(self.config, "config.v1+json"), "layers": layers}
        index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), "manifest.v1+json")]}
        (folder / "index.json").write_text(json.dumps(index))
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return folder


def stub(
    behaviour: dict[str, Any] | None = None,
    start: str = START,
    more: Tree | None = None,
    tag: str = "stub:1",
    **settings: Any,
) -> Stub:
    """An image whose entrypoint runs the stand-in engine."""
    tree: Tree = {
        "srv/engine.py": (0o644, STUB.read_bytes()),
        "srv/behaviour.json": (0o644, json.dumps(behaviour or {}).encode()),
        "srv/start": (0o755, start.encode()),
        "tmp/.keep": (0o644, b""),
        **(more or {}),
    }
    return Stub([root(), pack(tree)], {"Entrypoint": ENTRYPOINT, "Cmd": ["serve"], "Env": ENV, **settings}, tag)


# Two tags that lied, and the submissions that never answered


VLLM = "usr/lib/python3/dist-packages/vllm"
GPU = ["CUDA_VERSION=12.4.1", "NVIDIA_REQUIRE_CUDA=cuda>=12.4"]
NGRAM = (
    "#!/bin/sh\nexec python3 -m vllm.entrypoints.openai.api_server --model /opt/ml/model --port 8080 "
    '--speculative-config \'{{"method": "ngram", "num_speculative_tokens": {k}}}\'\n'
)
SOURCES = (
    "#!/bin/sh\n. /srv/config.sh\nexec python3 -m vllm.entrypoints.openai.api_server --model /opt/ml/model --port 8080 "
    '--speculative-config "$SPECULATION"\n'
)


def lying_tag(tag: str, k: int) -> Stub:
    """An image called dflash that starts an n-gram configuration and holds no drafter."""
    return stub(start=NGRAM.format(k=k), tag=tag)


def for_another_card(library: str = "ada") -> Stub:
    """An image for a GPU whose engine was compiled for sm_89 alone (`two`: for sm_80 and sm_86)."""
    code = (STUB.parent / "cuda" / f"{library}.so").read_bytes()
    more: Tree = {f"{VLLM}/_C.abi3.so": (0o644, code), f"{VLLM}/vllm_flash_attn/_vllm_fa2_C.abi3.so": (0o644, code)}
    return stub(more=more, Env=[*ENV, *GPU])


def overridden() -> Stub:
    """An image whose environment says K 15 and whose start script sources a file that says 40."""
    told = 'SPECULATION={"method": "ngram", "num_speculative_tokens": %d}'
    config = (told % 40).replace("=", "='", 1) + "'\n"
    more: Tree = {"srv/config.sh": (0o644, f"# what takes effect\n{config}".encode())}
    return stub(start=SOURCES, more=more, Env=[*ENV, told % 15], tag="team:r7")


def entrypoint_dropped() -> Stub:
    return stub(Entrypoint=None, Cmd=["/srv/start", "serve"])


def argument_ignored() -> Stub:
    """A start script that knows no `serve`."""
    start = '#!/bin/sh\n[ $# = 0 ] && exec python3 /srv/engine.py\necho "unknown command $1" >&2\nexit 64\n'
    return stub(start=start, Cmd=[])


def flattened(engine: Any, folder: Path, changes: list[str]) -> Path:
    """`docker export | docker import` of a good image, saved."""
    with stub(tag="whole:1").archive(folder / "whole.tar").open("rb") as stream:
        engine.images.load(stream)
    container = engine.containers.create("whole:1")
    try:
        tar = b"".join(container.export())
    finally:
        container.remove()
    engine.api.import_image(src=tar, repository="flat", tag="1", changes=changes)
    file = folder / "flat.tar"
    file.write_bytes(b"".join(engine.images.get("flat:1").save(named=True)))
    return file


FAULTS: dict[str, tuple[Callable[[Any, Path], Path], str, str]] = {
    "flattened by export and import": (lambda engine, to: flattened(engine, to, []), "layers", "flattened by export"),
    "entrypoint dropped": (
        lambda _, to: entrypoint_dropped().archive(to / "i.tar"), "entrypoint", "looks for a program `serve`"),
    "`serve` ignored": (
        lambda _, to: argument_ignored().archive(to / "i.tar"), "starts", "it serves without an argument"),
    "kernels for another card": (
        lambda _, to: for_another_card().archive(to / "i.tar"), "claims", "holds sm_89: nothing that runs on 8.6"),
    "overridden by a sourced script": (
        lambda _, to: overridden().archive(to / "i.tar"), "claims", "ENV claims"),
    "tag dflash-r6v2, n-gram with K 20": (
        lambda _, to: lying_tag("team:dflash-r6v2", 20).archive(to / "i.tar"), "claims", "dflash"),
    "tag dflash-r6v12, n-gram with K 40": (
        lambda _, to: lying_tag("team:dflash-r6v12", 40).archive(to / "i.tar"), "claims", "dflash"),
}  # fmt: skip
"""What is wrong -> how a file of it is made (engine, folder), the check that stops it, words of its reason."""


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
