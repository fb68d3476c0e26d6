"""Predicted sizes are those of files that the project's own packer writes, and of an image that was built."""

from __future__ import annotations

from pathlib import Path

import hub_facts
import pytest
import torch
from safetensors.torch import save_file
from small_model import ARCHITECTURE

from qdc.formats.qwen35 import scratch_facts
from qdc.image.layers import digested
from qdc.measure.past import Past
from qdc.measure.size import CODE, DEBIAN, PACKAGES, file_size, image_size, layer_size
from qdc.measure.sizes import base_model, dflash_tensors, packed
from qdc.methods import draft_files, grid, packing, qwen
from qdc.methods.census import census
from qdc.methods.dflash import Drafter, DrafterShape
from qdc.recipe.load import load
from qdc.sources.facts import attach

SCRATCH = {"architecture": ARCHITECTURE, "tokenizer": {"vocab_size": 480}}
SHAPE = {"layers": 2, "hidden_size": 64, "intermediate_size": 192, "heads": 4, "kv_heads": 2, "head_dim": 16}
IGNORE = ["lm_head", "re:.*conv1d$", r"re:.*linear_attn\.in_proj_[ab]$"]


@pytest.mark.parametrize("group", [16, 32])
def test_a_packed_target_has_the_predicted_size(tmp_path: Path, group: int) -> None:
    scheme = {"bits": 4, "group_size": group, "symmetric": True}
    facts = {"target.base": scratch_facts(SCRATCH)}
    model = qwen.build_model(dict(facts["target.base"].text_config), 0)
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for module in census(model, IGNORE)[0]:
        codes, scale = grid.rtn_quantize(tensors.pop(f"{module}.weight").float(), scheme)
        tensors |= packing.packed_tensors(module, codes, scale)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    base = base_model(facts)
    predicted = packed(base.body, scheme, IGNORE) | base.embedding
    assert file_size(predicted) == (tmp_path / "model.safetensors").stat().st_size
    real = digested({"opt/models/target/model.safetensors": tmp_path / "model.safetensors"}, "weights")
    assert layer_size("opt/models/target", predicted) == real.size


def test_a_drafter_has_the_predicted_size(tmp_path: Path) -> None:
    architecture = {**SHAPE, "taps": [0, 1, 2]}
    shape = DrafterShape(**SHAPE, draft_block_size=8, taps=(0, 1, 2), mask_token_id=3, rope_theta=1e4)
    with torch.no_grad():
        state = draft_files.plain_state(Drafter(shape))
    draft_files.save(tmp_path / "dense.safetensors", state)
    tensors = dflash_tensors(architecture, 64)
    assert {name: shape for name, (_, shape) in tensors.items()} == {k: tuple(v.shape) for k, v in state.items()}
    assert file_size(tensors) == (tmp_path / "dense.safetensors").stat().st_size


def test_without_a_build_what_is_not_weights_is_assumed(root: Path) -> None:
    loaded = attach(load(root / "recipes" / "tiny.yaml"))
    made = image_size(loaded.data, loaded.facts, Past(), set())
    by_name = {term.what: term.figure for term in made.layers}
    assert {what for what, figure in by_name.items() if not figure.assumed} == {"target weights", "drafter weights"}
    assert made.fits and made.total.assumed
    assert not image_size(
        {**loaded.data, "deploy": {**loaded.data["deploy"], "size_limit": {"bytes": 1e9, "of": "docker-save"}}},
        loaded.facts,
        Past(),
        set(),
    ).fits


def test_layers_of_an_earlier_build_count_as_they_were(root: Path) -> None:
    loaded = attach(load(root / "recipes" / "tiny.yaml"))
    known = Past(layers={"base": 7, "runtime packages": 11}, layers_of="b")
    before = image_size(loaded.data, loaded.facts, known, set())
    after = image_size(loaded.data, loaded.facts, known, {"base-image", "runtime"})
    for made, assumed in ((before, True), (after, False)):
        base, packages = made.layers[:2]
        assert (base.figure.value, packages.figure.value) == (7, 11)
        assert (base.figure.assumed, packages.figure.assumed) == (assumed, assumed)
    assert min(DEBIAN[0], PACKAGES[0]) > CODE[0]


def test_a_base_of_unknown_size_is_said_so_and_decides_nothing(root: Path) -> None:
    text = "image.base={ref: 'example.org/mine@sha256:" + "0" * 64 + "'}"
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml", [text])
    made = image_size(loaded.data, hub_facts.facts_for(loaded), Past(), set())
    assert (made.unknown, made.fits) == (("base",), None)


def test_a_given_base_is_known_as_it_is_stored(root: Path) -> None:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml")
    facts = hub_facts.facts_for(loaded)
    given = {"ref": "example.org/mine@sha256:" + "1" * 64}
    deploy = {**loaded.data["deploy"], "size_limit": {"bytes": 20e9, "of": "docker-save-gzip"}}
    recipe = {**loaded.data, "image": {"base": given}, "deploy": deploy}
    made = image_size(recipe, facts, Past(), set(), 12_000_000_000)
    assert made.unknown == () and made.layers[0].what == "base" and made.layers[0].figure.assumed
    assert made.layers[0].figure.value == round(2.4 * 12e9)
    past = Past(layers={"base": 28_600_000_000}, layers_of="b")
    known = image_size(recipe, facts, past, {"base-image"}, 12_000_000_000)
    assert known.layers[0].figure.value == 28_600_000_000 and not known.layers[0].figure.assumed
    for found in (made, known):
        assert found.compressed is not None and 12e9 < found.compressed.value < 20e9 and found.fits
    recipe["image"] = {"base": {"archive": "base.tar"}}
    assert image_size(recipe, facts, Past(), set(), 5_000_000_000).layers[0].figure.value == 5_000_000_000
