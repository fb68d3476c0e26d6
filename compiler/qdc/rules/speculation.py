"""The engine with this drafter and this target: what is broken in which version, and which patch mends it.

Hybrid targets (layers with a recurrent state) are the hard case. Versions are read from the engine table.
"""

from __future__ import annotations

from collections.abc import Iterator

from qdc.core.errors import QdcError
from qdc.recipe.load import Loaded
from qdc.recipe.reading import Path_
from qdc.rules.parts import (
    BASE,
    drafted_block,
    fact,
    is_hybrid,
    kind,
    lacks,
    layer_kinds,
    on_cpu,
    patched,
    remedies,
    served_checkpoint,
    setting,
    target_place,
    target_size,
    target_text,
    whole,
)
from qdc.rules.registry import Found, Topic
from qdc.serving.engines import engine_row
from qdc.tables import engines, hardware

TOPIC = Topic()
_VERSION = ("serve", "engine", "vllm")
_CACHING = ("serve", "engine", "prefix_caching")
_KIND = ("drafter", "architecture", "kind")
_COPIES = ("ngram", "suffix")
_ALWAYS_DRAFT = ("dflash", "mtp", "eagle3")
_BLOCKS = ("dflash", "dflash2", "dspark")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _is_dflash(loaded: Loaded) -> bool:
    return kind(loaded) == "dflash"


def _copies(loaded: Loaded) -> bool:
    return kind(loaded) in _COPIES and lacks(loaded, "zero-draft")


def _lacks_short_steps(loaded: Loaded) -> bool:
    drafts = kind(loaded) in _ALWAYS_DRAFT or (kind(loaded) is not None and loaded.model.serve.engine.platform == "cpu")
    return drafts and lacks(loaded, "short-verify") and "zero-draft" not in patched(loaded)


def _caches(loaded: Loaded) -> bool:
    return kind(loaded) is not None and loaded.model.serve.engine.prefix_caching


def _cpu_caches(loaded: Loaded) -> bool:
    return on_cpu(loaded) and fact(loaded, "triton") is False and _caches(loaded)


def _gpu_caches(loaded: Loaded) -> bool:
    return loaded.model.serve.engine.platform != "cpu" and _caches(loaded)


def _has_size_limits(loaded: Loaded) -> bool:
    return fact(loaded, "attention-heads") is not None


@TOPIC.rule(
    "DRF06",
    "error",
    summary="The engine reads every tap one layer early.",
    why="The drafter then gets other hidden states than it was trained on, and only its acceptance length tells.",
    fix="Take a version that reads them rightly, or declare a patch.",
    evidence="The correction: https://github.com/vllm-project/vllm/pull/42704",
    failing='serve: {engine: {vllm: "0.21.0"}}',
    passing='serve: {engine: {vllm: "0.22.1"}}',
)
def taps_are_read_rightly(loaded: Loaded) -> Iterator[Found]:
    if _is_dflash(loaded) and lacks(loaded, "taps"):
        message = f"vLLM {loaded.model.serve.engine.vllm} reads every tap one layer early, without a word"
        where = (("drafter", "architecture", "taps"), "the taps")
        yield Found(_VERSION, message, remedies(loaded, "taps"), also=where)


@TOPIC.rule(
    "DRF13",
    "error",
    summary="A drafter that may draft nothing corrupts the state of a hybrid target.",
    why="After accepted drafts a step without drafts reads a stale recurrent state, and the text changes.",
    fix="Take a version without the fault, a drafter that drafts in every step, or a patch that always drafts.",
    evidence="The report and a correction: https://github.com/vllm-project/vllm/issues/39273 "
    "https://github.com/vllm-project/vllm/pull/52942",
    failing='serve: {engine: {vllm: "0.31.0"}}',
    passing='serve: {engine: {vllm: "0.32.0"}}',
    final="the served text would not be the model's",
    needs=BASE,
    about=_copies,
)
def a_step_without_drafts_keeps_the_state(loaded: Loaded) -> Iterator[Found]:
    engine = loaded.model.serve.engine
    if _copies(loaded) and is_hybrid(loaded):
        message = (
            f"`{kind(loaded)}` may draft nothing, and vLLM {engine.vllm} then reads a stale recurrent state of the "
            "target: the text changes"
        )
        hint = f"{remedies(loaded, 'zero-draft')}, or `kind: mtp`"
        yield Found(_KIND, message, hint, also=(_VERSION, "the engine"))


