"""The engine by itself: its version and runner, its patches, its graphs and how it accepts drafts."""

from __future__ import annotations

from collections.abc import Iterator

from qdc.core.errors import QdcError
from qdc.core.spelling import suggestion
from qdc.recipe.load import Loaded
from qdc.rules.parts import fact, kind, written_at
from qdc.rules.registry import Found, Topic
from qdc.serving.engines import required_patches
from qdc.serving.patches import patch_names
from qdc.serving.render import refusals
from qdc.tables import engines, patches

TOPIC = Topic()
_ENGINE = ("serve", "engine")
_VERSION = (*_ENGINE, "vllm")
_PATCHES = (*_ENGINE, "patches")
_ELSEWHERE = ("serve.rejection", "serve.gpu_memory_utilization")
"""What ENG12 and DEP08 say."""
_V2_KINDS = ("dflash2", "dspark", "lilicorr", "xpress")


def _lacked_kind(loaded: Loaded) -> str | None:
    """The recipe's kind of drafter where the engine is known to lack it."""
    wanted = kind(loaded)
    return wanted if wanted in engines.columns() and fact(loaded, wanted) is False else None


@TOPIC.rule(
    "ENG03",
    "error",
    summary="The engine has no drafter of this kind.",
    why="A kind came with a version, and two have gone with one.",
    fix="Take a version that has it, or another kind.",
    evidence="Read in the packages of vLLM 0.20.1 to 0.33.0, the newest of them: wheel:vllm==0.33.0",
    failing="drafter: {architecture: {kind: xpress}}",
    passing="drafter: {architecture: {kind: dflash}}",
    final="nothing could be served",
)
def the_engine_has_the_kind(loaded: Loaded) -> Iterator[Found]:
    engine, wanted = loaded.model.serve.engine, _lacked_kind(loaded)
    if wanted is None:
        return
    first, last = engines.first(engine.platform, wanted), engines.last(engine.platform, wanted)
    if first is not None and engines.before(engine.vllm, first):
        hint = f'write `vllm: "{first}"` or later, or another kind'
    else:
        hint = f'write `vllm: "{last}"` or earlier, or another kind' if last else "write another kind"
    message = f"vLLM {engine.vllm} on {engine.platform} has no drafter of kind `{wanted}`"
    yield Found(("drafter", "architecture", "kind"), message, hint, also=(_VERSION, "the engine"))


@TOPIC.rule(
    "ENG04",
    "error",
    summary="The drafter needs the V2 model runner, and the engine would use V1.",
    why="On V1 these kinds degrade without a word, or fail at load. Whether a platform has V2 at all is DRF12.",
    fix="Write `runner: v2`.",
    evidence="A DFlash2 drafter that V1 degraded: https://github.com/noonghunna/club-3090/issues/1064",
    failing="drafter: {architecture: {kind: dspark}}\nserve: {engine: {runner: v1}}",
    passing="drafter: {architecture: {kind: dspark}}\nserve: {engine: {runner: v2}}",
)
def the_runner_serves_the_kind(loaded: Loaded) -> Iterator[Found]:
    engine, wanted = loaded.model.serve.engine, kind(loaded)
    if wanted not in _V2_KINDS or engine.runner == "v2":
        return
    default = fact(loaded, "runner")
    if engine.runner == "v1" or (engine.platform != "cpu" and default in ("v1", "list")):
        given = "`runner: v1`" if engine.runner else f"the default runner of vLLM {engine.vllm}"
        message = f"`{wanted}` runs on the V2 model runner only, not on {given}"
        path = (*_ENGINE, "runner") if engine.runner else _VERSION
        yield Found(path, message, "write `runner: v2` under `serve.engine`")


@TOPIC.rule(
    "ENG09",
    "error",
    summary="A decode batch has no CUDA graph of its size.",
    why="With drafts a batch of n requests holds n x (K + 1) tokens. A size without a graph runs several times slower, "
    "or crashes in piecewise mode.",
    fix="Leave `cudagraph_capture_sizes` out: every multiple of K + 1 is written then.",
    evidence="25 against 133 tokens a second: https://github.com/vllm-project/vllm/issues/54933; the crash: "
    "https://github.com/vllm-project/vllm/pull/46324",
    failing="serve: {cudagraph_capture_sizes: [16, 32, 64, 128]}",
    passing="serve: {cudagraph_capture_sizes: [16, 32, 48, 64, 80, 96, 112, 128]}",
)
def every_batch_has_a_graph(loaded: Loaded) -> Iterator[Found]:
    serve = loaded.model.serve
    sizes = serve.cudagraph_capture_sizes
    if sizes is None or serve.eager or serve.engine.platform == "cpu" or loaded.model.drafter is None or not serve.k:
        return
    step = serve.k + 1
    missing = [n * step for n in range(1, serve.max_num_seqs + 1) if n * step not in sizes]
    if missing:
        shown = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        message = f"decode batches hold multiples of K + 1 = {step} tokens, and the list lacks {shown}"
        path = ("serve", "cudagraph_capture_sizes")
        yield Found(path, message, "remove it: all multiples are written then", key=True)


