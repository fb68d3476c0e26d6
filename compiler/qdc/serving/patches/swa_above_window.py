"""Engine patch `swa-above-window`: the drafter's window, symmetric, and only where a sequence is longer than it.

The window W is the drafter's own (config.json: `layer_types` and `sliding_window`, or `dflash_config.use_swa` and
`swa_window_size`, with `dflash_config.causal: false`): a query at position p sees the keys in [p - (W-1), p + (W-1)].
For every call of a drafter layer's attention it is applied if the longest sequence of the batch (an upper bound that
counts the drafted tokens) is longer than W, and not otherwise: nothing would be cut off, and the kernel without a
window is the faster one. Versions before 0.25 have no window for drafters; from 0.25.0 on the engine's is always on.
The target's layers are not touched. The KV cache of the drafter stays a full one: a window saves attention time, not
memory, and no block is given back while it may be needed.
The choice is made in Python, call by call. That holds where attention runs between captured graphs (the engine's V1
runner captures drafters piecewise); inside a captured graph the choice would be frozen, so that is an exception.
Loaded by the engine as a general plugin in every process. Ends the process unless the engine is one of the versions
below and every function that is replaced or relied on has the examined source; a drafter without a window, with a
causal or a mixed one, or on another attention backend than FLASH_ATTN is an exception at loading.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

NAME = "swa-above-window"
MODULE = "vllm.model_executor.models.qwen3_dflash"
BACKEND = "vllm.v1.attention.backends.flash_attn"
_INIT = f"{MODULE}:DFlashQwen3DecoderLayer.__init__"
_FORWARD = f"{BACKEND}:FlashAttentionImpl.forward"
_BUILD = f"{BACKEND}:FlashAttentionMetadataBuilder.build"
_INPUTS = "vllm.v1.spec_decode.dflash:DFlashProposer.set_inputs_first_pass"
_EVERY = {
    f"{BACKEND}:FlashAttentionImpl.__init__": "6147298d17baf5a4e879ad9618bef6e36df36e621a9938cd4ee28720ff405771",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_drafting": (
        "1c62e27225cb347d885451eca9e476669ae651a8f43f259f11c18a94bb8afcd7"
    ),
}
_022 = {
    **_EVERY,
    _INIT: "72cd85292b29b1ccd702c0e95cd55a20efc615704427607d41a6c1fc59f6ea9e",
    _FORWARD: "2b40ba3c09fcdf98c089969715b82d0cf72c1f54e9bdac3ea017f9cfa612a8ba",
    _BUILD: "b24629f0a654d3536cb67c25f1b7e01e73c90729f294060687165c907b3a881d",
    _INPUTS: "b2577d93298c448983d2aea4ac29e635efb56060e7ed3c45c28041e742b8ab5e",
}
_023 = {
    **_022,
    _FORWARD: "05c01eb93dfef2093f9f0a94cc598f4633f87b3648f528274dd33ffc5c176720",
    _INPUTS: "3c3ed20f160cfb8f3f600b25ee9418aa049ace18b4cfd8e6942feab71c151885",
}
_024 = {
    **_023,
    _FORWARD: "7c515d5ab5c6f38c03cfbe4f17db90f27c7fdf0af1b01ba7485eb44691e3f822",
    _BUILD: "f3b6f8eea59b0d0fd927270a5e1ea3ac985eb551f9c9bd7cfa9621d74d9cfa5f",
}
_025 = {
    **_EVERY,
    _INIT: "16365603b55eca7ad405d34374b4db0da5d69d3dd4ff2c0f480ce9a359290d79",
    f"{MODULE}:_resolve_layer_attention": "d381aab249276172ac97569d1f1be381cfb8f07bb36208f709db2278e422a5da",
    _FORWARD: "ab04e553229613b33de7bbb0cbb362ffa16d021c4fc18e3c176dc5da2ef86e28",
    _BUILD: "ddab93f651bb3e996a63137bab7fe811475bf5d4fb8b7faf4c625d77a1cd39dc",
    _INPUTS: "f33c60f7ca3bbd4827b6b425109e129f27a8b4cbcd4e1369076f204a1c2fb58e",
}
SOURCES: dict[str, dict[str, str]] = {
    "0.22.0": _022,
    "0.22.1": _022,
    "0.23.0": _023,
    "0.24.0": _024,
    "0.25.0": _025,
    "0.25.1": _025,
}
"""Engine version -> place (`module:name`) -> SHA-256 of the examined source."""
OWN_WINDOW = ("0.25.0", "0.25.1")
"""Versions with a window of their own, which they read from the metadata of a call and not from the layer."""
SLIDING = "sliding_attention"
log = logging.getLogger(f"vllm.{__name__}")


def apply() -> None:
    """Put the changed functions in place; a second call does nothing. Ends the process where it does not fit."""
    if is_in_place():
        return
    examine()
    engine = importlib.import_module(MODULE)
    _replace(engine.DFlashQwen3DecoderLayer, "__init__", _init)
    if _version() in OWN_WINDOW:
        _replace(engine, "_resolve_layer_attention", _without_window)
    if not is_in_place():
        stop("the functions could not be replaced")


def is_in_place() -> bool:
    """Whether this process runs the changed functions."""
    if _version() not in SOURCES:
        return False
    engine = importlib.import_module(MODULE)
    try:
        functions = [engine.DFlashQwen3DecoderLayer.__init__]
        if _version() in OWN_WINDOW:
            functions.append(engine._resolve_layer_attention)
    except AttributeError:
        return False
    return all(getattr(function, "__qdc_patch__", None) == NAME for function in functions)


def examine() -> None:
    """End the process unless this engine is a known version whose functions have the examined source."""
    version = _version()
    if version not in SOURCES:
        stop(f"vLLM {version} was not examined; known: {', '.join(SOURCES)}")
    for place, digest in SOURCES[version].items():
        module, _, name = place.partition(":")
        try:
            source = inspect.getsource(attrgetter(name)(importlib.import_module(module)))
        except (AttributeError, ImportError, OSError, TypeError) as error:
            stop(f"vLLM {version}: {place}: {error}")
        found = hashlib.sha256(source.encode()).hexdigest()
        if found != digest:
            stop(f"vLLM {version}: {place} is not the examined source (SHA-256 {found})")


def stop(why: str) -> NoReturn:
    """End the process with one line on stderr."""
    raise SystemExit(f"qdc: the engine patch {NAME} does not fit: {why}")


def window_of(config: Any) -> int:
    """The window in tokens that a drafter's config.json states, by the rule of the engine's version 0.25.1.

    Raises RuntimeError for none, a causal or a mixed one, or one that is no whole number from 1 on.
    """
    dflash = getattr(config, "dflash_config", None) or {}
    sliding = [kind == SLIDING for kind in getattr(config, "layer_types", None) or []]
    if any(sliding) and not all(sliding):
        raise RuntimeError(f"{NAME}: the drafter's layers are sliding and full by turns, which no version here serves")
    if not any(sliding) and not dflash.get("use_swa"):
        raise RuntimeError(f"{NAME}: the drafter's config.json has no window; leave the patch out or state one")
    causal = dflash.get("causal")
    if any(sliding) if causal is None else causal:
        raise RuntimeError(
            f"{NAME}: the drafter's window is causal; the symmetric one needs dflash_config.causal: false"
        )
    window = dflash.get("swa_window_size", getattr(config, "sliding_window", None))
    if type(window) is not int or window < 1:
        raise RuntimeError(f"{NAME}: the drafter's window is {window!r}, not a whole number from 1 on")
    return window


def sides(window: int, longest: int) -> tuple[int, int]:
    """Keys that a query sees to its left and right; (-1, -1) is all of them. `longest`: tokens, drafts included."""
    return (window - 1, window - 1) if longest > window else (-1, -1)


def arm(layer: Any, window: int) -> None:
    """Let an attention layer of the engine choose its window call by call. Raises RuntimeError where it cannot."""
    impl = layer.impl
    if type(impl) is not importlib.import_module(BACKEND).FlashAttentionImpl:
        raise RuntimeError(
            f"{NAME}: the drafter's attention is {type(impl).__name__}; "
            "write attention_backend FLASH_ATTN into the speculative config"
        )
    if layer.sliding_window is not None or tuple(impl.sliding_window) != (-1, -1):
        raise RuntimeError(f"{NAME}: the drafter's layer has a window of its own")
    impl.forward = _windowed(impl, impl.forward, window, on_metadata=_version() in OWN_WINDOW)


def _windowed(impl: Any, original: Callable[..., Any], window: int, *, on_metadata: bool) -> Callable[..., Any]:
    def forward(
        layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *rest: Any, **more: Any
    ) -> Any:
        if attn_metadata is None:  # profiling: no attention is computed
            return original(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)
        if _capturing():
            raise RuntimeError(f"{NAME}: attention is inside a CUDA graph, which would freeze the choice of the window")
        if attn_metadata.causal is not False:
            raise RuntimeError(f"{NAME}: a drafter's call is causal")
        holder = attn_metadata if on_metadata else impl
        before = holder.sliding_window
        holder.sliding_window = sides(window, attn_metadata.max_seq_len)
        try:
            return original(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)
        finally:
            holder.sliding_window = before

    return forward


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _init(original: Callable[..., None]) -> Callable[..., None]:
    """DFlashQwen3DecoderLayer.__init__: built without a window, then given its choice."""

    def __init__(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        window = window_of(config)
        original(self, *args, config=config, **kwargs)
        arm(self.self_attn.attn, window)
        log.info("%s: %s: %d tokens", NAME, getattr(self.self_attn, "layer_name", "a layer"), window)

    return __init__


def _without_window(original: Callable[[Any, int], tuple[int | None, bool]]) -> Callable[[Any, int], tuple[None, bool]]:
    """_resolve_layer_attention: the engine is to build a full layer. It must agree about what the config says."""

    def resolve(config: Any, layer_idx: int) -> tuple[None, bool]:
        found = original(config, layer_idx)
        if found != (window_of(config), False):
            raise RuntimeError(f"{NAME}: the engine takes the drafter's window for {found}")
        return None, False

    return resolve


def _replace(holder: Any, name: str, change: Callable[[Any], Any]) -> None:
    function: Any = change(getattr(holder, name))
    function.__qdc_patch__ = NAME
    setattr(holder, name, function)


def _version() -> str:
    return str(importlib.import_module("vllm").__version__).split("+")[0]