@TOPIC.rule(
    "ENG01",
    "error",
    summary="The engine cannot load a quantized DFlash drafter.",
    why="It reads `qkv_proj.weight`, which a packed drafter lacks: a crash, or garbage.",
    fix="Take a version that loads it, declare a patch for this one, or serve the drafter in BF16.",
    evidence="The report: https://github.com/vllm-project/vllm/issues/51581; measured with vLLM 0.22.1 and 0.25.1.",
    failing="serve: {engine: {patches: [swa-above-window]}}",
    passing="serve: {engine: {patches: [w4-drafter, swa-above-window]}}",
    final="the drafter would not load",
    needs=("drafter.checkpoint",),
    about=_is_dflash,
)
def the_engine_loads_a_packed_drafter(loaded: Loaded) -> Iterator[Found]:
    if not _is_dflash(loaded) or not _packed_drafter(loaded) or not lacks(loaded, "quantized-drafter"):
        return
    drafter, engine = loaded.model.drafter, loaded.model.serve.engine
    ours = drafter is not None and drafter.ptq is not None
    message = f"vLLM {engine.vllm} reads `qkv_proj.weight`, which a packed drafter lacks"
    path = ("drafter", "ptq") if ours else ("drafter", "checkpoint")
    words = [remedies(loaded, "quantized-drafter"), "`ptq: null`" if ours else "a BF16 drafter"]
    yield Found(path, message, ", or ".join(filter(None, words)), key=True, also=(_VERSION, "the engine"))


def _packed_drafter(loaded: Loaded) -> bool:
    facts, drafter = served_checkpoint(loaded), loaded.model.drafter
    if drafter is not None and drafter.ptq is not None:
        return True
    return facts is not None and any(name.endswith("weight_packed") for name in facts.tensors)


@TOPIC.rule(
    "ENG02",
    "warning",
    summary="A step with few or no drafts may go wrong on a hybrid target.",
    why="Near `max_model_len` or under structured output the scheduler may trim drafts; the engine then takes another "
    "path through the recurrent state.",
    fix="Keep K + 1 tokens free below `max_model_len` and compare texts with and without speculation, or declare a "
    "patch.",
    evidence="https://github.com/vllm-project/vllm/pull/56531; measured: vLLM 0.25.1 on one H200 gave one of five "
    "conversations that fill the context another text, and on CPU every short step crashed vLLM 0.32.0.",
    failing='serve: {engine: {vllm: "0.31.0", patches: []}}',
    passing='serve: {engine: {vllm: "0.32.0", patches: []}}',
    needs=BASE,
    about=_lacks_short_steps,
)
def short_steps_keep_the_state(loaded: Loaded) -> Iterator[Found]:
    engine = loaded.model.serve.engine
    if not _lacks_short_steps(loaded) or not is_hybrid(loaded):
        return
    seen = "then crashes (measured)" if engine.platform == "cpu" else "then loses its state (measured with 0.25.1)"
    message = (
        f"near `max_model_len` or under structured output vLLM {engine.vllm} may trim drafts; a hybrid target {seen}"
    )
    words = [remedies(loaded, "short-verify"), "keep K + 1 tokens free and compare texts"]
    yield Found(_VERSION, message, ", or ".join(filter(None, words)))


@TOPIC.rule(
    "ENG05",
    "error",
    summary="Prefix caching and speculation are both on, on a CPU with a hybrid target.",
    why="The engine dies there: the cache of recurrent states is a Triton kernel, which a CPU has not.",
    fix="Write `prefix_caching: false`.",
    evidence="Measured with vLLM 0.32.0 on CPU.",
    failing="serve: {engine: {prefix_caching: true}}",
    passing="serve: {engine: {prefix_caching: false}}",
    final="the engine would die",
    needs=BASE,
    about=_cpu_caches,
)
def the_cpu_caches_no_prefixes(loaded: Loaded) -> Iterator[Found]:
    if _cpu_caches(loaded) and is_hybrid(loaded):
        message = "on a CPU the engine dies with prefix caching, a drafter and a hybrid target"
        yield Found(_CACHING, message, "write `prefix_caching: false`")


