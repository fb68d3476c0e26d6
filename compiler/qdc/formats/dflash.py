"""DFlash drafter `config.json`: written for the engine, and read back as facts.

Form: z-lab's DFlash config as vLLM 0.32.0 loads it (`DFlashDraftModel`, method "dflash"). Two forms: full
attention, and sliding with a symmetric window per query (`causal: false`). Knows no weights and no torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qdc.core.errors import QdcError
from qdc.formats.compressed_tensors import quantization_config
from qdc.formats.draft_names import OF_THE_TARGET, engine_name

ARCHITECTURE = "DFlashDraftModel"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED = (("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")), ("mlp", "gate_up_proj", ("gate_proj", "up_proj")))
"""Part of a layer, the engine's matrix, and the modules that it is made of."""


def linear_modules(layers: int) -> list[str]:
    """Names of every Linear of a drafter of `layers` layers: 7 a layer and `fc`, sorted."""
    names = ["fc"]
    for layer in range(layers):
        names += [f"layers.{layer}.self_attn.{name}" for name in _ATTENTION]
        names += [f"layers.{layer}.mlp.{name}" for name in _MLP]
    return sorted(names)


def split_ignored(layers: int, target_layers: int, ignore: Sequence[str]) -> tuple[list[str], list[str]]:
    """(quantized, ignored) Linear modules. A pattern is a module's name in the engine or `re:` and a regular
    expression over such names.

    Raises QdcError when a pattern is no regular expression, names no module (`lm_head` and `embed_tokens`,
    which belong to the target, may be named), or splits what the engine fuses (q, k, v; gate, up).
    """
    modules = linear_modules(layers)
    ignored: set[str] = set()
    for pattern in ignore:
        matched = {name for name in modules if _matches(pattern, engine_name(name, target_layers))}
        if not matched and not any(_matches(pattern, name) for name in OF_THE_TARGET):
            raise QdcError(
                "dflash.ignore",
                f"ignore pattern {pattern!r} matches no Linear of the drafter",
                hint=f"its Linears are model.fc and model.layers.{target_layers}..{target_layers + layers - 1}."
                "{self_attn,mlp}.*_proj",
            )
        ignored |= matched
    for layer in range(layers):
        for part, _, names in _FUSED:
            group = {f"layers.{layer}.{part}.{name}" for name in names}
            if group & ignored and not group <= ignored:
                raise QdcError(
                    "dflash.ignore",
                    f"layers.{layer}.{part}: {', '.join(names)} are one matrix in the engine; "
                    "they are quantized together or ignored together",
                )
    return [name for name in modules if name not in ignored], sorted(ignored)


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == name
    try:
        return re.match(pattern[3:], name) is not None
    except re.error as error:
        raise QdcError("dflash.ignore", f"{pattern!r} is not a regular expression: {error}") from error


def engine_ignore(layers: int, target_layers: int, ignore: Sequence[str]) -> list[str]:
    """`ignore` of a drafter's quantization_config, in the engine's names.

    As patterns without the leading `model`, which some versions leave out. A matrix that the engine fuses is named
    beside its modules: the class of vLLM 0.32.0 does not say what it fuses, so that the modules' names alone are not
    found there, and the engine dies while it loads (measured).
    """
    _, ignored = split_ignored(layers, target_layers, ignore)
    places = [(f"layers.{layer}.{part}", whole, names) for layer in range(layers) for part, whole, names in _FUSED]
    ignored += [f"{place}.{whole}" for place, whole, names in places if f"{place}.{names[0]}" in ignored]
    names = [engine_name(name, target_layers).removeprefix("model.") for name in ignored]
    return ["lm_head", "re:.*embed_tokens$", *("re:.*" + name.replace(".", r"\.") + "$" for name in names)]