@TOPIC.rule(
    "ENG12",
    "error",
    summary="Drafts would be accepted by a rule that is not lossless, or that the engine does not have.",
    why="`synthetic` fakes acceptance and `fly` is lossy, so that neither may stand behind a result.",
    fix="Write `standard` (in older versions `strict`).",
    evidence="Read in the packages: wheel:vllm==0.33.0",
    failing="serve: {rejection: synthetic}",
    passing="serve: {rejection: standard}",
    final="the measured acceptance or the served text would not be real",
)
def acceptance_is_real(loaded: Loaded) -> Iterator[Found]:
    serve, path = loaded.model.serve, written_at(loaded, ("serve", "rejection"), _VERSION)
    if loaded.model.drafter is None:
        return
    known = fact(loaded, "rejection")
    real = [name for name in known or ["standard"] if name not in ("synthetic", "fly", "probabilistic")]
    hint = f"write `rejection: {real[0]}`" if real else "take another engine"
    if serve.rejection == "synthetic":
        yield Found(path, "`synthetic` fakes acceptance: the drafts are not checked", hint)
    elif serve.rejection == "fly":
        yield Found(path, "`fly` is lossy: the text is not the target's", hint)
    elif known is not None and serve.rejection not in known:
        message = f"vLLM {serve.engine.vllm} has no rejection method `{serve.rejection}`; it has {', '.join(known)}"
        yield Found(path, message, hint)


@TOPIC.rule(
    "ENG14",
    "error",
    summary="There are no facts about this engine version on this platform.",
    why="What a version can is known from its package or from runs, not guessed from its number.",
    fix="Write a version that is known.",
    evidence="Follows from the design: compiler/qdc/tables/engines.json holds what is known, with a source per cell.",
    failing='serve: {engine: {vllm: "0.31.0"}}',
    passing='serve: {engine: {vllm: "0.32.0"}}',
    final="nothing could be served",
)
def engine_is_known(loaded: Loaded) -> Iterator[Found]:
    engine = loaded.model.serve.engine
    if not engines.known(engine.vllm, engine.platform):
        message = f"nothing is known of vLLM {engine.vllm!r} on {engine.platform}"
        yield Found(_VERSION, message, f"known: {', '.join(engines.rows(engine.platform))}")


@TOPIC.rule(
    "ENG15",
    "error",
    summary="A patch of this name does not exist.",
    why="A misspelt patch would be missing from the image.",
    fix="Write the name of a patch.",
    evidence="Follows from the list of patches: compiler/qdc/tables/patches.json and compiler/qdc/serving/patches.",
    failing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-op]}}",
    passing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-ops]}}",
    final="nothing could be served",
)
def patches_exist(loaded: Loaded) -> Iterator[Found]:
    known = _known_patches()
    engine = loaded.model.serve.engine
    fitting = [name for name in known if (row := patches.row(name)) and row.fits(engine.vllm, engine.platform)]
    for index, name in enumerate(engine.patches):
        if name not in known:
            hint = suggestion(name, fitting or known, "patches for this engine" if fitting else "patches")
            yield Found((*_PATCHES, index), f"there is no engine patch `{name}`", hint)


def _known_patches() -> list[str]:
    return sorted({*patch_names(), *patches.names()})


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
    "ENG17",
    "error",
    summary="A declared patch was not written for this engine.",
    why="A patch names the code that it changes; elsewhere it cannot load, or does nothing and says nothing.",
    fix="Remove it, or take an engine that it names.",
    evidence="Follows from the patches' own versions: compiler/qdc/tables/patches.json.",
    failing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-ops, fc-cast]}}",
    passing="serve: {engine: {patches: [amx-permission, expand-sampling, gdn-short-verify, torchvision-ops]}}",
    final="the image would not be what the recipe says",
)
def patches_fit_the_engine(loaded: Loaded) -> Iterator[Found]:
    engine = loaded.model.serve.engine
    if not engines.known(engine.vllm, engine.platform):
        return
    for index, name in enumerate(engine.patches):
        patch = patches.row(name)
        if patch is not None and not patch.fits(engine.vllm, engine.platform):
            versions = patch.first if patch.first == patch.last else f"{patch.first} to {patch.last}"
            message = f"`{name}` is for vLLM {versions} on {patch.platform}, not for {engine.vllm} on {engine.platform}"
            yield Found((*_PATCHES, index), message, "remove it, or take an engine that it names")


@TOPIC.rule(
    "ENG18",
    "error",
    summary="The engine cannot be told what the recipe says.",
    why="A setting that a version does not know would be left out of the image, or stop its engine at the start.",
    fix="Leave the setting out, or take an engine that has it.",
    evidence="Read in the packages of vLLM 0.19.0, 0.22.0 to 0.25.1, 0.32.0 and 0.33.0; what each is told is in "
    "compiler/qdc/serving/engines.json: wheel:vllm",
    failing="serve: {attention_backend: FLASH_ATTN}",
    passing="serve: {attention_backend: null}",
    final="the image would not be what the recipe says",
)
def the_engine_can_be_told(loaded: Loaded) -> Iterator[Found]:
    try:
        found = refusals(loaded.data["serve"], loaded.data["drafter"])
    except QdcError:
        return
    for path, why in found:
        parts = tuple(path.split("."))
        if path.startswith("drafter.") and _lacked_kind(loaded) is None:
            yield Found(parts, why, "take another drafter, or another engine", also=(_VERSION, "the engine"))
        elif path.startswith("serve.") and path not in _ELSEWHERE:
            yield Found(written_at(loaded, parts, _VERSION), why, f"remove `{parts[-1]}`, or take another engine")
