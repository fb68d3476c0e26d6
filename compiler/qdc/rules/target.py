"""The target's quantization: how its grid is made, what it leaves out, and whether the scheme fits the layers.

What a published grid's own file says is in `grid`; its tokens and heads are in `checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest

from qdc.core.spelling import nearest
from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.modules import Linear, ignored, kind, linears, matches, modules, pattern, readable, written
from qdc.rules.registry import Found, Topic
from qdc.tables import hardware, kernels

TOPIC = Topic()
_QUANTIZATION: Path_ = ("target", "quantization")
_IGNORE: Path_ = (*_QUANTIZATION, "ignore")
_GROUP: Path_ = (*_QUANTIZATION, "scheme", "group_size")
_SIZES = (128, 64, 32)


@TOPIC.rule(
    "TGT01",
    "error",
    summary="A grid is both taken and made, or neither, or its calibration is missing or has no use.",
    why="A published grid is taken as it is; a method makes a new one, and GPTQ and AWQ look at a calibration.",
    fix="Write `grid`, or `method: rtn`, or `method: gptq` or `awq` with a `calibration`.",
    evidence="Follows from the definition of the fields.",
    failing="target: {quantization: {method: gptq}}",
    passing="target: {quantization: {method: gptq, calibration: {data: teacher_corpus, conversations: 8, damp: 0.01}}}",
    final="nothing can be built from it",
)
def a_grid_has_one_origin(loaded: Loaded) -> Iterator[Found]:
    given = loaded.model.target.quantization
    method, place = given.method, (*_QUANTIZATION, "method")
    if given.grid is None and method is None:
        hint = "add `method: rtn`, `gptq` or `awq`, or `grid: {hf: ..., revision: ...}`"
        yield Found(_QUANTIZATION, "nothing says where the grid comes from", hint)
    if given.grid is not None and method is not None:
        also = ((*_QUANTIZATION, "grid"), "the grid that is taken")
        yield Found(
            place, f"`method: {method}` makes a grid, but one is taken as it is", "keep one of the two", also=also
        )
    elif given.grid is not None and given.calibration is not None:
        path = (*_QUANTIZATION, "calibration")
        yield Found(path, "a grid that is taken as it is looks at no calibration", "remove `calibration`", key=True)
    elif method in ("gptq", "awq") and given.calibration is None:
        hint = (
            "add `calibration: {data: CORPUS, conversations: 128}` with a corpus `by: teacher`, or write `method: rtn`"
        )
        yield Found(place, f"`method: {method}` looks at a calibration, and there is none", hint)


@TOPIC.rule(
    "TGT04",
    "error",
    summary="An entry of the target's ignore list names no module, or the list leaves nothing to quantize.",
    why="What a misspelt entry should spare is quantized; a list that names all leaves a BF16 model under INT4's name.",
    fix="Write a name or a pattern of modules that the checkpoint has.",
    evidence="A pattern that ignored every layer: https://github.com/vllm-project/llm-compressor/issues/1230; patterns "
    "that name nothing are told since https://github.com/vllm-project/llm-compressor/pull/1658",
    failing='target: {quantization: {ignore: [lm_head, "re:.*vision_tower.*"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab]$"]}}',
    final="it would be another product than the recipe says",
    needs=("target.base", "target.quantization.grid"),
)
def ignore_entries_name_modules(loaded: Loaded) -> Iterator[Found]:
    facts = [loaded.facts[place] for place in ("target.base", "target.quantization.grid") if place in loaded.facts]
    entries = loaded.model.target.quantization.ignore
    names = sorted(set().union(*map(modules, facts)))
    layers = {name for given in facts for name in linears(given)}
    for index, entry in enumerate(entries):
        if facts and readable(entry) and not any(matches(name, entry) for name in names):
            message = f"`{entry}` names 0 of {len(names)} modules, so what it should spare would be quantized"
            yield Found((*_IGNORE, index), message, _nearest_entry(entry, names))
    if layers and all(ignored(name, entries) for name in layers):
        message = f"the list names all {len(layers)} Linear modules, so nothing is quantized"
        yield Found(_IGNORE, message, "remove the entry that names too much, e.g. write `ignore: [lm_head]`")


def _nearest_entry(entry: str, names: list[str]) -> str:
    """Help for an entry that names nothing: the module, or the part of a name, that it was most likely meant for."""
    if not entry.startswith("re:"):
        near = nearest(entry, names) or next((name for name in names if name.endswith(f".{entry}")), None)
        if near is not None:
            return f"did you mean `{near}`?"
    split = [[part for part in name.split(".") if not part.isdigit()] for name in names]
    parts = dict.fromkeys(part for parts in zip_longest(*split) for part in parts if part is not None)
    for word in re.findall(r"[a-z][a-z0-9_]{3,}", entry.removeprefix("re:")):
        if word not in parts and (near := nearest(word, parts)) is not None:
            return f"did you mean `{near}` for `{word}`?"
    return f"parts of names here: {', '.join(list(parts)[:16])}"


@TOPIC.rule(
    "TGT06",
    "error",
    summary="A quantized layer of the target has inputs that its group size, or a packed word, does not divide.",
    why="A group of input columns shares one scale; a group cut short has none in the packed format.",
    fix="Take a group size that divides every width, or ignore the module, or change the width.",
    evidence="Packing a matrix with a width that the group does not divide fails or loads wrongly: "
    "https://github.com/vllm-project/compressed-tensors/issues/447 "
    "https://github.com/sgl-project/sglang/issues/3571",
    failing="target: {base: {scratch: {architecture: {intermediate_size: 400}}}}",
    passing="target: {base: {scratch: {architecture: {intermediate_size: 416}}}}",
    final="nothing can be built from it",
    needs=("target.base",),
)
def target_groups_divide(loaded: Loaded) -> Iterator[Found]:
    scheme, layers = loaded.model.target.quantization.scheme, _quantized(loaded)
    group, word = scheme.group_size, 32 // scheme.bits
    bad = [layer for layer in layers if layer.shape[1] % (word if group == -1 else group) or layer.shape[1] % word]
    if bad:
        shown = list(dict.fromkeys(f"{kind(layer.name)} = {layer.shape[1]}" for layer in bad))
        fits = [size for size in _SIZES if not any(layer.shape[1] % size for layer in layers)]
        what = f"group size {group} does not divide" if group != -1 else f"a word of {word} codes does not divide"
        more = ", …" if len(shown) > 4 else ""
        yield Found(_GROUP, f"{what} the inputs of {', '.join(shown[:4])}{more}", _other_size(loaded, fits, bad))


def _quantized(loaded: Loaded) -> list[Linear]:
    """The Linear modules of the base that the recipe quantizes; none where nothing is known of it."""
    facts, entries = loaded.facts.get("target.base"), loaded.model.target.quantization.ignore
    found = linears(facts).values() if facts is not None else ()
    return [layer for layer in found if not layer.packed and not ignored(layer.name, entries)]


def _other_size(loaded: Loaded, fits: list[int], bad: list[Linear]) -> str:
    if fits:
        return f"write `group_size: {fits[0]}`"
    entries = [*loaded.model.target.quantization.ignore, *dict.fromkeys(pattern(layer.name) for layer in bad)]
    return f"write `{written(entries)}`"


@TOPIC.rule(
    "TGT07",
    "error",
    summary="No kernel that is known for the card takes a quantized layer's bits, group size and shape.",
    why="The engine refuses such a model when it loads it, after hours of quantization.",
    fix="Take a group size and widths that a kernel of the card takes, or ignore the module.",
    evidence="Disputed. No kernel took groups of 64 with 8256 inputs: "
    "https://github.com/vllm-project/llm-compressor/issues/1489; one report trusts groups of 128 only: "
    "https://github.com/mit-han-lab/llm-awq/issues/21; groups of 32, 64 and 128 are listed: "
    "https://github.com/vllm-project/vllm/pull/14447",
    failing="target: {quantization: {grid: null, method: rtn}}  # a layer has 9248 inputs",
    passing="target: {quantization: {grid: null, method: rtn}}  # it has 9216",
    needs=("target.base",),
)
def a_kernel_takes_it(loaded: Loaded) -> Iterator[Found]:
    model, card = loaded.model, hardware.row(loaded.model.deploy.hardware)
    scheme, layers = model.target.quantization.scheme, _quantized(loaded)
    if card is None or card.sm.value is None:
        return
    known, sm = kernels.rows(model.serve.engine.platform, card.sm.value), card.sm.value

    @cache
    def refusals(shape: tuple[int, int], group: int) -> list[str]:
        """Why each kernel refuses such a layer; none where one takes it."""
        given = scheme.bits, group, scheme.symmetric, *shape, model.serve.dtype
        said = [(kernel.name, kernel.refuses(kernels.Matrix(*given))) for kernel in known]
        return [f"{name} {why}" for name, why in said if why] if all(why for _, why in said) else []

    bad = [layer for layer in layers if refusals(layer.shape, scheme.group_size)]
    if bad:
        out, width = bad[0].shape
        reasons = "; ".join(refusals(bad[0].shape, scheme.group_size))
        message = (
            f"no listed kernel runs {scheme.bits} bit in groups of {scheme.group_size} on {kind(bad[0].name)} "
            f"({out} x {width}) on SM {sm}: {reasons} (disputed: which sizes work)"
        )
        fits = [size for size in _SIZES if not any(refusals(layer.shape, size) for layer in layers)]
        yield Found(_GROUP, message, _other_size(loaded, fits, bad))


@TOPIC.rule(
    "TGT16",
    "error",
    summary="An `re:` entry of an ignore list is not a regular expression.",
    why="It would match no module, so what it should spare would be quantized.",
    fix="Correct the expression; it is matched from the start of a module's name.",
    evidence="Follows from the definition of the field.",
    failing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab$"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab]$"]}}',
    final="nothing can be built from it",
)
def patterns_compile(loaded: Loaded) -> Iterator[Found]:
    places: list[tuple[Path_, list[str]]] = [
        (("target", "quantization", "ignore"), loaded.model.target.quantization.ignore)
    ]
    if loaded.model.drafter and loaded.model.drafter.ptq:
        places.append((("drafter", "ptq", "ignore"), loaded.model.drafter.ptq.ignore))
    for path, patterns in places:
        for index, entry in enumerate(patterns):
            if entry.startswith("re:"):
                try:
                    re.compile(entry[3:])
                except re.error as error:
                    where = f" at letter {error.pos + 1} of the pattern" if error.pos is not None else ""
                    message = f"`{entry}` is not a pattern: {error.msg}{where}"
                    yield Found((*path, index), message, "correct it, or write the module's exact name without `re:`")
