"""The model equals the stock one, padding and batches change nothing, and sampling follows its seed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import small_model

from qdc.methods import (
    gated_delta,
    generate,
    qwen,
)

torch.set_num_threads(1)


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
