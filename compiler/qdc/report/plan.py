"""The text of a plan: stages with their states and reasons, then what the recipe will cost and give.

Figures that rest on an assumption have a `~` before them; the last line says so. Lines fit 100 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from qdc.graph.plan import Stage
from qdc.measure.figures import Figure, Lacking, Number, Term
from qdc.measure.memory import Serving, Training
from qdc.measure.parameters import Parameters
from qdc.measure.predict import USUAL, Predictions, Roofline
from qdc.measure.size import ImageSize
from qdc.measure.work import StageTime
from qdc.report.text import reason_text

WIDTH = 100
LABEL = 14
SHORT = 1
"""Seconds below which a stage's time is not listed."""
_ASSUMED = "~"
_BOUND = "\u00a0"


def stage_lines(stages: Sequence[Stage]) -> list[str]:
    """A line for each stage: name, state, the first two reasons or what it waits for."""
    width = max(len(stage.instance.name) for stage in stages)
    lines = []
    for stage in stages:
        awaited = [str(reason["what"]) for reason in stage.reasons if reason["kind"] == "upstream"]
        others = [reason_text(reason) for reason in stage.reasons if reason["kind"] != "upstream"]
        head = f"{stage.instance.name.ljust(width)}  {stage.state.ljust(7)}  "
        why = "; ".join([*others[:2], *([_waits(awaited, WIDTH - len(head))] if awaited else [])])
        lines.append(f"{head}{why}".rstrip())
    return lines


def _waits(names: Sequence[str], room: int) -> str:
    """What a stage waits for, with as many names as fit."""
    for listed in range(len(names), 0, -1):
        rest = f" and {len(names) - listed} more" if listed < len(names) else ""
        text = f"waits for {', '.join(names[:listed])}{rest}"
        if len(text) <= room:
            return text
    return f"waits for {len(names)} stages"


def prediction_lines(made: Predictions) -> list[str]:
    """What is predicted, part by part; what lacks facts says which."""
    lines: list[str] = []
    if made.parameters:
        lines += _parameters(made.parameters)
    if made.image:
        lines += _image(made.image)
    if made.serving:
        lines += _serving(made.serving)
    if trainings := [*([made.qad] if made.qad else []), *made.drafting]:
        lines += _training(trainings)
    if made.roofline:
        lines += _roofline(made.roofline)
    if made.times:
        lines += _times(made.times)
    lines += _absent(made.absent)
    for index, (path, what) in enumerate(made.missing):
        lines += _wrapped("" if index else "no stage yet", f"{what} ({path})")
    if any(_ASSUMED in line for line in lines):
        lines += [f"{_ASSUMED} rests on an assumption; --json gives the source of every figure"]
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    """A label, and text beside it that breaks at blanks, but never between a number and its unit."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label.ljust(LABEL),
        subsequent_indent=" " * LABEL,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(_BOUND, " ") for line in lines]


def _mark(figure: Figure) -> str:
    return _ASSUMED if figure.assumed else ""


def amount(value: Number) -> str:
    """Bytes with three digits: 4.21 GB."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{_BOUND}{letter}B" if value < 1e12 else f"{value / unit:,.0f}{_BOUND}{letter}B"
    return f"{value:g}{_BOUND}B"


def millions(value: Number) -> str:
    """A count of parameters: 4,205.8 M."""
    return f"{value / 1e6:,.1f}{_BOUND}M" if value >= 1e7 else f"{value / 1e6:.3f}{_BOUND}M"


def _bytes(figure: Figure) -> str:
    return f"{_mark(figure)}{amount(figure.value)}"


def _terms(terms: Iterable[Term]) -> str:
    return ", ".join(f"{term.what} {_bytes(term.figure)}" for term in terms)


def _parameters(found: Parameters) -> list[str]:
    parts = [f"target {millions(found.target.value)}"]
    if found.drafter:
        parts += [f"drafter {millions(found.drafter.value)}", f"together {millions(found.served.value)}"]
    where = "within" if found.within else "over"
    return _wrapped("parameters", f"{', '.join(parts)}, {where} the original's {millions(found.original.value)}")


def _image(found: ImageSize) -> list[str]:
    lines = _wrapped("image", f"{_bytes(found.total)}: {_terms(found.layers)}")
    if found.unknown:
        lines += _wrapped("", f"not counted, because nothing here tells its size: {', '.join(found.unknown)}")
    if found.limit is not None:
        verdict = {True: "fits", False: "too large", None: "undecided"}[found.fits]
        lines += _wrapped("", f"{_bytes(found.weighed)} as {found.limit_of} of {amount(found.limit)}: {verdict}")
    return lines


def _serving(found: Serving) -> list[str]:
    lines = _wrapped("serving", f"{_terms(found.fixed)}; a request of full length: {_terms(found.request)}")
    guessed = _ASSUMED if any(term.figure.assumed for term in (*found.fixed, *found.request)) else ""
    text = f"one request {guessed}{amount(found.one)}, {found.requests} requests {guessed}{amount(found.all)}"
    if found.room is None:
        return lines + _wrapped("", text)
    verdict = "all fit" if found.fits_all else f"{found.runs} fit at a time" if found.fits_one else "not even one fits"
    return lines + _wrapped("", f"{text} of {_bytes(found.room)}: {verdict}")


