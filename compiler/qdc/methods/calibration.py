"""GPTQ of a whole target, decoder layer by decoder layer: later layers see the quantized earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qdc.methods import gptq, grid, qwen
from qdc.methods.qwen_model import Qwen

Batch = tuple[torch.Tensor, torch.Tensor]
BATCH = 64


def padded_batches(rows: Sequence[list[int]], pad_id: int, size: int = BATCH) -> list[Batch]:
    """Right-padded (ids [B, T], mask [B, T]) batches of token ids, in order."""
    batches = []
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        width = max(len(row) for row in some)
        ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in some])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in some])
        batches.append((ids, mask))
    return batches


def _hessians(model: Qwen, modules: Sequence[str], batches: Sequence[Batch]) -> dict[str, gptq.Hessian]:
    named = dict(model.named_modules())
    found = {name: gptq.Hessian(named[name].in_features) for name in modules}
    counted: list[torch.Tensor] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, inputs: found[name].add(inputs[0][counted[-1]])

    handles = [named[name].register_forward_pre_hook(hook(name)) for name in modules]
    try:
        with torch.no_grad():
            for ids, mask in batches:
                counted.append(mask.bool().to(qwen.device_of(model)))
                qwen.forward(model, ids, mask)
    finally:
        for handle in handles:
            handle.remove()
    return found


def gptq_model(
    model: Qwen,
    modules: Sequence[str],
    batches: Sequence[Batch],
    scheme: dict[str, Any],
    damp: float,
    report: Callable[[int, int, str], None],
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, float]]:
    """Grid and relative output error of each module; `model`'s weights become the quantized ones."""
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    errors: dict[str, float] = {}
    layers: dict[str, list[str]] = {}
    for name in modules:
        layers.setdefault(".".join(name.split(".")[:3]), []).append(name)
    named = dict(model.named_modules())
    for _, names in sorted(layers.items(), key=lambda item: int(item[0].split(".")[2])):
        hessians = _hessians(model, names, batches)
        for name in names:
            weight, total = named[name].weight, hessians[name].total
            pairs[name] = gptq.gptq_quantize(weight, total, scheme, damp)
            served = grid.decode(*pairs[name])
            errors[name] = gptq.output_error(weight, served, total)
            with torch.no_grad():
                weight.copy_(served)
        report(len(pairs), len(modules), "modules")
    return pairs, errors
