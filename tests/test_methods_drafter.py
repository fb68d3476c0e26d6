"""The drafter's numerics: config forms, masks, training objective, replay, calibration, quantization."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdc.core.errors import QdcError
from qdc.formats.dflash import drafter_config, engine_ignore, linear_modules, read_drafter_config, split_ignored
from qdc.methods import draft_quantization, draft_training, replay
from qdc.methods.dflash import Drafter, DrafterShape, block_positions, block_tokens, context_mask, own_mask
from qdc.methods.draft_data import Conversation, calibration_anchors, choose
from qdc.methods.draft_training import Batch, Frozen, decay_weights, labels_and_weights, sample_anchors

ARCHITECTURE: dict[str, Any] = {
    "kind": "dflash",
    "layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "draft_block_size": 4,
    "taps": [0, 2],
    "mask_token": "<|mask|>",
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "init_range": 0.2,
}
VOCABULARY = 23
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")


def config(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "target_layers": 4,
        "vocab_size": VOCABULARY,
        "mask_token_id": 3,
        "window": None,
        "quantization": None,
    }
    return drafter_config(ARCHITECTURE, **(settings | changes))


def small(seed: int = 0) -> tuple[Drafter, Frozen]:
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(DrafterShape.from_config(config()))
    drafter.initialise(0.3, generator)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
    table = torch.randn(VOCABULARY, 32, generator=generator)
    return drafter, Frozen(table, table)


# --- config.json


@given(window=st.none() | st.integers(1, 4096), quantized=st.booleans(), target_layers=st.integers(3, 48))
def test_what_is_written_is_read_back(window: int | None, quantized: bool, target_layers: int) -> None:
    scheme = {"bits": 4, "group_size": 32, "symmetric": True}
    written = config(
        window=window,
        target_layers=target_layers,
        quantization={"scheme": scheme, "ignore": []} if quantized else None,
    )
    facts = read_drafter_config(json.loads(json.dumps(written)))
    assert facts["kind"] == "dflash"
    assert facts["window"] == window
    assert facts["causal"] is False
    assert (facts["taps"], facts["draft_block_size"], facts["mask_token_id"]) == ([0, 2], 4, 3)
    assert facts["layers"] == 2
    if quantized:
        assert {name: facts["quantization"][name] for name in scheme} == scheme
    else:
        assert facts["quantization"] is None


def test_sliding_layers_without_a_word_on_causality_are_causal() -> None:
    written = config(window=16)
    del written["dflash_config"]["causal"]
    assert read_drafter_config(written)["causal"] is True
    written["layer_types"][0] = "full_attention"
    facts = read_drafter_config(written)
    assert facts["causal"] is None
    assert facts["window_layers"] == [1]


def test_the_use_swa_form_slides_everywhere() -> None:
    written = config()
    written["dflash_config"] |= {"use_swa": True, "swa_window_size": 48}
    del written["layer_types"]
    facts = read_drafter_config(written)
    assert (facts["window"], facts["window_layers"]) == (48, [0, 1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from(sorted(config(window=8))), value=json_values, inside=st.booleans())
def test_a_damaged_config_is_facts_or_an_error_never_a_crash(field: str, value: Any, inside: bool) -> None:
    damaged = config(window=8)
    if inside:
        damaged["dflash_config"] |= {field: value, "target_layer_ids": value}
    else:
        damaged[field] = value
    try:
        assert read_drafter_config(damaged)["kind"] == "dflash"
    except QdcError as error:
        assert error.id == "dflash.config"


@pytest.mark.parametrize("taps", [[], [1, 1], [2, 1], [0, 4], [-1, 2]])
def test_taps_must_increase_inside_the_target(taps: list[int]) -> None:
    with pytest.raises(QdcError, match="taps"):
        drafter_config(
            ARCHITECTURE | {"taps": taps},
            target_layers=4,
            vocab_size=9,
            mask_token_id=3,
            window=None,
            quantization=None,
        )


def test_the_drafter_has_the_linears_the_config_speaks_of() -> None:
    drafter, _ = small()
    assert sorted(draft_quantization.linears(drafter)) == linear_modules(2)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < set(drafter.state_dict())


def test_ignored_modules_carry_the_engines_layer_numbers() -> None:
    assert engine_ignore(2, 4, ["model.fc", "re:.*layers\\.5\\.mlp\\.down_proj$"])[2:] == [
        "re:.*fc$",
        "re:.*layers\\.5\\.mlp\\.down_proj$",
    ]


def test_a_matrix_that_the_engine_fuses_is_ignored_by_its_own_name_too() -> None:
    named = engine_ignore(2, 4, ["re:.*layers\\.4\\.self_attn\\.[qkv]_proj$", "re:.*layers\\.5\\.mlp\\..*"])[2:]
    assert [name for name in named if "qkv" in name or "gate_up" in name] == [
        "re:.*layers\\.4\\.self_attn\\.qkv_proj$",
        "re:.*layers\\.5\\.mlp\\.gate_up_proj$",
    ]
    assert len(named) == 3 + 3 + 2


@pytest.mark.parametrize(
    "ignore", ["model.layers.4.self_attn.q_proj", "re:.*gate_proj", "fc", "re:.*layers\\.0\\.", "re:("]
)
def test_an_ignore_that_the_engine_cannot_follow_is_refused(ignore: str) -> None:
    with pytest.raises(QdcError):
        split_ignored(2, 4, [ignore])


# --- the model, against a slow one written from the definition


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight


def turned(x: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def slow_block(
    drafter: Drafter, frozen: Frozen, taps: Tensor, anchor_token: int, anchor: int, block: int, window: int | None
) -> Tensor:
    """Hidden states [block, hidden] of one block, a query at a time, over lists of visible keys."""
    w = drafter.state_dict()
    shape = drafter.shape
    context = [rms(w["fc.weight"] @ taps[k], w["hidden_norm.weight"]) for k in range(anchor)]
    tokens = [anchor_token] + [shape.mask_token_id] * (block - 1)
    states = [frozen.embedding[token] for token in tokens]
    for layer in range(shape.layers):
        p = f"layers.{layer}."
        normed = [rms(x, w[p + "input_layernorm.weight"]) for x in states]
        rows = [(k, c) for k, c in enumerate(context)] + [(anchor + j, x) for j, x in enumerate(normed)]
        after = []
        for j, x in enumerate(normed):
            place, heads = anchor + j, []
            visible = [(k, r) for k, r in rows if window is None or abs(place - k) <= window - 1]
            for head in range(shape.heads):
                at = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
                group = head // (shape.heads // shape.kv_heads)
                kv = slice(group * shape.head_dim, (group + 1) * shape.head_dim)
                query = turned(rms((w[p + "self_attn.q_proj.weight"] @ x)[at], w[p + "self_attn.q_norm.weight"]), place)
                keys = [
                    turned(rms((w[p + "self_attn.k_proj.weight"] @ r)[kv], w[p + "self_attn.k_norm.weight"]), k)
                    for k, r in visible
                ]
                values = [(w[p + "self_attn.v_proj.weight"] @ r)[kv] for _, r in visible]
                scores = torch.stack([query @ key for key in keys]) / math.sqrt(shape.head_dim)
                heads.append((scores.softmax(0).unsqueeze(1) * torch.stack(values)).sum(0))
            after.append(states[j] + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads))
        states = []
        for x in after:
            normed_x = rms(x, w[p + "post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(w[p + "mlp.gate_proj.weight"] @ normed_x)
            states.append(x + w[p + "mlp.down_proj.weight"] @ (gate * (w[p + "mlp.up_proj.weight"] @ normed_x)))
    return torch.stack([rms(x, w["norm.weight"]) for x in states])


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_parallel_blocks_equal_the_slow_loop_over_visible_keys(window: int | None) -> None:
    drafter, frozen = small()
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(4, VOCABULARY, (2, 12), generator=generator)
    taps = torch.randn(2, 12, 64, generator=generator)
    anchors = torch.tensor([[5, 1, 9], [2, 11, 7]])
    with torch.no_grad():
        tokens = block_tokens(ids.gather(1, anchors), 4, 3)
        fast = drafter(taps, frozen.embedding[tokens], anchors, 4, window).view(2, 3, 4, -1)
        for b in range(2):
            for a in range(3):
                anchor = int(anchors[b, a])
                slow = slow_block(drafter, frozen, taps[b], int(ids[b, anchor]), anchor, 4, window)
                torch.testing.assert_close(fast[b, a], slow, atol=2e-5, rtol=2e-5)


@given(anchor=st.integers(0, 30), slot=st.integers(0, 6), key=st.integers(0, 30), window=st.none() | st.integers(1, 40))
def test_a_query_sees_context_below_its_anchor_within_the_window(
    anchor: int, slot: int, key: int, window: int | None
) -> None:
    mask = context_mask(torch.tensor([[anchor]]), 31, 7, window)
    seen = bool(mask[0, 0, slot, key] == 0)
    assert seen == (key < anchor and (window is None or anchor + slot - key <= window - 1))
    assert bool(own_mask(7, window)[slot, slot] == 0)


def test_a_window_as_wide_as_everything_changes_nothing() -> None:
    drafter, frozen = small()
    taps = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[8, 3]])
    noise = frozen.embedding[block_tokens(torch.tensor([[5, 6]]), 4, 3)]
    with torch.no_grad():
        assert torch.equal(drafter(taps, noise, anchors, 4, 12), drafter(taps, noise, anchors, 4))
        assert not torch.allclose(drafter(taps, noise, anchors, 4, 4), drafter(taps, noise, anchors, 4))


# --- training


def test_decay_weights_are_those_of_the_paper() -> None:
    weights = decay_weights(16, 7.0)
    assert weights[0] == 0
    assert [round(float(w), 4) for w in weights[1:5]] == [1.0, 0.8669, 0.7515, 0.6514]
    assert round(float(weights.sum()), 4) == 6.6306


@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_anchors_are_distinct_answer_positions_with_a_label_after_them(
    spans: list[tuple[int, int]], count: int, seed: int
) -> None:
    assistant = torch.zeros(len(spans), 24, dtype=torch.bool)
    for row, (start, length) in enumerate(spans):
        assistant[row, start : start + length] = True
    anchors, valid = sample_anchors(assistant, count, torch.Generator().manual_seed(seed))
    for row, (start, length) in enumerate(spans):
        real = anchors[row][valid[row]].tolist()
        assert len(set(real)) == len(real) == min(count, max(0, length - 1))
        assert all(start <= a < start + length - 1 for a in real)


def test_anchors_are_uniform() -> None:
    assistant = torch.zeros(4000, 12, dtype=torch.bool)
    assistant[:, 3:12] = True
    anchors, _ = sample_anchors(assistant, 2, torch.Generator().manual_seed(0))
    counts = torch.bincount(anchors.flatten(), minlength=12)[3:11]
    assert counts.min() > 850
    assert counts.max() < 1150


def test_labels_are_the_same_positions_tokens_and_stop_at_the_answers_end() -> None:
    ids = torch.arange(100, 110).unsqueeze(0)
    assistant = torch.tensor([[False] * 3 + [True] * 5 + [False] * 2])
    batch = Batch(ids, assistant, torch.zeros(1, 10, 64))
    labels, weights = labels_and_weights(batch, torch.tensor([[5, 0]]), torch.tensor([[True, False]]), 4, 4.0)
    assert labels[0, 0].tolist() == [105, 106, 107, 108]
    assert (weights[0, 0] > 0).tolist() == [False, True, True, False]
    assert not weights[0, 1].any()


def test_the_loss_is_the_weighted_mean_over_blocks_done_one_by_one() -> None:
    drafter, frozen = small()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, VOCABULARY, (2, 10), generator=generator)
    assistant = torch.tensor([[False] * 3 + [True] * 7, [False] * 4 + [True] * 4 + [False] * 2])
    taps = torch.randn(2, 10, 64, generator=generator)
    anchors, valid = torch.tensor([[3, 7], [5, 0]]), torch.tensor([[True, True], [True, False]])
    total, norm = 0.0, 0.0
    for b, anchor, end in ((0, 3, 10), (0, 7, 10), (1, 5, 8)):
        hidden = slow_block(drafter, frozen, taps[b], int(ids[b, anchor]), anchor, 4, None)
        for j in range(1, 4):
            if anchor + j < end:
                weight = math.exp(-(j - 1) / 4.0)
                chances = (frozen.head @ hidden[j]).log_softmax(0)
                total -= weight * float(chances[ids[b, anchor + j]])
                norm += weight
    with torch.no_grad():
        loss = draft_training.block_loss(drafter, frozen, Batch(ids, assistant, taps), anchors, valid, 4.0)
    assert float(loss) == pytest.approx(total / norm, rel=1e-4)


# --- replay


def speculate(
    drafter: Drafter, frozen: Frozen, answer: Conversation, taps: Tensor, k: int, window: int | None
) -> replay.Counts:
    """The speculative loop itself: draft a block, verify against the target's greedy tokens, go on."""
    ids = list(answer.input_ids)
    place, accepted, drafts = answer.prompt_tokens, 0, 0
    with torch.no_grad():
        while place < len(ids) - 1:
            hidden = slow_block(drafter, frozen, taps, ids[place], place, k + 1, window)
            drafted = (hidden[1:] @ frozen.head.T).argmax(-1).tolist()
            truth = ids[place + 1 :]
            n = 0
            while n < min(k, len(truth)) and drafted[n] == truth[n]:
                n += 1
            accepted, drafts, place = accepted + n, drafts + 1, place + n + 1
    return replay.Counts(accepted, drafts)


