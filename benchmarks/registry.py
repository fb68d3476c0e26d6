"""What goes to a registry: an image, the same image again, the same with another K. Prints a section of Markdown.

    python benchmarks/registry.py                     # builds micro in a store of its own (some minutes)
    python benchmarks/registry.py --store DIR         # with a store that has it
    python benchmarks/registry.py --gib 4             # larger weights in the second part

Against Debian's `docker-registry` on this machine, over TLS with a basic login. The first part is `qdc build` and
`qdc export` as a user types them; the second has weights of random bytes, to show what size does. skopeo reads every
digest back.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

import image_fixtures  # noqa: E402
import machine  # noqa: E402
import real_registry  # noqa: E402
from registry_server import PASSWORD, USER  # noqa: E402

from qdc.formats import safetensors  # noqa: E402
from qdc.formats.ranges import FileRange  # noqa: E402
from qdc.image import export, push, registry  # noqa: E402
from qdc.image.reference import parse  # noqa: E402
from qdc.store.store import Store  # noqa: E402

LIMIT = 200_000
"""Bytes that a change of K may send."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--store", type=Path, help="a store that may have micro's stages")
    options.add_argument("--gib", type=float, default=1.0, help="size of the target's weights in the second part")
    given = options.parse_args()
    load = " ".join(f"{figure:.2f}" for figure in os.getloadavg())
    with tempfile.TemporaryDirectory(prefix="qdc-registry-") as name:
        folder = Path(name)
        with real_registry.serving(folder / "registry", "basic") as host:
            _log_in(folder, host)
            built = _built(folder, given.store or folder / "store", host)
            large = _large(folder, given.gib, host)
    head = ["image", "bytes of the image", "blobs sent", "bytes sent", "s", "MB/s"]
    print("## What a registry is sent\n\n" + "\n".join(machine.lines(f"load average when it began: {load}")))
    how = "Debian's docker-registry on loopback, TLS, basic login"
    print(f"\n`python benchmarks/registry.py --gib {given.gib:g}`; {how}.\n")
    print("\n".join(["| " + " | ".join(head) + " |", "|---" + "|---:" * 5 + "|"]))
    for row in [*built, *large]:
        rate = f"{row['sent'] / row['s'] / 1e6:.0f}" if row["sent"] > 10e6 else ""
        cells = [row["what"], f"{row['size']:,}", row["blobs"], f"{row['sent']:,}", f"{row['s']:.2f}", rate]
        print("| " + " | ".join(map(str, cells)) + " |")
    changed = [row for row in (*built, *large) if "K" in row["what"]]
    print(f"\nskopeo reads the manifest digest of each as it was sent. Limit of a change of K: {LIMIT:,} bytes.")
    return 0 if all(row["sent"] < LIMIT for row in changed) else 1


def _log_in(folder: Path, host: str) -> None:
    (folder / "docker").mkdir()
    secret = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (folder / "docker/config.json").write_text(json.dumps({"auths": {host: secret}}))
    os.environ["DOCKER_CONFIG"] = str(folder / "docker")
    os.environ["SSL_CERT_FILE"] = str(folder / "registry/tls/ca.crt")


def _built(folder: Path, store: Path, host: str) -> list[dict[str, Any]]:
    """Micro by the command line, then with another K."""
    rows = []
    for what, sets in (("micro", []), ("micro again", []), ("micro, K 6", ["--set", "serve.k=6"])):
        recipe = ["recipes/micro.yaml", "--store", str(store)]
        build = _qdc("build", *recipe, "--set", "image.base={scratch: true}", *sets)
        started = time.monotonic()
        done = _qdc("export", build["build"], f"registry:{host}/bench/micro", "--store", str(store))["pushed"]
        seconds = time.monotonic() - started
        _same(done["reference"], done["digest"])
        size = _size(Store(store), build["build"])
        rows.append({"what": what, "size": size, "blobs": done["blobs"], "sent": done["sent"], "s": seconds})
    return rows


def _size(store: Store, build: str) -> int:
    record = store.build(build)
    assert record is not None
    value = json.loads(store.read(record["image"]["artifact"], "image.json"))
    return sum(layer["size"] for layer in value["layers"])


def _large(folder: Path, gib: float, host: str) -> list[dict[str, Any]]:
    """An image of the real stages with large weights, then with another K, then as one archive file."""
    pieces = image_fixtures.Pieces(folder / "large", target=lambda place: _target(place, int(gib * 2**30)))
    images = {k: pieces.image(f"k{k}", image_fixtures.product(k=k)) for k in (7, 6)}
    held = pieces.contents(*images.values())
    rows = []
    for what, k in ((f"{gib:g} GiB of weights", 7), ("the same again", 7), ("the same, K 6", 6)):
        started = time.monotonic()
        with registry.connect(parse(f"{host}/bench/large")) as opened:
            done = push.push(images[k], held.__getitem__, opened)
        seconds = time.monotonic() - started
        _same(str(done.reference), done.digest)
        rows.append({"what": what, "size": done.image.size, "blobs": done.blobs, "sent": done.sent, "s": seconds})
    started = time.monotonic()
    image = export.export_archive(images[6], held.__getitem__, folder / "image.tar")
    row = {"what": "the same to one archive file, for comparison", "size": image.size, "blobs": "", "sent": image.size}
    return [*rows, {**row, "s": time.monotonic() - started}]


def _target(place: Path, size: int) -> Path:
    """`image_fixtures.target` with `size` random bytes of weights besides."""
    made = image_fixtures.target(place)
    file = made / "ct/model.safetensors"
    reader = FileRange(file)
    header = safetensors.read_header(reader)
    tensors = {
        name: (tensor.dtype, list(tensor.shape), safetensors.read_tensor(reader, header, name))
        for name, tensor in header.tensors.items()
    }
    tensors["model.norm.weight"] = ("BF16", [size // 2], os.urandom(size // 2 * 2))
    safetensors.write(file, tensors)
    return made


def _qdc(*words: str) -> Any:
    return json.loads(_run(*words, "--json", "--quiet"))


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "qdc", *words]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def _same(reference: str, digest: str) -> None:
    """skopeo reads the manifest that was sent."""
    login = str(Path(os.environ["DOCKER_CONFIG"]) / "config.json")
    command = ["skopeo", "--insecure-policy", "inspect", "--authfile", login, "--raw", f"docker://{reference}"]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise SystemExit(f"skopeo reads another manifest of {reference} than {digest}")


if __name__ == "__main__":
    sys.exit(main())
