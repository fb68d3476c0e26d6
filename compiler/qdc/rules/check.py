"""Rules over several fields of a recipe, decidable before anything runs.

Each rule is one small function that yields findings. This module does not know how they are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdc.core.errors import QdcError
from qdc.recipe.diagnostics import Diagnostic, RecipeInvalid
from qdc.recipe.load import Loaded
from qdc.recipe.model import Corpus, PromptSet
from qdc.serving.patches import patch_names
from qdc.serving.render import required_patches


def check(loaded: Loaded) -> list[Diagnostic]:
    """All findings, errors and warnings."""
    return [finding for rule in RULES for finding in rule(loaded)]


def require(loaded: Loaded) -> list[Diagnostic]:
    """The warnings of a recipe without errors; raises RecipeInvalid otherwise."""
    findings = check(loaded)
    if any(item.severity == "error" for item in findings):
        raise RecipeInvalid(findings)
    return findings


def names_exist(loaded: Loaded) -> Iterator[Diagnostic]:
    """Every name of a data entry exists and is of the right kind."""
    data, model = loaded.model.data, loaded.model

    def want(path: tuple[str | int, ...], name: str, kind: type, what: str) -> Iterator[Diagnostic]:
        if name not in data:
            yield loaded.diagnose(
                "DAT01", path, f"`data` has no entry `{name}`", f"entries are: {', '.join(sorted(data))}"
            )
        elif not isinstance(data[name], kind):
            yield loaded.diagnose("DAT01", path, f"`{name}` is not {what}")

    for name, entry in data.items():
        if isinstance(entry, PromptSet):
            for index, other in enumerate(entry.exclude):
                yield from want(("data", name, "exclude", index), other, PromptSet, "a prompt set")
        else:
            yield from want(("data", name, "prompts"), entry.prompts, PromptSet, "a prompt set")
    base = model.target.base
    if hasattr(base, "scratch"):
        yield from want(
            ("target", "base", "scratch", "training", "data"), base.scratch.training.data, PromptSet, "a prompt set"
        )
    grid = model.target.quantization.grid
    if grid.method == "gptq":
        yield from want(
            ("target", "quantization", "grid", "calibration", "data"), grid.calibration.data, Corpus, "a corpus"
        )
    if model.target.qad:
        yield from want(("target", "qad", "data"), model.target.qad.data, Corpus, "a corpus")
    if model.drafter:
        for index, training in enumerate(model.drafter.training):
            yield from want(("drafter", "training", index, "data"), training.data, Corpus, "a corpus")
        if model.drafter.ptq:
            yield from want(
                ("drafter", "ptq", "calibration", "data"), model.drafter.ptq.calibration.data, Corpus, "a corpus"
            )
    for part in ("quality", "acceptance"):
        if (wanted := getattr(model.evaluate, part)) is not None:
            yield from want(("evaluate", part, "data"), wanted.data, PromptSet, "a prompt set")


def no_circles(loaded: Loaded) -> Iterator[Diagnostic]:
    """Prompt sets do not exclude each other in a circle; QAD does not train on the target's own answers."""
    data = loaded.model.data
    for name in data:
        seen, front = set(), [name]
        while front:
            entry = data.get(front.pop())
            for other in entry.exclude if isinstance(entry, PromptSet) else []:
                if other == name:
                    yield loaded.diagnose("DAT02", ("data", name, "exclude"), f"`{name}` excludes itself in a circle")
                    return
                if other not in seen:
                    seen.add(other)
                    front.append(other)
    makers: list[tuple[str, tuple[str | int, ...], str]] = []
    if loaded.model.target.qad is not None:
        makers.append(("QAD", ("target", "qad", "data"), loaded.model.target.qad.data))
    grid = loaded.model.target.quantization.grid
    if grid.method == "gptq":
        place = ("target", "quantization", "grid", "calibration", "data")
        makers.append(("the target's GPTQ", place, grid.calibration.data))
    for what, path, name in makers:
        entry = data.get(name)
        if isinstance(entry, Corpus) and entry.by == "target":
            yield loaded.diagnose(
                "DAT03",
                path,
                f"{what} cannot use `{name}`: the target that writes it is made from it",
                "use a corpus with `by: teacher`",
            )


