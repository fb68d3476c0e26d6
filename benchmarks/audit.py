"""Measures what `qdc audit` reads and how fast, and writes its sections of docs/results/audit.md.

    registry   bytes and requests of images with 2 and 20 GB of raw weights, over loopback
    archives   raw and gzip archives against reading them
    hostile    a million members, bombs
    fuzz       tests/test_audit_safety.py with 10,000 changed images
    verdicts   every image and folder of tests/audit_fixtures: expected and found
    tools      what skopeo, syft and dive print of the same faults (QDC_TOOLS: the folder of those not on PATH)

`--only NAME` (repeatable) measures some sections; `--quick` prints a small run and writes nothing. Weights are headers
of real shapes over zeros, kept as holes in sparse files, so that the disk holds a few MB; only the gzip archive has
data, because zeros would unpack too well.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compiler")]

import audit_verdicts  # noqa: E402
import machine  # noqa: E402
from page import compose  # noqa: E402
from registry_server import OCI_CONFIG, OCI_LAYER, digest_of, serving  # noqa: E402
from sparse import Sparse, weight_layer  # noqa: E402
from test_audit_images import drafter_json, drafter_weights, recipe, target_config  # noqa: E402
from test_audit_others import COMMAND  # noqa: E402
from test_audit_safety import empty_files, one_layer  # noqa: E402
from test_formats_images import Content, make_tar, sha  # noqa: E402

PAGE = ROOT / "docs" / "results" / "audit.md"
CLAIMS = {
    "target.quantization.scheme.bits": "4",
    "target.quantization.scheme.group_size": "128",
    "target.quantization.scheme.symmetric": "true",
    "drafter.kind": "dflash",
    "drafter.swa.window": "64",
    "serve.k": "7",
}
REQUIRE = [f"{path}={value}" for path, value in CLAIMS.items()]
AUDIT = """
import json, re, sys, time
from qdc.audit.audit import audit
from qdc.audit.images import open_image
place, name, digests, *require = sys.argv[1:]
digests = json.loads(digests)
began, cpu = time.perf_counter(), time.process_time()
with open_image(place, name, digests=digests) as reader:
    report = audit(reader, require=require, digests=digests)
    files = len(reader.files())
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) // 1024
words = {row["claim"]: row["verdict"] for row in report["verdicts"]}
why = [row["evidence"][0]["text"] for row in report["verdicts"] if row["claim"] == "image.files"]
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "files": files, "words": words, "why": why,
                  "counts": report["counts"], "transfer": report["transfer"]}))
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", action="append", choices=list(SECTIONS), help="measure this section (repeatable)")
    options.add_argument("--quick", action="store_true", help="small sizes; prints, writes nothing")
    options.add_argument("--patience", type=float, default=machine.PATIENCE, help="seconds to wait for a quiet machine")
    given = options.parse_args()
    load = machine.quiet(0.0 if given.quick else given.patience)
    base = Path.home() / ".cache" / "qdc-bench"
    base.mkdir(parents=True, exist_ok=True)
    made = {}
    for name in given.only or SECTIONS:
        with tempfile.TemporaryDirectory(dir=base) as folder:
            made[name] = [*SECTIONS[name](Path(folder), given.quick), "", f"{load} {commit_line()}"]
    if given.quick:
        print("\n".join(line for lines in made.values() for line in [*lines, ""]))
    else:
        compose(PAGE, head(), made)
    return 0


def head() -> list[str]:
    return [
        "# Audit, measured",
        "",
        "Each section says what wrote it. `python benchmarks/audit.py` writes those about bytes and times.",
        "",
        *machine.lines(measured=""),
    ]


def commit_line() -> str:
    return f"Measured with {machine.commit().strip(', ')}." if machine.commit() else ""


def audit_of(place: str, name: str, digests: bool | None = None, require: list[str] | None = None) -> dict[str, Any]:
    """What an audit in a process of its own tells."""
    words = [place, name, json.dumps(digests), *(REQUIRE if require is None else require)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "compiler")}
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, *words], capture_output=True, text=True, env=environment, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def proved(answer: dict[str, Any]) -> str:
    """How many of the claims came out as proved."""
    return f"{sum(answer['words'].get(claim) == 'proved' for claim in CLAIMS)} of {len(CLAIMS)}"


# The image: an engine's command line, a target of so many bytes, a small drafter


def settings_files() -> dict[str, Content]:
    config = json.loads(target_config(128))
    config["quantization_config"]["ignore"] = ["lm_head"]
    return {
        "models/t/config.json": json.dumps(config).encode(),
        "models/d/config.json": drafter_json(recipe()),
        "models/d/model.safetensors": drafter_weights(),
        "usr/lib/python3/site-packages/vllm-0.22.1.dist-info/METADATA": b"Name: vllm\nVersion: 0.22.1\n",
    }


