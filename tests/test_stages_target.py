"""The target's stages end to end on a very small model: outputs, determinism, resuming, and refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_harness import CHATML, run_stage
from target_chain import BASE, IGNORE, PACK, QAD, SAMPLING, SCHEME, SELECT, Chain, build

from qdc.core.errors import QdcError
from qdc.core.files import sha256_file
from qdc.methods import grid, pretraining, qwen, target
from qdc.methods.tokenizer import load_tokenizer

torch.set_num_threads(1)


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return build(tmp_path_factory.mktemp("chain"))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_prompts_are_counted_and_disjoint(chain: Chain) -> None:
    ours, excluded = rows(chain.out["prompts"], "prompts.jsonl"), rows(chain.out["heldout"], "prompts.jsonl")
    assert len(ours) == 60 and not {r["id"] for r in ours} & {r["id"] for r in excluded}
    summary = read(chain.out["prompts"] / "summary.json")
    assert summary["drawn"] == summary["rows"] + sum(summary["dropped"].values())


def in_file(folder: Path, *lines: str) -> Path:
    folder.mkdir()
    (folder / "mine.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


def said(*turns: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], "note": 1})


def test_prompts_of_a_file_are_its_rows_without_what_is_there_already(chain: Chain, tmp_path: Path) -> None:
    known = rows(chain.out["heldout"], "prompts.jsonl")[0]["messages"][0]["content"]
    source = in_file(
        tmp_path / "source",
        said(("system", "Be short."), ("user", "What is 2 + 2?"), ("assistant", "4.")),
        said(("user", "what IS  2 + 2?")),
        said(("user", known.upper())),
        said(("user", "Name a colour."), ("assistant", "Red."), ("user", "Another.")),
    )
    made = run_stage("prompts", {"source": source, "exclude_0": chain.out["heldout"]}, {"id": "text"}, tmp_path)
    first, second = rows(made, "prompts.jsonl")
    assert [turn["role"] for turn in first["messages"]] == ["system", "user"] and first["answer"] == "4."
    assert len(second["messages"]) == 3 and second["answer"] is None and len(second["id"]) == 16
    summary = read(made / "summary.json")
    assert summary == {"rows": 2, "drawn": 4, "dropped": {"duplicate": 1, "excluded": 1}}
    with pytest.raises(QdcError, match="prompt 2 has no answer to learn from"):
        run_stage("base", {"text": made}, BASE, tmp_path / "base")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no JSON", "line 2 of the file: it is no JSON object"),
        ('{"messages": []}', "it is no JSON object with `messages`"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content"),
        (said(("assistant", "Hello.")), "no text of the user's"),
        (said(("user", " ")), "no text of the user's"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, line: str, words: str) -> None:
    source = in_file(tmp_path / "source", said(("user", "Hi")), line)
    with pytest.raises(QdcError, match=words):
        run_stage("prompts", {"source": source}, {}, tmp_path)


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QdcError, match="no prompt to keep"):
        run_stage("prompts", {"source": in_file(tmp_path / "source")}, {}, tmp_path)


def test_base_learns_and_is_a_folder_that_transformers_reads(chain: Chain) -> None:
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM

    folder = chain.out["base"]
    losses = [row["loss"] for row in read(folder / "training.json")["log"]]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Tom has 17 apples at home."}]
    text = ours.render_chat(turns, True)
    assert theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == text
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([ours.encode(text)])
    with torch.no_grad():
        ours_logits = qwen.forward(qwen.load_model(folder), ids)
        assert torch.allclose(model(input_ids=ids).logits, ours_logits, atol=1e-4)


def test_base_and_distill_are_deterministic(chain: Chain, tmp_path: Path) -> None:
    again = run_stage("base", {"text": chain.out["text"]}, BASE, tmp_path / "base")
    assert digests(again) == digests(chain.out["base"])
    given = {"teacher": again, "grid": chain.out["grid"], "data": chain.out["pack"]}
    assert digests(run_stage("distill", given, QAD, tmp_path / "qad")) == digests(chain.out["distill"])


class Killed(Exception):
    """Stands for the process's end in the middle of a stage."""


def killed_at(step: int) -> Any:
    def report(done: int, _total: int, _note: str) -> None:
        if done == step:
            raise Killed

    return report


@pytest.mark.parametrize("step", [1, 5])
def test_distill_resumes_bit_for_bit(chain: Chain, tmp_path: Path, step: int) -> None:
    given = {"teacher": chain.out["base"], "grid": chain.out["grid"], "data": chain.out["pack"]}
    with pytest.raises(Killed):
        run_stage("distill", given, QAD, tmp_path, report=killed_at(step))
    kept = sorted(p.name for p in tmp_path.glob("partial/state-*"))
    assert kept == ([] if step == 1 else ["state-000004"])
    steps: list[int] = []
    output = run_stage("distill", given, QAD, tmp_path, report=lambda done, *_: steps.append(done))
    assert steps[0] == (1 if step == 1 else 5)
    assert digests(output) == digests(chain.out["distill"])
    assert {p.suffix for p in (tmp_path / "partial").rglob("*") if p.is_file()} == {".safetensors", ".json"}


