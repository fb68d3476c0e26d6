"""Where the drafter comes from: a published checkpoint or trainings, and what each kind needs to be said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.recipe.drafter import BlockDrafter, NgramDrafter
from qdc.recipe.load import Loaded
from qdc.rules.parts import drafted_block, inner_configs, published, setting
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_TRAININGS = ("drafter", "training")
_SHAPE = ("drafter", "architecture")
_OWN_WEIGHTS = ("dflash", "dflash2", "dspark", "lilicorr", "xpress", "eagle", "eagle3", "peagle")
_SIZES = (
    "layers",
    "hidden_size",
    "intermediate_size",
    "heads",
    "kv_heads",
    "head_dim",
    "rope_theta",
    "max_position_embeddings",
    "init_range",
)
_STORED = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "draft_block_size": "block_size",
}
_START = ("layers", "hidden_size", "draft_block_size")


@TOPIC.rule(
    "DRF14",
    "error",
    summary="A training starts from a published drafter of another shape.",
    why="The start would win and the recipe's own figure be ignored without a word.",
    fix="Write the shape of the drafter that the training starts from, or no `init`.",
    evidence="A public training script takes the start's configuration and ignores its own: "
    "https://github.com/nota-github/adaptfm-quant-dflash",
    failing="drafter: {training: [{init: {hf: z-lab/Qwen3.5-4B-DFlash, "
    "revision: 96899cc270945f554998309580b08a04a05a3187}}, {}]}\n# its config.json: block_size 8",
    passing="drafter: {training: [{init: {hf: z-lab/Qwen3.5-4B-DFlash, "
    "revision: 96899cc270945f554998309580b08a04a05a3187}}, {}]}\n# its config.json: block_size 16",
    final="nothing can be built from it",
    needs=("drafter.training.*.init",),
)
def a_start_has_the_shape(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    for place, facts in published(loaded):
        if block is None or place[:2] != _TRAININGS:
            continue
        for field, wanted, stored in _differences(block, facts, _START):
            message = f"`{field}` is {wanted}, but the training starts from a drafter with {stored}"
            hint = f"write `{field}: {stored}`, or remove `init`"
            yield Found((*_SHAPE, field), message, hint, also=(place, "the start"))
        taps, mask = stored_taps(facts), setting(facts.config or {}, "mask_token_id")
        if taps is not None and taps != block.taps:
            message = f"the training starts from a drafter with the taps {taps}"
            yield Found(
                (*_SHAPE, "taps"), message, f"write `taps: {taps}`, or remove `init`", also=(place, "the start")
            )
        if mask is not None and block.mask_token_id not in (None, mask):
            message = f"the training starts from a drafter with mask token {mask}"
            hint = f"write `mask_token_id: {mask}`, or remove `init`"
            yield Found((*_SHAPE, "mask_token_id"), message, hint, also=(place, "the start"))


def stored_taps(facts: ModelFacts) -> list[int] | None:
    """Taps of a published drafter in z-lab's convention, None where its file does not say."""
    taps = setting(facts.config or {}, "target_layer_ids")
    if taps is None:
        ids = setting(facts.config or {}, "aux_hidden_state_layer_ids")
        taps = [id - 1 if isinstance(id, int) else id for id in ids] if isinstance(ids, list) else None
    return taps if isinstance(taps, list) else None


