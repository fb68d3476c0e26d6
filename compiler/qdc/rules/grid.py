"""A published grid: whether its tensors are what the recipe says, and whether the engine can load them.

Tensors decide. Descriptions of published checkpoints have been wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.modules import fused, ignored, kind, linears, listed, matches, pattern, written
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_GRID = "target.quantization.grid"
_QUANTIZATION: Path_ = ("target", "quantization")
_IGNORE: Path_ = (*_QUANTIZATION, "ignore")


@TOPIC.rule(
    "TGT02",
    "error",
    summary="The tensors of the published grid have other bits, groups or zero points than the recipe's scheme.",
    why="Codes would be read with another grid than they were made on.",
    fix="Write the scheme that the tensors have.",
    evidence="The code of a public submission says of its grid what its tensors contradict: "
    "https://github.com/nota-github/adaptfm-quant-dflash (src/qad/quant_config.py)",
    failing="target: {quantization: {scheme: {group_size: 128}}}",
    passing="target: {quantization: {scheme: {group_size: 32}}}",
    final="it would be another product than the recipe says",
    needs=("target.base", _GRID),
)
def the_scheme_is_the_grids(loaded: Loaded) -> Iterator[Found]:
    scheme = loaded.model.target.quantization.scheme
    wanted = {"bits": scheme.bits, "group_size": scheme.group_size, "symmetric": scheme.symmetric}
    stored = _schemes(loaded)
    for field, value in wanted.items():
        counts = Counter(facts[field] for facts in stored)
        if set(counts) - {value}:
            shown = ", ".join(f"`{_yaml(found)}` ({count} modules)" for found, count in counts.most_common())
            message = f"the grid's tensors have {field} {shown}, the recipe says `{_yaml(value)}`"
            hint = f"write `{field}: {_yaml(counts.most_common(1)[0][0])}`"
            if len(counts) > 1:
                hint = "name a grid with one scheme, or ignore the modules that differ"
            yield Found((*_QUANTIZATION, "scheme", field), message, hint, also=((*_QUANTIZATION, "grid"), "the grid"))


def _schemes(loaded: Loaded) -> list[dict[str, Any]]:
    """Bits, group size and symmetry of each packed module of the grid, from the shapes of its tensors.

    Inputs are those of the base's module of the same name; where it has none, those that the recipe's bits give.
    A module with as many groups as the recipe says has the recipe's group size: one group is also -1.
    """
    grid, base = loaded.facts.get(_GRID), loaded.facts.get("target.base")
    if grid is None or base is None:
        return []
    scheme, plain, found = loaded.model.target.quantization.scheme, linears(base), []
    for name, layer in linears(grid).items():
        if layer.groups is None:
            continue
        known = plain.get(name)
        words = layer.shape[1]
        columns = known.shape[1] if known is not None and not known.packed else words * 32 // scheme.bits
        size = -1 if layer.groups == 1 else columns // layer.groups
        if layer.groups == (1 if scheme.group_size == -1 else columns / scheme.group_size):
            size = scheme.group_size
        found.append({"bits": 32 * words // columns, "group_size": size, "symmetric": not layer.zeros})
    return found


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@TOPIC.rule(
    "TGT03",
    "error",
    summary="The modules that the grid packs are not the Linear modules that the ignore list leaves.",
    why="The recipe would not describe the file: what it ignores would be quantized, or the reverse.",
    fix="Write the ignore list that the help prints.",
    evidence="An ignore list was honoured while calibrating and not while saving: "
    "https://github.com/vllm-project/compressed-tensors/issues/712",
    failing='target: {quantization: {ignore: [lm_head, "re:.*visual.*", "re:.*in_proj_[ab]$", "re:.*mtp.*"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*visual.*", "re:.*in_proj_[ab]$", "re:^mtp\\\\.fc$"]}}',
    final="it would be another product than the recipe says",
    needs=(_GRID,),
)
def the_ignore_list_is_the_grids(loaded: Loaded) -> Iterator[Found]:
    facts, entries = loaded.facts.get(_GRID), loaded.model.target.quantization.ignore
    if facts is None:
        return
    layers = linears(facts)
    packed = [name for name, layer in layers.items() if layer.packed]
    also_packed = [name for name in packed if ignored(name, entries)]
    left = [name for name, layer in layers.items() if not layer.packed and not ignored(name, entries)]
    if not also_packed and not left:
        return
    said = [f"ignored but packed: {listed(also_packed)} ({len(also_packed)} in all)"] if also_packed else []
    said += [f"neither packed nor ignored: {listed(left)} ({len(left)} in all)"] if left else []
    kept = [entry for entry in entries if not any(matches(name, entry) for name in packed)]
    for name, layer in layers.items():
        if not layer.packed and not ignored(name, kept):
            entry = pattern(name)
            kept.append(name if any(matches(other, entry) for other in packed) else entry)
    yield Found(_IGNORE, "; ".join(said), f"write `{written(kept)}`", also=((*_QUANTIZATION, "grid"), "the grid"))


@TOPIC.rule(
    "TGT05",
    "error",
    summary="Modules that the engine loads as one matrix are quantized differently.",
    why="One matrix has one scheme: the engine stops, or reads codes as weights.",
    fix="Ignore all members of the group, or none.",
    evidence="Members of a fused module with different schemes: https://github.com/vllm-project/vllm/issues/25378 "
    "https://github.com/vllm-project/vllm/pull/47445",
    failing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_a$", "re:.*conv1d$"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*in_proj_[ab]$", "re:.*conv1d$"]}}',
    final="the engine would fail, or serve other text than the model's",
    needs=("target.base", _GRID),
)
def fused_modules_are_alike(loaded: Loaded) -> Iterator[Found]:
    given = loaded.model.target.quantization
    grid, facts = loaded.facts.get(_GRID), loaded.facts.get("target.base")
    told: set[tuple[str, ...]] = set()
    if given.grid is not None and grid is not None:
        layers = linears(grid)
        for members in fused(layers):
            stored = {name: (layers[name].groups, layers[name].zeros) for name in members}
            kinds = tuple(map(kind, members))
            if len(set(stored.values())) > 1 and kinds not in told:
                told.add(kinds)
                odd = [f"`{name}` has {_stored(*stored[name])}" for name in members]
                message = f"{', '.join(odd)}, but the engine loads them as one matrix"
                yield Found((*_QUANTIZATION, "grid"), message, "name a grid that treats them alike")
    elif given.grid is None and facts is not None:
        for members in fused(linears(facts)):
            spared = [name for name in members if ignored(name, given.ignore)]
            others = [name for name in members if name not in spared]
            kinds = tuple(map(kind, members))
            if spared and others and kinds not in told:
                told.add(kinds)
                index = next(i for i, entry in enumerate(given.ignore) if matches(spared[0], entry))
                message = f"`{spared[0]}` is ignored, `{others[0]}` is not, and the engine loads them as one matrix"
                more = ", ".join(f'"{pattern(name)}"'.replace("\\", "\\\\") for name in others)
                yield Found((*_IGNORE, index), message, f"add {more} to the list, or remove this entry")


def _stored(groups: int | None, zeros: bool) -> str:
    if groups is None:
        return "plain weights"
    return f"codes with {groups} scale{'s' if groups > 1 else ''} a row{' and zero points' if zeros else ''}"
