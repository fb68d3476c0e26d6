"""The drafter's stages from folder to folder, on a target small enough to train here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_harness import CHATML, run_stage

from qdc.core import canonical
from qdc.core.errors import QdcError
from qdc.formats import qwen35
from qdc.formats.dflash import drafter_config, linear_modules, read_drafter_config
from qdc.methods import qwen
from qdc.methods.draft_data import Conversation
from qdc.methods.draft_taps import all_taps
from qdc.methods.packing import unpack_codes
from qdc.methods.tokenizer import load_tokenizer, train_byte_bpe, write_tokenizer
from qdc.stages import draft_train

torch.set_num_threads(1)
WORDS = ["ash", "bay", "cat", "dog", "elm", "fox", "gum", "hen", "ivy", "jay"]
LAYERS = ["linear_attention", "full_attention"]
DRAFTER: dict[str, Any] = {
    "kind": "dflash",
    "layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "draft_block_size": 4,
    "taps": [0, 1],
    "mask_token": "<|mask|>",
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "init_range": 0.05,
}
TRAINING: dict[str, Any] = {
    "architecture": DRAFTER,
    "taps_from": "target",
    "model_folder": ".",
    "steps": 60,
    "batch": {"conversations": 8},
    "anchors": 4,
    "loss_decay": 4.0,
    "max_length": 64,
    "optimizer": {"kind": "muon", "lr": 1e-2, "momentum": 0.95, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "schedule": {"kind": "cosine", "warmup_ratio": 0.05},
    "grad_clip": 1.0,
    "seed": 5,
}
SCHEME = {"bits": 4, "group_size": 32, "symmetric": True}
QUANTIZATION = {"method": "gptq", "scheme": SCHEME, "ignore": [], "damp": 0.01, "model_folder": "."}
EVALUATION = {"prompts": 12, "max_tokens": 24, "k": 3, "window": 16, "model_folder": "."}


def chats() -> list[list[dict[str, str]]]:
    """ "cat elm" is answered "cat elm cat elm cat elm ."."""
    return [
        [
            {"role": "user", "content": f"{a} {b}"},
            {"role": "assistant", "content": " ".join([f"{a} {b}"] * 3) + " ."},
        ]
        for a in WORDS[:8]
        for b in WORDS[2:]
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(canonical.dumps(row) + b"\n" for row in rows))


def train_target(folder: Path) -> None:
    model = qwen.build_model(json.loads((folder / "config.json").read_text()), seed=1)
    tokenizer = load_tokenizer(folder)
    texts = [torch.tensor(tokenizer.encode(tokenizer.render_chat(chat))) for chat in chats()]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(70):
        rows = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(step))[:16]]
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained target, a corpus, held-out prompts, a trained drafter and its calibration."""
    root = tmp_path_factory.mktemp("drafter")
    target = root / "target"
    target.mkdir()
    texts = [f"user assistant {turn['content']}" for chat in chats() for turn in chat]
    write_tokenizer(train_byte_bpe(texts, 300, "<|mask|>"), target, CHATML, 512, "<|mask|>")
    config = qwen35.text_config(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "layers": LAYERS,
            "attention": {"heads": 2, "kv_heads": 1, "head_dim": 32},
            "linear_attention": {"key_heads": 1, "value_heads": 1, "head_dim": 32, "conv_kernel": 4},
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "init_range": 0.08,
        },
        300,
        {"pad": 0, "eos": 2},
    )
    (target / "config.json").write_text(json.dumps(config))
    train_target(target)
    rows = [
        {"id": f"c{n}", "messages": chat, "finish_reason": "stop" if n % 9 else "length"}
        for n, chat in enumerate(chats())
    ]
    short = [{"role": "user", "content": "ash"}, {"role": "assistant", "content": ""}]
    rows.append({"id": "short", "messages": short, "finish_reason": "stop"})
    write_lines(root / "corpus" / "conversations.jsonl", rows)
    write_lines(root / "heldout" / "prompts.jsonl", [{"id": r["id"], "messages": r["messages"][:1]} for r in rows])
    found = {"target": target, "corpus": root / "corpus", "heldout": root / "heldout"}
    found["drafter"] = run_stage("draft-train", inputs(found), TRAINING, root / "train")
    calibration = {"conversations": 100, "anchors": 4, "draft_block_size": 4, "seed": 3}
    found["calibration"] = run_stage(
        "calibrate", {"corpus": root / "corpus", "tokenizer": target}, calibration, root / "calibrate"
    )
    found["quantized"] = run_stage("draft-quantize", quantize_inputs(found), QUANTIZATION, root / "quantize")
    return found


def inputs(world: dict[str, Path], **more: Path) -> dict[str, Path]:
    return {"target": world["target"], "data": world["corpus"], **more}


def quantize_inputs(world: dict[str, Path]) -> dict[str, Path]:
    return {name: world[name] for name in ("drafter", "calibration", "target")}