def _differences(block: BlockDrafter, facts: ModelFacts, fields: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """(field, the recipe's value, the file's) where both say one and they differ."""
    configs = inner_configs(facts.config or {})
    for field in fields:
        wanted = getattr(block, field)
        stored = next((place[_STORED[field]] for place in configs if place.get(_STORED[field]) is not None), None)
        if wanted is not None and stored is not None and wanted != stored:
            yield field, wanted, stored


@TOPIC.rule(
    "DRF25",
    "error",
    summary="A size of the drafter is not that of its checkpoint.",
    why="The file is served as it is, so that the recipe would say what the image does not hold.",
    fix="Write the checkpoint's value, or leave the field out.",
    evidence="Follows from what a recipe is for: it says what the image holds.",
    failing="drafter: {architecture: {layers: 5}}  # config.json of the checkpoint: num_hidden_layers 6",
    passing="drafter: {architecture: {layers: 6}}  # config.json of the checkpoint: num_hidden_layers 6",
    needs=("drafter.checkpoint",),
)
def the_checkpoint_has_the_shape(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    for place, facts in published(loaded):
        if block is not None and place == ("drafter", "checkpoint"):
            for field, wanted, stored in _differences(block, facts, tuple(_STORED)):
                message = f"`{field}` is {wanted}, but the checkpoint has {stored}"
                hint = f"write `{field}: {stored}`"
                yield Found((*_SHAPE, field), message, hint, also=(place, "the checkpoint"))


@TOPIC.rule(
    "DRF16",
    "note",
    summary="The served target is quantized, and the drafter was never trained on it.",
    why="A drafter learns from the hidden states that it will see; those of a quantized target are a little different.",
    fix="Add a training with `taps_from: target`, or measure the acceptance length.",
    evidence="Disputed. A second training on the quantized target gave 0.06 accepted tokens: "
    "https://arxiv.org/abs/2607.04244; elsewhere a mismatch is blamed for 2 to 12 % acceptance: "
    "https://github.com/z-lab/dflash/issues/152",
    failing="drafter: {training: [{}, {taps_from: teacher}]}",
    passing="drafter: {training: [{}, {taps_from: target}]}",
)
def trained_on_what_is_served(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is None or drafter.architecture.kind not in _OWN_WEIGHTS:
        return
    if any(training.taps_from == "target" for training in drafter.trainings):
        return
    path = ("drafter", "training") if drafter.training else ("drafter", "checkpoint")
    if drafter.training is None and drafter.checkpoint is None:
        return
    message = (
        "the served target is quantized, and no training saw it (disputed: one paper gained 0.06 accepted tokens, "
        "elsewhere a mismatch is blamed for an acceptance of 2 to 12 %)"
    )
    hint = "measure the acceptance length, or add a training with `taps_from: target`"
    yield Found(path, message, hint, key=True)


@TOPIC.rule(
    "DRF17",
    "error",
    summary="Two trainings of the drafter have the same name.",
    why="A name is a stage and what `from` refers to.",
    fix="Give each training a name of its own.",
    evidence="Follows from the definition of the field.",
    failing="drafter: {training: [{name: pretrain}, {name: pretrain}]}",
    passing="drafter: {training: [{name: pretrain}, {name: finetune}]}",
    final="nothing can be built from it",
)
def trainings_are_named_apart(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    first: dict[str, int] = {}
    for index, training in enumerate(drafter.trainings if drafter else []):
        if training.name in first:
            where = ((*_TRAININGS, first[training.name], "name"), "first here")
            path, hint = (*_TRAININGS, index, "name"), f"write another name, e.g. `{training.name}_2`"
            yield Found(path, f"`{training.name}` is given twice", hint, also=where)
        first.setdefault(training.name, index)


@TOPIC.rule(
    "DRF20",
    "error",
    summary="The drafter has no source of weights, or two, or one that its kind does not use.",
    why="A drafter is trained here or taken as published; `mtp` is a part of the target, and `ngram` and `suffix` copy "
    "text and have no weights.",
    fix="Write exactly one of `training` and `checkpoint`; neither for `mtp`, `ngram` and `suffix`.",
    evidence="Follows from what the kinds are.",
    failing="drafter: {training: null}",
    passing="drafter: {checkpoint: null}",
    final="nothing can be built from it",
)
def the_drafter_has_a_source(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is None:
        return
    kind = drafter.architecture.kind
    given = [name for name in ("training", "checkpoint") if getattr(drafter, name) is not None]
    if kind in ("mtp", "ngram", "suffix"):
        for name in given:
            message = f"a drafter of kind `{kind}` has no weights of its own"
            yield Found(("drafter", name), message, f"remove `{name}`", key=True)
    elif len(given) == 2:
        where = (("drafter", "training"), "given here too")
        message = "a drafter is trained here or taken as published, not both"
        yield Found(("drafter", "checkpoint"), message, "remove one of the two", key=True, also=where)
    elif not given:
        hint = "add `training: [...]`, or `checkpoint: {hf: ..., revision: ...}`"
        yield Found(("drafter",), "the drafter has neither `training` nor `checkpoint`", hint, key=True)


@TOPIC.rule(
    "DRF21",
    "error",
    summary="A drafter that is trained here is of another kind than `dflash`, lacks a size, or has one that the "
    "training does not know.",
    why="Only `dflash` is trained here, from all of its sizes; what a published drafter says itself, a new one cannot.",
    fix="Write every size, and nothing that only published drafters have; serve other kinds from a `checkpoint`.",
    evidence="Follows from the training: compiler/qdc/methods/dflash.py.",
    failing="drafter: {architecture: {head_dim: null}}",
    passing="drafter: {architecture: {head_dim: 32}}",
    final="nothing can be built from it",
)
def a_trained_drafter_has_its_sizes(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is None or drafter.training is None or drafter.architecture.kind in ("mtp", "ngram", "suffix"):
        return
    shape = drafter.block
    if shape is None or shape.kind != "dflash":
        message = f"a drafter of kind `{drafter.architecture.kind}` is not trained here"
        hint = "write `kind: dflash`, or a `checkpoint` in place of `training`"
        yield Found((*_SHAPE, "kind"), message, hint)
        return
    lacking = [name for name in _SIZES if getattr(shape, name) is None]
    if lacking:
        hint = ", ".join(f"add `{name}: ...`" for name in lacking)
        yield Found(_SHAPE, f"a drafter that is trained here needs {', '.join(lacking)}", hint, key=True)
    for name in ("partial_rotary_factor", "target_hidden_size", "draft_vocab_size", "sample_from_anchor"):
        if getattr(shape, name):
            message = f"the training knows no `{name}`: only published drafters have one"
            yield Found((*_SHAPE, name), message, f"remove `{name}`", key=True)


@TOPIC.rule(
    "DRF23",
    "error",
    summary="A training has no length, or two.",
    why="`steps` and `epochs` are two ways to say how long it lasts.",
    fix="Write exactly one of the two.",
    evidence="Follows from the definition of the fields.",
    failing="drafter: {training: [{epochs: 2}, {}]}",
    passing="drafter: {training: [{epochs: 2, steps: null}, {}]}",
    final="nothing can be built from it",
)
def a_training_has_one_length(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    for index, training in enumerate(drafter.trainings if drafter else []):
        path = (*_TRAININGS, index)
        if training.steps is not None and training.epochs is not None:
            message = "`steps` and `epochs` are both given"
            where = ((*path, "steps"), "given here too")
            yield Found((*path, "epochs"), message, "remove one of the two", key=True, also=where)
        elif training.steps is None and training.epochs is None:
            message = f"the training `{training.name}` has no length"
            yield Found((*path, "name"), message, "add `steps: ...`, or `epochs: ...`")


@TOPIC.rule(
    "DRF24",
    "error",
    summary="A training starts from two drafters.",
    why="`from` names an earlier training, `init` a published drafter; only one of them gives the weights.",
    fix="Remove `from` or `init`.",
    evidence="Follows from the definition of the fields.",
    failing="drafter: {training: [{}, {init: {hf: z-lab/Qwen3.5-4B-DFlash, "
    "revision: 96899cc270945f554998309580b08a04a05a3187}}]}",
    passing="drafter: {training: [{}, {from: pretrain}]}",
    final="nothing can be built from it",
)
def a_training_has_one_start(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    for index, training in enumerate(drafter.trainings if drafter else []):
        if training.from_ is not None and training.init is not None:
            path = (*_TRAININGS, index)
            message = f"`{training.name}` starts from `{training.from_}` and from a published drafter"
            where = ((*path, "from"), "given here too")
            yield Found((*path, "init"), message, "remove one of the two", key=True, also=where)


@TOPIC.rule(
    "DRF26",
    "error",
    summary="The smallest match of an n-gram drafter is larger than its largest.",
    why="It would look for nothing and draft nothing.",
    fix="Write a `prompt_lookup_min` of at most `prompt_lookup_max`.",
    evidence="Follows from the definition of the fields.",
    failing="drafter: {architecture: {prompt_lookup_min: 5}}",
    passing="drafter: {architecture: {prompt_lookup_min: 2}}",
    final="nothing would be drafted",
)
def an_ngram_has_a_length(loaded: Loaded) -> Iterator[Found]:
    shape = loaded.model.drafter.architecture if loaded.model.drafter else None
    if isinstance(shape, NgramDrafter) and shape.prompt_lookup_min > shape.prompt_lookup_max:
        message = (
            f"the smallest match, {shape.prompt_lookup_min}, is larger than the largest, {shape.prompt_lookup_max}"
        )
        path, where = (*_SHAPE, "prompt_lookup_min"), ((*_SHAPE, "prompt_lookup_max"), "the largest")
        yield Found(path, message, f"write `prompt_lookup_min: {shape.prompt_lookup_max}` or less", also=where)