@pytest.mark.parametrize(("k", "window"), [(3, None), (2, None), (3, 4)])
def test_replay_counts_what_the_speculative_loop_counts(k: int, window: int | None) -> None:
    drafter, frozen = small(7)
    generator = torch.Generator().manual_seed(11)
    answers, taps = [], []
    for row, (prompt, length) in enumerate([(3, 7), (4, 2), (2, 9), (4, 1)]):
        ids = torch.randint(4, VOCABULARY, (prompt + length,), generator=generator)
        tap = torch.randn(prompt + length, 64, generator=generator)
        with torch.no_grad():
            for place in range(prompt, prompt + length - 1):
                if torch.rand(1, generator=generator) < 0.75:
                    hidden = slow_block(drafter, frozen, tap, int(ids[place]), place, k + 1, window)
                    ids[place + 1] = (frozen.head @ hidden[1]).argmax()
        answers.append(Conversation(str(row), tuple(ids.tolist()), prompt))
        taps.append(tap)
    expected = [speculate(drafter, frozen, c, t, k, window) for c, t in zip(answers, taps, strict=True)]
    assert replay.replay(drafter, frozen, answers, taps, k, window) == expected
    assert sum(c.accepted for c in expected) > 3
    assert expected[3] == replay.Counts(0, 0)


