"""Images that qdc did not build: what is found is recorded, what a script decides is unread, nothing crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import models
from test_audit_images import drafter_json as drafter_config_bytes
from test_audit_images import drafter_weights, named, recipe, row, target_config, target_weights
from test_formats_images import Content, layout_blobs, make_config, make_tar, write_layout

from qdc.audit.audit import audit, exit_code
from qdc.audit.images import open_image
from qdc.formats import oci, safetensors

FILES: dict[str, Content] = {
    "models/t/config.json": target_config(),
    "models/t/model.safetensors": target_weights(),
    "models/d/config.json": drafter_config_bytes(recipe()),
    "models/d/model.safetensors": drafter_weights(),
    "usr/lib/python3/site-packages/vllm-0.22.1.dist-info/METADATA": b"Name: vllm\nVersion: 0.22.1\n",
}
SPECULATION = {"method": "dflash", "model": "/models/d", "num_speculative_tokens": 7}
COMMAND = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/t", "--max-model-len=4096",
           "--speculative-config", json.dumps(SPECULATION)]  # fmt: skip


def report_of(
    folder: Path, files: dict[str, Content], settings: dict[str, Any], tag: str | None = None, **options: Any
) -> dict[str, Any]:
    layers = [make_tar(files)]
    path = write_layout(folder, layout_blobs(make_config(layers, settings), layers, tag))
    return audit(oci.open_image(path), **options)


def test_an_engine_started_by_its_own_command_line_is_read(tmp_path: Path) -> None:
    report = report_of(tmp_path, FILES, {"Entrypoint": COMMAND}, require=["serve.k=7", "drafter.swa.window=64"])
    for claim in ("serve.k", "drafter.swa.window"):
        assert row(report, claim)["verdict"] == "proved"
    found = {claim: row(report, claim)["value"] for claim in named(report, "recorded")}
    assert found["serve.max_model_len"] == 4096
    assert found["target.quantization.scheme.group_size"] == 32
    assert found["drafter.kind"] == "dflash"
    assert found["serve.engine.vllm"] == "0.22.1"
    assert named(report, "refuted") == []


def test_a_start_that_is_not_in_the_image_leaves_settings_unread(tmp_path: Path) -> None:
    report = report_of(tmp_path, FILES, {"Entrypoint": ["/start.sh"], "Cmd": ["serve"]}, require=["serve.k=7"])
    assert row(report, "serve.k")["verdict"] == "unread"
    assert "cannot decide: /start.sh is not in the image" in row(report, "serve.k")["evidence"][0]["text"]
    assert exit_code(report) == 3
    assert row(report, "target.quantization.scheme.bits")["value"] == 4


@pytest.mark.parametrize("tag", ["team:dflash16k15-r6", "team:dflash-r6v2"])
def test_a_tag_that_says_dflash_over_an_image_without_a_drafter_is_refuted(tag: str, tmp_path: Path) -> None:
    files = {path: data for path, data in FILES.items() if not path.startswith("models/d")}
    report = report_of(tmp_path, files, {"Entrypoint": ["/start.sh"]}, tag)
    assert "drafter.kind" in named(report, "refuted")
    assert exit_code(report) == 1


@pytest.mark.parametrize("kind", ["dflash", "ngram"])
def test_drafter_weights_do_not_prove_that_a_script_uses_them(kind: str, tmp_path: Path) -> None:
    settings = {"Entrypoint": ["/start.sh"]}
    report = report_of(tmp_path / "a", FILES, settings, require=[f"drafter.kind={kind}"])
    assert row(report, "drafter.kind")["verdict"] == "unread"
    files = {path: data for path, data in FILES.items() if not path.startswith("models/d")}
    report = report_of(tmp_path / "b", files, settings, require=[f"drafter.kind={kind}"])
    assert row(report, "drafter.kind")["verdict"] == ("refuted" if kind == "dflash" else "unread")


def test_a_contradiction_that_nobody_claims_is_unread(tmp_path: Path) -> None:
    config = json.loads(target_config())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 128
    report = report_of(tmp_path, FILES | {"models/t/config.json": json.dumps(config).encode()}, {"Entrypoint": COMMAND})
    found = row(report, "target.quantization.scheme.group_size")
    assert found["verdict"] == "unread"
    assert "config.json says group_size 128, the tensors say 32" in [item["text"] for item in found["evidence"]]


def test_commands_can_name_a_place_that_stays(tmp_path: Path) -> None:
    layers = [make_tar(FILES)]
    path = write_layout(tmp_path, layout_blobs(make_config(layers, {"Entrypoint": COMMAND}), layers))
    with open_image("oci", str(path), shown="build 7", prints="image") as reader:
        report = audit(reader)
    assert report["where"] == "build 7"
    command = row(report, "serve.engine.vllm")["evidence"][0]["command"]
    assert command.startswith("cat image/blobs/sha256/")


def test_an_engine_told_ngram_refutes_a_dflash_tag_though_the_weights_are_there(tmp_path: Path) -> None:
    words = [*COMMAND[:-1], json.dumps({"method": "ngram", "num_speculative_tokens": 4})]
    report = report_of(tmp_path, FILES, {"Entrypoint": words}, "team:dflash-r6v2")
    assert row(report, "drafter.kind")["value"] == "ngram"
    assert row(report, "drafter.kind")["verdict"] == "refuted"


def test_dflash_without_a_drafter_where_the_engine_looks_is_refuted(tmp_path: Path) -> None:
    words = [*COMMAND[:-1], json.dumps({**SPECULATION, "model": "/models/none"})]
    report = report_of(tmp_path, FILES, {"Entrypoint": words}, require=["drafter.kind=dflash"])
    assert row(report, "drafter.kind")["verdict"] == "refuted"


@pytest.mark.parametrize(
    "settings", [{}, {"Entrypoint": None, "Cmd": None}, {"Entrypoint": "x", "Cmd": [1]}, {"Env": 5}]
)
def test_an_empty_image_is_unread_not_a_crash(settings: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(tmp_path, {"a": b""}, settings)
    assert exit_code(report) == 3
    assert named(report, "refuted") == []


def test_malformed_weights_are_unread_with_the_reason(tmp_path: Path) -> None:
    files = FILES | {"models/t/model.safetensors": target_weights()[:-1]}
    report = report_of(tmp_path, files, {"Entrypoint": COMMAND}, require=["target.quantization.scheme.bits=4"])
    found = row(report, "target.quantization.scheme.bits")
    assert found["verdict"] == "unread"
    assert "tensors end at" in found["evidence"][0]["text"]


def test_hidden_weights_are_shown(tmp_path: Path) -> None:
    layers = [make_tar(FILES), make_tar({"models/t/model.safetensors": target_weights(64)})]
    path = write_layout(tmp_path, layout_blobs(make_config(layers, {"Entrypoint": COMMAND}), layers))
    report = audit(oci.open_image(path), require=["target.quantization.scheme.group_size=32"])
    assert row(report, "target.quantization.scheme.group_size")["verdict"] == "refuted"
    assert row(report, "image.hidden")["value"] == ["models/t/model.safetensors"]


@pytest.mark.parametrize(
    ("layer", "verdict"), [(models.LAYERS, "proved"), (0, "refuted"), (models.LAYERS + 1, "refuted")]
)
def test_a_drafters_ignore_list_counts_its_layers_on_from_the_targets(tmp_path: Path, layer: int, verdict: str) -> None:
    """So the engine names them; layer 0 of the file is stored in BF16."""
    files = models.drafter(layers=2, window=None)
    size = int.from_bytes(files["model.safetensors"][:8], "little")
    header = json.loads(files["model.safetensors"][8 : 8 + size])
    data = files["model.safetensors"][8 + size :]
    tensors = {
        name: (row["dtype"], row["shape"], data[slice(*row["data_offsets"])])
        for name, row in header.items()
        if name != "__metadata__" and not name.startswith("layers.0.mlp.down_proj.")
    }
    tensors |= models.plain("layers.0.mlp.down_proj", *models.LINEARS["mlp.down_proj"])
    pattern = rf"re:.*layers\.{layer}\.mlp\.down_proj$"
    config = json.loads(files["config.json"])
    config["quantization_config"]["ignore"].append(pattern)
    held = {
        "models/d/config.json": json.dumps(config).encode(),
        "models/d/model.safetensors": safetensors.dumps(tensors),
    }
    report = report_of(
        tmp_path, FILES | held, {"Entrypoint": COMMAND}, require=[f"drafter.ptq.ignore={json.dumps([pattern])}"]
    )
    assert row(report, "drafter.ptq.ignore")["verdict"] == verdict, row(report, "drafter.ptq.ignore")