@TOPIC.rule(
    "ENG06",
    "error",
    summary="A hybrid target is served on a CPU in another dtype than BF16.",
    why="The CPU kernel of linear attention asserts BF16 at the first request.",
    fix="Write `dtype: bfloat16`.",
    evidence="Measured with vLLM 0.32.0 on CPU.",
    failing="serve: {dtype: float16}",
    passing="serve: {dtype: bfloat16}",
    final="the engine would die",
    needs=BASE,
    about=on_cpu,
)
def the_cpu_kernel_takes_the_dtype(loaded: Loaded) -> Iterator[Found]:
    dtype, wanted = loaded.model.serve.dtype, fact(loaded, "linear-attention-dtype")
    if on_cpu(loaded) and is_hybrid(loaded) and wanted is not None and dtype != wanted:
        message = f"the CPU kernel of linear attention takes {wanted} only, not {dtype}"
        yield Found(("serve", "dtype"), message, f"write `dtype: {wanted}`")


@TOPIC.rule(
    "ENG19",
    "error",
    summary="The engine's kernels do not take a size of the target or of the drafter.",
    why="It starts, and dies at the first request.",
    fix="Take one of the sizes that the finding lists.",
    evidence="Measured with vLLM 0.32.0 on CPU: linear attention with heads 32 wide and with convolutions over 1, 2, 3 "
    "and 5 tokens; drafters with heads 16 and 40 wide; heads 80, 96, 160 and 224 wide of which a quarter is rotated, "
    "as in Qwen3.5, where the rotary kernel writes past its end.",
    failing="target: {base: {scratch: {architecture: {linear_attention: {conv_kernel: 3}}}}}",
    passing="target: {base: {scratch: {architecture: {linear_attention: {conv_kernel: 4}}}}}",
    final="the engine would die",
    needs=(*BASE, "drafter.checkpoint"),
    about=_has_size_limits,
)
def the_kernels_take_the_sizes(loaded: Loaded) -> Iterator[Found]:
    for column, path, size, what in _sizes(loaded):
        taken = fact(loaded, column)
        if taken is not None and size is not None and size not in taken:
            *first, last = map(str, taken)
            known = f"{', '.join(first)} or {last}" if first else last
            message = f"{what} is {size}, and the kernel of vLLM {loaded.model.serve.engine.vllm} takes {known}"
            yield Found(path, message, f"write {known}", also=(_VERSION, "the engine"))


def _inside(place: Path_, field: str) -> Path_:
    """The field of a target that the recipe describes; of a given one there is only the target itself."""
    return (*place, field) if place != ("target", "base") else place


def _sizes(loaded: Loaded) -> Iterator[tuple[str, Path_, int | None, str]]:
    """(column of the engine table, recipe path, size, what it is) of every size that a kernel may refuse."""
    if is_hybrid(loaded):
        place = target_place(loaded, "linear_attention")
        head, width = _inside(place, "head_dim"), _inside(place, "conv_kernel")
        sizes = {target_size(loaded, f"linear_{name}_head_dim") for name in ("key", "value")} - {None}
        for size in sorted(sizes, key=str):
            yield "linear-attention-heads", head, size, "a head of the target's linear attention"
        tokens = target_size(loaded, "linear_conv_kernel_dim")
        yield "linear-attention-widths", width, tokens, "the convolution of the target's linear attention"
    if "full_attention" in layer_kinds(loaded):
        place = target_place(loaded, "attention")
        head = _inside(place, "head_dim")
        rope = (target_text(loaded) or {}).get("rope_parameters")
        quarter = isinstance(rope, dict) and rope.get("partial_rotary_factor") == 0.25
        column = "attention-heads-quarter" if quarter else "attention-heads"
        yield column, head, target_size(loaded, "head_dim"), "a head of the target's attention"
    block, facts = drafted_block(loaded), served_checkpoint(loaded)
    if block is not None and facts is None:
        path: Path_ = ("drafter", "architecture", "head_dim")
        yield "attention-heads", path, block.head_dim, "a head of the drafter's attention"
    elif facts is not None and facts.config is not None:
        yield "attention-heads", ("drafter", "checkpoint"), whole(setting(facts.config, "head_dim")), "a drafter's head"


