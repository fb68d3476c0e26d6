"""The least time that one request takes on a card, from the bytes and operations that it cannot do without.

A step of decoding reads the target, the drafter and the head, reads and writes recurrent states and reads the KV
cache; prefill does the target's multiplications. Kernels that overlap nothing and waste nothing would take this long:
a bound, no forecast. Batch 1. Embedding look-ups, activations and the drafter's prefill are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qdc.formats.checkpoint import ModelFacts
from qdc.measure.figures import Figure
from qdc.measure.sizes import Json, TextModel, base_model, drafter, served_target, size

if TYPE_CHECKING:
    from qdc.measure.past import Past

STATE_OPERATIONS = 6
"""Operations that each number of a recurrent state costs a token: decay, two products, an update (2 each a product)."""
USUAL_TOKENS_A_STEP = 5.0
"""Acceptance length of a good block drafter (arXiv 2607.04244, table 4: 4.92 to 5.03)."""


@dataclass(frozen=True)
class Form:
    """What is served, in bytes. `model`: sizes of the text model; `weights`: its layers; `head`; `state`: recurrent
    state of a sequence; `states`: states read and written a step; `kv_token`: KV cache a token; `draft`: drafter's
    weights and `draft_head` a step; `draft_kv_token`; `window`: tokens that the drafter sees, None for all."""

    model: TextModel
    weights: int
    head: int
    state: int
    states: int
    kv_token: int
    draft: int = 0
    draft_head: int = 0
    draft_kv_token: int = 0
    window: int | None = None


@dataclass(frozen=True)
class Speed:
    """`bytes_s` and `flop_s`: what the card reaches."""

    bytes_s: float
    flop_s: float

    def derated(self, bandwidth: float, operations: float) -> Speed:
        return Speed(self.bytes_s * bandwidth, self.flop_s * operations)


@dataclass(frozen=True)
class Regime:
    """A kind of request, in seconds. `terms`: parts of a step, by name."""

    prompt: int
    answer: int
    prefill: float
    terms: dict[str, float]
    tokens_a_step: float

    @property
    def name(self) -> str:
        return f"{self.prompt}/{self.answer}"

    @property
    def step(self) -> float:
        return sum(self.terms.values())

    @property
    def latency(self) -> float:
        return self.prefill + self.answer / self.tokens_a_step * self.step

    @property
    def largest(self) -> tuple[str, float]:
        """The largest term of a step and its part of it."""
        name = max(self.terms, key=lambda term: self.terms[term])
        return name, self.terms[name] / self.step


def teacher_form(recipe: Json, facts: Mapping[str, ModelFacts]) -> Form:
    """The base in its own precision without a drafter. Raises Lacking."""
    model = base_model(facts)
    return _form(recipe, model, model, None)


def served_form(recipe: Json, facts: Mapping[str, ModelFacts]) -> Form:
    """What the recipe serves. Raises Lacking."""
    model = base_model(facts)
    return _form(recipe, model, served_target(recipe, facts), facts)


def state_bytes(recipe: Json, model: TextModel) -> int:
    """Recurrent state of one sequence. FP32, unless the recipe or the model says BF16."""
    given = recipe["serve"]["state_dtype"]
    wanted = model.config.get("mamba_ssm_dtype", "float32") if given == "auto" else given
    return model.state_elements * (2 if wanted in ("bfloat16", "float16") else 4)


def kv_width(recipe: Json) -> int:
    """Bytes of a number in the KV cache."""
    given = recipe["serve"]["kv_cache_dtype"]
    if given == "auto":
        return 4 if recipe["serve"]["dtype"] == "float32" else 2
    return 1


def _form(recipe: Json, model: TextModel, stored: TextModel, facts: Mapping[str, ModelFacts] | None) -> Form:
    dtype = recipe["serve"]["dtype"]
    proposer = drafter(recipe, facts, model) if facts is not None else None
    k = (recipe["serve"]["k"] or 0) if proposer else 0
    plain = Form(
        model,
        weights=size(stored.body, dtype),
        head=size(stored.read_head, dtype),
        state=state_bytes(recipe, model),
        states=1 + (k + 1),
        kv_token=model.kv_elements * kv_width(recipe),
    )
    if proposer is None:
        return plain
    own = size({"head": proposer.tensors["lm_head.weight"]}) if proposer.own_head else 0
    width = 4 if dtype == "float32" else 2
    rows = 0 if proposer.own_head else proposer.head_rows
    return replace(
        plain,
        draft=proposer.passes * (size(proposer.tensors, dtype) - own),
        draft_head=proposer.passes * (own or plain.head * rows // model.vocabulary),
        draft_kv_token=proposer.kv_elements * width * max(1, proposer.passes),
        window=proposer.window,
    )


def prefill_operations(model: TextModel, tokens: int) -> float:
    """Floating-point operations of reading a prompt: matrices, causal attention, recurrent states."""
    matrices = 2 * model.linear_parameters * tokens
    attention = model.attention_layers * 4 * (tokens**2 / 2) * model.attention_width
    return matrices + attention + STATE_OPERATIONS * model.state_elements * tokens


def bound(form: Form, prompt: int, answer: int, speed: Speed, tokens_a_step: float) -> Regime:
    """The bound of one kind of request; the cache is as long as at the middle of the answer."""
    context = prompt + answer / 2
    seen = context if form.window is None else min(context, form.window)
    read = {
        "target weights": form.weights,
        "head": form.head,
        "recurrent states": form.states * form.state,
        "KV cache": form.kv_token * context,
        "drafter weights": form.draft,
        "drafter's head": form.draft_head,
        "drafter's KV cache": form.draft_kv_token * seen,
    }
    terms = {name: amount / speed.bytes_s for name, amount in read.items() if amount}
    weights = (form.weights + form.head) / speed.bytes_s
    prefill = max(prefill_operations(form.model, prompt) / speed.flop_s, weights)
    return Regime(prompt, answer, prefill, terms, tokens_a_step)


def tokens_a_step(recipe: Json, past: Past) -> Figure:
    """Tokens that a step yields: as a build of this recipe with this K measured, else assumed."""
    k = recipe["serve"]["k"]
    if recipe["drafter"] is None or k is None:
        return Figure(1.0, "tokens", False, "no drafter")
    if past.acceptance is not None:
        source = f"acceptance length in build {past.acceptance_of}"
        changed = "" if past.acceptance_exact else ", whose target, drafter or data were others"
        return Figure(past.acceptance, "tokens", not past.acceptance_exact, source + changed)
    return Figure(min(USUAL_TOKENS_A_STEP, k + 1.0), "tokens", True, "assumed; at most K + 1")


def mean_ratio(slow: list[float], fast: list[float]) -> float:
    """The mean over the regimes of slow / fast, not the ratio of means."""
    return sum(a / b for a, b in zip(slow, fast, strict=True)) / len(fast)


def baseline(base: dict[str, Any], hardware: str, regimes: list[str]) -> tuple[list[float], str] | None:
    """(seconds of each regime, source) that was published for the BF16 base on this card; None without."""
    import json
    from pathlib import Path

    for row in json.loads(Path(__file__).with_name("baselines.json").read_bytes()):
        if (row["base"], row["hardware"]) == (base.get("hf"), hardware) and set(regimes) <= set(row["regimes"]):
            return [row["regimes"][name] for name in regimes], row["source"]
    return None