def test_base_resumes_bit_for_bit(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "SAVE_EVERY", 4)
    with pytest.raises(Killed):
        run_stage("base", {"text": chain.out["text"]}, BASE, tmp_path, report=killed_at(9))
    steps: list[int] = []
    output = run_stage("base", {"text": chain.out["text"]}, BASE, tmp_path, report=lambda done, *_: steps.append(done))
    assert steps == [9, 10, 11, 12] and digests(output) == digests(chain.out["base"])


def test_a_given_base_is_copied_and_checked(chain: Chain, tmp_path: Path) -> None:
    source = chain.out["base"]
    params = {"path": True, "chat_template": None}
    copied = run_stage("base", {"source": source}, params, tmp_path / "copy")
    expected = {name: value for name, value in digests(source).items() if name != "training.json"}
    assert digests(copied) == expected
    wrong = tmp_path / "fp32"
    wrong.mkdir()
    for name in expected:
        (wrong / name).write_bytes((source / name).read_bytes())
    (wrong / "chat_template.jinja").unlink()
    with pytest.raises(QdcError, match="no chat template"):
        run_stage("base", {"source": wrong}, params, tmp_path / "untold")
    settings = read(wrong / "tokenizer_config.json")
    (wrong / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHATML}))
    older = run_stage("base", {"source": wrong}, params, tmp_path / "older")
    assert (older / "chat_template.jinja").read_text() == CHATML
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, wrong / "model.safetensors")
    with pytest.raises(QdcError, match="not BF16"):
        run_stage("base", {"source": wrong}, params, tmp_path / "refused")
    config = read(wrong / "config.json")
    (wrong / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(QdcError, match="architecture"):
        run_stage("base", {"source": wrong}, params, tmp_path / "foreign")


def test_corpus_accounts_for_every_row(chain: Chain, tmp_path: Path) -> None:
    summary = read(chain.out["corpus"] / "summary.json")
    kept = rows(chain.out["corpus"], "conversations.jsonl")
    assert summary["rows"] == 60 == summary["kept"] + sum(summary["dropped"].values())
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in kept)
    given = {"prompts": chain.out["prompts"], "model": chain.out["base"]}
    params = {"by": "teacher", "model_folder": ".", "sampling": SAMPLING, "truncated": "drop"}
    if summary["truncated"] == 60:
        with pytest.raises(QdcError, match="no conversation was kept"):
            run_stage("corpus", given, params, tmp_path)
    else:
        dropped = read(run_stage("corpus", given, params, tmp_path) / "summary.json")
        assert dropped["dropped"]["truncated"] == summary["truncated"]


def test_sampled_corpora_follow_their_seed(chain: Chain, tmp_path: Path) -> None:
    given = {"prompts": chain.out["prompts"], "model": chain.out["base"]}
    texts = []
    for index, seed in enumerate((1, 1, 2)):
        sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_tokens": 8, "seed": seed}
        params = {"by": "teacher", "model_folder": ".", "sampling": sampling, "truncated": "keep"}
        texts.append(digests(run_stage("corpus", given, params, tmp_path / str(index))))
    assert texts[0] == texts[1] != texts[2]


def test_pack_splits_by_row_and_keeps_all_tokens(chain: Chain) -> None:
    facts = read(chain.out["pack"] / "pack.json")
    assert facts["train"]["rows"] + facts["heldout"]["rows"] == facts["rows"]
    for name in ("train", "heldout"):
        packed = load_file(chain.out["pack"] / f"{name}.safetensors")
        assert packed["input_ids"].dtype == torch.int32 and packed["assistant_mask"].dtype == torch.uint8
        assert packed["input_ids"].shape == packed["assistant_mask"].shape
        assert int(packed["length"].sum()) == facts[name]["tokens"]
        written = packed["input_ids"][packed["assistant_mask"].bool()]
        assert len(written) == facts[name]["assistant_tokens"] > 0


def test_qad_lowers_the_heldout_divergence(chain: Chain) -> None:
    selection = read(chain.out["select"] / "selection.json")
    assert [row["step"] for row in selection["table"]] == [2, 4, 6]
    best = min(selection["table"], key=lambda row: row["kl"])
    assert selection["selected"] == best["step"] and best["kl"] < selection["ptq_kl"]
    chosen = chain.out["distill"] / "checkpoints" / f"step-{best['step']:06d}.safetensors"
    assert sha256_file(chosen) == sha256_file(chain.out["select"] / "selected.safetensors")


