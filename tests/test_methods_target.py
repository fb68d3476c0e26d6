"""The target-side numerics: quick rules equal stock ones, batches equal single runs, and sums add up."""

from __future__ import annotations

import math
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_harness import CHATML

from qdc.core.errors import QdcError
from qdc.methods import (
    calibration,
    divergence,
    documents,
    gated_delta,
    generate,
    pretraining,
    qwen,
    statistics,
    student,
    synthetic,
    tokenizer,
    training,
)
from qdc.methods.census import census
from qdc.methods.qwen_model import Qwen

torch.set_num_threads(1)

ARCHITECTURE: dict[str, Any] = {
    "kind": "qwen3_5",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": ["linear_attention", "full_attention"],
    "attention": {"heads": 2, "kv_heads": 1, "head_dim": 32},
    "linear_attention": {"key_heads": 1, "value_heads": 2, "head_dim": 16, "conv_kernel": 4},
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "init_range": 0.2,
}


def small_model(seed: int = 0, vocab: int = 64) -> Qwen:
    return qwen.build_model(qwen.text_config(ARCHITECTURE, vocab, {"pad": 0, "eos": 2}), seed).eval()


def stock_rule(inputs: dict[str, torch.Tensor], state: torch.Tensor | None = None) -> Any:
    """transformers' own rule on the same inputs."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    names = {"decay": "g", "rate": "beta"}
    renamed = {names.get(name, name): tensor for name, tensor in inputs.items()}
    return torch_chunk_gated_delta_rule(
        **renamed, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def rule_inputs(seed: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = {name: torch.randn(2, length, 2, 8, generator=draw) for name in ("query", "key", "value")}
    inputs["decay"] = -torch.rand(2, length, 2, generator=draw) * 2
    inputs["rate"] = torch.rand(2, length, 2, generator=draw)
    return inputs


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.integers(1, 100), st.booleans())
def test_quick_rule_equals_the_stock_rule(seed: int, length: int, with_state: bool) -> None:
    inputs = rule_inputs(seed, length)
    state = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(seed)) if with_state else None
    stock_out, stock_state = stock_rule(inputs, state)
    quick_out, quick_state = gated_delta.chunk_gated_delta_rule(**inputs, state=state)
    assert torch.allclose(quick_out, stock_out, atol=2e-5)
    assert torch.allclose(quick_state, stock_state, atol=2e-5)


def test_one_token_at_a_time_equals_the_chunked_rule() -> None:
    inputs = rule_inputs(4, 40)
    whole, end = gated_delta.chunk_gated_delta_rule(**inputs)
    state, outputs = torch.zeros(2, 2, 8, 8), []
    for place in range(40):
        here = {name: tensor[:, place : place + 1] for name, tensor in inputs.items()}
        output, state = gated_delta.gated_delta_step(**here, state=state)
        outputs.append(output)
    assert torch.allclose(torch.cat(outputs, dim=1), whole, atol=2e-5)
    assert torch.allclose(state, end, atol=2e-5)


def test_quick_rule_is_stable_when_every_key_is_the_same() -> None:
    inputs = rule_inputs(1, 96)
    inputs["key"] = inputs["key"][:, :1].expand_as(inputs["key"]).contiguous()
    inputs["decay"], inputs["rate"] = inputs["decay"] * 0, inputs["rate"] * 0 + 1
    assert torch.allclose(gated_delta.chunk_gated_delta_rule(**inputs)[0], stock_rule(inputs)[0], atol=2e-5)


def test_quick_rule_has_the_stock_gradients() -> None:
    gradients = []
    for quick in (False, True):
        inputs = {name: tensor.requires_grad_() for name, tensor in rule_inputs(5, 70).items()}
        output = gated_delta.chunk_gated_delta_rule(**inputs)[0] if quick else stock_rule(inputs)[0]
        output.square().sum().backward()
        gradients.append([inputs[name].grad for name in sorted(inputs)])
    for stock_gradient, quick_gradient in zip(*gradients, strict=True):
        assert stock_gradient is not None and quick_gradient is not None
        assert torch.allclose(stock_gradient, quick_gradient, atol=1e-4, rtol=1e-4)


def test_under_autocast_the_rule_stays_near_its_full_precision() -> None:
    inputs = rule_inputs(8, 96)
    exact = gated_delta.chunk_gated_delta_rule(**inputs)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gated_delta.chunk_gated_delta_rule(**inputs)[0]
    error = float((rounded - exact).norm() / exact.norm())
    assert 0 < error < 0.02


@pytest.mark.parametrize("length", [1, 3, 9])
def test_convolution_is_causal_depthwise_and_continues_from_its_window(length: int) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 6, length + 5, generator=draw), torch.randn(6, 4, generator=draw)
    whole = torch.nn.functional.conv1d(hidden, weight[:, None], padding=3, groups=6)[..., : length + 5]
    expected = torch.nn.functional.silu(whole)
    first, window = gated_delta.causal_conv1d(hidden[..., :5], weight)
    second, last = gated_delta.causal_conv1d(hidden[..., 5:], weight, window)
    assert torch.allclose(torch.cat([first, second], dim=-1), expected, atol=1e-6)
    assert torch.equal(last, hidden[..., -3:])


@pytest.fixture(scope="module")
def stock_model() -> Any:
    """transformers' model with the weights of `small_model()`."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = small_model()
    stock = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**model.config)).eval()
    stock.load_state_dict(model.state_dict())
    return stock


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_models_give_the_stock_logits(stock_model: Any, padding: str) -> None:
    model = small_model()
    ids = torch.randint(4, 64, (3, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :9] = 0
    if padding == "right":
        mask[0, 60:] = 0
    place = None if padding == "none" else qwen.positions(mask)
    with torch.no_grad():
        ours = qwen.forward(model, ids, None if padding == "none" else mask)
        theirs = stock_model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False).logits
    shown = mask.bool()
    assert torch.allclose(ours[shown], theirs[shown], atol=2e-4) and not torch.equal(ours[0], ours[1])


