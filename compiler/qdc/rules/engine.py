"""The engine: its version, its patches, and the room that requests need."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.core.errors import QdcError
from qdc.core.spelling import suggestion
from qdc.recipe.load import Loaded
from qdc.rules.registry import Found, Topic
from qdc.serving.patches import patch_names
from qdc.serving.render import required_patches

TOPIC = Topic()
_BUDGET = 2048
_PATCHES = ("serve", "engine", "patches")


@TOPIC.rule(
    "ENG10",
    "error",
    summary="One draft step of all sequences needs more tokens than the engine's budget of 2048.",
    why="A step drafts K + 1 tokens for each sequence at once; past the budget the engine reads out of bounds.",
    fix="Lower `serve.max_num_seqs` or `serve.k`.",
    evidence="An out-of-bounds read of a draft step larger than the budget: "
    "https://github.com/vllm-project/vllm/pull/53970",
    failing="serve: {max_num_seqs: 257}",
    passing="serve: {max_num_seqs: 256}",
    final="the engine would fail",
)
def a_draft_step_fits(loaded: Loaded) -> Iterator[Found]:
    serve = loaded.model.serve
    if loaded.model.drafter is None or serve.k is None:
        return
    needed = serve.max_num_seqs * (serve.k + 1)
    if needed > _BUDGET:
        message = f"{serve.max_num_seqs} sequences draft {needed} tokens a step (K + 1 = {serve.k + 1}); {_BUDGET} fit"
        hint = f"write `max_num_seqs: {_BUDGET // (serve.k + 1)}` or less"
        yield Found(("serve", "max_num_seqs"), message, hint)


@TOPIC.rule(
    "ENG14",
    "error",
    summary="There are no facts about this engine version on this platform.",
    why="Arguments, environment and needed patches are known from runs of a version, not guessed from its number.",
    fix="Write a version that is known.",
    evidence="Follows from the design: compiler/qdc/serving/engines.json holds what runs have shown.",
    failing='serve: {engine: {vllm: "0.31.0"}}',
    passing='serve: {engine: {vllm: "0.32.0"}}',
    final="nothing could be served",
)
def engine_is_known(loaded: Loaded) -> Iterator[Found]:
    try:
        required_patches(loaded.data["serve"]["engine"], loaded.model.drafter is not None)
    except QdcError as error:
        yield Found(("serve", "engine", "vllm"), error.message, error.hint or "write a version that is known")


@TOPIC.rule(
    "ENG15",
    "error",
    summary="A patch of this name does not exist.",
    why="A misspelt patch would be missing from the image.",
    fix="Write the name of a patch.",
    evidence="Follows from the list of patches in compiler/qdc/serving/patches.",
    failing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-op]}}",
    passing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-ops]}}",
    final="nothing could be served",
)
def patches_exist(loaded: Loaded) -> Iterator[Found]:
    known = patch_names()
    for index, name in enumerate(loaded.model.serve.engine.patches):
        if name not in known:
            yield Found((*_PATCHES, index), f"there is no engine patch `{name}`", suggestion(name, known, "patches"))


@TOPIC.rule(
    "ENG16",
    "error",
    summary="A patch that this engine needs is not declared.",
    why="Without it the engine does not start, or serves other text than the model's.",
    fix="Add the patch to `serve.engine.patches`.",
    evidence="Measured with vLLM 0.32.0 on CPU; compiler/qdc/serving/engines.json says what each patch is for.",
    failing="serve: {engine: {patches: [amx-permission, expand-sampling, torchvision-ops]}}",
    passing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-ops]}}",
    final="the served text would not be the model's",
)
def needed_patches_are_declared(loaded: Loaded) -> Iterator[Found]:
    engine = loaded.data["serve"]["engine"]
    try:
        needed = required_patches(engine, loaded.model.drafter is not None)
    except QdcError:
        return
    for name, why in needed.items():
        if name not in engine["patches"]:
            message = f"vllm {engine['vllm']} on {engine['platform']} needs the patch `{name}`: {why}"
            yield Found(_PATCHES, message, f"add {name} to the list")


@TOPIC.rule(
    "SRV01",
    "error",
    summary="A measured answer and one draft step do not fit into `max_model_len`.",
    why="Near the limit answers are cut, and the engine stops drafting.",
    fix="Raise `serve.max_model_len`, or ask for fewer answer tokens.",
    evidence="A public serving configuration had less room than its benchmarks ask for: "
    "https://github.com/nota-github/adaptfm-quant-dflash; vLLM 0.32 stops drafting there (measured).",
    failing="serve: {max_model_len: 40}",
    passing="serve: {max_model_len: 128}",
)
def answers_fit(loaded: Loaded) -> Iterator[Found]:
    evaluate, serve = loaded.model.evaluate, loaded.model.serve
    step = (serve.k or 0) + 1
    for name in ("acceptance", "quality"):
        part = getattr(evaluate, name)
        if hasattr(part, "data") and part.max_tokens + step >= serve.max_model_len:
            message = (
                f"max_model_len {serve.max_model_len} leaves no room for {part.max_tokens} answer tokens "
                f"of `evaluate.{name}` and K + 1 = {step}"
            )
            where = (("evaluate", name, "max_tokens"), "answer tokens")
            hint = f"write `max_model_len: {part.max_tokens + step}` and the prompt's tokens, or more"
            yield Found(("serve", "max_model_len"), message, hint, also=where)
            return