@given(answer=st.lists(st.integers(0, 2), min_size=1, max_size=20), k=st.integers(1, 5), data=st.data())
def test_a_walk_covers_the_answer_once(answer: list[int], k: int, data: st.DataObject) -> None:
    drafts = [data.draw(st.lists(st.integers(0, 2), min_size=k, max_size=k)) for _ in answer]
    counts = replay.walk(answer, drafts)
    assert counts.accepted + counts.drafts in (len(answer) - 1, len(answer))
    assert counts.drafts <= len(answer) - 1
    perfect = [[*answer[i + 1 : i + 1 + k], *[9] * max(0, k - len(answer) + i + 1)] for i in range(len(answer))]
    assert replay.walk(answer, perfect).drafts == math.ceil((len(answer) - 1) / (k + 1))


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert replay.walk([7, 1, 2, 5, 5], [[1, 2, 4]] + [[0] * 3] * 4) == replay.Counts(2, 2)
    assert replay.acceptance_length([replay.Counts(2, 1)]) == 3.0
    assert replay.acceptance_length([replay.Counts(0, 5), replay.Counts(5, 5)]) == 1.5


def test_the_bootstrap_brackets_the_figure_and_the_paired_difference() -> None:
    first = [replay.Counts(i % 5, 2) for i in range(80)]
    second = [replay.Counts(i % 5 + 1, 2) for i in range(80)]
    (low, high), (other, _), (least, most) = replay.bootstrap([second, first])
    assert low < replay.acceptance_length(second) < high
    assert other < replay.acceptance_length(first)
    assert least == pytest.approx(0.5)
    assert most == pytest.approx(0.5)