def heldout_is_heldout(loaded: Loaded) -> Iterator[Diagnostic]:
    """Every prompt set that something learns from excludes the sets that measure it."""
    model, data = loaded.model, loaded.model.data
    measured = {part.data for part in (model.evaluate.quality, model.evaluate.acceptance) if part}
    used = {entry.prompts for entry in data.values() if isinstance(entry, Corpus)}
    if hasattr(model.target.base, "scratch"):
        used.add(model.target.base.scratch.training.data)
    for name in sorted(used):
        entry = data.get(name)
        for other in sorted(measured):
            if name == other:
                yield loaded.diagnose("DAT04", ("evaluate",), f"`{name}` is both trained on and measured with")
            elif isinstance(entry, PromptSet) and other not in entry.exclude:
                yield loaded.diagnose(
                    "DAT04",
                    ("data", name),
                    f"`{name}` may share prompts with the held-out `{other}`",
                    f"add `exclude: [{other}]`",
                )


def groups_divide(loaded: Loaded) -> Iterator[Diagnostic]:
    """A quantization group divides the input width of every quantized layer."""
    target = loaded.model.target
    if hasattr(target.base, "scratch"):
        shape = target.base.scratch.architecture
        linear = shape.linear_attention
        widths = {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "attention heads x head_dim": shape.attention.heads * shape.attention.head_dim,
            "linear_attention value_heads x head_dim": linear.value_heads * linear.head_dim,
        }
        yield from _undivided(
            loaded, ("target", "quantization", "scheme", "group_size"), target.quantization.scheme.group_size, widths
        )
    drafter = loaded.model.drafter
    if drafter and drafter.ptq:
        shape_ = drafter.architecture
        widths = {
            "hidden_size": shape_.hidden_size,
            "intermediate_size": shape_.intermediate_size,
            "heads x head_dim": shape_.heads * shape_.head_dim,
        }
        yield from _undivided(loaded, ("drafter", "ptq", "scheme", "group_size"), drafter.ptq.scheme.group_size, widths)


def _undivided(loaded: Loaded, path: tuple[str, ...], group: int, widths: dict[str, int]) -> Iterator[Diagnostic]:
    bad = [f"{name} = {width}" for name, width in widths.items() if width % group]
    if bad:
        fits = [size for size in (32, 64, 128) if not any(width % size for width in widths.values())]
        yield loaded.diagnose(
            "TGT05",
            path,
            f"group size {group} does not divide {', '.join(bad)}",
            f"use {' or '.join(map(str, fits))}" if fits else "change the layer's width",
        )


def drafter_fits(loaded: Loaded) -> Iterator[Diagnostic]:
    """K, taps, widths and window of the drafter fit the target and the draft block."""
    model = loaded.model
    drafter, serve = model.drafter, model.serve
    if drafter is None:
        if serve.k is not None:
            yield loaded.diagnose(
                "DRF01",
                ("serve", "k"),
                "`serve.k` is given but the recipe has no drafter",
                "remove it, or add `drafter:`",
            )
        return
    shape = drafter.architecture
    limit = shape.draft_block_size - 1
    if serve.k is None:
        yield loaded.diagnose(
            "DRF01",
            ("serve",),
            "`serve.k` is missing",
            f"a draft block of {shape.draft_block_size} drafts at most {limit} tokens: write `k: {limit}`",
        )
    elif serve.k > limit:
        yield loaded.diagnose(
            "DRF02",
            ("serve", "k"),
            f"K = {serve.k}, but a draft block of {shape.draft_block_size} is one anchor and {limit} masks",
            f"write `k: {limit}`",
        )
    elif serve.k < limit:
        yield loaded.diagnose(
            "DRF03",
            ("serve", "k"),
            f"K = {serve.k} shortens the block that was trained "
            f"({shape.draft_block_size}): the drafter sees fewer masks than in training",
            f"measure it, or write `k: {limit}`",
            "warning",
        )
    if sorted(set(shape.taps)) != shape.taps:
        yield loaded.diagnose("DRF04", ("drafter", "architecture", "taps"), "taps must be strictly increasing")
    if shape.heads % shape.kv_heads:
        yield loaded.diagnose(
            "DRF05",
            ("drafter", "architecture", "kv_heads"),
            f"kv_heads = {shape.kv_heads} does not divide heads = {shape.heads}",
        )
    if hasattr(model.target.base, "scratch"):
        target = model.target.base.scratch.architecture
        if shape.hidden_size != target.hidden_size:
            yield loaded.diagnose(
                "DRF06",
                ("drafter", "architecture", "hidden_size"),
                f"the drafter uses the target's embedding and head: hidden_size must be {target.hidden_size}",
            )
        if max(shape.taps) >= len(target.layers):
            yield loaded.diagnose(
                "DRF07",
                ("drafter", "architecture", "taps"),
                f"tap {max(shape.taps)} is not a layer of the target, which has layers 0 to {len(target.layers) - 1}",
            )
    if drafter.swa and drafter.swa.window <= shape.draft_block_size:
        yield loaded.diagnose(
            "SWA01",
            ("drafter", "swa", "window"),
            f"window {drafter.swa.window} is not larger than the draft block ({shape.draft_block_size})",
        )


