"""What a published drafter's own files say, against the recipe, the target and the engine.

From its headers and its configuration, in z-lab's form (`dflash_config`) or in speculators'. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.recipe.load import Loaded
from qdc.rules.parts import (
    BASE,
    PUBLISHED,
    drafted_block,
    has_published,
    inner_configs,
    published,
    runner,
    served_checkpoint,
    setting,
    target_size,
    whole,
)
from qdc.rules.registry import Found, Topic
from qdc.tables import engines

TOPIC = Topic()
_SHAPE = ("drafter", "architecture")
_CHECKPOINT = ("drafter", "checkpoint")


@TOPIC.rule(
    "DRF05",
    "error",
    summary="The taps of the published drafter are not those of the recipe.",
    why="Two conventions differ by one: z-lab counts layers (`target_layer_ids` = taps), speculators hidden states "
    "(`aux_hidden_state_layer_ids` = taps + 1). A shifted tap only lowers acceptance, and nothing says so.",
    fix="Write the taps that the message names.",
    evidence="An engine had to tell the two conventions apart: https://github.com/vllm-project/vllm/pull/40727",
    failing="drafter: {architecture: {taps: [2, 8, 13, 19, 24, 30]}}",
    passing="drafter: {architecture: {taps: [1, 7, 12, 18, 23, 29]}}",
    needs=PUBLISHED,
)
def taps_are_those_of_the_file(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    for place, facts in published(loaded):
        for name, shift in (("target_layer_ids", 0), ("aux_hidden_state_layer_ids", 1)):
            stored = setting(facts.config or {}, name)
            if block is None or not isinstance(stored, list) or stored == [tap + shift for tap in block.taps]:
                continue
            taps = [id - shift if isinstance(id, int) else id for id in stored]
            message = f"the checkpoint says `{name}: {stored}`, which are the taps {taps}"
            hint = f"write `taps: {taps}`" if place == _CHECKPOINT else f"write `taps: {taps}`, or remove `init`"
            yield Found((*_SHAPE, "taps"), message, hint, also=(place, "the checkpoint"))


@TOPIC.rule(
    "DRF09",
    "error",
    summary="Drafter and target have vocabularies of different sizes.",
    why="The drafter uses the target's embedding and head; engines refuse such pairs, or accept nothing. Where only "
    "rows without a token differ it is a warning.",
    fix="Take a drafter of this target, or pad its configuration and rows to the target's.",
    evidence="An engine refused a pair of 151936 and 152064 rows: https://github.com/vllm-project/vllm/issues/7252; "
    "another pair shared no head and accepted nothing: https://github.com/vllm-project/vllm/pull/46435",
    failing="drafter: {checkpoint: {hf: z-lab/Qwen3.5-4B-DFlash, revision: 96899cc270945f554998309580b08a04a05a3187}}\n"
    "# its config.json: vocab_size 151936; the target's: 248320",
    passing="drafter: {checkpoint: {hf: z-lab/Qwen3.5-4B-DFlash, revision: 96899cc270945f554998309580b08a04a05a3187}}\n"
    "# its config.json: vocab_size 248320; the target's: 248320",
    needs=(*BASE, *PUBLISHED),
    about=has_published,
)
def vocabularies_agree(loaded: Loaded) -> Iterator[Found]:
    rows, tokenizer = target_size(loaded, "vocab_size"), loaded.facts.get("target.base")
    size = tokenizer.tokenizer.size if tokenizer is not None and tokenizer.tokenizer is not None else None
    for place, facts in published(loaded):
        own = whole(setting(facts.config or {}, "vocab_size"))
        if own is None or rows is None or own == rows:
            continue
        padding = size is not None and size <= min(own, rows)
        what = "only rows without a token differ" if padding else "tokens differ"
        message = f"the drafter's vocabulary has {own} rows, the target's {rows}: {what}"
        hint = f"pad the drafter's configuration and rows to {rows}, or take a drafter of this target"
        yield Found(place, message, hint, "warning" if padding else None, key=True)


@TOPIC.rule(
    "DRF10",
    "error",
    summary="The drafter has a reduced vocabulary, but its file lacks its own head or the map of ids.",
    why="Without the map (`d2t`) row i of the small head is taken for token i of the target.",
    fix="Take a checkpoint with both tensors.",
    evidence="Acceptance fell from 25 % to 1.7 %: https://github.com/vllm-project/vllm-ascend/issues/11374",
    failing="drafter: {architecture: {draft_vocab_size: 32000}}  # the file has no d2t",
    passing="drafter: {architecture: {draft_vocab_size: 32000}}  # the file has lm_head of 32000 rows and d2t",
    needs=(*BASE, *PUBLISHED),
    about=has_published,
)
def a_small_head_has_its_map(loaded: Loaded) -> Iterator[Found]:
    rows, drafter = target_size(loaded, "vocab_size"), loaded.model.drafter
    for place, facts in published(loaded):
        given = getattr(drafter.architecture, "draft_vocab_size", None) if drafter else None
        size = given or whole(setting(facts.config or {}, "draft_vocab_size"))
        if size is None or rows is None or size >= rows:
            continue
        heads = {tensor.shape[:1] for name, tensor in facts.tensors.items() if name.endswith("lm_head.weight")}
        maps = [name for name in facts.tensors if name.rsplit(".", 1)[-1] == "d2t"]
        lacking = [*([] if (size,) in heads else [f"a head of {size} rows"]), *([] if maps else ["the id map `d2t`"])]
        if lacking:
            path = (*_SHAPE, "draft_vocab_size") if given is not None else place
            message = f"a draft vocabulary of {size} of {rows} tokens, but the file lacks {' and '.join(lacking)}"
            yield Found(path, message, "take a checkpoint with its own head and `d2t`", key=True)


@TOPIC.rule(
    "DRF11",
    "error",
    summary="The drafter's rotary embedding is not said, said twice with different values, or partial without a word "
    "in the recipe.",
    why="A factor of 0.25 that was copied from the target rotates a quarter of each head where training rotated all "
    "of it: good validation, bad serving.",
    fix="Correct the checkpoint's configuration, or write `partial_rotary_factor` where the drafter was trained so.",
    evidence="Training ignored the factor that the engine applied: "
    "https://github.com/vllm-project/speculators/issues/613 https://github.com/NVIDIA-NeMo/Automodel/pull/3605",
    failing="drafter: {architecture: {partial_rotary_factor: null}}  # config.json of the checkpoint: 0.25",
    passing="drafter: {architecture: {partial_rotary_factor: 0.25}}  # config.json of the checkpoint: 0.25",
    needs=PUBLISHED,
)
def rotation_is_said_once(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    for place, facts in published(loaded):
        if block is None:
            continue
        thetas, factors = _rotary(facts, "rope_theta"), _rotary(facts, "partial_rotary_factor")
        declared = block.partial_rotary_factor if block.partial_rotary_factor is not None else 1.0
        wrong = sorted(factors - {declared})
        if len(thetas) != 1:
            said = f"says several: {', '.join(map(str, sorted(thetas)))}" if thetas else "does not say it"
            hint = "correct its config.json; one `rope_theta`, the one of its training"
            yield Found(place, f"the drafter's `rope_theta`: its configuration {said}", hint, key=True)
        if wrong:
            message = f"the checkpoint's `partial_rotary_factor` is {wrong[0]}, the recipe's {declared}"
            hint = f"remove it from its config.json, or write `partial_rotary_factor: {wrong[0]}` if it was trained so"
            yield Found(place, message, hint, key=True)


def _rotary(facts: ModelFacts, name: str) -> set[float]:
    """Every value that a configuration gives to a setting of the rotary embedding."""
    places: list[Mapping[str, Any]] = []
    for config in inner_configs(facts.config or {}):
        places.append(config)
        places += [config[key] for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), Mapping)]
    return {float(place[name]) for place in places if isinstance(place.get(name), int | float)}


@TOPIC.rule(
    "DRF12",
    "error",
    summary="The engine has no class for the drafter's architecture, or one that cannot run here.",
    why="An engine picks the class by the first name under `architectures`; a name may stand for another family's "
    "class, and some classes run on the V2 model runner only, which a CPU has not.",
    fix="Correct the name in the checkpoint's config.json, or take a version and platform that run it.",
    evidence="`DSparkDraftModel` resolved to DeepSeek's class: "
    "https://github.com/syv-ai/qwen38-27b-rtx3090/issues/25; DFlash2 needs the V2 runner: "
    "https://github.com/noonghunna/club-3090/issues/1064",
    failing='drafter: {architecture: {kind: dspark}}\nserve: {engine: {vllm: "0.32.0", runner: v2}}\n'
    "# config.json of the checkpoint: architectures [DSparkDraftModel], model_type qwen3",
    passing='drafter: {architecture: {kind: dspark}}\nserve: {engine: {vllm: "0.32.0", runner: v2}}\n'
    "# config.json of the checkpoint: architectures [Qwen3DSparkModel], model_type qwen3",
    needs=("drafter.checkpoint",),
)
def the_engine_has_the_class(loaded: Loaded) -> Iterator[Found]:
    facts, engine = served_checkpoint(loaded), loaded.model.serve.engine
    config = (facts.config if facts is not None else None) or {}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = engines.architecture(name) if isinstance(name, str) else None
    if known is None:
        return
    where = ("drafter", "checkpoint")
    if engines.value(engine.vllm, engine.platform, known.column) is False:
        newer = engines.first(engine.platform, known.column)
        hint = f'write `vllm: "{newer}"` or later' if newer else "take another drafter, or another platform"
        message = f"vLLM {engine.vllm} on {engine.platform} has no class `{name}`"
        yield Found(where, message, hint, key=True)
    elif known.families is not None and config.get("model_type") not in known.families:
        message = f"`{name}` is the class of {', '.join(known.families)}, not of {config.get('model_type')}"
        other = engines.architecture_of(known.column, str(config.get("model_type")))
        hint = f"write `architectures: [{other}]` in its config.json" if other else "take another drafter"
        yield Found(where, message, hint, key=True)
    elif known.runner == "v2" and runner(loaded) == "v1":
        message = f"`{name}` runs on the V2 model runner only"
        hint = "take `kind: dflash`, or a GPU" if engine.platform == "cpu" else "write `runner: v2`"
        yield Found(where, message, hint, key=True)