def _training(found: Sequence[Training]) -> list[str]:
    lines: list[str] = []
    for total in dict.fromkeys(item.total for item in found):
        alike = [item for item in found if item.total == total]
        room, fits = alike[0].room, alike[0].fits
        verdict = "" if room is None else f" of {amount(room)}, {'fits' if fits else 'too large'}"
        names = ", ".join(item.stage for item in alike)
        lines += _wrapped("", f"{names}: {_bytes(total)}{verdict}: {_terms(alike[0].terms)}")
    lines += _wrapped("", "activations are not counted")
    return _labelled("training", lines)


def _labelled(label: str, lines: list[str]) -> list[str]:
    return [label.ljust(LABEL) + lines[0][LABEL:], *lines[1:]]


def seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"


def _roofline(found: Roofline) -> list[str]:
    card, mark = found.card, _ASSUMED if found.assumed else ""
    given = ((card.bandwidth_gbs, "GB/s"), (card.bf16_tflops, "TFLOP/s"))
    rates = ", ".join(f"{_ASSUMED if cell.assumed else ''}{cell.value:g}{_BOUND}{unit}" for cell, unit in given)
    tokens = f"{_mark(found.tokens)}{found.tokens.value:.3g} tokens a step ({found.tokens.source})"
    lines = _wrapped("roofline", f"{card.name}, {rates}; {tokens}")
    header = ["prompt/answer", "prefill", "step", "bound", "before", "speed-up", "largest part of a step"]
    rows = [header]
    for regime, before in zip(found.regimes, found.before, strict=True):
        what, share = regime.largest
        times = [seconds(value) for value in (regime.prefill, regime.step, regime.latency, before)]
        rows.append([regime.name, *times, f"{before / regime.latency:.2f}x", f"{what} {share:.0%}"])
    widths = [max(len(row[index]) for row in rows) for index in range(len(header) - 1)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(" " * LABEL + "  ".join([*cells, row[-1]]))
    mean = f"mean {mark}{found.speedup(found.regimes):.2f}x against {found.against}"
    usual = (
        f"{_ASSUMED}{found.speedup(found.usual):.2f}x at {USUAL[0]:.0%} of the bandwidth and {USUAL[1]:.0%} of the rate"
    )
    return lines + _wrapped("", f"{mean}; {usual}")


def duration(hours: float) -> str:
    """Hours, minutes or seconds, with what digits mean something."""
    if hours >= 1:
        return f"{hours:,.0f}{_BOUND}h" if hours >= 10 else f"{hours:.1f}{_BOUND}h"
    return f"{hours * 60:.1f}{_BOUND}min" if hours * 60 >= 1 else f"{hours * 3600:.1f}{_BOUND}s"


def _times(found: Sequence[StageTime]) -> list[str]:
    """Stages as they took earlier, build by build; then scaled and assumed ones, a line each; the sum."""
    known = [(item, item.hours) for item in found if item.hours is not None]
    lines: list[str] = []
    for build in dict.fromkeys(item.build for item, hours in known if not hours.assumed):
        same = [(item, hours) for item, hours in known if item.build == build and not hours.assumed]
        long = [(item, hours) for item, hours in same if hours.value * 3600 >= SHORT]
        parts = [f"{item.stage} {duration(hours.value)}" for item, hours in long]
        if len(long) < len(same):
            parts.append(f"{len(same) - len(long)} more of less than {SHORT}{_BOUND}s each")
        lines += _wrapped("", f"as in build {build}: {', '.join(parts)}")
    for item, hours in known:
        if hours.assumed:
            most = " at most" if item.at_most else ""
            lines += _wrapped("", f"{item.stage} {_ASSUMED}{duration(hours.value)}{most}: {hours.source}")
    for why in dict.fromkeys(item.why for item in found if item.hours is None):
        names = ", ".join(item.stage for item in found if item.hours is None and item.why == why)
        lines += _wrapped("", f"{names}: {why}")
    if len(known) > 1:
        guessed = _ASSUMED if any(hours.assumed for _, hours in known) else ""
        lines += _wrapped("", f"together {guessed}{duration(sum(hours.value for _, hours in known))}")
    return _labelled("time", lines)


def _absent(absent: dict[str, Lacking]) -> list[str]:
    """What cannot be predicted, by what it lacks."""
    lines: list[str] = []
    reasons = {what: (lacking.needs, lacking.why) for what, lacking in absent.items()}
    for needs, why in dict.fromkeys(reasons.values()):
        names = ", ".join(what for what, reason in reasons.items() if reason == (needs, why))
        lines += _wrapped("", f"{names}: {why or _needed(needs)}")
    return _labelled("unknown", lines) if lines else []


def _needed(places: Sequence[str]) -> str:
    return f"needs the headers of {', '.join(places)}: `qdc{_BOUND}lock`"
