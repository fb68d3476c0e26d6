"""What vLLM (0.32.0) calls the modules of a DFlash drafter. Knows no file and no configuration."""

from __future__ import annotations

OF_THE_TARGET = ("lm_head", "model.lm_head", "embed_tokens", "model.embed_tokens")
"""Modules that a drafter shares with its target: they may be named in an ignore list."""


def engine_name(module: str, target_layers: int) -> str:
    """The name in the engine of a module of the file: `model.fc`, and `model.layers.N` with N counted on from the
    target's layers."""
    parts = module.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + target_layers)
    return ".".join(["model", *parts])
