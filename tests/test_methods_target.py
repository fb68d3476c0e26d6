"""The target-side numerics: quick rules equal stock ones, batches equal single runs, and sums add up."""

from __future__ import annotations

import math
import random
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_model import small_model
from stage_harness import CHATML

from qdc.core.errors import QdcError
from qdc.methods import (
    calibration,
    divergence,
    documents,
    pretraining,
    statistics,
    student,
    synthetic,
    tokenizer,
    training,
)
from qdc.methods.census import census

torch.set_num_threads(1)


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
