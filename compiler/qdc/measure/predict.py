"""All predictions of a plan, each on its own: what lacks facts is named, the rest is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from qdc.formats.checkpoint import ModelFacts
from qdc.measure import memory
from qdc.measure.figures import Figure, Lacking
from qdc.measure.parameters import Parameters, parameters
from qdc.measure.past import Past
from qdc.measure.roofline import (
    Regime,
    Speed,
    baseline,
    bound,
    mean_ratio,
    served_form,
    teacher_form,
    tokens_a_step,
)
from qdc.measure.size import ImageSize, image_size
from qdc.measure.sizes import BASE, DRAFTER, GRID, Json
from qdc.measure.work import StageTime, times
from qdc.tables.hardware import Card, row

USUAL = (0.85, 0.60)
"""Parts of a card's bandwidth and BF16 rate that good kernels reach; assumed."""
_SERVED = (BASE, GRID, DRAFTER)
_READ = {
    "parameters": (BASE, DRAFTER),
    "image": _SERVED,
    "serving": _SERVED,
    "qad": (BASE,),
    "drafting": (BASE, DRAFTER),
    "roofline": _SERVED,
}
"""Prediction -> recipe paths of the checkpoints whose headers it reads."""
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Roofline:
    """`regimes`: bounds of what is served; `usual`: the same at `USUAL` parts of the card's rates; `teacher`: the BF16
    base's own bounds; `published`: (seconds, source) that were measured for it."""

    card: Card
    tokens: Figure
    regimes: tuple[Regime, ...]
    usual: tuple[Regime, ...]
    teacher: tuple[Regime, ...]
    published: tuple[list[float], str] | None

    @property
    def assumed(self) -> bool:
        return self.tokens.assumed or self.card.bandwidth_gbs.assumed or self.card.bf16_tflops.assumed

    @property
    def before(self) -> list[float]:
        """Seconds that speed-ups are against: published, else the teacher's bound."""
        return self.published[0] if self.published else [regime.latency for regime in self.teacher]

    @property
    def against(self) -> str:
        return "published times of the BF16 base" if self.published else "the BF16 base's bound"

    def speedup(self, regimes: Sequence[Regime]) -> float:
        return mean_ratio(self.before, [regime.latency for regime in regimes])

    def as_json(self) -> dict[str, Any]:
        source = self.published[1] if self.published else "bound of the BF16 base on the same card"
        each = zip(self.regimes, self.usual, self.teacher, self.before, strict=True)
        return {
            "card": self.card.name,
            "bandwidth": self._cell(self.card.bandwidth_gbs, "GB/s"),
            "bf16_rate": self._cell(self.card.bf16_tflops, "TFLOP/s"),
            "tokens_a_step": self.tokens.as_json(),
            "usual": {"bandwidth": USUAL[0], "bf16_rate": USUAL[1], "assumed": True},
            "regimes": [self._regime(*row, source) for row in each],
            "speedup": self._figure(self.speedup(self.regimes), "x", f"mean of ratios to {self.against}"),
            "usual_speedup": Figure(self.speedup(self.usual), "x", True, f"mean of ratios to {self.against}").as_json(),
        }

    def _regime(self, best: Regime, usual: Regime, teacher: Regime, before: float, source: str) -> Json:
        what, share = best.largest
        parts = {name: self._figure(value, "s", "bytes / bandwidth") for name, value in best.terms.items()}
        return {
            "regime": best.name,
            "prefill": self._figure(best.prefill, "s", "operations / rate, or weights / bandwidth"),
            "step": self._figure(best.step, "s", "sum of its terms"),
            "terms": parts,
            "largest": {"what": what, "share": share},
            "latency": self._figure(best.latency, "s", "prefill + answer / tokens a step x step"),
            "usual_latency": Figure(usual.latency, "s", True, "the same at the usual parts of the rates").as_json(),
            "teacher": self._figure(teacher.latency, "s", "bound of the BF16 base on the same card"),
            "baseline": Figure(before, "s", self.published is None and self.assumed, source).as_json(),
            "speedup": self._figure(before / best.latency, "x", f"against {self.against}"),
        }

    def _figure(self, value: float, unit: str, source: str) -> Json:
        return Figure(value, unit, self.assumed, source).as_json()

    @staticmethod
    def _cell(cell: Any, unit: str) -> Json:
        return Figure(cell.value, unit, cell.assumed, cell.source).as_json()


