"""The drafter's shape against the target, the draft block and K; its trainings and its PTQ."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.recipe.load import Loaded
from qdc.rules.parts import drafted_block
from qdc.rules.registry import Found, Topic
from qdc.rules.target import undivided

TOPIC = Topic()
_BLOCK = ("drafter", "architecture", "draft_block_size")


@TOPIC.rule(
    "DRF01",
    "error",
    summary="K is larger than the draft block less one.",
    why="A draft block is one anchor and the masks, and each mask drafts one token; more were never trained.",
    fix="Lower `serve.k` to `draft_block_size - 1`, or train a larger draft block.",
    evidence="Disputed. vLLM up to 0.33.0 does not check it: https://github.com/vllm-project/speculators/pull/456 "
    "https://github.com/vllm-project/vllm/pull/41834; one engine gained past the block with another drafter: "
    "https://github.com/Avarok-Cybersecurity/atlas/pull/817",
    failing="serve: {k: 8}",
    passing="serve: {k: 7}",
    final="the drafter cannot be evaluated past its draft block",
)
def k_fits_the_block(loaded: Loaded) -> Iterator[Found]:
    block, k = drafted_block(loaded), loaded.model.serve.k
    if block is None or k is None or k < block.draft_block_size:
        return
    size = block.draft_block_size
    message = f"K = {k}, but a draft block of {size} is one anchor and {size - 1} masks"
    yield Found(("serve", "k"), message, f"write `k: {size - 1}`", also=(_BLOCK, "the draft block"))


@TOPIC.rule(
    "DRF02",
    "warning",
    summary="K is smaller than the draft block less one.",
    why="The drafter then sees fewer masks than in training, which may cost acceptance.",
    fix="Write `k: draft_block_size - 1`, or measure the shorter block and accept it with a reason.",
    evidence="Disputed. One guard calls such output garbled: https://github.com/vllm-project/vllm/pull/47419; users "
    "serve K = 3 without harm: https://github.com/vllm-project/vllm/issues/50012",
    failing="serve: {k: 5}",
    passing="serve: {k: 7}",
)
def k_fills_the_block(loaded: Loaded) -> Iterator[Found]:
    block, k = drafted_block(loaded), loaded.model.serve.k
    if block is None or k is None or k >= block.draft_block_size - 1:
        return
    size = block.draft_block_size
    message = (
        f"K = {k} shortens the draft block that was trained ({size}): the drafter sees fewer masks than in training "
        "(disputed: whether that costs acceptance)"
    )
    yield Found(("serve", "k"), message, f"measure it, or write `k: {size - 1}`", also=(_BLOCK, "the draft block"))


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
def taps_are_layers(loaded: Loaded) -> Iterator[Found]:
    block, base = drafted_block(loaded), loaded.model.target.base
    if block is None:
        return
    path, taps = ("drafter", "architecture", "taps"), block.taps
    layers = len(base.scratch.architecture.layers) if hasattr(base, "scratch") else None
    if sorted(set(taps)) != taps:
        fixed = [tap for tap in sorted(set(taps)) if layers is None or tap < layers]
        yield Found(path, "taps must be strictly increasing", f"write `taps: {fixed}`")
    for index, tap in enumerate(taps):
        if layers is not None and tap >= layers:
            message = f"tap {tap} is not a layer of the target, which has layers 0 to {layers - 1}"
            where = ("target", "base", "scratch", "architecture", "layers")
            hint = f"write layers from 0 to {layers - 1}"
            yield Found((*path, index), message, hint, also=(where, f"{layers} layers"))


@TOPIC.rule(
    "DRF04",
    "error",
    summary="The drafter's hidden size is not the target's.",
    why="The drafter uses the target's embedding and output head.",
    fix="Write the target's hidden size.",
    evidence="Follows from the architecture (arXiv 2607.04244, section 3); an engine's check of `fc` against the taps: "
    "https://github.com/vllm-project/vllm/pull/48113",
    failing="drafter: {architecture: {hidden_size: 256}}",
    passing="drafter: {architecture: {hidden_size: 128}}",
    final="nothing can be built from it",
)
def hidden_sizes_agree(loaded: Loaded) -> Iterator[Found]:
    block, base = drafted_block(loaded), loaded.model.target.base
    if block is None or not hasattr(base, "scratch"):
        return
    wanted = base.scratch.architecture.hidden_size
    if block.hidden_size is not None and block.hidden_size != wanted:
        message = f"the drafter uses the target's embedding and head: hidden_size must be {wanted}"
        where = ("target", "base", "scratch", "architecture", "hidden_size")
        path = ("drafter", "architecture", "hidden_size")
        yield Found(path, message, f"write `hidden_size: {wanted}`", also=(where, "the target's"))


@TOPIC.rule(
    "DRF07",
    "error",
    summary="The drafter's mask token is not the one that the tokenizer has for it.",
    why="A mask borrowed from other tokens mixes `predict here` with real text, and acceptance sinks quietly.",
    fix="Write the tokenizer's `mask_token`.",
    evidence="A mask taken from the padding token was a bug of a public trainer: "
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2461",
    failing='drafter: {architecture: {mask_token: "<|pad|>"}}',
    passing='drafter: {architecture: {mask_token: "<|mask|>"}}',
    final="nothing can be built from it",
)
def mask_tokens_agree(loaded: Loaded) -> Iterator[Found]:
    block, base = drafted_block(loaded), loaded.model.target.base
    if block is None or not hasattr(base, "scratch"):
        return
    wanted, given = base.scratch.tokenizer.mask_token, block.mask_token
    if given is not None and wanted != given:
        where = ("target", "base", "scratch", "tokenizer", "mask_token")
        message = f"the tokenizer's mask token is `{wanted}`, not `{given}`"
        path = ("drafter", "architecture", "mask_token")
        yield Found(path, message, f'write `mask_token: "{wanted}"`', also=(where, "the tokenizer's"))


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
            where = ("drafter", "training", first[training.name], "name")
            path, hint = ("drafter", "training", index, "name"), f"write another name, e.g. `{training.name}_2`"
            yield Found(path, f"`{training.name}` is given twice", hint, also=(where, "first here"))
        first.setdefault(training.name, index)


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
        size = drafter.block.draft_block_size if drafter.block else None
        hint = (
            f"a draft block of {size} drafts at most {size - 1} tokens: write `k: {size - 1}`" if size else "write `k`"
        )
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
    path = ("drafter", "architecture", "kv_heads")
    yield Found(path, f"kv_heads = {given} does not divide heads = {heads}", f"write `kv_heads: {best}`")


@TOPIC.rule(
    "PTQ01",
    "error",
    summary="The drafter's group size does not divide the input width of a quantized layer.",
    why="A group of input columns shares one scale; a group cut short has none in the packed format.",
    fix="Take a group size that divides every width, or ignore the module.",
    evidence="A width that the group does not divide was refused by an engine: "
    "https://github.com/vllm-project/vllm/issues/7075",
    failing="drafter: {architecture: {heads: 3, kv_heads: 1}}",
    passing="drafter: {architecture: {heads: 4, kv_heads: 1}}",
    final="nothing can be built from it",
)
def drafter_groups_divide(loaded: Loaded) -> Iterator[Found]:
    drafter, shape = loaded.model.drafter, drafted_block(loaded)
    if drafter is None or drafter.ptq is None or shape is None:
        return
    widths = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "heads x head_dim": shape.heads and shape.head_dim and shape.heads * shape.head_dim,
    }
    known = {name: width for name, width in widths.items() if width is not None}
    yield from undivided(("drafter", "ptq", "scheme", "group_size"), drafter.ptq.scheme.group_size, known)