def documents(layers: list[tuple[str, int]]) -> tuple[bytes, dict[str, Any]]:
    """Configuration bytes and manifest for raw layers of (SHA-256, size)."""
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": COMMAND},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest, _ in layers]},
        }
    ).encode()
    listed = [{"mediaType": OCI_LAYER, "digest": f"sha256:{digest}", "size": size} for digest, size in layers]
    descriptor = {"mediaType": OCI_CONFIG, "digest": digest_of(config), "size": len(config)}
    return config, {"schemaVersion": 2, "config": descriptor, "layers": listed}


# Sections


def registry_section(folder: Path, quick: bool) -> list[str]:
    rows = []
    for gigabytes in (0.1, 0.2) if quick else (2, 20):
        layer = weight_layer(int(gigabytes * 1e9))
        small = make_tar(settings_files())
        # Nobody reads 20 GB here, so nobody misses their digest: that of the parts that are not zeros stands for it.
        digest = layer.sha256() if layer.size < 4e9 else hashlib.sha256(b"".join(layer.parts.values())).hexdigest()
        config, manifest = documents([(digest, layer.size), (sha(small), len(small))])
        with serving() as fake:
            fake.blobs |= {digest_of(config): config, f"sha256:{sha(small)}": small}
            fake.blobs[f"sha256:{digest}"] = layer  # type: ignore[assignment]
            fake.put("team/big", "v1", manifest)
            answer = audit_of("registry", f"{fake.host}/team/big:v1")
            sent = sum(request.sent for request in fake.log)
        transfer = answer["transfer"]
        rows.append(
            f"| {layer.size / 1e9:.1f} GB in {layer.files} files, {layer.tensors:,} tensors | {transfer['bytes']:,} "
            f"| {transfer['requests']} | {sent:,} | {answer['seconds']:.2f} ({answer['cpu']:.2f}) | {proved(answer)} "
            f"| {len(transfer['unverified'])} |"
        )
    return [
        "## A registry, without pulling layers",
        "",
        "An image of two raw layers (weights; settings and a small drafter) in a registry on this machine, audited",
        f"with {len(CLAIMS)} claims (bits, group, symmetric, drafter, window, K). Bytes and requests are those that",
        "the audit itself reports; `sent` is what the registry counted of its bodies. Budget: 1 MB and 2 s for 2 GB.",
        "",
        "| raw weights | bytes fetched | requests | sent | seconds (processor) | claims proved | named as unverified |",
        "|---|---:|---:|---:|---|---|---:|",
        *rows,
        "",
        "Unverified are the digests of layers that were not read whole; `--digests` reads them.",
    ]


def archives_section(folder: Path, quick: bool) -> list[str]:
    layer = weight_layer(int(1e8 if quick else 2e9))
    small = make_tar(settings_files())
    config, manifest = documents([(layer.sha256(), layer.size), (sha(small), len(small))])
    raw = folder / "raw.tar"
    write_archive(raw, config, manifest, [layer, small])
    rows = []
    for label, digests in (("all digests (default)", True), ("`--no-digests`", False)):
        best = quickest(audit_of("archive", str(raw), digests) for _ in range(3))
        read = quickest(timed(lambda: reading(raw)) for _ in range(3))
        rows.append(archive_row(f"raw, {raw.stat().st_size / 1e9:.1f} GB, {label}", best, {"SHA-256 of it": read}))
    packed, noisy = folder / "packed.tar.gz", weight_layer(int(5e7 if quick else 3e8), noise=True)
    config, manifest = documents([(noisy.sha256(), noisy.size), (sha(small), len(small))])
    write_archive(folder / "noisy.tar", config, manifest, [noisy, small])
    with packed.open("wb") as stream:
        subprocess.run(["gzip", "-1", "-c", str(folder / "noisy.tar")], stdout=stream, check=True)
    unpack = f"gzip -dc '{packed}' > /dev/null"
    runs = [
        (timed(lambda: subprocess.run(unpack, shell=True, check=True)), timed(lambda: inflated(packed)),
         audit_of("archive", str(packed), True))
        for _ in range(3)
    ]  # fmt: skip
    tool, library, best = (quickest(run[number] for run in runs) for number in range(3))
    label = f"gzip, {packed.stat().st_size / 1e9:.2f} GB of {noisy.size / 1e9:.2f}, all digests"
    rows.append(archive_row(label, best, {"`gzip -dc`": tool, "zlib": library}))
    share = 100 * library["seconds"] / best["seconds"]
    return [
        "## Archives",
        "",
        "The best of three runs each, alternating with plain reading of the same file; the file is in the page cache.",
        "By default every byte is read and held against its digest: a raw archive costs SHA-256 of each layer, and of",
        "each weight file in it, in two threads. `--no-digests` looks at headers and small files; digests are then",
        "`unread` and the exit is 3.",
        "",
        "| archive | audit, s (processor) | reading, s (processor) | claims proved | unread |",
        "|---|---|---|---|---:|",
        *rows,
        "",
        f"The compressed archive is audited at {share:.0f} % of the speed of zlib alone (target: 80 %).",
    ]


