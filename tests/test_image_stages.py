"""The image's stages: what lies in which layer, what changes with what, and that nothing else enters."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import image_fixtures as fixtures
import pytest

from qdc.core.errors import QdcError
from qdc.core.files import sha256_bytes
from qdc.formats.dflash import read_drafter_config
from qdc.image.layers import read_image
from qdc.stages import base_image, image, layer


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> fixtures.Pieces:
    return fixtures.Pieces(tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def first(pieces: fixtures.Pieces) -> Path:
    return pieces.image("first")


def files_of(pieces: fixtures.Pieces, folder: Path) -> dict[str, dict[str, bytes]]:
    """Layer role -> path -> content."""
    found = {}
    contents = pieces.contents(folder)
    described = read_image(folder)
    for part in described.layers:
        data = b"".join(described.chunks(part, contents.__getitem__))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            found[part.role] = {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}  # type: ignore[union-attr]
    return found


def test_weight_layers_hold_only_safetensors_and_others_hold_none(pieces: fixtures.Pieces, first: Path) -> None:
    layers = files_of(pieces, first)
    assert list(layers) == [
        "base",
        "runtime packages",
        "serving code",
        "target weights",
        "drafter weights",
        "model files",
        "configuration",
    ]
    assert list(layers["target weights"]) == ["opt/models/target/model.safetensors"]
    assert list(layers["drafter weights"]) == ["opt/models/drafter/model.safetensors"]
    others = [path for role, files in layers.items() if "weights" not in role for path in files]
    assert not [path for path in others if path.endswith(".safetensors")]
    assert len(others) == len(set(others))
    assert "opt/qdc/serving/launcher.py" in layers["serving code"]
    assert "opt/models/target/tokenizer.json" in layers["model files"]
    assert any(path.startswith("opt/qdc/patches/gdn-short-verify/") for path in layers["serving code"])


def test_configurations_are_the_recipes(pieces: fixtures.Pieces, first: Path) -> None:
    last = files_of(pieces, first)["configuration"]
    assert last["opt/models/target/chat_template.jinja"] == fixtures.TEMPLATE.encode()
    assert "chat_template" not in json.loads(last["opt/models/target/tokenizer_config.json"])
    drafter = read_drafter_config(json.loads(last["opt/models/drafter/config.json"]))
    assert drafter["window"] == 64 and drafter["causal"] is False and drafter["taps"] == [0, 1]
    serve, manifest = fixtures.documents(first)
    assert last["opt/qdc/serve.json"] == (first / "serve.json").read_bytes()
    assert last["opt/qdc/manifest.json"] == (first / "manifest.json").read_bytes()
    assert [weights["path"] for weights in serve["weights"]] == [
        "/opt/models/target/model.safetensors",
        "/opt/models/drafter/model.safetensors",
    ]
    assert manifest["target"]["census"] == {
        "plain": ["model.embed_tokens"],
        "quantized": ["model.layers.0.mlp.up_proj"],
    }
    assert manifest["drafter"]["calibration"] == {"conversations": 64}


def test_the_manifest_names_every_small_file_by_its_digest(pieces: fixtures.Pieces, first: Path) -> None:
    layers = files_of(pieces, first)
    small = {
        path: sha256_bytes(data)
        for role, files in layers.items()
        if "weights" not in role
        for path, data in files.items()
    }
    documents = ("opt/qdc/serve.json", "opt/qdc/manifest.json")
    _, manifest = fixtures.documents(first)
    assert manifest["files"] == {path: digest for path, digest in small.items() if path not in documents}
    labels = json.loads((first / "config.json").read_bytes())["config"]["Labels"]
    assert labels["io.qdc.manifest.digest"] == "sha256:" + small["opt/qdc/manifest.json"]
    assert labels["io.qdc.recipe.digest"] == "sha256:" + manifest["recipe_digest"]


def test_the_image_id_is_that_of_the_config_and_ends_the_name(first: Path) -> None:
    described = read_image(first)
    assert described.id == sha256_bytes((first / "config.json").read_bytes())
    assert described.name == f"micro:w4g32-qad60-dflash8k7-gptq32-swa64-cpu-{described.id[:12]}"
    assert described.name in (first / "Dockerfile").read_text()


@pytest.mark.parametrize("change", [{"k": 6}, {"window": 32}, {"window": None}])
def test_k_or_the_window_rewrites_only_the_last_layer(
    pieces: fixtures.Pieces, first: Path, change: dict[str, Any]
) -> None:
    other = pieces.image(f"other-{change}", fixtures.product(**change))
    before, after = read_image(first), read_image(other)
    assert before.id != after.id
    assert [a.diff_id == b.diff_id for a, b in zip(before.layers, after.layers, strict=True)] == [True] * 6 + [False]
    written = sum(path.stat().st_size for path in other.rglob("*") if path.is_file())
    assert written < 200_000


def test_a_recipe_may_show_the_digest_of_the_manifest_alone(pieces: fixtures.Pieces) -> None:
    recipe = fixtures.product()
    recipe["serve"]["manifest"] = "digest"
    serve, manifest = fixtures.documents(pieces.image("digest", recipe))
    assert serve["manifest"] == "digest" == manifest["serving"]["manifest"]


def test_a_drafter_without_weights_is_told_to_the_engine_and_brings_no_layer(pieces: fixtures.Pieces) -> None:
    shape = {"kind": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    recipe = {**fixtures.product(k=3), "drafter": {"architecture": shape, "ptq": None, "swa": None}}
    made = pieces.image("ngram", recipe, without=("drafter", "layer_drafter"))
    described = read_image(made)
    assert "drafter weights" not in [layer.role for layer in described.layers]
    assert described.name.startswith("micro:w4g32-qad60-ngramk3-cpu-")
    serve, manifest = fixtures.documents(made)
    told = json.loads(serve["arguments"][serve["arguments"].index("--speculative-config") + 1])
    assert (told["method"], told["prompt_lookup_max"], told["num_speculative_tokens"]) == ("ngram", 4, 3)
    assert manifest["drafter"] == {"architecture": shape}
    assert not [path for path in manifest["files"] if path.startswith("opt/models/drafter")]


def test_a_drafter_made_otherwise_than_the_recipe_says_is_refused(pieces: fixtures.Pieces) -> None:
    recipe = fixtures.product()
    recipe["drafter"]["architecture"] = {**fixtures.ARCHITECTURE, "taps": [0, 2]}
    with pytest.raises(QdcError, match="dflash_config") as error:
        pieces.image("wrong-taps", recipe)
    assert error.value.id == "stage.image.drafter" and error.value.exit_code == 4


def test_a_target_of_another_scheme_is_refused(pieces: fixtures.Pieces) -> None:
    recipe = fixtures.product()
    recipe["target"]["quantization"]["scheme"] = {"bits": 4, "group_size": 16, "symmetric": True}
    with pytest.raises(QdcError, match="group_size 32, the recipe says 16"):
        pieces.image("wrong-scheme", recipe)


def test_code_and_pickles_have_no_place_in_the_image(pieces: fixtures.Pieces, tmp_path: Path) -> None:
    folder = fixtures.target(tmp_path / "target")
    (folder / "ct" / "modeling_evil.py").write_text("print(1)")
    inputs = {**pieces.inputs, "target": folder}
    params = {
        "name": "x",
        "recipe": fixtures.product(),
        "chat_template": "",
        "accepted": [],
        "lock": {},
        "licences": [],
    }
    with pytest.raises(QdcError, match=r"modeling_evil\.py has no place"):
        fixtures.run(image, tmp_path / "image", inputs, params)


def test_a_layer_without_weights_and_an_index_that_lies_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "dense.safetensors").write_bytes(b"")
    for index in (None, {"weight_map": {"a": "../x.safetensors"}}, {"weight_map": {"a": "gone.safetensors"}}):
        if index is not None:
            (source / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(QdcError) as error:
            fixtures.run(layer, tmp_path / "layer", {"weights": source}, {"folder": ".", "prefix": "opt/models/x"})
        assert error.value.id == "stage.layer.weights"


def test_a_base_without_mmdebstrap_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QdcError, match="mmdebstrap is not installed") as error:
        fixtures.run(base_image, tmp_path, {}, {"debian": "bookworm", "packages": []})
    assert "apt-get install" in str(error.value.hint) and error.value.exit_code == 4


def test_a_base_without_root_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "mmdebstrap"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(QdcError, match="needs root") as error:
        fixtures.run(base_image, tmp_path, {}, {"debian": "bookworm", "packages": []})
    assert "root" in str(error.value.hint)
