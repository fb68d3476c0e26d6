"""Hostile images: an error that names the place, or a report; in bounded time and memory, never another exception.

300 changed images; `QDC_FUZZ=10000` for more, and `QDC_FUZZ_REPORT=FILE` for what came of them.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from test_audit_images import (
    MANIFEST,
    SERVE,
    drafter_json,
    drafter_weights,
    named,
    recipe,
    row,
    target_config,
    target_weights,
    untouched,
)
from test_formats_images import Content, layout_blobs, make_config, make_tar, sha, write_layout

from qdc.audit.audit import audit
from qdc.audit.images import open_image
from qdc.audit.text import render_text
from qdc.core.errors import QdcError
from qdc.formats import oci, overlay, ranges, tar
from qdc.formats.ranges import BytesRange

EXAMPLES = int(os.environ.get("QDC_FUZZ", "300"))
SECONDS = 20.0
"""Of one image, on any machine; a real one of this size takes 0.03."""
CLAIMS = ["serve.k=7", "drafter.kind=dflash", "target.quantization.scheme.bits=4", "drafter.swa.window=64"]
WAYS = ("outer", "layer", "header", "document", "weights", "file", "extra", "config")
FORMS = ("oci", "oci-gzip", "archive", "archive-gzip", "docker-archive", "folder")
NUMBERS = (0, 1, 7, 255, 256, 511, 512, 1 << 31, (1 << 32) - 1, 1 << 33, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)
TEXTS = [
    "..", "../../etc/passwd", "/etc/shadow", "a/../../b", ".wh.", ".wh..wh..opq", ".wh...", "é" * 60, "\udcff", "a\nb",
    "x" * 99, "/" * 90, "./././.", "opt", "opt/models/target/model.safetensors", MANIFEST, SERVE, "blobs/sha256/x",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1 << 70, 1e308, "", "x" * 5000, [], {}, [[]], {"": {}}, "sha256:" + "0" * 64, "../../x",
    ["/bin/sh", "-c", "exit 1"], {"manifests": []}, "re:(a+)+$", "\x00", "/opt/models/drafter", [None], [{}],
]  # fmt: skip


# Changes at random, in the places where they reach furthest


def flipped(random_: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut, doubled, moved or put in."""
    raw = bytearray(data)
    for _ in range(random_.randint(1, 6)):
        at, kind = random_.randrange(len(raw) + 1), random_.randrange(6)
        if kind == 0 and raw:
            raw[at % len(raw)] ^= 1 << random_.randrange(8)
        elif kind == 1:
            raw[at : at + 8] = struct.pack("<Q", random_.choice(NUMBERS))
        elif kind == 2:
            del raw[at : at + random_.choice((1, 3, 512, 4096))]
        elif kind == 3:
            raw[at:at] = raw[at : at + random_.choice((1, 512, 2048))]
        elif kind == 4:
            del raw[at : len(raw) if random_.random() < 0.3 else at + 1]
        else:
            raw[at : at + 4] = bytes(random_.randrange(256) for _ in range(4))
    return bytes(raw)


