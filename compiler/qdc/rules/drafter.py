"""The drafter's shape against the target: draft block and K, taps, mask token, heads.

What a published drafter's own file says is in `published`; how a drafter is made is in `training`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qdc.formats.checkpoint import ModelFacts
from qdc.recipe.load import Loaded
from qdc.rules.parts import (
    BASE,
    PUBLISHED,
    drafted_block,
    largest_k,
    layer_kinds,
    published,
    served_checkpoint,
    setting,
    target_place,
    target_size,
    whole,
)
from qdc.rules.registry import Found, Topic

TOPIC = Topic()
_SHAPE = ("drafter", "architecture")
_BLOCK = (*_SHAPE, "draft_block_size")
_TAPS = (*_SHAPE, "taps")
_MASKS = ("dflash", "dspark")
_ENDS = ("eos_token_id", "bos_token_id", "pad_token_id")


@TOPIC.rule(
    "DRF01",
    "error",
    summary="K is larger than the draft block can draft.",
    why="A draft block is one anchor and the masks, and each mask drafts one token (with `sample_from_anchor` and for "
    "`dspark` the anchor's slot too); more were never trained.",
    fix="Lower `serve.k`, or serve a drafter with a larger draft block. `allow_k_mismatch: true` is for engines that "
    "extend the block.",
    evidence="Disputed. vLLM up to 0.33.0 does not check it: https://github.com/vllm-project/speculators/pull/456 "
    "https://github.com/vllm-project/vllm/pull/41834; one engine gained past the block with another drafter: "
    "https://github.com/Avarok-Cybersecurity/atlas/pull/817",
    failing="serve: {k: 8}",
    passing="serve: {k: 7}",
    final="the drafter cannot be evaluated past its draft block",
)
def k_fits_the_block(loaded: Loaded) -> Iterator[Found]:
    block, k = drafted_block(loaded), loaded.model.serve.k
    if block is None or block.kind not in _MASKS or k is None or block.allow_k_mismatch:
        return
    size, most = block.draft_block_size, largest_k(block)
    if k > most:
        masks = f"is one anchor and {size - 1} masks" if most < size else f"drafts {size} tokens"
        message = f"K = {k}, but a draft block of {size} {masks}"
        yield Found(("serve", "k"), message, f"write `k: {most}`", also=(_BLOCK, "the draft block"))


@TOPIC.more("DRF01", needs=("drafter.checkpoint",), about=drafted_block)
def k_fits_the_block_of_the_file(loaded: Loaded) -> Iterator[Found]:
    block, k, facts = drafted_block(loaded), loaded.model.serve.k, served_checkpoint(loaded)
    size = whole(setting(facts.config, "block_size")) if facts is not None and facts.config is not None else None
    if block is None or block.kind not in _MASKS or k is None or block.allow_k_mismatch or size is None:
        return
    if size < block.draft_block_size and largest_k(block, size) < k <= largest_k(block):
        message = f"K = {k}, but the checkpoint's draft block is {size}"
        where = (("drafter", "checkpoint"), "the checkpoint")
        yield Found(("serve", "k"), message, f"write `k: {largest_k(block, size)}`", also=where)


@TOPIC.rule(
    "DRF02",
    "warning",
    summary="K is smaller than the draft block can draft.",
    why="The drafter then sees fewer masks than in training, which may cost acceptance.",
    fix="Write the largest K of the draft block, or measure the shorter one and accept it with a reason.",
    evidence="Disputed. One guard calls such output garbled: https://github.com/vllm-project/vllm/pull/47419; users "
    "serve K = 3 without harm: https://github.com/vllm-project/vllm/issues/50012",
    failing="serve: {k: 5}",
    passing="serve: {k: 7}",
)
def k_fills_the_block(loaded: Loaded) -> Iterator[Found]:
    block, k = drafted_block(loaded), loaded.model.serve.k
    if block is None or block.kind not in _MASKS or k is None or k >= largest_k(block):
        return
    message = (
        f"K = {k} shortens the draft block that was trained ({block.draft_block_size}): the drafter sees fewer masks "
        "than in training (disputed: whether that costs acceptance)"
    )
    hint = f"measure it, or write `k: {largest_k(block)}`"
    yield Found(("serve", "k"), message, hint, also=(_BLOCK, "the draft block"))


@TOPIC.rule(
    "DRF03",
    "error",
    summary="The taps do not increase strictly, or one is not a layer of the target.",
    why="Tap i is the output of layer i; a tap past the last layer fails at the first decoded token.",
    fix="List layers of the target from 0, each once, in order.",
    evidence="A tap of a layer that the target lacks failed only while serving: "
    "https://github.com/vllm-project/vllm/pull/48113",
    failing="drafter: {architecture: {taps: [0, 2, 4]}}",
    passing="drafter: {architecture: {taps: [0, 2, 3]}}",
    final="nothing can be built from it",
)
def taps_increase(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    if block is not None and sorted(set(block.taps)) != block.taps:
        layers = len(layer_kinds(loaded))
        fixed = [tap for tap in sorted(set(block.taps)) if not layers or tap < layers]
        yield Found(_TAPS, "taps must be strictly increasing", f"write `taps: {fixed}`")


@TOPIC.more("DRF03", needs=BASE, about=drafted_block)
def taps_are_layers(loaded: Loaded) -> Iterator[Found]:
    block, layers = drafted_block(loaded), target_size(loaded, "num_hidden_layers")
    if block is None or layers is None:
        return
    for index, tap in enumerate(block.taps):
        if tap >= layers:
            message = f"tap {tap} is not a layer of the target, which has layers 0 to {layers - 1}"
            where = (target_place(loaded, "layers"), f"{layers} layers")
            yield Found((*_TAPS, index), message, f"write layers from 0 to {layers - 1}", also=where)


@TOPIC.rule(
    "DRF04",
    "error",
    summary="The drafter's width is not the target's, or its `fc` does not take the taps.",
    why="The drafter uses the target's embedding and output head, and `fc` takes all taps side by side.",
    fix="Write the target's hidden size (or `target_hidden_size` for a drafter of another width), and the taps of the "
    "checkpoint.",
    evidence="Follows from the architecture (arXiv 2607.04244, section 3); an engine's check of `fc` against the taps: "
    "https://github.com/vllm-project/vllm/pull/48113",
    failing="drafter: {architecture: {hidden_size: 256}}",
    passing="drafter: {architecture: {hidden_size: 128}}",
    final="nothing can be built from it",
    needs=BASE,
    about=drafted_block,
)
def hidden_sizes_agree(loaded: Loaded) -> Iterator[Found]:
    block, wanted = drafted_block(loaded), target_size(loaded, "hidden_size")
    if block is None or wanted is None:
        return
    if block.hidden_size not in (None, wanted) and block.target_hidden_size is None:
        message = f"the drafter uses the target's embedding and head: hidden_size must be {wanted}"
        where = (target_place(loaded, "hidden_size"), "the target's")
        yield Found((*_SHAPE, "hidden_size"), message, f"write `hidden_size: {wanted}`", also=where)
    if block.target_hidden_size not in (None, wanted):
        message = f"the target's hidden size is {wanted}, not {block.target_hidden_size}"
        path = (*_SHAPE, "target_hidden_size")
        where = (target_place(loaded, "hidden_size"), "the target's")
        yield Found(path, message, f"write `target_hidden_size: {wanted}`", also=where)


@TOPIC.more("DRF04", needs=(*BASE, *PUBLISHED), about=drafted_block)
def fc_takes_the_taps(loaded: Loaded) -> Iterator[Found]:
    block, width = drafted_block(loaded), target_size(loaded, "hidden_size")
    for place, facts in published(loaded):
        columns = _columns(facts, "fc")
        if block is None or width is None or columns is None or columns == len(block.taps) * width:
            continue
        message = (
            f"`fc` of the checkpoint takes {columns} inputs, but {len(block.taps)} taps of width {width} give "
            f"{len(block.taps) * width}"
        )
        taps = (
            f"list {columns // width} taps" if columns % width == 0 else "take a drafter that was made for the target"
        )
        yield Found(_TAPS, message, taps, also=(place, "the checkpoint"))


def _columns(facts: ModelFacts, module: str) -> int | None:
    """Inputs of a Linear of the file, packed or not; None where the file does not say."""
    for name, tensor in facts.tensors.items():
        if name.removeprefix("model.") == f"{module}.weight" and len(tensor.shape) == 2:
            return tensor.shape[1]
        if name.removeprefix("model.") == f"{module}.weight_packed" and len(tensor.shape) == 2:
            bits = _bits(facts)
            return tensor.shape[1] * 32 // bits if bits else None
    return None


def _bits(facts: ModelFacts) -> int | None:
    """Bits a weight of a file whose groups all have the same."""
    quantization = (facts.config or {}).get("quantization_config")
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    bits = [whole(weight.get("num_bits")) for weight in weights if isinstance(weight, dict)]
    return bits[0] if bits and all(size == bits[0] for size in bits) else None


@TOPIC.rule(
    "DRF07",
    "error",
    summary="The drafter's mask token is missing, is not the one that it was made with, or has another meaning.",
    why="A mask borrowed from other tokens mixes `predict here` with real text, and acceptance sinks quietly.",
    fix="Write `mask_token_id` of the published drafter or an unused special token of the tokenizer; for a target that "
    "this recipe trains, `mask_token` of its tokenizer.",
    evidence="A mask taken from the padding token was a bug of a public trainer: "
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2461",
    failing='drafter: {architecture: {mask_token: "<|pad|>"}}',
    passing='drafter: {architecture: {mask_token: "<|mask|>"}}',
    final="nothing can be built from it",
)
def mask_tokens_agree(loaded: Loaded) -> Iterator[Found]:
    block, base = drafted_block(loaded), loaded.model.target.base
    if block is None:
        return
    given, scratch = block.mask_token, getattr(base, "scratch", None)
    if given is None and block.mask_token_id is None:
        hint = f'write `mask_token: "{scratch.tokenizer.mask_token}"`' if scratch else "write `mask_token_id: ...`"
        yield Found(_SHAPE, "the drafter has no mask token", hint, key=True)
    elif scratch is not None and given is None:
        hint = f'write `mask_token: "{scratch.tokenizer.mask_token}"` in its place'
        yield Found((*_SHAPE, "mask_token_id"), "ids of a tokenizer that the recipe trains are not known yet", hint)
    elif scratch is not None and given != scratch.tokenizer.mask_token:
        wanted = scratch.tokenizer.mask_token
        where = (("target", "base", "scratch", "tokenizer", "mask_token"), "the tokenizer's")
        message = f"the tokenizer's mask token is `{wanted}`, not `{given}`"
        yield Found((*_SHAPE, "mask_token"), message, f'write `mask_token: "{wanted}"`', also=where)


@TOPIC.more("DRF07", needs=BASE, about=drafted_block)
def the_mask_means_nothing_else(loaded: Loaded) -> Iterator[Found]:
    block, facts = drafted_block(loaded), loaded.facts.get("target.base")
    if block is None or facts is None or hasattr(loaded.model.target.base, "scratch"):
        return
    special = facts.tokenizer.special if facts.tokenizer is not None else {}
    if block.mask_token is not None and facts.tokenizer is not None and block.mask_token not in special.values():
        message = f"the tokenizer has no special token `{block.mask_token}`"
        yield Found((*_SHAPE, "mask_token"), message, "write `mask_token_id` of the published drafter in its place")
    mask, path = _mask_id(block.mask_token_id, block.mask_token, special), "mask_token_id"
    if block.mask_token_id is None:
        path = "mask_token"
    meaning = _meaning(loaded, facts, mask) if mask is not None else None
    if meaning is not None:
        message = f"token {mask}{f' ({special[mask]})' if mask in special else ''} {meaning}"
        yield Found((*_SHAPE, path), message, "write an unused special token, the one that the drafter was made with")


@TOPIC.more("DRF07", needs=PUBLISHED, about=drafted_block)
def the_mask_is_the_one_of_the_file(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    for place, facts in published(loaded):
        stored = setting(facts.config or {}, "mask_token_id")
        if block is None or block.mask_token_id is None or stored in (None, block.mask_token_id):
            continue
        message = f"the checkpoint was trained with mask token {stored}, not {block.mask_token_id}"
        hint = f"write `mask_token_id: {stored}`"
        yield Found((*_SHAPE, "mask_token_id"), message, hint, also=(place, "the checkpoint"))


def _mask_id(id: int | None, text: str | None, special: dict[int, str]) -> int | None:
    return id if id is not None else next((one for one, word in special.items() if word == text), None)


def _meaning(loaded: Loaded, facts: ModelFacts, mask: int) -> str | None:
    """What keeps a token from being a mask, None if nothing does."""
    if (rows := _rows(facts)) is not None and mask >= rows:
        return f"is past the embedding's {rows} rows"
    for name in _ENDS:
        if mask in _ids(facts, name):
            return f"is the target's {name.split('_')[0].upper()} token"
    text = facts.tokenizer.special.get(mask) if facts.tokenizer is not None else None
    return "is written by the chat template" if text is not None and text in loaded.chat_template else None


def _rows(facts: ModelFacts) -> int | None:
    shapes = [tensor.shape for name, tensor in facts.tensors.items() if name.endswith("embed_tokens.weight")]
    return max((shape[0] for shape in shapes if shape), default=None) or whole(facts.text_config.get("vocab_size"))


def _ids(facts: ModelFacts, name: str) -> set[int]:
    """Every id that the checkpoint gives this meaning."""
    given: list[Any] = [(place or {}).get(name) for place in (facts.generation_config, facts.config, facts.text_config)]
    if name == "eos_token_id" and facts.tokenizer is not None:
        given.append(facts.tokenizer.eos)
    return {id for item in given for id in (item if isinstance(item, list) else [item]) if isinstance(id, int)}


@TOPIC.rule(
    "DRF08",
    "warning",
    summary="The mask token can come out of ordinary text.",
    why="Any prompt that holds this token looks like an empty slot to the drafter.",
    fix="Take an unused special token.",
    evidence="Follows from what a mask means: only a special token is never made from text.",
    failing="drafter: {architecture: {mask_token_id: 279}}",
    passing="drafter: {architecture: {mask_token_id: 248070}}",
    needs=BASE,
    about=drafted_block,
)
def the_mask_is_special(loaded: Loaded) -> Iterator[Found]:
    block, facts = drafted_block(loaded), loaded.facts.get("target.base")
    mask = block.mask_token_id if block is not None else None
    if mask is None or facts is None or facts.tokenizer is None:
        return
    if mask < facts.tokenizer.size and mask not in facts.tokenizer.special:
        message = f"token {mask} is an ordinary word of the tokenizer, so a prompt may hold it"
        unused = [id for id in facts.tokenizer.special if _meaning(loaded, facts, id) is None]
        hint = f"write an unused special token, e.g. `mask_token_id: {unused[-1]}`" if unused else "take a special one"
        yield Found((*_SHAPE, "mask_token_id"), message, hint)


@TOPIC.rule(
    "DRF22",
    "error",
    summary="The mask token is given twice, as text and as id.",
    why="The two may differ, and nobody could say which one counts.",
    fix="Keep `mask_token` for a target that this recipe trains, `mask_token_id` for a published one.",
    evidence="Follows from the definition of the fields.",
    failing="drafter: {architecture: {mask_token_id: 5}}",
    passing="drafter: {architecture: {mask_token_id: null}}",
    final="nothing can be built from it",
)
def one_mask(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    if block is not None and block.mask_token is not None and block.mask_token_id is not None:
        extra = "mask_token_id" if hasattr(loaded.model.target.base, "scratch") else "mask_token"
        where = ((*_SHAPE, "mask_token" if extra == "mask_token_id" else "mask_token_id"), "given here too")
        yield Found(
            (*_SHAPE, extra), "`mask_token` and `mask_token_id` are both given", f"remove `{extra}`", also=where
        )


@TOPIC.rule(
    "DRF18",
    "error",
    summary="`serve.k` is missing beside a drafter, or given without one.",
    why="K is a part of the product, and only a drafter has it.",
    fix="Write `k` exactly when the recipe has a `drafter`.",
    evidence="Follows from the definition of K.",
    failing="serve: {k: null}",
    passing="serve: {k: 7}",
    final="nothing can be built from it",
)
def k_is_of_a_drafter(loaded: Loaded) -> Iterator[Found]:
    drafter, k = loaded.model.drafter, loaded.model.serve.k
    if drafter is None and k is not None:
        message = "`serve.k` is given but the recipe has no drafter"
        yield Found(("serve", "k"), message, "remove it, or add `drafter:`", key=True)
    if drafter is not None and k is None:
        hint = "write `k`"
        if drafter.block:
            size, most = drafter.block.draft_block_size, largest_k(drafter.block)
            hint = f"a draft block of {size} drafts at most {most} tokens: write `k: {most}`"
        yield Found(("serve", "k"), "`serve.k` is missing", hint)


@TOPIC.rule(
    "DRF19",
    "error",
    summary="The drafter's key-value heads do not divide its query heads.",
    why="Each key-value head serves the same number of query heads.",
    fix="Write a divisor of `heads`.",
    evidence="Follows from grouped-query attention.",
    failing="drafter: {architecture: {kv_heads: 3}}",
    passing="drafter: {architecture: {kv_heads: 2}}",
    final="nothing can be built from it",
)
def heads_divide(loaded: Loaded) -> Iterator[Found]:
    block = drafted_block(loaded)
    heads, given = (block.heads, block.kv_heads) if block else (None, None)
    if heads is None or given is None or not heads % given:
        return
    best = max(size for size in range(1, heads + 1) if not heads % size and size <= given)
    yield Found(
        (*_SHAPE, "kv_heads"), f"kv_heads = {given} does not divide heads = {heads}", f"write `kv_heads: {best}`"
    )