def test_models_have_the_stock_names_and_gradients(stock_model: Any) -> None:
    model = small_model()
    ids = torch.randint(4, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    model(ids).logits.log_softmax(-1)[..., 7].mean().backward()
    stock_model.zero_grad()
    stock_model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 7].mean().backward()
    theirs = dict(stock_model.named_parameters())
    assert sorted(model.state_dict()) == sorted(stock_model.state_dict())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and theirs[name].grad is not None
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-6, rtol=1e-3), name


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_no_shown_token(left: bool) -> None:
    model = small_model()
    row = torch.randint(4, 64, (1, 11), generator=torch.Generator().manual_seed(2))
    padding = torch.zeros(1, 6, dtype=torch.long)
    ids = torch.cat([padding, row] if left else [row, padding], dim=1)
    with torch.no_grad():
        alone = qwen.forward(model, row)
        padded = qwen.forward(model, ids, (ids > 0).long())
    shown = padded[:, 6:] if left else padded[:, :11]
    assert torch.allclose(shown, alone, atol=1e-5)


def test_tap_i_is_the_output_of_layer_i() -> None:
    model = small_model()
    ids = torch.randint(4, 64, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits, taps = qwen.forward_taps(model, ids, None, [0, 1])
        again = model.lm_head(model.model.norm(taps[..., 32:]))
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(again, logits) and torch.equal(taps[..., :32], states[1])


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_generation_in_batches_equals_a_full_pass_token_by_token(batch: int) -> None:
    model = small_model(7)
    draw = random.Random(0)
    prompts = [[draw.randrange(4, 64) for _ in range(n)] for n in (3, 12, 5, 5, 9)]
    greedy = generate.Sampling(0.0, 1.0, 0, 12, 0)
    done = generate.generate(model, prompts, greedy, 2, 0, lambda *_: None, batch=batch)
    for prompt, completion in zip(prompts, done, strict=True):
        with torch.no_grad():
            logits = qwen.forward(model, torch.tensor([prompt + completion.ids]))[0]
        assert logits.argmax(-1).tolist()[len(prompt) - 1 :][: len(completion.ids)] == completion.ids
        assert (len(completion.ids) == 12) == (completion.finish_reason == "length")


def test_generation_stops_at_the_end_token() -> None:
    model = small_model()
    with torch.no_grad():
        first = int(qwen.forward(model, torch.tensor([[5, 6, 7]]))[0, -1].argmax())
    greedy = generate.Sampling(0.0, 1.0, 0, 12, 0)
    done = generate.generate(model, [[5, 6, 7]], greedy, first, 0, lambda *_: None)
    assert done == [generate.Completion([], "stop")]


def sampled(logits: torch.Tensor, seed: int, top_p: float = 1.0, top_k: int = 0) -> list[int]:
    sampling = generate.Sampling(1.0, top_p, top_k, 1, seed)
    return generate.choose(logits, sampling, torch.Generator().manual_seed(seed)).tolist()


def test_sampling_follows_its_seed_and_its_filters() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(4000, 4)
    assert sampled(logits, 1) == sampled(logits, 1) != sampled(logits, 2)
    assert set(sampled(logits, 3)) == {0, 1, 2, 3}
    assert set(sampled(logits, 3, top_k=2)) == {0, 1}
    assert set(sampled(logits, 3, top_p=0.5)) == {0}
    assert set(sampled(logits, 3, top_p=0.79)) == {0, 1}
    share = sampled(logits, 4, top_k=2).count(0) / 4000
    assert abs(share - 0.5 / 0.8) < 0.04


def test_divergence_in_chunks_equals_the_whole_with_its_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    teacher, head = torch.randn(50, 8, generator=draw), torch.randn(20, 8, generator=draw)
    results = []
    for chunk in (7, 64):
        ours = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        own_head = (head + 0.1).requires_grad_()
        kl = divergence.token_kl(teacher, ours, head, own_head, 1.5, chunk)
        kl.mean().backward()
        results.append((kl.detach(), ours.grad, own_head.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None and other is not None and torch.allclose(one, other, atol=1e-6)
    assert bool((results[0][0] > 0).all())
    assert divergence.token_kl(teacher, teacher, head, head).abs().max() < 1e-6


def test_divergence_of_two_known_distributions() -> None:
    teacher, ours = torch.log(torch.tensor([[0.75, 0.25]])), torch.log(torch.tensor([[0.5, 0.5]]))
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence.kl_of_logits(teacher, ours).item() == pytest.approx(expected)


def test_published_learning_rate_at_the_selected_step() -> None:
    schedule = {"kind": "cosine", "warmup_ratio": 0.03}
    assert 2e-6 * training.schedule_factor(schedule, 5000, 8000) == pytest.approx(6.512e-7, rel=1e-3)
    assert training.schedule_factor(schedule, 240, 8000) == 1.0
    factors = [training.schedule_factor(schedule, step, 8000) for step in range(241)]
    assert factors == sorted(factors) and factors[0] > 0


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 9))
def test_batches_visit_every_row_once_an_epoch(count: int, size: int, seed: int) -> None:
    seen = [row for step in range(count) for row in training.batch_rows(count, size, step, seed)]
    for start in range(0, len(seen), count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_muon_takes_hidden_matrices_and_nothing_else() -> None:
    model = small_model()
    settings_ = {"kind": "muon", "lr": 0.1, "momentum": 0.9, "betas": [0.9, 0.95], "weight_decay": 0.0}
    named = dict(model.named_parameters())
    optimizers = training.Optimizers(named, settings_, pretraining.matrices(model))
    muon = next(part for part in optimizers.parts if type(part).__name__ == "Muon")
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in named.items() if id(p) in taken}
    assert "model.embed_tokens.weight" not in names and not any("conv1d" in n or "norm" in n for n in names)
    assert len(names) == sum(isinstance(m, torch.nn.Linear) for m in model.modules()) - 1


def test_unknown_optimizer_and_schedule_are_refused() -> None:
    with pytest.raises(QdcError, match="optimizer"):
        training.Optimizers({}, {"kind": "lion", "lr": 1.0}, [])
    with pytest.raises(QdcError, match="schedule"):
        training.schedule_factor({"kind": "linear"}, 0, 1)


def test_worked_answers_are_right() -> None:
    for problem in islice(synthetic.problems("arithmetic-chat", 3), 3000):
        for left, sign, right, result in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", problem.answer):
            value = int(left) + int(right) if sign == "+" else int(left) - int(right)
            assert value == int(result) and 0 < value < 100
        if problem.prompt.startswith("Reverse"):
            listed = problem.prompt.removeprefix("Reverse the list: ").rstrip(".").split(", ")
            assert problem.answer == f"Reversed: {', '.join(listed[::-1])}."


def test_prompts_are_unique_and_avoid_the_excluded() -> None:
    first, _ = synthetic.unique_problems("arithmetic-chat", 500, 1, set())
    keys = {synthetic.normalised(p.prompt) for p in first}
    second, dropped = synthetic.unique_problems("arithmetic-chat", 500, 1, keys)
    assert len(keys) == 500 and dropped["excluded"] == 500
    assert not keys & {synthetic.normalised(p.prompt) for p in second}
    assert synthetic.normalised(" Tom  HAS\n1 ") == "tom has 1"


def test_a_space_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = synthetic.Problem("Always this?", "Yes.")
    monkeypatch.setitem(synthetic.KINDS, "constant", lambda _draw: one)
    with pytest.raises(QdcError, match="gave only 1 new prompts"):
        synthetic.unique_problems("constant", 3, 0, set())
    with pytest.raises(QdcError, match="no synthetic text"):
        synthetic.unique_problems("poetry", 1, 0, set())


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [p.prompt + p.answer for p in islice(synthetic.problems("arithmetic-chat", 0), 400)]
    backend = tokenizer.train_byte_bpe([*texts, *["assistant\n", "user\n"] * 50], 480, "<|mask|>")
    tokenizer.write_tokenizer(backend, folder, CHATML, 128, "<|mask|>")
    return tokenizer.load_tokenizer(folder)


def test_tokenizer_keeps_numbers_whole_and_special_tokens_first(vocabulary: tokenizer.Tokenizer) -> None:
    assert [vocabulary.token_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")] == [0, 1, 2, 3]
    assert (vocabulary.pad_id, vocabulary.eos_id) == (0, 2)
    assert len(vocabulary.encode(" 17")) == 1 and len(vocabulary.encode("assistant")) == 1
    with pytest.raises(QdcError, match="no end token"):
        tokenizer.Tokenizer(vocabulary.backend, {}, CHATML)
    with pytest.raises(QdcError, match="no token"):
        vocabulary.token_id("<|absent|>")


@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(vocabulary: tokenizer.Tokenizer, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode(text), skip_special=False) == text


def test_templates_render_in_a_sandbox(vocabulary: tokenizer.Tokenizer) -> None:
    turns = [{"role": "user", "content": "Hi", "tools": "dropped"}]
    assert vocabulary.render_chat(turns, True) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    hostile = "{{ messages.append(1) }}"
    bad = tokenizer.Tokenizer(vocabulary.backend, {"eos_token": "<|im_end|>"}, hostile)
    assert bad.pad_id == bad.eos_id == 2
    with pytest.raises(Exception, match=r"unsafe|not safely callable"):
        bad.render_chat(turns)


def test_documents_mark_the_assistant_and_invent_no_end(vocabulary: tokenizer.Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Tom has 4."}]
    whole, cut = documents.conversations(vocabulary, [chat, chat], [True, False])
    written = [i for i, said in zip(whole.ids, whole.assistant, strict=True) if said]
    assert vocabulary.decode(written, skip_special=False) == "Tom has 4.<|im_end|>"
    assert whole.ids[: len(cut.ids)] == cut.ids and cut.ids[-1] != vocabulary.eos_id
    assert vocabulary.decode(whole.ids, skip_special=False) == vocabulary.render_chat(chat)


@given(st.lists(st.lists(st.integers(4, 60), max_size=30), max_size=8), st.integers(1, 16))
def test_packing_loses_no_token(rows: list[list[int]], length: int) -> None:
    coded = [documents.Document(row, [1] * len(row)) for row in rows]
    packed = documents.pack(coded, length, separator=1, padding=0)
    flat = [int(t) for ids, n in zip(packed.input_ids, packed.length, strict=True) for t in ids[:n]]
    assert flat == [token for row in rows for token in [*row, 1]]
    assert int(packed.assistant_mask.sum()) == sum(len(row) for row in rows)
    assert bool((packed.length[:-1] == length).all())


def test_malformed_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(QdcError) as caught:
        list(documents.read_rows(tmp_path / "rows.jsonl"))
    assert caught.value.line == 2


def test_census_needs_every_convolution_ignored_and_something_left() -> None:
    model = small_model()
    quantized, ignored = census(model, ["lm_head", "re:.*conv1d$", r"re:.*in_proj_[ab]$"])
    assert len(quantized) == 13 and "model.layers.0.linear_attn.conv1d" in ignored
    with pytest.raises(QdcError, match="convolutions"):
        census(model, ["lm_head"])
    with pytest.raises(QdcError, match="every module"):
        census(model, ["re:.*"])


def test_gptq_of_a_model_has_less_output_error_than_rounding() -> None:
    model = small_model(3)
    modules, _ = census(model, ["lm_head", "re:.*conv1d$", r"re:.*in_proj_[ab]$"])
    draw = random.Random(1)
    rows = [[draw.randrange(4, 64) for _ in range(draw.randrange(5, 20))] for _ in range(70)]
    batches = calibration.padded_batches(rows, 0)
    scheme = {"bits": 4, "group_size": 16, "symmetric": True}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pairs, errors = calibration.gptq_model(model, modules, batches, scheme, 0.01, lambda *_: None)
    assert sorted(pairs) == modules and all(0 < error < 0.05 for error in errors.values())
    after = dict(model.named_parameters())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"{module}.weight" for module in modules}


def test_latents_keep_the_teachers_residue_only_on_the_given_codes() -> None:
    weight = torch.tensor([[7.0, 2.4, 2.6, 0, 0, 0, 0, 0]]).to(torch.bfloat16)
    scale = torch.ones(1, 1, dtype=torch.bfloat16)
    codes = torch.tensor([[7, 2, 2, 0, 0, 0, 0, 0]], dtype=torch.int8)
    latents = student.initial_latents({"m.weight": weight}, {"m": (codes, scale)}, "quantized-weights")
    assert latents["m.weight"][0, :3].tolist() == [7.0, weight[0, 1].item(), 2.0]
    with pytest.raises(QdcError, match="trainable"):
        student.initial_latents({}, {}, "some")


def test_intervals_and_the_sign_test_match_published_values() -> None:
    low, high = statistics.wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert statistics.wilson(0, 24)[0] == 0.0 and statistics.wilson(24, 24)[1] == 1.0
    assert statistics.sign_test(9, 1) == pytest.approx(22 / 1024)
    assert statistics.sign_test(0, 0) == 1.0 and statistics.sign_test(5, 5) == 1.0
    draw = random.Random(0)
    values = [draw.gauss(3, 1) for _ in range(400)]
    low, high = statistics.bootstrap_ratio(values, [1.0] * 400)
    assert low < 3 < high and high - low == pytest.approx(2 * 1.96 / 20, rel=0.2)
    with pytest.raises(ValueError, match="nothing"):
        statistics.wilson(0, 0)