def header_changed(random_: random.Random, data: bytes) -> bytes:
    """A field of one tar header changed, with the checksum made right again."""
    try:
        found = tar.members(BytesRange(data))
    except QdcError:
        return data
    if not found:
        return data
    raw, member = bytearray(data), random_.choice(found)
    at = member.offset - 512
    field, size = random_.choice(((0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
    if field == 156:
        raw[at + 156] = random_.choice(b"01234567xgLKSX\0V\x7f")
    elif field in (100, 124):
        number = random_.choice(NUMBERS)
        octal = b"%0*o\0" % (size - 1, number)
        text = octal if len(octal) == size else b"\x80" + number.to_bytes(12, "big")[1 - size :]
        raw[at + field : at + field + size] = text[:size].ljust(size, b"\0")
    else:
        text = random_.choice(TEXTS).encode("utf-8", "surrogateescape")[:size]
        raw[at + field : at + field + size] = text.ljust(size, b"\0")
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    return bytes(raw)


def document_changed(random_: random.Random, data: bytes) -> bytes:
    """A value in a JSON document changed, or its text."""
    try:
        value = json.loads(data)
    except ValueError:
        return flipped(random_, data)
    if random_.random() < 0.2:
        return flipped(random_, data)
    spots: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        here = todo.pop()
        for key, inner in here.items() if isinstance(here, dict) else enumerate(here):
            spots.append((here, key))
            todo += [inner] if isinstance(inner, dict | list) else []
    for section, key in random_.sample(spots, min(len(spots), random_.randint(1, 3))):
        section[key] = random_.choice(VALUES)
    return json.dumps(value).encode()


def weights_changed(random_: random.Random, data: bytes) -> bytes:
    """The header of a safetensors file changed: its length, its text, or a value in it."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    if random_.random() < 0.3:
        return struct.pack("<Q", random_.choice(NUMBERS)) + header + rest
    header = document_changed(random_, header)
    return struct.pack("<Q", len(header) if random_.random() < 0.9 else random_.choice(NUMBERS)) + header + rest


def extra_members(random_: random.Random) -> bytes:
    """Members that nobody packs by accident, without the end of an archive."""
    buffer = io.BytesIO()
    format_ = random_.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as made:
        for _ in range(random_.randint(1, 4)):
            info = tarfile.TarInfo(random_.choice(TEXTS))
            info.type = random_.choice((b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"S"))
            info.linkname = random_.choice([*TEXTS, "a", "b"])
            if random_.random() < 0.3:
                info.pax_headers = {random_.choice(("size", "path", "linkpath", "GNU.sparse.name")): random_.choice(
                    ("-1", "9" * 30, "..", "x" * 3000, "a", "0"))}  # fmt: skip
            made.addfile(info)
    return buffer.getvalue().rstrip(b"\0") + bytes(512)


START = b"""#!/bin/bash
set -e
source /opt/config.sh
export K="${K:-7}" MODEL=${MODEL:-/models/t}
[ -f "$MODEL/config.json" ] || exit 1
cat > /tmp/spec.json <<END
{"method": "dflash", "model": "/models/d", "num_speculative_tokens": $K}
END
exec vllm serve "$MODEL" --max-model-len 4096 --speculative-config "$(cat /tmp/spec.json)" "$@"
"""
SITE = "usr/lib/python3/site-packages"


def library() -> bytes:
    """An ELF file with a section of GPU code of which only the header is one."""
    names, code = b"\0.nv_fatbin\0.shstrtab\0", struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64).ljust(80, b"\1")
    at = 64 + len(code) + len(names)
    head = b"\x7fELF\2\1\1".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, 3, 2)
    sections = [(0, 0, 0, 0), (1, 1, 64, len(code)), (12, 3, 64 + len(code), len(names))]
    table = [
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, where, size, 0, 0, 1, 0) for name, kind, where, size in sections
    ]
    return head + code + names + b"".join(table)


@functools.cache
def foreign() -> tuple[list[dict[str, Content]], dict[str, Any]]:
    """An image as others make them: scripts, packages, a library, settings that a later layer hides."""
    record = b"vllm/__init__.py,sha256=AAAA,1\nvllm/_C.abi3.so,,\n"
    layers: list[dict[str, Content]] = [
        {"bin/bash": b"\x7fELF", "opt/config.sh": b"K=15\n", "etc/os-release": b"ID=debian\n"},
        {f"{SITE}/vllm-0.22.1.dist-info/METADATA": b"Name: vllm\nVersion: 0.22.1\n",
         f"{SITE}/vllm-0.22.1.dist-info/RECORD": record, f"{SITE}/vllm/__init__.py": b"",
         f"{SITE}/plug-1.dist-info/entry_points.txt": b"[vllm.general_plugins]\nplug = plug:register\n",
         f"{SITE}/vllm/_C.abi3.so": library()},
        {"models/t/config.json": target_config(), "models/t/model.safetensors": target_weights(),
         "models/t/generation_config.json": b'{"eos_token_id": [2, 3]}', "models/t/tokenizer_config.json": b"{}",
         "models/t/tokenizer.json": b'{"model": {"vocab": {"a": 0}}, "added_tokens": []}',
         "models/t/chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"},
        {"models/d/config.json": drafter_json(recipe()), "models/d/model.safetensors": drafter_weights()},
        {"opt/config.sh": b"export K=7 VLLM_USE_V1=1\n", "start.sh": START, "models/t/.wh.tokenizer.json": b""},
    ]  # fmt: skip
    return layers, {"Entrypoint": ["/bin/bash", "/start.sh"], "Cmd": ["--port", "8000"], "Env": ["K=9", "PATH=/bin"]}


@functools.cache
def own() -> tuple[list[dict[str, Content]], dict[str, Any]]:
    return untouched().layers, untouched().settings


def changed_image(random_: random.Random, folder: Path) -> tuple[str, str]:
    """An image in one of the forms, changed in one to three ways; where it is."""
    layers, start = random_.choice((own, foreign))()
    files = [dict(layer) for layer in layers]
    form, way = random_.choice(FORMS), random_.choice(WAYS)
    if way in ("document", "weights", "file"):
        suffix = {"document": ".json", "weights": ".safetensors", "file": ""}[way]
        found = [(n, p) for n, layer in enumerate(files) for p, data in layer.items() if isinstance(data, bytes)]
        number, path = random_.choice([(n, p) for n, p in found if p.endswith(suffix)])
        change = {"document": document_changed, "weights": weights_changed, "file": flipped}[way]
        files[number][path] = change(random_, bytes(files[number][path]))  # type: ignore[arg-type]
    if form == "folder":
        return "folder", str(changed_folder(random_, folder, files, way))
    tars = [make_tar(layer) for layer in files]
    number = random_.randrange(len(tars))
    if way in ("layer", "header"):
        tars[number] = (flipped if way == "layer" else header_changed)(random_, tars[number])
    elif way == "extra":
        at = random_.choice((0, len(tars[number].rstrip(b"\0")) // 512 * 512 + 512))
        tars[number] = tars[number][:at] + extra_members(random_) + tars[number][at:]
    config = make_config(tars, start)
    if way == "config":
        config = document_changed(random_, config)
    return written(random_, folder, form, config, tars, outer=way == "outer")


def changed_folder(random_: random.Random, folder: Path, files: list[dict[str, Content]], way: str) -> Path:
    found = {
        path.removeprefix("opt/")[7:].replace("t/", "target/", 1) if path.startswith("models/t/") else
        path.removeprefix("opt/")[7:]: data
        for layer in files for path, data in layer.items() if path.removeprefix("opt/").startswith("models/")
    }  # fmt: skip
    data = {path: data for path, data in found.items() if isinstance(data, bytes)}
    if way not in ("document", "weights", "file"):
        path = random_.choice(sorted(data))
        data[path] = flipped(random_, data[path])
    root = write_layout(folder / "m", data)
    if random_.random() < 0.2:
        (root / "target/more.safetensors").symlink_to(random_.choice(("/etc/passwd", "model.safetensors", "more", ".")))
    return root


def written(
    random_: random.Random, folder: Path, form: str, config: bytes, tars: list[bytes], outer: bool
) -> tuple[str, str]:
    pack = form == "oci-gzip" or random_.random() < 0.2
    blobs = layout_blobs(config, tars, "n:t", pack)
    stored = [gzip.compress(layer, 1, mtime=0) if pack else layer for layer in tars]
    path = folder / "image"
    if form.startswith("oci"):
        if outer:
            name = random_.choice(sorted(blobs))
            change = document_changed if random_.random() < 0.5 else flipped
            blobs[name] = change(random_, blobs[name])
        return "oci", str(write_layout(path, blobs))
    layers = [f"blobs/sha256/{sha(layer)}" for layer in stored]
    listed = [{"Config": f"blobs/sha256/{sha(config)}", "RepoTags": ["n:t"], "Layers": layers}]
    if form == "docker-archive":
        del blobs["index.json"], blobs["oci-layout"]
    blobs["manifest.json"] = json.dumps(listed).encode()
    if outer and random_.random() < 0.5:
        name = random_.choice([name for name in blobs if not name.startswith("blobs/")])
        blobs[name] = document_changed(random_, blobs[name])
        outer = False
    data = make_tar(dict(blobs))
    if outer:
        data = (header_changed if random_.random() < 0.5 else flipped)(random_, data)
    if form == "archive-gzip":
        data = gzip.compress(data, 1, mtime=0)
        data = flipped(random_, data) if outer and random_.random() < 0.5 else data
    path.write_bytes(data)
    return "archive", str(path)


def outcome(place: str, name: str) -> str:
    """What an audit comes to: the id of an error, or the word that decides a report. Anything else is a failure."""
    try:
        with open_image(place, name) as reader:
            report = audit(reader, require=CLAIMS)
    except QdcError as error:
        assert error.message and error.exit_code == 4, error.id
        str(error).encode()
        return error.id
    json.dumps(report, allow_nan=False).encode()
    render_text(report).encode()
    assert sum(report["counts"].values()) == len(report["verdicts"])
    assert all(row["evidence"] or row["verdict"] == "recorded" for row in report["verdicts"])
    return "refuted" if report["counts"]["refuted"] else "unread" if report["counts"]["unread"] else "proved"


def test_changed_images_are_reported_or_refused(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    slowest, began = 0.0, time.monotonic()
    for seed in range(EXAMPLES):
        random_ = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        place, name = changed_image(random_, folder)
        before = time.process_time()
        try:
            found[outcome(place, name)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {place}:{name}") from error
        slowest = max(slowest, time.process_time() - before)
        assert slowest < SECONDS, f"seed {seed}"
        shutil.rmtree(folder)
    assert found["refuted"] > EXAMPLES // 10 and sum(found.values()) == EXAMPLES
    if report := os.environ.get("QDC_FUZZ_REPORT"):
        told = {"images": EXAMPLES, "seconds": time.monotonic() - began, "slowest": slowest, "outcomes": dict(found)}
        Path(report).write_text(json.dumps(told))


# What exhausts readers


def one_layer(folder: Path, layer: bytes, stored: bytes | None = None) -> Path:
    """A layout of one layer; `stored`: its blob, if it is not the layer itself."""
    blobs = layout_blobs(make_config([layer]), [stored or layer])
    return write_layout(folder, blobs)


def said(path: Path, **options: Any) -> str:
    """What `image.files` says of an image of one layer."""
    with open_image("oci", str(path), **options) as reader:
        report = audit(reader)
    found = row(report, "image.files")
    assert found["verdict"] == "unread"
    return str(found["evidence"][0]["text"])


def pax(name: str, records: dict[str, str]) -> bytes:
    info = tarfile.TarInfo(name)
    info.pax_headers = records
    return info.tobuf(tarfile.PAX_FORMAT)


def special(kind: bytes, name: str, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info.tobuf(tarfile.GNU_FORMAT)


GLOBAL = tarfile.TarInfo.create_pax_global_header({"path": "opt/qdc/manifest.json"})
HOSTILE = {
    "a path that leaves the root": (special(b"0", "a/../../etc/passwd"), "leaves its root"),
    "an escaping hard link": (special(b"1", "a", "../../etc/passwd"), "leaves its root"),
    "a hard link to nothing": (special(b"1", "a", "b"), "is not there"),
    "links in a circle": (special(b"2", "a", "b") + special(b"2", "b", "a") + special(b"0", "a/x"), "too many links"),
    "a path of many parts": (pax("x", {"path": "a/" * 4000}), "too long"),
    "a PAX header of many MB": (pax("x", {"comment": "x" * (3 << 20)}), "extension header of"),
    "a PAX size that is none": (pax("x", {"size": "-5"}), "PAX size"),
    "a file larger than its archive": (pax("x", {"size": str(1 << 50)}), "but it ends at"),
    "a global header that renames": (GLOBAL, "global header sets path"),
    "a sparse file": (pax("GNUSparseFile.0/f", {"GNU.sparse.major": "1", "GNU.sparse.name": "f"}), "sparse"),
    "half a header": (b"x" * 100, "half a header"),
    "an unknown type": (special(b"V", "label"), "unknown type"),
}


@pytest.mark.parametrize("data", [b"x" * 100, b"# qdc\n\nOne recipe in, one image out. " * 40])
def test_a_file_of_another_kind_is_said_to_be_no_tar(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(data)
    with pytest.raises(QdcError, match=r"README\.md: not a tar"):
        open_image("archive", str(tmp_path / "README.md")).__enter__()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_named_with_their_layer(name: str, tmp_path: Path) -> None:
    data, why = HOSTILE[name]
    layer = make_tar({"first": b"1"}).rstrip(b"\0")
    layer = layer.ljust(-(-len(layer) // 512) * 512, b"\0") + data
    layer += bytes(1024) if len(data) % 512 == 0 else b""
    text = said(one_layer(tmp_path, layer))
    assert why in text
    assert f"sha256:{sha(layer)}" in text or name == "a sparse file"


def test_devices_and_links_out_of_the_image_show_nothing(tmp_path: Path) -> None:
    members = special(b"3", "dev/sda") + special(b"6", "pipe") + special(b"2", "opt/qdc/manifest.json", "/etc/shadow")
    with open_image("oci", str(one_layer(tmp_path, members + bytes(1024)))) as reader:
        assert reader.files() == {} and reader.cuts == []
        assert reader.find("opt/qdc/manifest.json") is None
        audit(reader)


JSONS = ["[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, "[" + "[]," * 1_500_000 + "1]", "9" * 9000]


@pytest.mark.parametrize("text", JSONS, ids=range(len(JSONS)))
def test_json_that_is_deep_or_wide_is_refused(text: str, tmp_path: Path) -> None:
    layers = [make_tar({SERVE: text.encode()})]
    path = write_layout(tmp_path, layout_blobs(make_config(layers), layers))
    report = audit(oci.open_image(path), require=["serve.k=1"])
    assert row(report, "serve.k")["verdict"] == "unread"


@pytest.mark.parametrize(
    "header",
    [b"", b"{}", b"[1]", b"{" * 9999, b'{"a":{"dtype":"F32","shape":[99999999999,9],"data_offsets":[0,4]}}',
     b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', b'{"a":1,"a":2}', b'{"__metadata__":{"a":1}}', b"\xff"],
)  # fmt: skip
@pytest.mark.parametrize("length", [None, 1 << 63, 7])
def test_malformed_weights_name_their_file(header: bytes, length: int | None, tmp_path: Path) -> None:
    data = struct.pack("<Q", len(header) if length is None else length) + header + bytes(4)
    files: dict[str, Content] = {"m/config.json": target_config(), "m/model.safetensors": data}
    layers = [make_tar(files)]
    path = write_layout(tmp_path, layout_blobs(make_config(layers), layers))
    report = audit(oci.open_image(path), require=["target.quantization.scheme.bits=4"])
    found = row(report, "target.quantization.scheme.bits")
    assert found["verdict"] in ("unread", "refuted")
    assert "model.safetensors" in str(found["evidence"]) or "no module is stored packed" in str(found["evidence"])


def test_an_image_of_too_many_layers_is_refused(tmp_path: Path) -> None:
    layer = make_tar({"a": b""})
    path = write_layout(tmp_path, layout_blobs(make_config([layer] * 300), [layer] * 300))
    with pytest.raises(QdcError, match="layers"):
        oci.open_image(path)


def test_a_gzip_bomb_stops_where_the_allowance_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges.Allowance, "FREE", 1 << 20)
    inner = make_tar({"zeros": bytes(32 << 20)})
    layer = one_layer(tmp_path / "a", inner, gzip.compress(inner, 9))
    for digests in (True, False):
        assert "unpacks to more than" in said(layer, digests=digests)
    archive = tmp_path / "b.tar.gz"
    archive.write_bytes(gzip.compress(make_tar(dict(layout_blobs(make_config([inner]), [inner]))), 9))
    with pytest.raises(QdcError, match=r"b\.tar\.gz: unpacks to more than"), open_image("archive", str(archive)):
        pass


def test_names_and_members_have_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_tar({f"d/{number}": b"" for number in range(300)})
    monkeypatch.setattr(tar, "MAX_MEMBERS", 200)
    assert "more than 200 members" in said(one_layer(tmp_path / "a", layer))
    monkeypatch.setattr(tar, "MAX_MEMBERS", 1000)
    monkeypatch.setattr(tar, "MAX_TEXT", 1000)
    assert "of names" in said(one_layer(tmp_path / "b", layer))


def test_links_and_whiteouts_that_take_long_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "MAX_STEPS", 5000)
    members = special(b"2", "l", "a/b/c/" + "../c/" * 200)
    members += b"".join(special(b"0", f"l/{number}/x") for number in range(300))
    assert "take too long" in said(one_layer(tmp_path, members + bytes(1024)))


MEASURE = """
import re, sys, time
from qdc.audit.audit import audit
from qdc.audit.images import open_image
began = time.process_time()
with open_image("oci", sys.argv[1]) as reader:
    report = audit(reader)
    count = len(reader.files())
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(count, round(peak), time.process_time() - began)
"""


def measured(path: Path) -> tuple[int, int, float]:
    """Files seen, peak MB and seconds of processor time of an audit in a process of its own."""
    out = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True).stdout
    count, peak, seconds = out.split()
    return int(count), int(peak), float(seconds)


def empty_files(names: Iterable[str]) -> bytes:
    """A tar of empty files, made faster than by tarfile."""
    blank = bytearray(special(b"0", ""))
    blank[148:156] = b" " * 8
    rest, rest_sum = bytes(blank[100:]), sum(blank[100:])
    parts = []
    for name in names:
        field = name.encode().ljust(100, b"\0")
        parts += [field, rest[:48], b"%06o\0 " % (sum(field) + rest_sum), rest[56:]]
    return b"".join(parts) + bytes(1024)


def test_many_entries_take_little_memory(tmp_path: Path) -> None:
    """100,000 here; benchmarks/audit.py measures a million."""
    count = 100_000
    blank = measured(one_layer(tmp_path / "a", make_tar({"a": b""})))[1]
    layer = empty_files(f"usr/share/{number % 97}/{number:030}" for number in range(count))
    files, peak, seconds = measured(one_layer(tmp_path / "b", layer))
    assert files == count
    assert (peak - blank) * 10 + blank < 500
    assert seconds < 60


def test_a_model_folder_of_links_and_pipes_ends(tmp_path: Path) -> None:
    root = tmp_path / "m"
    (root / "deep").mkdir(parents=True)
    (root / "config.json").write_bytes(target_config())
    (root / "model.safetensors").write_bytes(target_weights())
    (root / "deep/up").symlink_to("..")
    (root / "out.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe.safetensors")
    with open_image("folder", str(root)) as reader:
        report = audit(reader, require=["target.quantization.scheme.bits=4"])
        assert sorted(reader.files()) == ["config.json", "model.safetensors"]
    told = str(row(report, "image.files")["evidence"])
    assert "out.safetensors" in told and "pipe.safetensors" in told and "deep/up" in told
    assert named(report, "refuted") == []


@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing", "text"])
def test_what_is_no_image_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("hello")
    with pytest.raises(QdcError) as caught, open_image("archive", str(path)):
        pass
    assert caught.value.exit_code == 4 and "x" in str(caught.value)


def test_nothing_of_an_image_is_imported_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def boom(*_: Any, **__: Any) -> Any:
        raise AssertionError("executed")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, boom)
    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, boom)
    monkeypatch.setattr(os, "system", boom)
    layers = [make_tar({"m/pytorch_model.bin": b"\x80\x04.", "m/config.json": b"{}", "usr/bin/python3": b"\x7fELF",
                        "usr/lib/python3/site-packages/sitecustomize.py": b"raise SystemExit"})]  # fmt: skip
    path = write_layout(tmp_path, layout_blobs(make_config(layers, {"Entrypoint": ["/usr/bin/python3"]}), layers))
    with open_image("oci", str(path)) as reader:
        audit(reader, require=CLAIMS)
