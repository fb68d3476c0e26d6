"""A drafter's config.json in every published form gives the same facts: taps in one convention, window, causality."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdc.formats.dflash import drafter_config, read_drafter_config
from qdc.formats.drafters import LAYERS, STATES, kind_of, read_drafter, rope_of

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100, "rope_theta": 10000.0}
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **SHAPE, "block_size": 16,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 8, 15]},
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
    "block_size": 16, "mask_token_id": 3, "aux_hidden_state_layer_ids": [2, 9, 16],
    "transformer_layer_config": {"model_type": "qwen3", **SHAPE},
    "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy",
                           "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 15}]},
}  # fmt: skip
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **SHAPE, "num_hidden_layers": 1,
    "draft_vocab_size": 32, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
}  # fmt: skip


def changed(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy with fields set; `a__b` is `b` of `a`."""
    result = copy.deepcopy(config)
    for path, value in fields.items():
        *parents, last = path.split("__")
        place = result
        for part in parents:
            place = place[part]
        place[last] = value
    return result


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ZLAB, "dflash"),
        (SPECULATORS, "dflash"),
        (EAGLE3, "eagle3"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "lilicorr"),
        ({"architectures": ["XPressDraftModel"]}, "xpress"),
        ({"architectures": ["PEagleDraftModel"]}, "peagle"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp-speculator"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}, None),
        ({"architectures": None}, None),
        ({}, None),
    ],
)
def test_the_kind_comes_from_the_class(config: dict[str, Any], kind: str | None) -> None:
    assert kind_of(config) == kind
    found = read_drafter(config)
    assert (found.kind if found else None) == kind


def test_two_conventions_of_taps_name_the_same_layers() -> None:
    zlab, other = read_drafter(ZLAB), read_drafter(SPECULATORS)
    assert zlab is not None and other is not None
    assert zlab.taps == other.taps == [1, 8, 15]
    assert (zlab.convention, zlab.stored, zlab.form) == (LAYERS, [1, 8, 15], "z-lab")
    assert (other.convention, other.stored, other.form) == (STATES, [2, 9, 16], "speculators")
    assert zlab.draft_block_size == other.draft_block_size == 16
    assert zlab.mask_token_id == other.mask_token_id == 3
    assert zlab.layers == other.layers == 2
    assert other.k == 15 and zlab.k is None
    eagle = read_drafter(EAGLE3)
    assert eagle is not None and eagle.taps == [1, 15, 28] and eagle.draft_vocab_size == 32


@pytest.mark.parametrize(
    ("config", "window", "layers", "causal"),
    [
        (ZLAB, None, [], False),
        (changed(ZLAB, dflash_config__use_swa=True, dflash_config__swa_window_size=1024), 1024, [0, 1], True),
        (changed(ZLAB, dflash_config__use_swa=True, sliding_window=512), 512, [0, 1], True),
        (changed(ZLAB, layer_types=["sliding_attention"] * 2, sliding_window=64), 64, [0, 1], True),
        (changed(ZLAB, layer_types=["sliding_attention"] * 2, sliding_window=64, is_causal=False), 64, [0, 1], False),
        (changed(ZLAB, layer_types=["sliding_attention"] * 2, sliding_window=64, dflash_config__causal=False),
         64, [0, 1], False),
        (changed(ZLAB, layer_types=["sliding_attention", "full_attention"], sliding_window=64), 64, [0], None),
        (changed(ZLAB, layer_types=["full_attention"] * 2, sliding_window=64), None, [], False),
        (changed(ZLAB, sliding_window=64), None, [], False),
        (changed(ZLAB, sliding_window=64, use_sliding_window=True), None, [], False),
        (changed(ZLAB, sliding_window=64, use_sliding_window=True, max_window_layers=0), 64, [0, 1], True),
        (SPECULATORS, None, [], False),
        (changed(SPECULATORS, sliding_window_non_causal=False), None, [], True),
        (changed(SPECULATORS, transformer_layer_config__layer_types=["sliding_attention"] * 2,
                 transformer_layer_config__sliding_window=2048), 2048, [0, 1], False),
    ],
)  # fmt: skip
def test_window_and_causality_are_as_the_engine_takes_them(
    config: dict[str, Any], window: int | None, layers: list[int], causal: bool | None
) -> None:
    found = read_drafter(config)
    assert found is not None
    assert (found.window, found.window_layers, found.causal) == (window, layers, causal)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (changed(ZLAB, dflash_config__target_layer_ids="1,8"), "is not a list of layer numbers"),
        (changed(ZLAB, block_size=-1), "block_size is -1"),
        (changed(ZLAB, dflash_config__block_size=8), "block_size is 16 and 8"),
        (changed(ZLAB, mask_token_id=4), "mask_token_id is 3 and 4"),
        (changed(ZLAB, layer_types=["sliding_attention"]), "layer_types names 1 layers"),
        (changed(ZLAB, layer_types=["sliding_attention"] * 2), "nothing says how far"),
        (changed(ZLAB, layer_types=["sliding_attention"] * 2, sliding_window=64, use_sliding_window=False),
         "use_sliding_window is false"),
        (changed(ZLAB, layer_types=["sliding_attention"] * 2, sliding_window=64, dflash_config__swa_window_size=32),
         "sliding_window is 64"),
        (changed(ZLAB, dflash_config__swa_window_size=32), "no layer slides"),
        (changed(SPECULATORS, transformer_layer_config=None), "transformer_layer_config is missing"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_itself_says_so(config: dict[str, Any], problem: str) -> None:
    found = read_drafter(config)
    assert found is not None and any(problem in text for text in found.problems)


def test_every_place_of_the_rotary_embedding_is_looked_at() -> None:
    config = {"rope_theta": 1e7, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    assert rope_of(config) == {"rope_theta": [1e7, 1e6], "partial_rotary_factor": [0.25]}
    assert rope_of({"rope_theta": 1e7}, {"rope_scaling": {"rope_theta": 1e7}}) == {"rope_theta": [1e7]}


@given(st.integers(1, 4), st.integers(2, 16), st.none() | st.integers(2, 999), st.sets(st.integers(0, 7), min_size=1))
def test_what_qdc_writes_is_read_alike_by_both_readers(
    layers: int, block: int, window: int | None, taps: set[int]
) -> None:
    architecture = {"layers": layers, "hidden_size": 64, "intermediate_size": 64, "heads": 2, "kv_heads": 1,
                    "head_dim": 32, "draft_block_size": block, "taps": sorted(taps), "rope_theta": 10000.0,
                    "max_position_embeddings": 256}  # fmt: skip
    config = drafter_config(
        architecture, target_layers=8, vocab_size=100, mask_token_id=3, window=window, quantization=None
    )
    own, found = read_drafter_config(config), read_drafter(config)
    assert found is not None and found.problems == ()
    for name in ("kind", "taps", "draft_block_size", "mask_token_id", "window", "window_layers", "causal", "layers"):
        assert getattr(found, name) == own[name], name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [*ZLAB, *SPECULATORS, "layer_types", "sliding_window", "use_sliding_window", "is_causal", "eagle_config"]
)


@settings(max_examples=150)
@given(st.sampled_from([ZLAB, SPECULATORS, EAGLE3]), st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_config_raises(config: dict[str, Any], fields: dict[str, Any]) -> None:
    found = read_drafter({**config, **fields})
    assert found is None or found.taps is None or all(type(tap) is int for tap in found.taps)