def drafter_config(
    architecture: Mapping[str, Any],
    *,
    target_layers: int,
    vocab_size: int,
    mask_token_id: int,
    window: int | None,
    quantization: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The whole config.json.

    `architecture`: the recipe's drafter.architecture. `window`: None for full attention, or W tokens: a query
    at position p sees keys in [p - (W-1), p + (W-1)]. `quantization`: {scheme, ignore} or None (BF16).
    Raises QdcError when taps are not strictly increasing layers of the target, or W < 1.
    """
    taps = list(architecture["taps"])
    if not taps or any(b <= a for a, b in itertools.pairwise(taps)):
        raise QdcError("dflash.taps", f"taps {taps} are not strictly increasing")
    if taps[0] < 0 or taps[-1] >= target_layers:
        raise QdcError("dflash.taps", f"taps {taps} leave the target's layers 0..{target_layers - 1}")
    if window is not None and window < 1:
        raise QdcError("dflash.window", f"a window of {window} tokens sees nothing")
    layers = int(architecture["layers"])
    dflash: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": taps}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": architecture["hidden_size"],
        "intermediate_size": architecture["intermediate_size"],
        "num_attention_heads": architecture["heads"],
        "num_key_value_heads": architecture["kv_heads"],
        "head_dim": architecture["head_dim"],
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "max_position_embeddings": architecture["max_position_embeddings"],
        "rms_norm_eps": architecture.get("rms_norm_eps", 1e-6),
        "rope_theta": architecture["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "block_size": architecture["draft_block_size"],
        "num_target_layers": target_layers,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * layers,
        "use_sliding_window": window is not None,
        "dflash_config": dflash,
    }
    if window is not None:
        config |= {"sliding_window": window, "max_window_layers": 0}
        dflash |= {"causal": False, "swa_window_size": window}
    if quantization is not None:
        ignored = engine_ignore(layers, target_layers, quantization.get("ignore") or [])
        config["quantization_config"] = quantization_config(quantization["scheme"], ignored)
    return config


def read_drafter_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a drafter's config.json, as vLLM 0.32.0 takes them.

    {kind: "dflash", draft_block_size (None when absent: the engine does not read it), taps (z-lab layer ids),
    mask_token_id, window: W or None, window_layers: [layer ids that slide], causal: bool, or None when layers
    differ, layers, quantization: {bits, group_size, symmetric, ignore} or None}.
    Causality: `is_causal`, else `dflash_config.causal`, else a sliding layer is causal and a full one not.
    Raises QdcError("dflash.config") when the file is no DFlash config or a field has the wrong type.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        raise QdcError("dflash.config", f"architectures {architectures!r} is not [{ARCHITECTURE!r}]")
    dflash = config.get("dflash_config")
    if not isinstance(dflash, Mapping):
        raise QdcError("dflash.config", "dflash_config is missing")
    layers = _whole(config, "num_hidden_layers")
    taps = dflash.get("target_layer_ids")
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise QdcError("dflash.config", "dflash_config.target_layer_ids is not a list of layer numbers")
    window, sliding = _window(config, dflash, layers)
    causal = {_causal(config, dflash, layer in sliding) for layer in range(layers)}
    return {
        "kind": "dflash",
        "draft_block_size": _whole(config, "block_size") if "block_size" in config else None,
        "taps": taps,
        "mask_token_id": _whole(dflash, "mask_token_id"),
        "window": window,
        "window_layers": sliding,
        "causal": causal.pop() if len(causal) == 1 else None,
        "layers": layers,
        "quantization": _scheme(config.get("quantization_config")),
    }


def _whole(source: Mapping[str, Any], name: str) -> int:
    value = source.get(name)
    if type(value) is not int or value < 0:
        raise QdcError("dflash.config", f"{name} is {value!r}, not a whole number")
    return value


def _window(config: Mapping[str, Any], dflash: Mapping[str, Any], layers: int) -> tuple[int | None, list[int]]:
    if dflash.get("use_swa"):
        source = dflash if dflash.get("swa_window_size") is not None else config
        name = "swa_window_size" if source is dflash else "sliding_window"
        return _whole(source, name), list(range(layers))
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise QdcError("dflash.config", "layer_types is not a list")
    sliding = [layer for layer, kind in enumerate(types[:layers]) if kind == "sliding_attention"]
    return (_whole(config, "sliding_window") if sliding else None), sliding


def _causal(config: Mapping[str, Any], dflash: Mapping[str, Any], slides: bool) -> bool:
    for source, name in ((config, "is_causal"), (dflash, "causal")):
        if source.get(name) is not None:
            return bool(source[name])
    return slides


def _scheme(quantization: Any) -> dict[str, Any] | None:
    if quantization is None:
        return None
    try:
        group = next(iter(quantization["config_groups"].values()))
        weights = group["weights"]
        return {
            "bits": int(weights["num_bits"]),
            "group_size": weights["group_size"],
            "symmetric": bool(weights["symmetric"]),
            "ignore": list(quantization.get("ignore") or []),
        }
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise QdcError("dflash.config", f"quantization_config is not compressed-tensors: {error!r}") from error
