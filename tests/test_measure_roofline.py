"""Sizes of what is served, and the bound that follows from them, against a table computed by hand.

The table is for Qwen3.5-4B on an A10G (600 GB/s, 70 TFLOP/s), K 15, 5 tokens a step, against 2582, 5441, 6576 ms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hub_facts
import pytest

from qdc.measure.figures import Lacking
from qdc.measure.parameters import parameters
from qdc.measure.past import Past
from qdc.measure.predict import predict, roofline
from qdc.measure.roofline import Form, Speed, bound, mean_ratio, served_form, teacher_form, tokens_a_step
from qdc.measure.sizes import base_model, count, drafter, served_target, size
from qdc.recipe.load import Loaded, load
from qdc.sources.facts import attach
from qdc.tables.hardware import row

A10G = Speed(600e9, 70e12)
BASELINE = [2.582, 5.441, 6.576]
REGIMES = [(64, 128), (2048, 256), (8192, 256)]
PLAIN = ["drafter=null", "serve.k=null"]


def nota(root: Path, *sets: str) -> Loaded:
    return load(root / "recipes" / "qwen35-4b-nota.yaml", list(sets))


def form(loaded: Loaded, facts: dict[str, Any] | None = None) -> Form:
    return served_form(loaded.data, facts or hub_facts.facts_for(loaded))


@pytest.mark.parametrize(
    ("sets", "tokens", "speed", "steps", "milliseconds", "mean"),
    [
        (None, 1, A10G, (14.2, 14.3, 14.6), (1830, 3876, 4654), 1.41),
        (PLAIN, 1, A10G, (5.65, 5.76, 6.10), (730, 1690, 2468), 3.14),
        (["drafter.ptq=null", "drafter.swa=null"], 5, A10G, (10.8, 11.0, 11.6), (284, 778, 1498), 6.83),
        ([], 5, A10G, (9.49, 9.64, 9.97), (250, 708, 1418), 7.55),
        ([], 5, A10G.derated(0.85, 0.60), (11.2, 11.3, 11.7), (297, 939, 2112), 5.87),
    ],
    ids=["BF16", "INT4", "INT4 and BF16 drafter", "the paper's form", "at 85 % and 60 %"],
)
def test_the_bound_reproduces_the_table(
    root: Path,
    sets: list[str] | None,
    tokens: int,
    speed: Speed,
    steps: tuple[float, ...],
    milliseconds: tuple[float, ...],
    mean: float,
) -> None:
    loaded = nota(root, *(sets or []))
    facts = hub_facts.facts_for(loaded)
    of = teacher_form(loaded.data, facts) if sets is None else served_form(loaded.data, facts)
    made = [bound(of, *regime, speed, tokens) for regime in REGIMES]
    assert [regime.step * 1e3 for regime in made] == pytest.approx(steps, rel=0.005)
    assert [regime.latency * 1e3 for regime in made] == pytest.approx(milliseconds, abs=1.3)
    assert round(mean_ratio(BASELINE, [regime.latency for regime in made]), 2) == mean


def test_sizes_follow_from_shapes(root: Path) -> None:
    loaded = nota(root)
    facts = hub_facts.facts_for(loaded)
    base = base_model(facts)
    assert base.linear_parameters == pytest.approx(3.569e9, rel=1e-3)
    assert size(base.read_head) == pytest.approx(1.271e9, rel=1e-3)
    assert size(base.text) == pytest.approx(8.41e9, rel=1e-3)
    assert size(served_target(loaded.data, facts).text) == pytest.approx(3.285e9, rel=4e-3)
    assert (form(loaded).state, form(loaded).kv_token) == (50331648, 32768)
    served = drafter(loaded.data, facts, base)
    assert served is not None and served.kv_elements * 2 == 20480
    assert served.parameters == pytest.approx(537.4e6, rel=1e-4)
    assert size(served.tensors) == pytest.approx(0.2771e9, rel=4e-4)


def test_a_target_packed_here_is_as_large_as_the_published_grid(root: Path) -> None:
    published = nota(root)
    facts = hub_facts.facts_for(published)
    own = nota(root, "target.quantization.grid=null", "target.quantization.method=rtn")
    assert size(served_target(own.data, facts).text) == size(served_target(published.data, facts).text)


def test_each_draft_token_more_writes_a_state_more(root: Path) -> None:
    steps = [bound(form(nota(root, f"serve.k={k}")), 64, 128, A10G, 5).step for k in (14, 15)]
    assert (steps[1] - steps[0]) * 1e3 == pytest.approx(0.084, abs=0.0005)


@pytest.mark.parametrize(("window", "seen"), [(256, 256), (1024, 1024), (8320, 8320), (16384, 8320)])
def test_the_drafter_reads_no_more_than_its_window(root: Path, window: int, seen: int) -> None:
    terms = bound(form(nota(root, f"drafter.swa.window={window}")), 8192, 256, A10G, 5).terms
    assert terms["drafter's KV cache"] == pytest.approx(seen * 20480 / 600e9)


def test_other_proposers_have_their_own_terms(root: Path) -> None:
    copying = "drafter={architecture: {kind: ngram, prompt_lookup_min: 2, prompt_lookup_max: 5}}"
    assert set(bound(form(nota(root, copying)), 64, 128, A10G, 2).terms) == {
        "target weights",
        "head",
        "recurrent states",
        "KV cache",
    }
    own_head = nota(root, "drafter={architecture: {kind: mtp}}", "serve.k=4")
    made = form(own_head)
    assert made.draft == 4 * size(base_model(hub_facts.facts_for(own_head)).mtp)
    assert made.draft_head == 4 * made.head
    small = form(nota(root, "drafter.architecture.draft_vocab_size=32000"))
    assert small.draft_head == 32000 * 2560 * 2
    assert small.draft == form(nota(root)).draft


def test_narrow_caches_halve_their_terms(root: Path) -> None:
    wide, narrow = form(nota(root)), form(nota(root, "serve.kv_cache_dtype=fp8", "serve.state_dtype=bfloat16"))
    assert (narrow.kv_token, narrow.state) == (wide.kv_token // 2, wide.state // 2)


def test_parameters_are_counted_and_set_against_the_original(root: Path) -> None:
    loaded = nota(root)
    facts = hub_facts.facts_for(loaded)
    found = parameters(loaded.data, facts)
    assert found.drafter is not None
    assert found.served.value == found.target.value + found.drafter.value
    assert found.original.value == sum(count({n: (t.dtype, t.shape)}) for n, t in facts["target.base"].tensors.items())
    assert found.within is (found.served.value <= found.original.value)
    assert parameters(nota(root, *PLAIN).data, facts).within


def test_tokens_a_step_are_measured_or_marked(root: Path) -> None:
    recipe = nota(root).data
    assert (tokens_a_step(recipe, Past()).value, tokens_a_step(recipe, Past()).assumed) == (5.0, True)
    assert tokens_a_step(nota(root, "serve.k=3").data, Past()).value == 4.0
    same = tokens_a_step(recipe, Past(acceptance=4.48, acceptance_of="b", acceptance_exact=True))
    assert (same.value, same.assumed) == (4.48, False) and "build b" in same.source
    assert tokens_a_step(recipe, Past(acceptance=4.48, acceptance_of="b")).assumed
    assert tokens_a_step(nota(root, *PLAIN).data, Past(acceptance=4.48)).value == 1.0


def test_without_published_times_the_teacher_is_the_measure(root: Path) -> None:
    loaded = nota(root, "deploy.hardware=l4")
    facts = hub_facts.facts_for(loaded)
    made = roofline(loaded.data, facts, row("l4"), Past())
    assert made is not None and made.published is None
    assert made.before == [regime.latency for regime in made.teacher]
    assert made.as_json()["regimes"][0]["baseline"]["assumed"]


def test_what_lacks_facts_is_named_and_the_rest_is_given(root: Path) -> None:
    loaded = nota(root)
    facts = hub_facts.facts_for(loaded)
    del facts["target.quantization.grid"]
    made = predict(loaded.data, facts, Past(), fresh=set(), stale=["distill"])
    assert made.parameters and made.qad and made.times[0].hours
    assert {what: lacking.needs for what, lacking in made.absent.items()} == dict.fromkeys(
        ("image", "serving", "roofline"), ("target.quantization.grid",)
    )
    with pytest.raises(Lacking):
        base_model({})


def test_a_cpu_has_no_roofline(root: Path) -> None:
    regimes = "evaluate.latency={regimes: [32/16], warmup: 1, runs: 3, baseline: teacher}"
    loaded = attach(load(root / "recipes" / "tiny.yaml", [regimes]))
    made = predict(loaded.data, loaded.facts, Past(), fresh=set(), stale=[])
    assert made.roofline is None and "cpu" in made.absent["roofline"].why