@dataclass
class Predictions:
    """Each part None where it cannot be made; `absent`: part -> (recipe paths whose headers it needs, or why)."""

    parameters: Parameters | None = None
    image: ImageSize | None = None
    serving: memory.Serving | None = None
    qad: memory.Training | None = None
    drafting: list[memory.Training] = field(default_factory=list)
    roofline: Roofline | None = None
    times: list[StageTime] = field(default_factory=list)
    absent: dict[str, Lacking] = field(default_factory=dict)
    missing: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> Json:
        training = [*([self.qad] if self.qad else []), *self.drafting]
        return {
            "parameters": self.parameters.as_json() if self.parameters else None,
            "image": self.image.as_json() if self.image else None,
            "serving": self.serving.as_json() if self.serving else None,
            "training": [item.as_json() for item in training],
            "roofline": self.roofline.as_json() if self.roofline else None,
            "times": [item.as_json() for item in self.times],
            "absent": [
                {"what": what, "needs": list(lacking.needs), "why": lacking.why or None}
                for what, lacking in self.absent.items()
            ],
            "missing": [{"path": path, "what": what} for path, what in self.missing],
        }


def predict(
    recipe: Json,
    facts: Mapping[str, ModelFacts],
    past: Past,
    *,
    fresh: set[str],
    stale: Sequence[str],
    missing: Sequence[tuple[str, str]] = (),
    training_bytes: float | None = None,
    base_bytes: int | None = None,
) -> Predictions:
    """All that can be said. `fresh`, `stale`: stage instances that are in the store, and that are to run;
    `training_bytes`: free memory of the training device, where it is known; `base_bytes`: of a given base as stored."""
    made = Predictions(missing=list(missing))
    card = row(recipe["deploy"]["hardware"])

    def attempt(what: str, make: Callable[[], _Made]) -> _Made | None:
        try:
            return make()
        except Lacking as lacking:
            read = [place for place in _READ[what] if place not in facts and _named(recipe, place)]
            made.absent[what] = Lacking(read, lacking.why) if lacking.needs else lacking
            return None

    made.parameters = attempt("parameters", lambda: parameters(recipe, facts))
    made.image = attempt("image", lambda: image_size(recipe, facts, past, fresh, base_bytes))
    made.serving = attempt("serving", lambda: memory.serving(recipe, facts, card))
    made.qad = attempt("qad", lambda: memory.qad(recipe, facts, training_bytes))
    made.drafting = attempt("drafting", lambda: memory.drafting(recipe, facts, training_bytes)) or []
    made.roofline = attempt("roofline", lambda: roofline(recipe, facts, card, past))
    made.times = times(recipe, facts, card, past, stale)
    return made


def _named(recipe: Json, place: str) -> bool:
    """Whether the recipe names a checkpoint there."""
    value: Any = recipe
    for part in place.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value is not None


def roofline(recipe: Json, facts: Mapping[str, ModelFacts], card: Card | None, past: Past) -> Roofline | None:
    """Bounds of every regime of `evaluate.latency`, None without it. Raises Lacking."""
    wanted = recipe["evaluate"]["latency"]
    if wanted is None:
        return None
    if card is None or card.bandwidth_gbs.value is None or card.bf16_tflops.value is None:
        raise Lacking(why=f"the hardware table has no rates of {recipe['deploy']['hardware']}")
    speed = Speed(card.bandwidth_gbs.value * 1e9, card.bf16_tflops.value * 1e12)
    slow = speed.derated(*USUAL)
    tokens = tokens_a_step(recipe, past)
    served, teacher = served_form(recipe, facts), teacher_form(recipe, facts)
    pairs = [(int(a), int(b)) for a, _, b in (regime.partition("/") for regime in wanted["regimes"])]
    return Roofline(
        card,
        tokens,
        tuple(bound(served, *pair, speed, tokens.value) for pair in pairs),
        tuple(bound(served, *pair, slow, tokens.value) for pair in pairs),
        tuple(bound(teacher, *pair, speed, 1.0) for pair in pairs),
        baseline(recipe["target"]["base"], card.name, wanted["regimes"]),
    )
