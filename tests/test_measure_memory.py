"""Memory of serving and of training: the sums that a plan prints and that rules decide by."""

from __future__ import annotations

from pathlib import Path

import hub_facts
import pytest

from qdc.core.errors import QdcError
from qdc.measure import memory
from qdc.recipe.load import load
from qdc.run import settings
from qdc.tables.hardware import row


def serving(root: Path, *sets: str) -> memory.Serving:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml", list(sets))
    return memory.serving(loaded.data, hub_facts.facts_for(loaded), row(loaded.model.deploy.hardware))


def test_serving_is_the_sum_of_its_parts(root: Path) -> None:
    found = serving(root, "serve.max_model_len=13312", "serve.gpu_memory_utilization=0.9")
    parts = {term.what: term.figure.value for term in found.request}
    assert 8 * parts["recurrent states"] == pytest.approx(6.8e9, rel=0.01)
    assert 8 * parts["KV cache"] == pytest.approx(5.7e9, rel=0.01)
    assert parts["recurrent states"] == 17 * 50331648
    assert found.room is not None and found.room.value == pytest.approx(0.9 * 24e9)
    assert found.fits_one and found.fits_all and found.runs == 8
    assert found.all == pytest.approx(sum(t.figure.value for t in found.fixed) + 8 * sum(parts.values()))


def test_the_longest_request_that_fits_is_the_longest(root: Path) -> None:
    one = ("serve.max_num_seqs=1", "serve.gpu_memory_utilization=0.7")
    longest = serving(root, *one).longest
    assert longest is not None
    assert serving(root, *one, f"serve.max_model_len={longest}").fits_one
    assert not serving(root, *one, f"serve.max_model_len={longest + 1}").fits_one


def test_as_many_requests_run_as_fit(root: Path) -> None:
    runs = serving(root, "serve.max_num_seqs=16").runs
    assert runs is not None and runs < 16
    assert serving(root, f"serve.max_num_seqs={runs}").fits_all
    assert not serving(root, f"serve.max_num_seqs={runs + 1}").fits_all


@pytest.mark.parametrize("change", ["serve.gpu_memory_utilization=null", "deploy.hardware=cpu"])
def test_without_a_room_nothing_is_decided(root: Path, change: str) -> None:
    found = serving(root, change)
    assert (found.room, found.fits_one, found.runs) == (None, None, None)
    assert found.one > 0


def test_eager_has_no_graphs(root: Path) -> None:
    assert serving(root).one - serving(root, "serve.eager=true").one == memory.GRAPHS[0]


@pytest.mark.parametrize(
    ("sets", "fits"),
    [(["kl_chunk_tokens=16384"], False), (["kl_chunk_tokens=null"], False), (["kl_chunk_tokens=1024"], True)],
)
def test_logits_decide_whether_qad_fits(root: Path, sets: list[str], fits: bool) -> None:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml", [f"target.qad.{item}" for item in sets])
    facts = hub_facts.facts_for(loaded)
    found = memory.qad(loaded.data, facts, 80e9)
    assert found is not None and found.fits is fits
    logits = {term.what: term.figure.value for term in found.terms}["logits"]
    tokens = loaded.data["target"]["qad"]["kl_chunk_tokens"] or 16384
    assert logits == 4 * tokens * 248320 * 4
    chunk = memory.fitting_chunk(loaded.data, facts, 80e9)
    assert chunk is not None and chunk >= 1024
    assert memory.fitting_chunk(loaded.data, facts, 8e9) is None
    assert memory.qad(loaded.data, facts, None) is not None


def test_the_optimizer_and_the_trained_set_count(root: Path) -> None:
    def needs(*sets: str) -> float:
        loaded = load(root / "recipes" / "qwen35-4b-nota.yaml", list(sets))
        found = memory.qad(loaded.data, hub_facts.facts_for(loaded), None)
        assert found is not None
        return found.total.value

    assert needs("target.qad.optimizer.kind=adamw") - needs() == pytest.approx(6 * 3.569e9, rel=1e-3)
    assert needs("target.qad.trainable=all") - needs() == pytest.approx(10 * 0.636e9, rel=0.01)


def test_each_drafter_training_is_listed(root: Path) -> None:
    loaded = load(root / "recipes" / "qwen35-4b-nota.yaml")
    facts = hub_facts.facts_for(loaded)
    found = memory.drafting(loaded.data, facts, 40e9)
    assert [item.stage for item in found] == ["draft-train:pretrain", "draft-train:finetune"]
    assert all(item.fits and item.total.assumed for item in found)
    plain = load(root / "recipes" / "qwen35-4b-nota.yaml", ["drafter=null", "serve.k=null"])
    assert memory.drafting(plain.data, facts, None) == []


def test_the_setting_is_a_number_of_gigabytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings.training_bytes() is None
    monkeypatch.setenv("QDC_TRAINING_MEMORY_GB", "80")
    assert settings.settings().training_bytes == 80e9
    for bad in ("much", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("QDC_TRAINING_MEMORY_GB", bad)
        with pytest.raises(QdcError) as error:
            settings.training_bytes()
        assert error.value.id == "settings.training_memory_gb"
    monkeypatch.delenv("QDC_TRAINING_MEMORY_GB")
    (tmp_path / "qdc").mkdir()
    (tmp_path / "qdc" / "config.yaml").write_text("training_memory_gb: 24\n")
    assert settings.training_bytes() == 24e9