@TOPIC.rule(
    "ENG07",
    "error",
    summary="Target, drafter and engine do not share one dtype.",
    why="The drafter's `fc` takes the target's dtype, and its input is never cast.",
    fix="Serve everything in one dtype, best BF16, or declare a patch that casts.",
    evidence="Disputed. Reports name CPU offload or ROCm as the cause: https://github.com/vllm-project/vllm/pull/40334 "
    "https://github.com/vllm-project/vllm/issues/42588; yet one entry of a contest patched it on an A10G.",
    failing="serve: {dtype: float16}",
    passing="serve: {dtype: bfloat16}",
    needs=(*BASE, "target.quantization.grid", "drafter.checkpoint"),
    about=_is_dflash,
)
def one_dtype(loaded: Loaded) -> Iterator[Found]:
    if not _is_dflash(loaded) or not lacks(loaded, "dtype"):
        return
    dtypes = {"serve.dtype": loaded.model.serve.dtype, "the target": _target_dtype(loaded)}
    dtypes["the drafter's fc"] = _drafter_dtype(loaded)
    known = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    if len(set(known.values())) > 1:
        said = ", ".join(f"{name} is {dtype}" for name, dtype in known.items())
        message = f"{said}, and the drafter's `fc` never casts its input (disputed: where this matters)"
        yield Found(("serve", "dtype"), message, "use bfloat16 for all")


def _target_dtype(loaded: Loaded) -> str | None:
    """Of the target's embedding as it is served: the grid's file, else the base's."""
    for place in ("target.quantization.grid", "target.base"):
        facts = loaded.facts.get(place)
        for name, tensor in (facts.tensors if facts is not None else {}).items():
            if name.endswith("embed_tokens.weight"):
                return _DTYPES.get(tensor.dtype)
    return None


def _drafter_dtype(loaded: Loaded) -> str | None:
    """Of the drafter's `fc`, or of its scales where it is packed; what is trained here is BF16."""
    facts = served_checkpoint(loaded)
    if facts is None:
        return "bfloat16" if loaded.model.drafter and loaded.model.drafter.training else None
    ends = ("fc.weight", "fc.weight_scale")
    return next((_DTYPES.get(tensor.dtype) for name, tensor in facts.tensors.items() if name.endswith(ends)), None)


@TOPIC.rule(
    "ENG08",
    "warning",
    summary="Prefix caching and speculation are both on, with a hybrid target on a GPU.",
    why="Hits in the prefix cache corrupted the recurrent state in several versions.",
    fix="Write `prefix_caching: false`, or measure quality with it on.",
    evidence="Disputed. Corruption up to 0.28.0: https://github.com/vllm-project/vllm/issues/53912; not reproduced by "
    "another user: https://github.com/vllm-project/vllm/issues/43559",
    failing="serve: {engine: {prefix_caching: true}}",
    passing="serve: {engine: {prefix_caching: false}}",
    needs=BASE,
    about=_gpu_caches,
)
def prefixes_are_not_cached(loaded: Loaded) -> Iterator[Found]:
    if _gpu_caches(loaded) and is_hybrid(loaded):
        message = "prefix caching with speculation has corrupted hybrid targets (disputed: one user saw no harm)"
        yield Found(_CACHING, message, "write `prefix_caching: false`, or measure quality with it on")


