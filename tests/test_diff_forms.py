"""Two sides in different forms: a recipe and its own image, a model under other names, facts beside documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import build, images, models, tampered
from audit_fixtures.pieces import Folder, under
from test_audit_images import Built, recipe
from test_diff import changes, pair

from qdc.audit.claims import MANIFEST
from qdc.core.files import sha256_bytes
from qdc.formats import qwen35, safetensors
from qdc.formats.ranges import BytesRange
from qdc.manifest.diff import diff

Files = dict[str, Any]


def manifest() -> dict[str, Any]:
    """The content manifest of a small image of qdc."""
    made: dict[str, Any] = json.loads(Built(recipe()).read(MANIFEST))
    return made


def test_a_recipe_and_its_manifest_do_not_differ_by_fields_that_are_not_set() -> None:
    document = manifest()
    product = document["recipe"]
    spelled = {**product, "deploy": {**product.get("deploy", {}), "driver": None}}
    spelled["serve"] = {**product["serve"], "attention_backend": None, "chat_template": "a.jinja"}
    assert diff(spelled, document) == []
    assert [row["text"] for row in diff({**spelled, "serve": {**spelled["serve"], "k": 5}}, document)] == ["K 5 -> 7"]


def test_a_recipe_is_compared_with_its_image_by_the_templates_text() -> None:
    document = manifest()
    text = "{{ messages }}"
    document["recipe"]["serve"]["chat_template"] = f"sha256:{sha256_bytes(text.encode())}"
    spelled = {**document["recipe"], "serve": {**document["recipe"]["serve"], "chat_template": "a.jinja"}}
    assert diff(spelled, document, templates=(text, text)) == []
    (row,) = diff(spelled, document, templates=(text + "\n\n", text))
    assert row["text"].startswith("chat template: 1 line")


def test_a_local_base_is_not_compared_with_the_digest_of_its_files() -> None:
    document = manifest()
    product = document["recipe"]
    document["recipe"] = {**product, "image": {"base": {"tree": "5" * 64}}}
    assert diff({**product, "image": {"base": {"archive": "base.tar"}}}, document) == []
    (row,) = diff({**product, "image": {"base": {"debian": "bookworm"}}}, document)[:1]
    assert row["path"].startswith("image.base")


def wrapped(files: Files) -> Files:
    """The model in the form of a whole Qwen3.5: every tensor as it was, under another name."""
    data = files["model.safetensors"]
    header = safetensors.read_header(BytesRange(data))
    tensors = {
        qwen35.whole_name(name): (held.dtype, held.shape, data[held.offset : held.offset + held.size])
        for name, held in header.tensors.items()
    }
    config = json.dumps(qwen35.whole_of(json.loads(files["config.json"]))).encode()
    return files | {"model.safetensors": safetensors.dumps(tensors), "config.json": config}


def one_bit(files: Files) -> Files:
    data = bytearray(files["model.safetensors"])
    data[-1] ^= 1
    return files | {"model.safetensors": bytes(data)}


def test_a_target_under_other_names_is_the_same_target(tmp_path: Path) -> None:
    plain = models.target("ct")
    texts, _ = pair(tmp_path, Folder(plain), Folder(wrapped(plain)))
    assert texts[0].startswith("target: the same 46 tensors, wrapped as a whole model (file "), texts[0]
    assert "target.quantization" not in "\n".join(texts)


@pytest.mark.parametrize("way", ["there", "back"])
def test_so_it_is_in_images(tmp_path: Path, way: str) -> None:
    a, b = images.served(images.speculation()), images.served(images.speculation(), "--language-model-only")
    b.layers[1] = under("models/target", wrapped(models.target("ct")))
    sides = (a, b) if way == "there" else (b, a)
    texts, _ = pair(tmp_path, *sides)
    how = "wrapped" if way == "there" else "no longer wrapped"
    assert texts[0].startswith(f"target: the same 46 tensors, {how} as a whole model"), texts[0]


def test_one_bit_is_not_hidden_by_other_names(tmp_path: Path) -> None:
    plain = models.target("ct")
    texts, _ = pair(tmp_path, Folder(plain), Folder(one_bit(wrapped(plain))))
    assert texts[0].startswith("target weights ")


def test_the_same_names_with_other_numbers_are_other_weights(tmp_path: Path) -> None:
    plain = models.target("ct")
    texts, _ = pair(tmp_path, Folder(plain), Folder(one_bit(plain)))
    assert texts[0].startswith("target weights ")


def test_a_folder_is_not_said_to_lack_what_only_a_manifest_can_say(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folder = build.write("folder-awq", tmp_path / "a")
    image = tampered.untouched().write(tmp_path / "b")
    texts, _ = changes(tmp_path, folder, image)
    assert texts[0].startswith("target weights ")
    assert not [text for text in texts if "QAD" in text or "grid" in text]
