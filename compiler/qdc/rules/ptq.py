"""The drafter's PTQ: groups, ignored modules, calibration; and what the CPU's INT4 kernel takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from qdc.formats.draft_names import OF_THE_TARGET, engine_name
from qdc.recipe.load import Loaded
from qdc.rules.modules import Linear, fused, ignored, linears, matches
from qdc.rules.parts import (
    BASE,
    drafter_linears,
    fact,
    has_ptq,
    layer_kinds,
    on_cpu,
    quantized_linears,
    served_checkpoint,
)
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_PTQ = ("drafter", "ptq")
_GROUP = (*_PTQ, "scheme", "group_size")


def _has_members(loaded: Loaded) -> bool:
    return has_ptq(loaded) or (loaded.model.drafter is not None and loaded.model.drafter.checkpoint is not None)


def _is_awq(loaded: Loaded) -> bool:
    drafter = loaded.model.drafter
    return drafter is not None and drafter.ptq is not None and drafter.ptq.method == "awq"


@TOPIC.rule(
    "PTQ01",
    "error",
    summary="The drafter's group size does not divide the input width of a quantized layer.",
    why="A group of input columns shares one scale, and codes are packed into words of 32 bits; neither may be cut "
    "short. `fc` takes all taps side by side.",
    fix="Take a group size that divides every width, or ignore the module.",
    evidence="A width that the group does not divide was refused by an engine: "
    "https://github.com/vllm-project/vllm/issues/7075",
    failing="drafter: {architecture: {heads: 3, kv_heads: 1}}",
    passing="drafter: {architecture: {heads: 4, kv_heads: 1}}",
    final="nothing can be built from it",
    needs=BASE,
    about=has_ptq,
)
def drafter_groups_divide(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is None or drafter.ptq is None:
        return
    scheme = drafter.ptq.scheme
    widths = {name: width for name, (_, width) in quantized_linears(loaded).items() if width is not None}
    bad = [
        name
        for name, width in widths.items()
        if (scheme.group_size > 0 and width % scheme.group_size) or width * scheme.bits % 32
    ]
    if bad:
        fits = [size for size in (128, 64, 32) if not any(width % size for width in widths.values())]
        others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        message = f"`{bad[0]}`{others} has {widths[bad[0]]} inputs, which groups of {scheme.group_size} do not divide"
        hint = f"write `group_size: {fits[0]}`, or ignore it" if fits else "ignore it, or change the width"
        yield Found(_GROUP, message, hint)


@TOPIC.rule(
    "PTQ02",
    "warning",
    summary="The drafter's group size is none that anybody is on record serving on a GPU.",
    why="A kernel is compiled for some group sizes; for others the engine falls back or stops.",
    fix="Write 32 or 128.",
    evidence="Disputed. 64 proved to have no kernel: https://github.com/vllm-project/llm-compressor/issues/1489; one "
    "report trusts 128 only: https://github.com/mit-han-lab/llm-awq/issues/21; yet 32 is served.",
    failing="drafter: {ptq: {scheme: {group_size: 64}}}",
    passing="drafter: {ptq: {scheme: {group_size: 32}}}",
)
def the_group_is_served(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is None or drafter.ptq is None:
        return
    group, served = drafter.ptq.scheme.group_size, fact(loaded, "served-groups")
    if served is not None and group not in served:
        message = f"nobody is on record serving a drafter with groups of {group} (disputed: one report trusts 128 only)"
        yield Found(_GROUP, message, f"write {' or '.join(f'`group_size: {size}`' for size in served)}")


@TOPIC.rule(
    "PTQ03",
    "error",
    summary="A quantized layer has a width that the CPU's INT4 kernel does not take.",
    why="The kernel works on blocks of 32 rows and 32 columns.",
    fix="Add the module to the `ignore` list.",
    evidence="Measured with vLLM 0.32.0 on CPU: `in_proj_a` with 4 outputs stops the engine.",
    failing='target: {quantization: {ignore: [lm_head, "re:.*conv1d$"]}}',
    passing='target: {quantization: {ignore: [lm_head, "re:.*linear_attn\\\\.in_proj_[ab]$", "re:.*conv1d$"]}}',
    needs=BASE,
    about=on_cpu,
)
def the_cpu_kernel_takes_it(loaded: Loaded) -> Iterator[Found]:
    multiple = fact(loaded, "int4-multiple")
    if not on_cpu(loaded) or multiple is None:
        return
    places = (
        (("target", "quantization", "ignore"), _target_linears(loaded)),
        ((*_PTQ, "ignore"), quantized_linears(loaded)),
    )
    for path, shapes in places:
        bad = [name for name, size in shapes.items() if any(width is not None and width % multiple for width in size)]
        if bad:
            out, width = shapes[bad[0]]
            others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            ends = sorted({name.rsplit(".", 1)[-1] for name in bad})
            message = f"the CPU's INT4 kernel takes multiples of {multiple}; `{bad[0]}`{others} is {out} x {width}"
            hint = "add " + ", ".join(f'"re:.*{end}$"' for end in ends) + " to the list"
            yield Found(path, message, hint, key=True)


def _target_linears(loaded: Loaded) -> dict[str, tuple[int | None, int | None]]:
    """(out, in) of every Linear of the base that `target.quantization.ignore` leaves to be quantized."""
    facts, entries = loaded.facts.get("target.base"), loaded.model.target.quantization.ignore
    found = linears(facts) if facts is not None else {}
    return {name: linear.shape for name, linear in found.items() if not ignored(name, entries)}


@TOPIC.rule(
    "PTQ04",
    "error",
    summary="An entry of the drafter's `ignore` names no module of the engine.",
    why="The engine calls the modules `model.fc` and `model.layers.N...` with N counted on from the target's layers. "
    "An entry that names nothing there leaves a BF16 module for which the engine seeks packed weights in vain.",
    fix="Write a pattern that ends with the module's name.",
    evidence="Measured with vLLM 0.32.0 on CPU: `fc` is looked for as `model.fc`.",
    failing="drafter: {ptq: {ignore: [fc]}}",
    passing='drafter: {ptq: {ignore: ["re:.*fc$"]}}',
    final="nothing can be served from it",
    needs=BASE,
    about=has_ptq,
)
def ignored_modules_exist(loaded: Loaded) -> Iterator[Found]:
    drafter, layers = loaded.model.drafter, len(layer_kinds(loaded))
    if drafter is None or drafter.ptq is None or not layers:
        return
    names = [engine_name(name, layers) for name in drafter_linears(loaded)]
    for index, entry in enumerate(drafter.ptq.ignore):
        if entry.startswith("re:") and _broken(entry):
            continue
        if not any(matches(name, entry) for name in [*names, *OF_THE_TARGET]):
            last = re.escape(entry.removeprefix("re:").rsplit(".", 1)[-1].rstrip("$").lstrip("^"))
            known = [name for name in ("fc", "q_proj", "down_proj") if re.search(rf"{last}$", name)]
            hint = f'write `"re:.*{known[0]}$"`' if known else f"the engine's names are {names[0]}, {names[-1]}, ..."
            yield Found((*_PTQ, "ignore", index), f"`{entry}` names no module of the drafter in the engine", hint)


def _broken(entry: str) -> bool:
    try:
        re.compile(entry[3:])
    except re.error:
        return True
    return False


@TOPIC.rule(
    "PTQ05",
    "error",
    summary="Of layers that the engine fuses into one, some are quantized and some are not, or differently.",
    why="q, k and v are one matrix in the engine, and so are gate and up; unequal members load wrongly.",
    fix="Treat all members alike.",
    evidence="A quantization mapping was lost on fused members: https://github.com/vllm-project/vllm/issues/53116",
    failing='drafter: {ptq: {ignore: ["re:.*k_proj$"]}}',
    passing='drafter: {ptq: {ignore: ["re:.*[qkv]_proj$"]}}',
    final="the drafter would load wrongly",
    needs=(*BASE, "drafter.checkpoint"),
    about=_has_members,
)
def fused_modules_are_alike(loaded: Loaded) -> Iterator[Found]:
    drafter, facts = loaded.model.drafter, served_checkpoint(loaded)
    if drafter is None:
        return
    if drafter.ptq is not None:
        forms = dict.fromkeys(drafter_linears(loaded), "BF16") | dict.fromkeys(quantized_linears(loaded), "quantized")
    else:
        forms = {name: _form(linear) for name, linear in (linears(facts) if facts is not None else {}).items()}
    for group in fused(forms):
        if len({forms[name] for name in group}) > 1:
            said = ", ".join(f"{name.rpartition('.')[2]} is {forms[name]}" for name in group)
            message = f"`{group[0].rpartition('.')[0]}`: {said}, but the engine fuses them into one matrix"
            whole = "|".join(name.rpartition(".")[2] for name in group)
            hint = f'ignore all of them, `"re:.*({whole})$"`, or none' if drafter.ptq else "take another checkpoint"
            path = (*_PTQ, "ignore") if drafter.ptq else ("drafter", "checkpoint")
            yield Found(path, message, hint, key=True)
            return


def _form(linear: Linear) -> str:
    """How a Linear is stored: what members of a fused matrix must share."""
    if linear.groups is None:
        return "not quantized"
    zeros = " with zero points" if linear.zeros else ""
    return f"packed in {linear.shape[1]} words and {linear.groups} groups a row{zeros}"


@TOPIC.rule(
    "PTQ06",
    "error",
    summary="The floors of the calibration's mix ask for more conversations than there are.",
    why="One published set asked for 256 conversations and had 512, because four kinds had a floor of 128 each.",
    fix="Lower the floors, or ask for their sum.",
    evidence="A published calibration set: https://github.com/nota-github/adaptfm-quant-dflash",
    failing="drafter: {ptq: {calibration: {mix: {code: {share: 0.5, floor: 6}, math: {share: 0.5, floor: 6}}}}}",
    passing="drafter: {ptq: {calibration: {mix: {code: {share: 0.5, floor: 4}, math: {share: 0.5, floor: 4}}}}}",
    final="nothing can be built from it",
)
def the_floors_fit(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    calibration = drafter.ptq.calibration if drafter and drafter.ptq else None
    if calibration is None or calibration.mix is None:
        return
    floors = [bucket.floor for bucket in calibration.mix.values()]
    if sum(floors) > calibration.conversations:
        message = f"{len(floors)} kinds with floors of {', '.join(map(str, floors))} make {sum(floors)} conversations"
        path = (*_PTQ, "calibration", "conversations")
        hint = f"write `conversations: {sum(floors)}`, or lower the floors"
        where = ((*_PTQ, "calibration", "mix"), "the floors")
        yield Found(path, f"{message}, not {calibration.conversations}", hint, also=where)


@TOPIC.rule(
    "PTQ09",
    "warning",
    summary="AWQ is to quantize modules of a DFlash drafter that share no norm.",
    why="k and v read the draft block and the context, so that a scale folded into the norm before one of them is "
    "wrong for the other; `fc` has no norm before it.",
    fix="Write `method: gptq`, or leave q, k, v and `fc` out.",
    evidence="Follows from the drafter's data flow (compiler/qdc/methods/dflash.py).",
    failing="drafter: {ptq: {method: awq}}",
    passing="drafter: {ptq: {method: gptq}}",
    needs=BASE,
    about=_is_awq,
)
def awq_has_a_norm_to_fold_into(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is None or drafter.ptq is None or drafter.ptq.method != "awq" or drafter.architecture.kind != "dflash":
        return
    ends = {name.rsplit(".", 1)[-1] for name in quantized_linears(loaded)}
    bad = [name for name in ("k_proj", "v_proj", "fc") if name in ends]
    if bad:
        message = f"AWQ folds scales into a norm, but {', '.join(bad)} have none of their own"
        hint = 'write `method: gptq`, or `ignore: ["re:.*[qkv]_proj$", "re:.*fc$"]`'
        yield Found((*_PTQ, "method"), message, hint)