@TOPIC.rule(
    "ENG10",
    "error",
    summary="One step of all sequences needs more tokens than a step may hold.",
    why="A block drafter drafts K + 1 tokens for each sequence at once; past the budget the engine reads out of "
    "bounds. Whatever drafts, an engine does not start whose budget has less than one token for each sequence.",
    fix="Lower `serve.max_num_seqs` or `serve.k`, or raise `serve.max_num_batched_tokens`.",
    evidence="An out-of-bounds read of a draft step larger than the budget: "
    "https://github.com/vllm-project/vllm/pull/53970; vLLM 0.32.0 refused a budget below the sequences (measured).",
    failing="serve: {max_num_seqs: 65}",
    passing="serve: {max_num_seqs: 64}",
    final="the engine would fail",
)
def a_step_fits(loaded: Loaded) -> Iterator[Found]:
    serve, budget = loaded.model.serve, _budget(loaded)
    if budget is None:
        return
    step = serve.k + 1 if kind(loaded) in _BLOCKS and serve.k is not None else 1
    needed = serve.max_num_seqs * step
    if needed > budget:
        doing = f"draft {needed} tokens a step (K + 1 = {step})" if step > 1 else f"need {needed} tokens a step"
        message = f"{serve.max_num_seqs} sequences {doing}; {budget} fit"
        hint = f"write `max_num_seqs: {max(1, budget // step)}` or less"
        more = f", or `max_num_batched_tokens: {needed}`" if serve.engine.platform != "cpu" else ""
        yield Found(("serve", "max_num_seqs"), message, hint + more)


def _budget(loaded: Loaded) -> int | None:
    """Tokens that a step may hold: the recipe's, else what the image passes to the engine, else its default."""
    serve = loaded.model.serve
    if serve.max_num_batched_tokens is not None:
        return serve.max_num_batched_tokens
    try:
        passed = engine_row(loaded.data["serve"]["engine"])["defaults"].get("max_num_batched_tokens")
    except QdcError:
        passed = None
    default = fact(loaded, "batched-tokens")
    return int(passed) if passed is not None else default if isinstance(default, int) else None


@TOPIC.rule(
    "ENG11",
    "error",
    summary="The KV cache is quantized, and no attention kernel of this card takes drafts over it.",
    why="A block drafter attends in both directions, which the kernels for 8-bit caches on this card cannot.",
    fix="Write `kv_cache_dtype: auto`.",
    evidence="The report: https://github.com/vllm-project/vllm/issues/41559",
    failing="serve: {kv_cache_dtype: fp8}",
    passing="serve: {kv_cache_dtype: auto}",
)
def the_cache_is_not_quantized(loaded: Loaded) -> Iterator[Found]:
    dtype, least = loaded.model.serve.kv_cache_dtype, fact(loaded, "quantized-kv-sm")
    card = hardware.row(loaded.model.deploy.hardware)
    name = card.sm.value if card is not None else None
    if _is_dflash(loaded) and dtype != "auto" and name and least and hardware.order(name) < hardware.order(least):
        message = f"on SM {name} no attention kernel takes a block's drafts over a KV cache of {dtype}"
        where = (("deploy", "hardware"), f"SM {name}")
        yield Found(("serve", "kv_cache_dtype"), message, "write `kv_cache_dtype: auto`", also=where)


@TOPIC.rule(
    "ENG13",
    "note",
    summary="The target is quantized, the DFlash drafter is not, and a README says that this version forbids it.",
    why="The README of a published entry says so; the version's source has no such rule, and the pair loaded.",
    fix="Go on: the gate measures the acceptance length.",
    evidence="Disputed. The README: https://github.com/nota-github/adaptfm-quant-dflash; a pair loaded with vLLM "
    "0.22.1 and 0.25.1 (measured).",
    failing="drafter: {ptq: null}",
    passing='drafter: {ptq: null}\nserve: {engine: {vllm: "0.25.1", patches: []}}',
    needs=("drafter.checkpoint",),
    about=_is_dflash,
)
def a_plain_drafter_beside_a_packed_target(loaded: Loaded) -> Iterator[Found]:
    if not _is_dflash(loaded) or _packed_drafter(loaded) or not fact(loaded, "w4-pairing-claimed"):
        return
    message = (
        f"a README says that vLLM {loaded.model.serve.engine.vllm} serves no BF16 drafter beside a quantized target "
        "(disputed: its source has no such rule, and the pair loaded)"
    )
    newest = engines.last("cuda", "w4-pairing-claimed")
    yield Found(_VERSION, message, f"go on, the gate decides; versions after {newest} are not in question")