def test_training_writes_a_dflash_config_and_learns(world: dict[str, Path]) -> None:
    folder = world["drafter"]
    assert json.loads((folder / "config.json").read_text()) == drafter_config(
        DRAFTER, target_layers=2, vocab_size=300, mask_token_id=3, window=None, quantization=None
    )
    log = json.loads((folder / "training.json").read_text())
    assert [line["step"] for line in log["steps"]] == list(range(1, 61))
    assert log["steps"][-1]["loss"] < 0.3 * log["steps"][0]["loss"]
    assert log["conversations"] == {"read": 65, "used": 64, "without_anchor": 1}
    weights = load_file(folder / "model.safetensors")
    assert {name.removesuffix(".weight") for name in weights} >= set(linear_modules(1))
    assert all(value.dtype == torch.bfloat16 for value in weights.values())


def test_a_killed_training_resumes_bit_for_bit(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_train, "PARTIAL_STEPS", 4)
    params = TRAINING | {"steps": 12}
    whole = run_stage("draft-train", inputs(world), params, tmp_path / "whole")
    steps: list[int] = []

    def stop_at(limit: int) -> Callable[[int, int, str], None]:
        def report(done: int, _total: int, _note: str) -> None:
            steps.append(done)
            if done == limit:
                raise KeyboardInterrupt

        return report

    for limit in (6, 9):
        with pytest.raises(KeyboardInterrupt):
            run_stage("draft-train", inputs(world), params, tmp_path / "cut", report=stop_at(limit))
    resumed = run_stage("draft-train", inputs(world), params, tmp_path / "cut", report=stop_at(-1))
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 9, 10, 11, 12]
    for name in ("model.safetensors", "training.json", "config.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_a_second_training_starts_from_the_firsts_weights(world: dict[str, Path], tmp_path: Path) -> None:
    params = TRAINING | {"steps": 2, "seed": 6}
    tuned = run_stage("draft-train", inputs(world, init=world["drafter"]), params, tmp_path)
    log = json.loads((tuned / "training.json").read_text())
    before = json.loads((world["drafter"] / "training.json").read_text())
    assert log["warm_start"] is True
    assert log["steps"][0]["loss"] < 0.4 * before["steps"][0]["loss"]
    first, second = (load_file(f / "model.safetensors") for f in (world["drafter"], tuned))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_taps_are_the_outputs_of_their_layers_whatever_runs_beside(world: dict[str, Path]) -> None:
    model = qwen.load_model(world["target"])
    rows = [list(range(4, 30)), list(range(50, 61)), list(range(9, 26))]
    conversations = [Conversation(str(n), tuple(row), 3) for n, row in enumerate(rows)]
    for conversation, taps in zip(conversations, all_taps(model, conversations, [0], batch=2), strict=True):
        alone = torch.tensor([conversation.input_ids])
        hidden = model(input_ids=alone, output_hidden_states=True, use_cache=False).hidden_states
        torch.testing.assert_close(taps, hidden[1][0], atol=1e-4, rtol=1e-4)
    assert len(model.model.layers) == 2


def test_taps_computed_step_by_step_train_the_same(
    world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TRAINING | {"steps": 10}
    cached = run_stage("draft-train", inputs(world), params, tmp_path / "cached")
    monkeypatch.setattr(draft_train, "TAPS_LIMIT", 0)
    online = run_stage("draft-train", inputs(world), params, tmp_path / "online")
    losses = [
        [line["loss"] for line in json.loads((f / "training.json").read_text())["steps"]] for f in (cached, online)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"steps": 0}, "steps"),
        ({"optimizer": TRAINING["optimizer"] | {"lr": 1e-12}, "steps": 2}, "unchanged"),
        ({"architecture": DRAFTER | {"intermediate_size": 192}}, "init"),
        ({"architecture": DRAFTER | {"hidden_size": 32}}, "hidden-size"),
        ({"max_length": 3}, "data"),
    ],
)
def test_a_training_that_trains_nothing_fails(
    world: dict[str, Path], tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(QdcError) as failure:
        run_stage("draft-train", inputs(world, init=world["drafter"]), TRAINING | changes, tmp_path)
    assert failure.value.id == f"stage.draft-train.{what}"
    assert failure.value.exit_code == 4
    assert list((tmp_path / "output").iterdir()) == []


def test_a_loss_that_is_no_number_fails(world: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    for file in world["target"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(QdcError) as failure:
        run_stage("draft-train", inputs(world | {"target": broken}), TRAINING, tmp_path)
    assert failure.value.id == "stage.draft-train.diverged"


def test_calibration_accounts_for_every_conversation(world: dict[str, Path]) -> None:
    summary = json.loads((world["calibration"] / "summary.json").read_text())
    rows = [json.loads(line) for line in (world["calibration"] / "calibration.jsonl").read_text().splitlines()]
    assert summary["chosen"] == 65 == summary["kept"] + summary["dropped"]["answer_too_short"]
    assert summary["dropped"]["answer_too_short"] >= 1
    assert summary["blocks"] == sum(len(row["anchors"]) for row in rows)
    for row in rows:
        assert row["anchors"][0] == row["prompt_tokens"]
        assert row["anchors"][-1] + 4 < len(row["input_ids"])


def test_calibrating_on_answers_shorter_than_a_block_fails(world: dict[str, Path], tmp_path: Path) -> None:
    params = {"conversations": 9, "anchors": 4, "draft_block_size": 64, "seed": 3}
    with pytest.raises(QdcError, match="longer than a draft block"):
        run_stage("calibrate", {"corpus": world["corpus"], "tokenizer": world["target"]}, params, tmp_path)


def test_the_quantized_folder_holds_packed_codes_and_their_twin(world: dict[str, Path]) -> None:
    folder = world["quantized"]
    packed, dense = load_file(folder / "model.safetensors"), load_file(folder / "dense.safetensors")
    trained = load_file(world["drafter"] / "model.safetensors")
    assert set(dense) == set(trained)
    modules = linear_modules(1)
    assert {name.removesuffix(".weight_packed") for name in packed if "_packed" in name} == set(modules)
    for name in modules:
        scale = packed[f"{name}.weight_scale"]
        codes = unpack_codes(packed[f"{name}.weight_packed"]).float()
        twin = (codes * scale.float().repeat_interleave(32, dim=1)).to(torch.bfloat16)
        assert torch.equal(twin, dense[f"{name}.weight"])
        assert not torch.equal(twin, trained[f"{name}.weight"])
    for name in set(trained) - {f"{module}.weight" for module in modules}:
        assert torch.equal(packed[name], trained[name])
    facts = read_drafter_config(json.loads((folder / "config.json").read_text()))
    assert facts["quantization"] == SCHEME | {"ignore": ["lm_head", "re:.*embed_tokens$"]}
    report = json.loads((folder / "ptq.json").read_text())
    assert [line["module"] for line in report["modules"]] == modules
    assert all(0 < line["output_error"] < 0.1 for line in report["modules"])


def test_quantization_repeats_to_the_byte_and_ignores_what_it_is_told(world: dict[str, Path], tmp_path: Path) -> None:
    again = run_stage("draft-quantize", quantize_inputs(world), QUANTIZATION, tmp_path / "again")
    for file in sorted(world["quantized"].iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes()
    partly = run_stage(
        "draft-quantize",
        quantize_inputs(world),
        QUANTIZATION | {"ignore": ["model.fc"], "method": "rtn"},
        tmp_path / "partly",
    )
    assert "fc.weight" in load_file(partly / "model.safetensors")
    assert json.loads((partly / "ptq.json").read_text())["ignored"] == ["fc"]
    with pytest.raises(QdcError, match="ignored"):
        run_stage("draft-quantize", quantize_inputs(world), QUANTIZATION | {"ignore": ["re:.*"]}, tmp_path / "none")


def evaluate(world: dict[str, Path], folder: Path, drafters: list[Path], **changes: Any) -> Path:
    roles = {"target": world["target"], "heldout": world["heldout"]}
    roles |= {f"drafter_{index}": drafter for index, drafter in enumerate(drafters)}
    labels = [f"stage {index}" for index in range(len(drafters))]
    return run_stage("evaluate:drafter", roles, EVALUATION | {"labels": labels} | changes, folder)


def test_evaluation_gives_the_micro_average_of_the_prompts_it_lists(world: dict[str, Path], tmp_path: Path) -> None:
    folder = evaluate(world, tmp_path, [world["drafter"], world["quantized"]])
    evaluation = json.loads((folder / "evaluation.json").read_text())
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert [row["subject"] for row in evaluation["rows"]] == ["stage 0", "stage 1", "stage 1, window 16"]
    assert len(prompts) == 12
    for row in evaluation["rows"]:
        counts = [prompt["replay"][row["subject"]] for prompt in prompts]
        accepted, drafts = (sum(c[what] for c in counts) for what in ("accepted", "drafts"))
        assert row["value"] == pytest.approx((accepted + drafts) / drafts)
        assert row["low"] <= row["value"] <= row["high"]
        assert 1.5 < row["value"] <= 4.0
    assert [(t["subject"], t["against"]) for t in evaluation["tests"]] == [
        ("stage 1", "stage 0"),
        ("stage 1, window 16", "stage 1"),
    ]


@pytest.mark.parametrize("k", [0, 4])
def test_k_must_fit_the_draft_block(world: dict[str, Path], tmp_path: Path, k: int) -> None:
    with pytest.raises(QdcError) as failure:
        evaluate(world, tmp_path, [world["drafter"]], k=k)
    assert failure.value.id == "stage.evaluate-drafter.k"


def test_a_drafter_that_is_never_right_fails(world: dict[str, Path], tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    deaf.mkdir()
    (deaf / "config.json").write_bytes((world["drafter"] / "config.json").read_bytes())
    weights = load_file(world["drafter"] / "model.safetensors")
    weights["norm.weight"].zero_()
    save_file(weights, deaf / "model.safetensors")
    with pytest.raises(QdcError) as failure:
        evaluate(world, tmp_path, [deaf])
    assert failure.value.id == "stage.evaluate-drafter.acceptance"