def test_logits_in_smaller_chunks_train_the_same(chain: Chain, tmp_path: Path) -> None:
    given = {"teacher": chain.out["base"], "grid": chain.out["grid"], "data": chain.out["pack"]}
    made = run_stage("distill", given, {**QAD, "kl_chunk_tokens": 48}, tmp_path)
    ours, theirs = (read(folder / "training.json")["log"] for folder in (made, chain.out["distill"]))
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-3)


def test_distill_refuses_to_do_nothing(chain: Chain, tmp_path: Path) -> None:
    given = {"teacher": chain.out["base"], "grid": chain.out["grid"], "data": chain.out["pack"]}
    none = copy.deepcopy(QAD)
    none["schedule"]["steps"] = 0
    with pytest.raises(QdcError, match="no steps"):
        run_stage("distill", given, none, tmp_path / "none")
    still = copy.deepcopy(QAD)
    still["optimizer"]["lr"] = 0.0
    with pytest.raises(QdcError, match="no weight changed"):
        run_stage("distill", given, still, tmp_path / "still")


def test_base_says_when_it_diverges(chain: Chain, tmp_path: Path) -> None:
    wild = copy.deepcopy(BASE)
    wild["scratch"]["training"]["optimizer"]["lr"] = 1e30
    with pytest.raises(QdcError, match="the loss is") as caught:
        run_stage("base", {"text": chain.out["text"]}, wild, tmp_path)
    assert caught.value.id == "stage.base.diverged"


def test_distill_refuses_a_student_off_the_grid(chain: Chain, tmp_path: Path, monkeypatch: Any) -> None:
    from qdc.stages import distill

    def shifted(*arguments: Any) -> dict[str, torch.Tensor]:
        return {name: tensor * 1.2 for name, tensor in original(*arguments).items()}

    original = distill.initial_latents
    monkeypatch.setattr(distill, "initial_latents", shifted)
    given = {"teacher": chain.out["base"], "grid": chain.out["grid"], "data": chain.out["pack"]}
    with pytest.raises(QdcError, match="at step 0"):
        run_stage("distill", given, QAD, tmp_path)