def chain_is_whole(loaded: Loaded) -> Iterator[Diagnostic]:
    """`from` names an earlier training; names are unique; taps come from a model that exists."""
    drafter = loaded.model.drafter
    seen: list[str] = []
    for index, training in enumerate(drafter.training if drafter else []):
        path = ("drafter", "training", index)
        if training.name in seen:
            yield loaded.diagnose("DRF08", (*path, "name"), f"`{training.name}` is given twice")
        if training.from_ is not None and training.from_ not in seen:
            yield loaded.diagnose(
                "DRF08",
                (*path, "from"),
                f"`{training.from_}` is not an earlier training",
                f"earlier ones: {', '.join(seen) or 'none'}",
            )
        seen.append(training.name)


def window_of_tokens(loaded: Loaded) -> Iterator[Diagnostic]:
    """A measured answer has head-room of K + 1 below max_model_len: near it vLLM stops drafting (0.32, V1)."""
    model = loaded.model
    part, k = model.evaluate.acceptance, model.serve.k
    if part and k and part.max_tokens + k + 1 >= model.serve.max_model_len:
        yield loaded.diagnose(
            "SRV01",
            ("serve", "max_model_len"),
            f"max_model_len {model.serve.max_model_len} leaves "
            f"no room for {part.max_tokens} answer tokens and K + 1 = {k + 1}",
            "raise it",
        )


def patterns_compile(loaded: Loaded) -> Iterator[Diagnostic]:
    """Every `re:` pattern is a regular expression."""
    places: list[tuple[tuple[str | int, ...], list[str]]] = [
        (("target", "quantization", "ignore"), loaded.model.target.quantization.ignore)
    ]
    if loaded.model.drafter and loaded.model.drafter.ptq:
        places.append((("drafter", "ptq", "ignore"), loaded.model.drafter.ptq.ignore))
    for path, patterns in places:
        for index, pattern in enumerate(patterns):
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    yield loaded.diagnose("TGT06", (*path, index), f"`{pattern}` is not a pattern: {error}")


def engine_is_known(loaded: Loaded) -> Iterator[Diagnostic]:
    """The engine version has a row of facts, its patches exist, and those that it needs are declared."""
    engine = loaded.data["serve"]["engine"]
    try:
        needed = required_patches(engine, loaded.model.drafter is not None)
    except QdcError as error:
        yield loaded.diagnose("ENG01", ("serve", "engine", "vllm"), error.message, error.hint)
        return
    path = ("serve", "engine", "patches")
    for index, name in enumerate(engine["patches"]):
        if name not in patch_names():
            known = f"patches are: {', '.join(patch_names())}"
            yield loaded.diagnose("ENG02", (*path, index), f"there is no engine patch `{name}`", known)
    for name, why in needed.items():
        if name not in engine["patches"]:
            message = f"vllm {engine['vllm']} on {engine['platform']} needs the patch `{name}`: {why}"
            yield loaded.diagnose("ENG03", path, message, f"add {name} to the list")


def evaluations_have_a_subject(loaded: Loaded) -> Iterator[Diagnostic]:
    """Quality is measured on what QAD changed, acceptance on a drafter."""
    model = loaded.model
    if model.evaluate.quality and model.target.qad is None:
        yield loaded.diagnose("EVA01", ("evaluate", "quality"), "quality compares PTQ and QAD, but there is no `qad`",
                              "remove it, or add `target.qad`")  # fmt: skip
    if model.evaluate.acceptance and model.drafter is None:
        yield loaded.diagnose("EVA02", ("evaluate", "acceptance"), "acceptance is a drafter's, but there is none",
                              "remove it, or add `drafter`")  # fmt: skip


def accepted_are_used(loaded: Loaded) -> Iterator[Diagnostic]:
    """No rule can be accepted yet that would otherwise stop a build."""
    for index, entry in enumerate(loaded.model.accept):
        yield loaded.diagnose(
            "ACC01", ("accept", index, "rule"), f"`{entry.rule}` does not stop this recipe", "remove the entry"
        )


RULES: list[Any] = [
    names_exist,
    no_circles,
    heldout_is_heldout,
    groups_divide,
    drafter_fits,
    chain_is_whole,
    window_of_tokens,
    patterns_compile,
    engine_is_known,
    evaluations_have_a_subject,
    accepted_are_used,
]
