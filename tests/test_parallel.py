"""Trainings in several processes, started as a build starts them, against the same in one; and the setting `device`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from target_chain import QAD, Chain, build

from qdc.core.errors import QdcError
from qdc.graph.signature import package_signature
from qdc.methods.parallel import ALONE, Group, card
from qdc.run import process
from qdc.run.settings import settings

DRAFT: dict[str, Any] = {
    "architecture": {
        "kind": "dflash", "layers": 1, "hidden_size": 32, "intermediate_size": 64, "heads": 2, "kv_heads": 1,
        "head_dim": 16, "draft_block_size": 4, "taps": [0, 1], "mask_token": "<|mask|>", "rope_theta": 10000.0,
        "max_position_embeddings": 256, "init_range": 0.1,
    },
    "taps_from": "target", "steps": 8, "batch": {"conversations": 5}, "anchors": 4, "loss_decay": 4.0,
    "max_length": 96, "model_folder": "dense", "grad_clip": 1.0, "seed": 5,
    "optimizer": {"kind": "muon", "lr": 6e-3, "momentum": 0.95, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "schedule": {"kind": "cosine", "warmup_ratio": 0.04},
}  # fmt: skip


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return build(tmp_path_factory.mktemp("chain"))


@dataclass
class Ran:
    output: Path
    partial: Path
    said: list[tuple[int, int, str]]
    code: int
    error: dict[str, Any] | None


def run(folder: Path, module: str, inputs: dict[str, Path], params: dict[str, Any], **more: Any) -> Ran:
    """A stage in its worker, as an attempt of a build starts it. `more`: `processes`, `device`."""
    ran = Ran(folder / "output", folder / "partial", [], -1, None)
    for place in (ran.output, ran.partial):
        place.mkdir(parents=True, exist_ok=True)
    job = {
        "module": module, "params": params, "inputs": {role: str(path) for role, path in inputs.items()},
        "digests": dict.fromkeys(inputs, "0" * 64), "output": str(ran.output), "partial": str(ran.partial),
        "threads": 1, "packages": {}, "kind": module, "code": "", "data": False, "signature": package_signature(),
        **more,
    }  # fmt: skip
    worker = process.start(module, sys.executable, job, folder, folder / "log", lambda *said: ran.said.append(said))
    while process.wait_any([worker]) is None:
        pass
    ran.code, ran.error = worker.process.returncode, worker.error
    assert ran.code == 0 or ran.error, (folder / "log").read_text()[-2000:]
    return ran


def distilled(chain: Chain, folder: Path, **more: Any) -> Ran:
    given = {"teacher": chain.out["base"], "grid": chain.out["grid"], "data": chain.out["pack"]}
    return run(folder, "distill", given, {**QAD, "batch": {**QAD["batch"], "effective": 5}}, **more)


def drafted(chain: Chain, folder: Path, **more: Any) -> Ran:
    return run(folder, "draft_train", {"target": chain.out["target"], "data": chain.out["corpus"]}, DRAFT, **more)


def log(ran: Ran) -> list[dict[str, float]]:
    text = json.loads((ran.output / "training.json").read_text())
    rows: list[dict[str, float]] = text.get("log") or text["steps"]
    return rows


@pytest.mark.parametrize("make", [distilled, drafted])
def test_two_processes_train_what_one_trains(make: Any, chain: Chain, tmp_path: Path) -> None:
    one, two = make(chain, tmp_path / "one"), make(chain, tmp_path / "two", processes=2)
    assert one.code == two.code == 0, two.error
    assert len(log(one)) == len(log(two)) and one.said[-1][:2] == two.said[-1][:2] == (len(log(one)),) * 2
    for a, b in zip(log(one), log(two), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3)
    files = sorted(path.relative_to(one.output) for path in one.output.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(two.output) for path in two.output.rglob("*.safetensors")) and files
    for name in files:
        ours, theirs = load_file(one.output / name), load_file(two.output / name)
        assert set(ours) == set(theirs)
        for tensor in ours:
            apart = (ours[tensor].float() - theirs[tensor].float()).abs().mean()
            assert apart < 0.02 * ours[tensor].float().abs().mean(), (name, tensor)


def test_more_processes_than_rows_train_the_same(chain: Chain, tmp_path: Path) -> None:
    params = {**DRAFT, "batch": {"conversations": 1}, "steps": 2}
    given = {"target": chain.out["target"], "data": chain.out["corpus"]}
    one = run(tmp_path / "one", "draft_train", given, params)
    two = run(tmp_path / "two", "draft_train", given, params, processes=2)
    assert two.code == 0, two.error
    assert [row["loss"] for row in log(two)] == pytest.approx([row["loss"] for row in log(one)], rel=1e-3)


def test_a_share_is_every_nth_row_and_all_shares_are_the_batch() -> None:
    rows = list(range(7))
    assert ALONE.share(rows) == rows and ALONE.total(2.5, torch.device("cpu")) == 2.5
    assert sorted(row for rank in range(3) for row in Group(rank, 3).share(rows)) == rows
    assert Group(5, 6).share([1, 2]) == []


def test_without_a_card_the_device_is_an_error_that_says_what_to_type(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ran = distilled(chain, tmp_path, device="cuda")
    assert ran.code == 4 and ran.error and ran.error["id"] == "stage.device"
    assert "sees no card of that kind" in ran.error["message"] and "QDC_DEVICE=cpu" in ran.error["hint"]
    with pytest.raises(QdcError, match="sees no card"):
        card("cuda", 0)


def test_the_device_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDC_DEVICE", "cuda")
    assert settings().device == "cuda"
    monkeypatch.setenv("QDC_DEVICE", "tpu")
    with pytest.raises(QdcError, match="there is no device `tpu`"):
        settings()
