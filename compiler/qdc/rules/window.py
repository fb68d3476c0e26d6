"""The drafter's sliding window: its size, what it means, and which engine applies it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qdc.recipe.load import Loaded
from qdc.rules.parts import (
    BASE,
    drafted_block,
    fact,
    inner_configs,
    lacks,
    layer_kinds,
    patched,
    remedies,
    runner,
    served_checkpoint,
    setting,
    whole,
)
from qdc.rules.registry import Found, Topic
from qdc.tables import engines

TOPIC = Topic()
_WINDOW = ("drafter", "swa", "window")
_CHECKPOINT = ("drafter", "checkpoint")
_SLIDES = "sliding_attention"


def _slides_on_v1(loaded: Loaded) -> bool:
    return drafted_block(loaded) is not None and runner(loaded) == "v1" and bool(fact(loaded, "window"))


@TOPIC.rule(
    "SWA01",
    "error",
    summary="The engine ignores the drafter's window, and no declared patch applies it.",
    why="Older versions read no window from the drafter's configuration and say nothing.",
    fix="Take a version that has it, or declare the patch.",
    evidence="The change that brought the window: https://github.com/vllm-project/vllm/pull/46104",
    failing="serve: {engine: {patches: [w4-drafter]}}",
    passing="serve: {engine: {patches: [w4-drafter, swa-above-window]}}",
)
def the_engine_has_a_window(loaded: Loaded) -> Iterator[Found]:
    drafter, engine = loaded.model.drafter, loaded.model.serve.engine
    if drafter and drafter.swa and drafter.swa.window and lacks(loaded, "window"):
        message = f"vLLM {engine.vllm} ignores the drafter's window of {drafter.swa.window} without a word"
        yield Found(_WINDOW, message, remedies(loaded, "window"), also=(("serve", "engine", "vllm"), "the engine"))


@TOPIC.rule(
    "SWA02",
    "error",
    summary="The window's meaning is none that vLLM has.",
    why="vLLM counts from each query. `anchor-left` is the mask of speculators' training, `rotating-kv` the cache of "
    "z-lab's MLX code.",
    fix="Write `semantics: symmetric-per-query`.",
    evidence="Three meanings of one word: https://github.com/z-lab/dflash https://github.com/vllm-project/speculators",
    failing="drafter: {swa: {semantics: anchor-left}}",
    passing="drafter: {swa: {semantics: symmetric-per-query}}",
    final="the served window would be another one",
)
def the_engine_has_the_meaning(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter and drafter.swa and drafter.swa.semantics != "symmetric-per-query":
        message = f"vLLM counts the window from each query; it has no `{drafter.swa.semantics}`"
        yield Found(("drafter", "swa", "semantics"), message, "write `semantics: symmetric-per-query`")


@TOPIC.rule(
    "SWA03",
    "error",
    summary="The window is smaller than the draft block.",
    why="A query would not see the whole draft block that it is a part of; a window of 0 is no way to switch it off.",
    fix="Write a window of at least the draft block, or `swa: null` for full attention.",
    evidence="An engine's check of the same condition: https://github.com/sgl-project/sglang/pull/23553",
    failing="drafter: {swa: {window: 7}}",
    passing="drafter: {swa: {window: 8}}",
    final="the drafter would not see its own draft block",
)
def window_holds_the_block(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter and drafter.swa and drafter.block and drafter.swa.window < drafter.block.draft_block_size:
        size = drafter.block.draft_block_size
        message = f"window {drafter.swa.window} hides part of the draft block ({size})"
        block = ("drafter", "architecture", "draft_block_size")
        hint = f"write at least `window: {size}`, or `swa: null` for full attention"
        yield Found(_WINDOW, message, hint, also=(block, "the draft block"))


@TOPIC.rule(
    "SWA04",
    "error",
    summary="The published drafter was trained with a window, and the recipe serves it without one.",
    why="Full attention lowers its acceptance on long prompts.",
    fix="Write the window of the checkpoint.",
    evidence="Reports of a drafter served without its window: https://github.com/z-lab/dflash/issues/126",
    failing="drafter: {swa: null}  # config.json of the checkpoint: sliding_window 2048",
    passing="drafter: {swa: {window: 2048, semantics: symmetric-per-query, apply: always}}",
    needs=("drafter.checkpoint",),
)
def the_window_of_training_is_served(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    window = _stored_window(_config(loaded))
    if drafter is not None and drafter.swa is None and window is not None:
        message = f"the checkpoint was trained with a window of {window}, and the recipe serves full attention"
        hint = f"write `swa: {{window: {window}, semantics: symmetric-per-query, apply: always}}`"
        yield Found(_CHECKPOINT, message, hint, key=True)


@TOPIC.rule(
    "SWA05",
    "error",
    summary="The published drafter's sliding layers are causal in the engine.",
    why="Sliding layers are causal unless the configuration says otherwise, and a drafter that looks both ways loses "
    "acceptance at every width.",
    fix="Write `causal: false` under `dflash_config` of the checkpoint's config.json.",
    evidence="A causal window degraded a bidirectional drafter at every width: "
    "https://github.com/nota-github/adaptfm-quant-dflash; the default was read in vLLM 0.25.1.",
    failing="drafter: {swa: {window: 2048, semantics: symmetric-per-query, apply: always}}\n"
    'serve: {engine: {vllm: "0.32.0"}}\n# config.json of the checkpoint: use_swa alone',
    passing="drafter: {swa: {window: 2048, semantics: symmetric-per-query, apply: always}}\n"
    'serve: {engine: {vllm: "0.32.0"}}\n# config.json of the checkpoint: use_swa and causal: false',
    needs=("drafter.checkpoint",),
)
def sliding_layers_look_both_ways(loaded: Loaded) -> Iterator[Found]:
    drafter, config = loaded.model.drafter, _config(loaded)
    if drafter is None or drafter.swa is None or drafter.swa.semantics != "symmetric-per-query":
        return
    both = setting(config, "is_causal") is False or setting(config, "causal") is False
    if _stored_window(config) is not None and not both and fact(loaded, "window"):
        message = "the checkpoint's sliding layers are causal by default, but the window is to be symmetric"
        hint = "write `causal: false` under `dflash_config` of its config.json"
        where = (("drafter", "swa", "semantics"), "the recipe's window")
        yield Found(_CHECKPOINT, message, hint, key=True, also=where)


@TOPIC.rule(
    "SWA06",
    "error",
    summary="The published drafter mixes sliding and full layers, which this engine cannot serve.",
    why="Such drafters need the V2 model runner, hence a GPU and a newer version.",
    fix="Take a drafter whose layers are all alike, or move to an engine that serves it.",
    evidence="The change that allows them: https://github.com/vllm-project/vllm/pull/47914; the refusal was measured "
    "with vLLM 0.32.0 on CPU.",
    failing="drafter: {architecture: {kind: dflash}}"
    "  # config.json of the checkpoint: layer_types [sliding_attention, full_attention, ...]",
    passing="drafter: {architecture: {kind: dflash}}"
    "  # config.json of the checkpoint: layer_types [full_attention, full_attention, ...]",
    needs=("drafter.checkpoint",),
)
def layers_are_alike(loaded: Loaded) -> Iterator[Found]:
    engine, kinds = loaded.model.serve.engine, _layer_types(_config(loaded))
    if len(set(kinds)) < 2 or (runner(loaded) != "v1" and fact(loaded, "mixed-window") is not False):
        return
    slides = kinds.count(_SLIDES)
    message = f"{slides} of the checkpoint's {len(kinds)} layers slide, which needs the V2 model runner"
    first = engines.first("cuda", "mixed-window")
    hint = f'take a drafter whose layers are all alike, or a GPU with `vllm: "{first}"` or later and `runner: v2`'
    yield Found(_CHECKPOINT, message, hint, key=True, also=(("serve", "engine", "vllm"), f"{engine.platform} engine"))


@TOPIC.rule(
    "SWA07",
    "error",
    summary="The V1 model runner cannot place so many sliding draft layers.",
    why="It keeps all draft layers in one group of the KV cache, whose size is the smaller of the target's numbers of "
    "full and of linear layers.",
    fix="Take fewer drafter layers, or full attention.",
    evidence="Measured with vLLM 0.32.0 on CPU: 2 sliding layers on a target of 3 + 1 were refused, 1 ran.",
    failing="drafter: {architecture: {layers: 3}}",
    passing="drafter: {architecture: {layers: 2}}",
    needs=(*BASE, "drafter.checkpoint"),
    about=_slides_on_v1,
)
def draft_layers_fit_one_group(loaded: Loaded) -> Iterator[Found]:
    drafter, shape, kinds = loaded.model.drafter, drafted_block(loaded), layer_kinds(loaded)
    if drafter is None or shape is None or not kinds or not _slides_on_v1(loaded):
        return
    stored = _layer_types(_config(loaded))
    sliding = len(stored) if stored and set(stored) == {_SLIDES} else 0
    if drafter.swa is not None and shape.layers:
        sliding = shape.layers
    room = min(kinds.count("full_attention"), kinds.count("linear_attention"))
    if kinds.count("linear_attention") and sliding > room:
        message = f"{sliding} sliding draft layers, but the V1 runner keeps them in one KV group of {room} layers"
        path = ("drafter", "architecture", "layers") if shape.layers else _CHECKPOINT
        yield Found(path, message, f"write `layers: {room}`, or `swa: null` for full attention", key=not shape.layers)


@TOPIC.rule(
    "SWA08",
    "warning",
    summary="The window is to apply above its own length only, which the engine does not offer.",
    why="An engine's own window is always on. The switch was a plugin's, whose authors saw short requests 15 % slower "
    "without it.",
    fix="Write `apply: always` and measure short requests, or declare a patch that switches.",
    evidence="The plugin (vLLM 0.21 to 0.24) and its figure: https://github.com/nota-github/adaptfm-quant-dflash",
    failing="drafter: {swa: {apply: above-window}}",
    passing="drafter: {swa: {apply: always}}",
)
def the_engine_switches(loaded: Loaded) -> Iterator[Found]:
    drafter, engine = loaded.model.drafter, loaded.model.serve.engine
    if drafter is None or drafter.swa is None or drafter.swa.apply != "above-window":
        return
    if fact(loaded, "window") and "window-above" not in patched(loaded):
        message = f"the window of vLLM {engine.vllm} is always on; `above-window` was a plugin's switch"
        yield Found(("drafter", "swa", "apply"), message, "write `apply: always` and measure short requests")


@TOPIC.rule(
    "SWA09",
    "error",
    summary="A window is given for a drafter that has none.",
    why="Only block drafters have attention of their own that a window could bound.",
    fix="Remove `swa`.",
    evidence="Follows from what the kinds are.",
    failing="drafter: {swa: {window: 1024, semantics: symmetric-per-query, apply: always}}",
    passing="drafter: {swa: null}",
    final="nothing can be built from it",
)
def the_window_has_a_drafter(loaded: Loaded) -> Iterator[Found]:
    drafter = loaded.model.drafter
    if drafter is not None and drafter.swa is not None and drafter.block is None:
        message = f"a drafter of kind `{drafter.architecture.kind}` has no window"
        yield Found(("drafter", "swa"), message, "remove `swa`", key=True)


def _config(loaded: Loaded) -> Mapping[str, Any]:
    """The published drafter's configuration; empty where there is none, or its headers are not at hand."""
    facts = served_checkpoint(loaded)
    return facts.config or {} if facts is not None else {}


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    kinds: Any = next((inner["layer_types"] for inner in inner_configs(config) if inner.get("layer_types")), [])
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def _stored_window(config: Mapping[str, Any]) -> int | None:
    """Tokens of the window that a configuration declares, None without one."""
    if not setting(config, "use_swa") and _SLIDES not in _layer_types(config):
        return None
    return whole(setting(config, "swa_window_size")) or whole(setting(config, "sliding_window"))