def write_archive(path: Path, config: bytes, manifest: dict[str, Any], layers: list[Any]) -> None:
    """A docker-archive, with holes where layers have them."""
    names = [f"blobs/sha256/{item['digest'][7:]}" for item in manifest["layers"]]
    name = f"blobs/sha256/{sha(config)}"
    listed = json.dumps([{"Config": name, "RepoTags": ["big:v1"], "Layers": names}]).encode()
    out = Sparse()
    for member, data in zip((name, "manifest.json", *names), (config, listed, *layers), strict=True):
        out.member(member, data)
    out.end()
    out.write(path)


def archive_row(label: str, audit: dict[str, Any], reads: dict[str, dict[str, Any]]) -> str:
    told = ", ".join(f"{read['seconds']:.2f} ({read['cpu']:.2f}) {what}" for what, read in reads.items())
    unread = audit["counts"]["unread"]
    return f"| {label} | {audit['seconds']:.2f} ({audit['cpu']:.2f}) | {told} | {proved(audit)} | {unread} |"


def quickest(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return min(runs, key=lambda run: float(run["seconds"]))


def timed(act: Callable[[], Any]) -> dict[str, Any]:
    """Seconds by the clock, and of the processor."""
    began, before = time.perf_counter(), os.times()
    act()
    seconds, after = time.perf_counter() - began, os.times()
    return {"seconds": seconds, "cpu": sum(after[:4]) - sum(before[:4])}


def reading(path: Path) -> None:
    with path.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def inflated(path: Path) -> None:
    with gzip.open(path) as stream:
        while stream.read(1 << 20):
            pass


def hostile_section(folder: Path, quick: bool) -> list[str]:
    count = 20_000 if quick else 1_000_000
    flat = empty_files(f"usr/share/{number % 97}/{number:030}" for number in range(count))
    pairs = empty_files(f"usr/{number // 2:030}/{number % 2}" for number in range(count))
    zeros = make_tar({"zeros": bytes(1 << 20)})
    bomb = subprocess.run(
        ["sh", "-c", f"head -c {1 << 26 if quick else 16 << 30} /dev/zero | gzip -9"], capture_output=True, check=True
    ).stdout
    cases = {
        f"{count:,} files in 97 folders, raw": one_layer(folder / "a", flat),
        f"{count:,} files in {count // 2:,} folders, raw": one_layer(folder / "b", pairs),
        f"{count:,} files in {count // 2:,} folders, gzip": one_layer(folder / "c", pairs, gzip.compress(pairs, 1)),
        f"a gzip layer of {len(bomb) / 1e6:.0f} MB that unpacks to {1 << 26 if quick else 16 << 30:,} zeros": one_layer(
            folder / "d", zeros, bomb
        ),
    }
    rows = []
    for name, path in cases.items():
        answer = audit_of("oci", str(path), None, [])
        why = answer["why"][0].replace("|", "/") if answer["why"] else f"{answer['files']:,} files listed"
        rows.append(f"| {name} | {answer['peak']} | {answer['cpu']:.1f} | {answer['seconds']:.1f} | {why[:160]} |")
    return [
        "## Hostile sizes",
        "",
        "Peak memory and time of the whole audit, each in a process of its own. Limit: 500 MB.",
        "",
        "| image | peak, MB | processor, s | clock, s | what it says |",
        "|---|---:|---:|---:|---|",
        *rows,
    ]


def fuzz_section(folder: Path, quick: bool) -> list[str]:
    examples, report = (100 if quick else 10_000), folder / "report.json"
    environment = {**os.environ, "QDC_FUZZ": str(examples), "QDC_FUZZ_REPORT": str(report)}
    environment["PYTHONPATH"] = str(ROOT / "compiler")
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_audit_safety.py", "-k", "changed_images"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    return fuzz_lines(examples, json.loads(report.read_text()) if report.is_file() else {}, done.stdout[-3000:])


def fuzz_lines(examples: int, told: dict[str, Any], output: str = "") -> list[str]:
    lines = ["## Fuzz", "", f"`QDC_FUZZ={examples} pytest tests/test_audit_safety.py -k changed_images`: small images"]
    lines += ["(layout, archive, each also gzip, docker-archive, model folder) changed in blobs, tar headers,"]
    lines += [
        "documents, weights and configuration, each through the whole audit: a report, or an error with its place."
    ]
    if not told:
        return [*lines, "", "FAILED:", "", "```", output, "```"]
    return [
        *lines,
        "",
        f"{told['images']:,} images in {told['seconds']:.0f} s; none ended otherwise. The slowest took "
        f"{told['slowest']:.2f} s of processor time.",
        "",
        "| outcome | images |",
        "|---|---:|",
        *(f"| {word} | {count:,} |" for word, count in sorted(told["outcomes"].items(), key=lambda item: -item[1])),
    ]


SECTIONS: dict[str, Callable[[Path, bool], list[str]]] = {
    "registry": registry_section,
    "archives": archives_section,
    "hostile": hostile_section,
    "fuzz": fuzz_section,
    "verdicts": audit_verdicts.verdicts_section,
    "tools": audit_verdicts.tools_section,
}

if __name__ == "__main__":
    sys.exit(main())