def test_packed_target_is_proved_and_loads(chain: Chain) -> None:
    folder = chain.out["target"]
    proof = read(folder / "proof.json")
    assert sorted(proof["checks"]) == list("abcdefgh")
    assert all(check["pass"] for check in proof["checks"].values()) and 0 < proof["codes_changed"] < 1
    assert proof["census"]["counts"] == {"quantized": 13, "ignored": 4}
    config = read(folder / "ct" / "config.json")["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["ignore"] == proof["census"]["ignored"]
    packed = load_file(folder / "ct" / "model.safetensors")
    dense = qwen.load_model(folder / "dense").state_dict()
    for name, tensor in target.served_tensors(packed).items():
        assert torch.equal(dense[name], tensor)
    scales = load_file(chain.out["grid"] / "grid.safetensors")
    for module in proof["census"]["quantized"]:
        assert torch.equal(packed[f"{module}.weight_scale"], scales[f"{module}.scale"])
        assert f"{module}.weight" not in packed


def test_without_qad_the_ptq_grid_is_packed_as_it_is(chain: Chain, tmp_path: Path) -> None:
    folder = run_stage("pack-target", {"base": chain.out["base"], "grid": chain.out["grid"]}, PACK, tmp_path)
    proof = read(folder / "proof.json")
    assert proof["codes_changed"] == 0 and proof["trainable"] == {"set": None, "tensors": []}
    given = load_file(chain.out["grid"] / "grid.safetensors")
    for module, (codes, _) in target.unpacked_modules(load_file(folder / "ct" / "model.safetensors")).items():
        assert torch.equal(codes, given[f"{module}.codes"])


def test_all_parameters_may_be_trained(chain: Chain, tmp_path: Path) -> None:
    everything = {**copy.deepcopy(QAD), "trainable": "all"}
    given = {"teacher": chain.out["base"], "grid": chain.out["grid"], "data": chain.out["pack"]}
    trained = run_stage("distill", given, everything, tmp_path / "distill")
    chosen = run_stage("select", {**given, "checkpoints": trained}, {**SELECT, "trainable": "all"}, tmp_path / "s")
    inputs = {"base": chain.out["base"], "grid": chain.out["grid"], "selected": chosen}
    folder = run_stage("pack-target", inputs, {**PACK, "trainable": "all"}, tmp_path / "target")
    proof = read(folder / "proof.json")
    assert proof["checks"]["g"]["figure"] <= target.KL_NOISE and len(proof["trainable"]["tensors"]) > 20
    before = load_file(chain.out["base"] / "model.safetensors")["model.norm.weight"]
    assert not torch.equal(load_file(folder / "dense" / "model.safetensors")["model.norm.weight"], before)
    with pytest.raises(QdcError, match="unexpected trained set"):
        run_stage("pack-target", inputs, PACK, tmp_path / "refused")


def damaged(built: target.Target, check: str) -> target.Target:
    """`built` with the one fault that check is there to find."""
    module = next(iter(built.codes))
    packed, dense = dict(built.packed), dict(built.dense)
    if check == "a":
        packed[f"{module}.weight_scale"] = packed[f"{module}.weight_scale"] * 2
    if check == "b":
        packed[f"{module}.weight_shape"] = packed[f"{module}.weight_shape"] + 1
    if check == "e":
        packed[f"{module}.weight_packed"] = packed[f"{module}.weight_packed"] ^ 1
    if check == "f":
        dense[f"{module}.weight"] = dense[f"{module}.weight"] * 1.5
    if check == "h":
        packed["model.norm.weight"] = packed["model.norm.weight"] + 1
    codes = dict(built.codes)
    if check == "c":
        codes[module] = (codes[module][0] + 9, codes[module][1])
    return target.Target(codes, packed, dense)


@pytest.mark.parametrize("check", list("abcefh"))
def test_each_check_of_the_proof_finds_its_fault(chain: Chain, check: str) -> None:
    weights = qwen.read_weights(chain.out["base"])
    modules = read(chain.out["grid"] / "grid.json")["modules"]
    given = {m: grid.rtn_quantize(weights[f"{m}.weight"], SCHEME) for m in modules}
    built = target.build_target(weights, given, {})
    sound = target.prove((built.packed, built.dense), built, given, modules, set(), weights)
    assert all(entry["pass"] for entry in sound.values())
    broken = damaged(built, check)
    found = target.prove((broken.packed, broken.dense), broken, given, modules, set(), weights)
    assert not found[check]["pass"]


def test_a_failed_proof_fails_the_stage(chain: Chain, tmp_path: Path, monkeypatch: Any) -> None:
    from qdc.stages import pack_target

    def broken(*arguments: Any) -> target.Target:
        return damaged(target.build_target(*arguments), "f")

    monkeypatch.setattr(pack_target, "build_target", broken)
    with pytest.raises(QdcError, match="dense twin"):
        run_stage("pack-target", {"base": chain.out["base"], "grid": chain.out["grid"]}, PACK, tmp_path)


def test_gptq_grid_from_a_corpus(chain: Chain, tmp_path: Path) -> None:
    params = {
        "method": "gptq",
        "scheme": SCHEME,
        "ignore": IGNORE,
        "calibration": {"conversations": 40, "damp": 0.01},
    }
    given = {"base": chain.out["base"], "corpus": chain.out["corpus"]}
    folder = run_stage("quantize", given, params, tmp_path / "gptq")
    facts = read(folder / "grid.json")
    assert facts["calibration"]["conversations"] == 40 and len(facts["errors"]) == 13
    assert digests(folder)["grid.safetensors"] != digests(chain.out["grid"])["grid.safetensors"]
    inputs = {"teacher": chain.out["base"], "grid": folder, "data": chain.out["pack"]}
    trained = run_stage("distill", inputs, QAD, tmp_path / "distill")
    start = read(trained / "training.json")["start"]
    assert start["student"] == pytest.approx(start["dequantized"], rel=1e-4) and start["student"] > 0
    params["calibration"] = {"conversations": 4000, "damp": 0.01}
    with pytest.raises(QdcError, match="conversations were asked for"):
        run_stage("quantize", given, params, tmp_path / "short")


def test_evaluation_has_intervals_and_a_paired_test(chain: Chain, tmp_path: Path) -> None:
    given = {"teacher": "base", "grid": "grid", "target": "target", "heldout": "heldout", "data": "pack"}
    inputs = {role: chain.out[name] for role, name in given.items()}
    folder = run_stage("evaluate:target", inputs, {"prompts": 24, "max_tokens": 24}, tmp_path)
    result = read(folder / "evaluation.json")
    assert all(row["low"] <= row["value"] <= row["high"] and row["n"] > 0 for row in result["rows"])
    found = {(row["subject"], row["metric"]): row["value"] for row in result["rows"]}
    selection = read(chain.out["select"] / "selection.json")
    assert found["ptq", "kl-all-tokens"] == pytest.approx(selection["ptq_kl"], rel=1e-4)
    best = min(row["kl"] for row in selection["table"])
    assert found["qad", "kl-all-tokens"] == pytest.approx(best, rel=1e-4)
    (test,) = result["tests"]
    changed = {s: round((1 - found[s, "same-greedy-text"]) * 24) for s in ("ptq", "qad")}
    assert test["ptq_only_changed"] - test["qad_only_changed"] == changed["ptq"] - changed["qad"]
    assert 0 <= test["p"] <= 1