# --- calibration and quantization


@given(tokens=st.integers(1, 90), prompt=st.integers(1, 60), block=st.integers(2, 16), count=st.integers(1, 20))
def test_calibration_anchors_spread_over_the_answer(tokens: int, prompt: int, block: int, count: int) -> None:
    anchors = calibration_anchors(tokens, prompt, block, count)
    assert (anchors == []) == (tokens <= prompt + block + 1)
    assert anchors == sorted(set(anchors))
    if anchors:
        assert anchors[0] == prompt
        assert len(anchors) == min(count, tokens - block - prompt)
        assert len(anchors) == 1 or anchors[-1] == tokens - block - 1


def test_choosing_is_seeded_and_without_repeats() -> None:
    assert choose(50, 10, 3) == choose(50, 10, 3) != choose(50, 10, 4)
    assert sorted(choose(5, 9, 0)) == [0, 1, 2, 3, 4]


def calibration() -> tuple[list[draft_quantization.CalibrationRow], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows, taps = [], []
    for tokens, anchors in ((14, (3, 6, 9)), (11, (4, 6)), (9, (2,))):
        ids = torch.randint(4, VOCABULARY, (tokens,), generator=generator).tolist()
        rows.append(draft_quantization.CalibrationRow(tuple(ids), anchors))
        taps.append(torch.randn(tokens, 64, generator=generator))
    return rows, taps


def test_hessians_equal_one_forward_a_block() -> None:
    drafter, frozen = small()
    rows, taps = calibration()
    sums = {name: torch.zeros(m.in_features, m.in_features) for name, m in draft_quantization.linears(drafter).items()}

    def keep(name: str) -> Any:
        def hook(_module: Any, inputs: tuple[Tensor, ...]) -> None:
            flat = inputs[0].reshape(-1, inputs[0].shape[-1])
            sums[name] += flat.T @ flat

        return hook

    found = draft_quantization.hessians(drafter, frozen, rows, taps, batch=2)
    handles = [m.register_forward_pre_hook(keep(n)) for n, m in draft_quantization.linears(drafter).items()]
    with torch.no_grad():
        for row, tap in zip(rows, taps, strict=True):
            for anchor in row.anchors:
                noise = frozen.embedding[block_tokens(torch.tensor([[row.input_ids[anchor]]]), 4, 3)]
                drafter(tap[:anchor].unsqueeze(0), noise, torch.tensor([[anchor]]), 4)
    for handle in handles:
        handle.remove()
    for name, total in sums.items():
        torch.testing.assert_close(found[name], total, atol=1e-3, rtol=1e-4)
        assert float(total.abs().sum()) > 0


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantization_keeps_names_and_the_grid(method: str) -> None:
    drafter, frozen = small()
    rows, taps = calibration()
    found = draft_quantization.hessians(drafter, frozen, rows, taps)
    modules, ignored = split_ignored(2, 4, ["re:.*fc$"])
    scheme = {"bits": 4, "group_size": 32, "symmetric": True}
    result = draft_quantization.quantize(drafter, found, modules, method, scheme, 0.01)
    assert set(result.dense) == set(drafter.state_dict())
    assert ignored == ["fc"]
    assert {n.removesuffix(".weight_packed") for n in result.packed if n.endswith("_packed")} == set(modules)
    assert "fc.weight" in result.packed
    for name in modules:
        words, scale = result.packed[f"{name}.weight_packed"], result.packed[f"{name}.weight_scale"]
        nibbles = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1) - 8
        dense = (nibbles.float() * scale.float().repeat_interleave(32, dim=1)).to(torch.bfloat16)
        assert torch.equal(dense, result.dense[f"{name}.weight"])
        assert result.packed[f"{name}.weight_shape"].tolist() == list(dense.shape)


def test_gptq_errs_less_on_its_own_inputs_than_rounding() -> None:
    drafter, frozen = small()
    rows, taps = calibration()
    found = draft_quantization.hessians(drafter, frozen, rows, taps)
    scheme = {"bits": 4, "group_size": 32, "symmetric": True}
    errors = {
        method: sum(
            line["output_error"]
            for line in draft_quantization.quantize(drafter, found, linear_modules(2), method, scheme, 0.01).modules
        )
        for method in ("rtn", "gptq")
    }
    assert errors["gptq"] < 0.8 * errors["rtn"]


@settings(max_examples=30)
@given(anchors=st.lists(st.integers(0, 50), min_size=1, max_size=5), block=st.integers(2, 8))
def test_slot_j_of_the_block_at_s_is_position_s_plus_j(anchors: list[int], block: int) -> None:
    positions = block_positions(torch.tensor([anchors]), block)
    assert positions[0].tolist() == [s + j for s in anchors for j in range(block)]
